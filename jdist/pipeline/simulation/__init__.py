"""Simulation of a schedule under given costs, and timelines of simulations and runs."""

__all__: list[str] = []
