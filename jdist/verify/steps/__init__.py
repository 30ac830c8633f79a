"""Verification of whole optimizer steps: the first wrong step, and its wrong part."""

from jdist.verify.steps.step_check import Trained, step, step_judge

__all__ = ["Trained", "step", "step_judge"]
