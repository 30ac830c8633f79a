"""Schedules as data: actions, clocks, rules, weight versions and CSV."""

from jdist.pipeline.schedule.actions import Action, ScheduleError
from jdist.pipeline.schedule.drain import split_drain
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.schedule.update_policy import UpdatePolicy

__all__ = [
    "Action",
    "Schedule",
    "ScheduleError",
    "UpdatePolicy",
    "split_drain",
]
