"""Schedules as data: actions, clocks, rules, versions and CSV."""
