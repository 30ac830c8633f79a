"""The claims of `pipeline_scale` are false where the figures are."""

import pytest

from experiments import pipeline_scale as job


def sized(**changes):
    found = job.played("1F1B", 4)
    claims = job.size_claims({"1F1B": [found, found | changes]}, {})
    return [claim.holds for claim in claims]


def test_what_is_measured_holds():
    assert sized() == [True, True]


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({"makespan": 57.000001}, [False, True]),
        ({"alive": 5.0}, [True, False]),
    ],
)
def test_a_deviation_is_seen(changes, holds):
    """One size out of two off by a little."""
    assert sized(**changes) == holds


def test_a_link_that_costs_nothing_is_seen():
    (claim,) = job.size_claims({}, {"GPipe": [1.0, 1.1, 1.1]})
    assert not claim.holds


def test_limits():
    """Memory always, time in the full form only."""
    big = {"stages": 4, "micro_batches": 8, "actions": 64, "seconds": 9.0}
    big["bytes"] = 2**30
    assert [c.holds for c in job.limit_claims(big, quick=False)] == [True, True]
    assert [c.holds for c in job.limit_claims(big, quick=True)] == [True, None]
    slow = big | {"seconds": 10.5, "bytes": 2**31}
    assert [c.holds for c in job.limit_claims(slow, quick=False)] == [False, False]
