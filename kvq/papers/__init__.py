"""Experiments of papers by name: the runs of a table's cells, and which records answer them."""
