"""Versions of weights: which a micro-batch meets, how many are kept."""

import math

import numpy as np
import pytest

from jdist import pipeline
from jdist.pipeline import (
    Action,
    Schedule,
    UpdatePolicy,
    simulate,
    versions_used,
)
from jdist.pipeline.schedule.actions import Columns
from jdist.pipeline.schedule.versions import live_versions


def kept_by_hand(schedule, worker):
    """The versions a worker keeps, as a set, one action at a time."""
    policy, used = schedule.update_policy, versions_used(schedule)
    actions = [a for a in schedule.actions(worker) if a.kind != "W"]
    stage = actions[0].stage
    done, in_flight, most = 0, [], 1
    to_come = [a.micro_batch for a in actions if a.kind == "F"]
    for kind, _, i in actions:
        if kind == "F":
            in_flight.append(i)
            to_come.remove(i)
        else:
            in_flight.remove(i)
            done += 1
        newest = done // policy.every
        wanted = in_flight if policy.rule == "stashing" else in_flight + to_come
        held = {int(used[stage, x]) for x in wanted if used[stage, x] <= newest}
        most = max(most, len(held | {newest}))
    return most


CASES = [
    pipeline.pipedream(n, m, update_every=k, policy=policy)
    for n, m in ((1, 3), (3, 2), (4, 11), (5, 20))
    for k in (1, 2, 3, 7)
    for policy in ("stashing", "vertical_sync")
] + [
    pipeline.pipedream(3, 17, replicas=(3, 2, 1), update_every=2),
    pipeline.pipedream(3, 16, replicas=(1, 4, 2)),
    pipeline.pipedream_2bw(4, 24),
    pipeline.pipedream_2bw(3, 17, update_every=5),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_kept_versions_are_those_of_a_plain_count(number):
    schedule = CASES[number]
    expected = [kept_by_hand(schedule, w) for w in range(schedule.workers)]
    assert simulate(schedule).weight_versions == tuple(expected)


def test_without_replicas_n_minus_j():
    """PipeDream keeps n - j versions at stage j; vertical sync n everywhere."""
    for n in range(1, 9):
        found = simulate(pipeline.pipedream(n, 3 * n))
        assert found.weight_versions == tuple(n - j for j in range(n))
        found = simulate(pipeline.pipedream(n, 3 * n, policy="vertical_sync"))
        assert found.weight_versions == (n,) * n


def test_with_replicas_one_more_than_the_warm_up():
    for replicas in ((2, 1), (3, 2, 1), (1, 3), (4, 3, 2, 2)):
        n = len(replicas)
        found = simulate(pipeline.pipedream(n, 60, replicas=replicas))
        expected = []
        for stage, count in enumerate(replicas):
            ahead = (sum(replicas[stage:]) - 1) // count
            expected += [1 + ahead] * count
        assert found.weight_versions == tuple(expected)


def test_with_macro_batches():
    """1 + ceil((n - j - 1) / k): two are enough only from k = n - j - 1 on."""
    for n in range(1, 9):
        for k in range(1, 10):
            found = simulate(pipeline.pipedream(n, 90, update_every=k))
            expected = [1 + math.ceil((n - j - 1) / k) for j in range(n)]
            assert found.weight_versions == tuple(expected)


def test_two_versions_are_enough_for_2bw():
    for n in range(1, 9):
        for k in range(n, 10):
            found = simulate(pipeline.pipedream_2bw(n, 6 * k, update_every=k))
            assert found.weight_versions == (2,) * n


def test_the_papers_rules():
    """At stage j of n micro-batch t meets w(t-n+1+j); with vertical sync w(t-n+1)."""
    n, m = 5, 17
    t = np.arange(m)
    for stage in range(n):
        used = versions_used(pipeline.pipedream(n, m))[stage]
        np.testing.assert_array_equal(used, np.maximum(t - n + 1 + stage, 0))
        used = versions_used(pipeline.pipedream(n, m, policy="vertical_sync"))[stage]
        np.testing.assert_array_equal(used, np.maximum(t - n + 1, 0))
        used = versions_used(pipeline.pipedream_2bw(n, m, update_every=6))[stage]
        np.testing.assert_array_equal(used, np.maximum(t // 6 - 1, 0))


def test_a_version_is_there_when_it_is_used():
    """No micro-batch wants weights that its stage has not computed yet."""
    for schedule in CASES:
        used = versions_used(schedule)
        for worker in range(schedule.workers):
            done = 0
            for kind, stage, i in schedule.actions(worker):
                assert used[stage, i] <= done // schedule.update_policy.every
                done += kind == "B"


def test_with_a_flush_there_is_one_version():
    for schedule in (pipeline.gpipe(3, 5), pipeline.zbv(2, 4)):
        assert simulate(schedule).weight_versions == (1,) * schedule.workers
        assert not versions_used(schedule).any()


def test_a_worker_without_the_stage_keeps_none():
    columns = Columns.of([[Action("F", 0, 0)], [Action("F", 1, 0)], []])
    np.testing.assert_array_equal(live_versions(columns, None), [[1, 0, 0], [0, 1, 0]])


def test_backward_passes_out_of_order_are_refused():
    order = [["0F0", "0F1", "0B1", "0B0"]]
    schedule = Schedule.of(order, update_policy=UpdatePolicy())
    with pytest.raises(ValueError, match=r"finish micro-batches in order \(worker 0\)"):
        versions_used(schedule)


def test_vertical_sync_wants_one_worker_per_stage():
    schedule = pipeline.pipedream(2, 6, replicas=(2, 1), policy="vertical_sync")
    with pytest.raises(ValueError, match=r"UpdatePolicy\(rule=...\).*several workers"):
        versions_used(schedule)
