"""Finished runs shown elsewhere, beside their records: each from its record alone, now or later."""

from kvq.report.wandb.live import track

__all__ = ["track"]
