"""Who contributes to an update, reports that must agree, and schedules of policies."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import pipeline
from jdist.pipeline import UpdatePolicy
from jdist.pipeline.weight_stashing.epoch import _check_alike, contributions
from jdist.pipeline.weight_stashing.executor import schedule_of_step
from tests.pipeline.epochs import epoch_schedule


@settings(deadline=None, max_examples=30)
@given(count=st.integers(1, 4), every=st.integers(1, 3), length=st.integers(0, 40))
def test_every_micro_batch_contributes_to_one_update(count, every, length):
    """Each worker with its own, `every` to each update but the last."""
    workers = tuple(range(5, 5 + count))
    size = count * every
    updates = -(-length // size)
    seen = Counter()
    for number in range(updates):
        found = contributions(workers, size, number, length)
        assert sum(found.values()) == min(size, length - number * size)
        if number < updates - 1:
            assert found == dict.fromkeys(workers, every)
        seen += found
    assert seen == Counter(workers[i % count] for i in range(length))
    assert not contributions(workers, size, updates, length)


def report(**checksums):
    return checksums


def test_reports_that_agree():
    """A process need not have read all entries."""
    told = [report(x=1, y=2), report(y=2), report(), report(z=3, x=1)]
    _check_alike(told)


def test_reports_that_differ_name_the_first_who_has_it():
    match = "same batches and.*Got another y on worker 2 of the sch.* than on 1"
    with pytest.raises(ValueError, match=match):
        _check_alike([report(x=1), report(y=2), report(x=1, y=3)])


# --- schedules of policies ---


@pytest.mark.parametrize(
    ("policy", "every", "rule"),
    [
        ("stashing", None, UpdatePolicy("stashing", 1)),
        ("stashing", 3, UpdatePolicy("stashing", 3)),
        ("vertical_sync", None, UpdatePolicy("vertical_sync", 1)),
        ("vertical_sync", 2, UpdatePolicy("vertical_sync", 2)),
        ("2bw", None, UpdatePolicy("2bw", 4)),
        ("2bw", 6, UpdatePolicy("2bw", 6)),
        ("flush", None, UpdatePolicy("flush", 1)),
        ("flush", 3, UpdatePolicy("flush", 3)),
    ],
)
def test_the_schedule_of_a_policy(policy, every, rule):
    """A stage updates after each micro-batch, but under 2BW after as many as stages."""
    for replicas in (None, (1, 1, 1, 1)):
        found = epoch_schedule(policy, 4, 13, replicas, every)
        assert found.update_policy == rule
        assert found.resized(7) == epoch_schedule(policy, 4, 7, replicas, every)


@pytest.mark.parametrize("policy", ["vertical_sync", "2bw", "flush"])
def test_other_policies_have_no_replicas(policy):
    match = rf"replicas=...\).*1 for each stage with the policy '{policy}'.*Got \(1, 2"
    with pytest.raises(ValueError, match=match):
        epoch_schedule(policy, 2, 7, [1, 2])


def test_a_policy_that_is_unknown():
    match = r"policy=...\).*'stashing', 'vertical_sync', '2bw', 'flush'. Got 'gpipe'"
    with pytest.raises(ValueError, match=match):
        pipeline.pipedream(2, 7, policy="gpipe")


def test_a_step_has_no_needless_drain():
    """Of a flush schedule it is 1F1B; of the others the same actions, of one update."""
    for every in (1, 2, 5):
        flush = pipeline.pipedream(3, 5, update_every=every, policy="flush")
        assert schedule_of_step(flush) == pipeline.one_f_one_b(3, 5)
    for made in (
        pipeline.pipedream(3, 5, replicas=(2, 1, 1)),
        pipeline.pipedream(3, 5, policy="vertical_sync"),
        pipeline.pipedream(3, 5, policy="2bw"),
    ):
        found = schedule_of_step(made)
        assert found == made.synchronous()
        assert (found.columns == made.columns, found.update_policy) == (True, None)


def test_a_drain_that_a_user_wants_stays():
    """A flush schedule of another order than the published one keeps its order."""
    order = [["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]]
    order += [["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]]
    own = pipeline.Schedule.of(order, update_policy=UpdatePolicy("flush", 3))
    assert schedule_of_step(own) == pipeline.Schedule.of(order)
