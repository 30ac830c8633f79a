"""Schedules that are found by a solver, for given costs and memory."""

from jdist.pipeline.synthesis.synthesizer import Found, synthesize

__all__ = ["Found", "synthesize"]
