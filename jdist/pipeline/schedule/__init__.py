"""Schedules as data: actions, clocks, rules, weight versions and CSV."""

__all__: list[str] = []
