"""Calibration: text that is not the text under test, states and gradients of a model on it, fits, and their files."""

from kvq.calibration.fit import bind_calibration, calibrate

__all__ = ["bind_calibration", "calibrate"]
