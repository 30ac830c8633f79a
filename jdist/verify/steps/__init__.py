"""Verification of whole optimizer steps: the first wrong step, and its wrong part."""

from jdist.verify.steps.step_check import Trained, step

__all__ = ["Trained", "step"]
