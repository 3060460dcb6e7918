"""`python -m kvq.report.figures`: write every figure that the records of a results folder allow; needs no model."""

import sys

from kvq.report.figures.drawing import seldom_collected
from kvq.report.figures.every import main

if __name__ == "__main__":
    seldom_collected()
    sys.exit(main())
