"""`python -m kvq.recommend`: which cache format to take."""

if __name__ == "__main__":
    from kvq.entry import enter

    enter("kvq.recommend.advisor")
