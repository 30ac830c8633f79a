"""The claims of `schedule_synthesis` are false where the figures are."""

import numpy as np
import pytest

from experiments import schedule_synthesis as job
from jdist import pipeline

CASE = job.Case("1F1B", 12.0, 10.0, 10.0, 4.0, 4.0)
FREE = CASE._replace(memory=None)


def verdicts(*cases, free=(FREE,), quick=False):
    given = {"1F1B's": cases, "any": free}
    return [claim.holds for claim in job.found_claims(given, quick)]


def test_what_holds():
    assert verdicts(CASE, CASE) == [True, True, True]
    assert verdicts(CASE, quick=True) == [True, True, None]
    assert CASE.speedup == pytest.approx(1.2)


@pytest.mark.parametrize(
    "changes", [{"family_seconds": 9.9}, {"peak": 4.1}, {"lower_bound": 10.1}]
)
def test_a_deviation_is_seen(changes):
    """One case out of two."""
    assert verdicts(CASE, CASE._replace(**changes)) == [False, True, True]


def test_proofs_are_counted_and_gaps_told():
    """Two of three are no nine of ten; where memory binds the table has them."""
    open_ = CASE._replace(lower_bound=9.5)
    assert verdicts(open_) == [True, True, True]
    free = (FREE, FREE, FREE._replace(lower_bound=9.9))
    assert verdicts(CASE, free=free) == [True, True, False]
    (_, row) = job.rows({"1F1B's": [CASE, open_, open_]})
    assert row == ["1F1B's", "1.200", "1.200", "1.200", "1 of 3", "5.0%", "5.0%"]


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
