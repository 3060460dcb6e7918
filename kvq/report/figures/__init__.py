"""Figures as functions of the records under results/: how they look, what each shows, and their files."""
