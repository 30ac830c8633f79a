"""Simulation of a schedule under given costs, and timelines of simulations and runs."""

from jdist.pipeline.simulate.costs import Costs
from jdist.pipeline.simulate.simulate import simulate
from jdist.pipeline.simulate.timeline import Record, Timeline

__all__ = ["Costs", "Record", "Timeline", "simulate"]
