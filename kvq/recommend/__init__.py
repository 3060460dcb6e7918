"""Decisions from records: which cache format to take, and how many bits each layer is given."""
