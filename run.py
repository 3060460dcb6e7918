"""Run one measurement, or a sweep of them: `python run.py --help`."""

from kvq.entry import main

if __name__ == "__main__":
    main()
