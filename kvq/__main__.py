"""`python -m kvq`: the command `kvq` where no scripts are installed."""

from kvq.entry import main

if __name__ == "__main__":
    main()
