"""Schedules that are found by a solver, for given costs and memory."""

__all__: list[str] = []
