"""`task=drift`: distances to full precision along long sampled texts (`kvq.tasks.trajectory`)."""

from kvq.tasks.trajectory import TASK

__all__ = ["TASK"]
