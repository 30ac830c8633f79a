"""Schedules of epochs whose length shows at their end are those of that length."""

import numpy as np
import pytest

from jdist.pipeline.run.step import ActionCursor
from jdist.pipeline.schedule.open_schedule import (
    OpenSchedule,
    steady_length,
)
from jdist.pipeline.schedule.versions import live_versions
from tests.pipeline.epochs import epoch_schedule

CASES = [
    ("stashing", 1, None, 1),
    ("stashing", 4, None, 1),
    ("stashing", 4, None, 3),
    ("stashing", 3, (2, 1, 3), 1),
    ("stashing", 3, (3, 2, 1), 2),
    ("vertical_sync", 4, None, 1),
    ("vertical_sync", 3, None, 2),
    ("2bw", 3, None, 4),
    ("flush", 4, None, 3),
    ("flush", 3, None, 1),
]


class Counted:
    """A stream of so many micro-batches, which knows it when it has been asked."""

    def __init__(self, count):
        self.count, self.length = count, None

    def reaches(self, micro):
        if micro >= self.count:
            self.length = self.count
        return micro < self.count


def of(policy, n, replicas, every):
    return lambda m: epoch_schedule(policy, n, m, replicas, every)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("m", [1, 2, 5, 12, 131])
def test_programs_and_versions_are_those_of_the_length(case, m):
    """A worker is never told of more than the next action, and ends with the drain."""
    wanted = of(*case)(m)
    for ahead in range(wanted.workers):  # Another worker may find the end first.
        stream = Counted(m)
        schedule = OpenSchedule(of(*case)(1), stream)
        order = [ahead, *(w for w in range(wanted.workers) if w != ahead)]
        for worker in order:
            actions, found = ActionCursor(schedule.actions(worker)), []
            while (action := actions.next()) is not None:
                assert actions.next() == action
                if action.kind == "F":
                    stage, micro = action.stage, action.micro_batch
                    used = wanted.versions_used()[stage, micro]
                    assert schedule.version(stage, micro) == used
                assert action.kind == "B" or schedule.may_have(worker, m + 1)
                found.append(action)
                actions.advance()
            assert found == wanted.actions(worker)
            assert schedule.may_have(worker, m - 1)
            assert not schedule.may_have(worker, m)


@pytest.mark.parametrize("case", CASES)
def test_longer_epochs_keep_no_more_versions(case):
    short = steady_length(of(*case)(1))
    for m in (short + 1, 3 * short + 2):
        schedule = of(*case)(m)
        kept = live_versions(schedule.columns, schedule.update_policy)
        assert np.array_equal(kept, OpenSchedule(of(*case)(1), Counted(m)).kept)
