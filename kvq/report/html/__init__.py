"""All records of a results folder on one page that needs no network: tables, a plot of bits and quality, provenance."""
