"""Weights & Biases: a run there is made from a record alone, during a sweep or later."""
