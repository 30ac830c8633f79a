"""The judge of whole optimizer steps: what was wrong, at which step, in which part."""

from jdist.verify.steps.step_check import Trained, step

__all__ = ["Trained", "step"]
