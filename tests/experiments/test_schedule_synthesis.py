"""The claims of `schedule_synthesis` are false where the figures are."""

import numpy as np
import pytest

from experiments import schedule_synthesis as job
from jdist import pipeline

CASE = job.Case("1F1B", 12.0, 10.0, 10.0, 4.0, 4.0)


def verdicts(*cases, quick=False):
    return [claim.holds for claim in job.found_claims({"1F1B's": cases}, quick)]


def test_what_holds():
    assert verdicts(CASE, CASE) == [True, True]
    assert verdicts(CASE, quick=True) == [True, None]
    assert CASE.speedup == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({"family_seconds": 9.9}, [False, True]),
        ({"peak": 4.1}, [False, True]),
        ({"lower_bound": 10.1}, [False, True]),
        ({"lower_bound": 9.9}, [True, False]),
    ],
)
def test_a_deviation_is_seen(changes, holds):
    """One case out of two."""
    assert verdicts(CASE, CASE._replace(**changes)) == holds


def test_the_best_family_is_the_fastest_that_fits():
    """ZB-H1 only where there is memory for what its W waits with; none below 1F1B."""
    sizes = job.Sizes(3, 5, 1, 1.0)
    costs = job.costs_of(np.random.default_rng(1), 3)
    free, tight = (job.best_family(costs, memory, sizes) for memory in (None, 3.0))
    assert free.makespan <= tight.makespan
    assert (
        tight.makespan <= pipeline.simulate(pipeline.one_f_one_b(3, 5), costs).makespan
    )
    assert job.peak_of(tight) <= 3 < job.peak_of(free)
    assert job.best_family(costs, 2.0, sizes) is None


def test_fractions_of_the_memory_of_1f1b():
    assert [claim.holds for claim in job.fraction_claims()] == [True, True]
