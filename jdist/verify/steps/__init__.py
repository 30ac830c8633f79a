"""Verification of whole optimizer steps: the first wrong step, and its wrong part."""

from jdist.verify.steps.rounding_drift import drift
from jdist.verify.steps.step_check import Trained, step, step_judge

__all__ = ["Trained", "drift", "step", "step_judge"]
