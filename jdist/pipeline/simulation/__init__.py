"""Simulation of a schedule under given costs, and timelines of simulations and runs."""

from jdist.pipeline.simulation.costs import Costs
from jdist.pipeline.simulation.simulator import simulate
from jdist.pipeline.simulation.timeline import Record, Timeline

__all__ = ["Costs", "Record", "Timeline", "simulate"]
