"""`python -m kvq.report.figures`: write every figure that the records of a results folder allow; needs no model."""

import sys

from kvq.report.command import collect_seldom
from kvq.report.figures.every import main

if __name__ == "__main__":
    collect_seldom()
    sys.exit(main())
