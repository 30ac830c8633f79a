"""Simulating a schedule's costs, and timelines of simulations and runs."""
