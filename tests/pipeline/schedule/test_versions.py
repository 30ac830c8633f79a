"""Versions of weights: which a micro-batch meets, how many are kept."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import pipeline
from jdist.pipeline import (
    Costs,
    Schedule,
    UpdatePolicy,
    simulate,
)
from jdist.pipeline.schedule.actions import Action, Columns
from jdist.pipeline.schedule.versions import live_versions


def kept_by_hand(schedule, worker, stage):
    """The versions a worker keeps of a stage, as a set, one action at a time."""
    policy, used = schedule.update_policy, schedule.versions_used()
    program = schedule.actions(worker)
    actions = [a for a in program if a.kind != "W" and a.stage == stage]
    done, in_flight, most = 0, [], int(bool(actions))
    to_come = [a.micro_batch for a in actions if a.kind == "F"]
    for kind, _, i in actions:
        if kind == "F":
            in_flight.append(i)
            to_come.remove(i)
        else:
            in_flight.remove(i)
            done += 1
        newest = done // policy.every
        own = policy.rule in ("stashing", "flush")
        wanted = in_flight if own else in_flight + to_come
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
    pipeline.pipedream(4, 24, policy="2bw"),
    pipeline.pipedream(3, 17, update_every=5, policy="2bw"),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_kept_versions_are_those_of_a_plain_count(number):
    schedule = CASES[number]
    expected = [
        kept_by_hand(schedule, worker, stage)
        for stage, workers in enumerate(schedule.placement)
        for worker in workers
    ]
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
            found = simulate(pipeline.pipedream(n, 6 * k, update_every=k, policy="2bw"))
            assert found.weight_versions == (2,) * n


def test_the_papers_rules():
    """At stage j of n micro-batch t meets w(t-n+1+j); with vertical sync w(t-n+1)."""
    n, m = 5, 17
    t = np.arange(m)
    for stage in range(n):
        used = pipeline.pipedream(n, m).versions_used()[stage]
        np.testing.assert_array_equal(used, np.maximum(t - n + 1 + stage, 0))
        used = pipeline.pipedream(n, m, policy="vertical_sync").versions_used()[stage]
        np.testing.assert_array_equal(used, np.maximum(t - n + 1, 0))
        used = pipeline.pipedream(n, m, update_every=6, policy="2bw").versions_used()[
            stage
        ]
        np.testing.assert_array_equal(used, np.maximum(t // 6 - 1, 0))


def test_a_version_is_there_when_it_is_used():
    """No micro-batch wants weights that its stage has not computed yet."""
    for schedule in CASES:
        used = schedule.versions_used()
        for worker in range(schedule.workers):
            done = 0
            for kind, stage, i in schedule.actions(worker):
                assert used[stage, i] <= done // schedule.update_policy.every
                done += kind == "B"


def test_with_a_flush_there_is_one_version():
    for schedule in (pipeline.gpipe(3, 5), pipeline.zbv(2, 4)):
        assert simulate(schedule).weight_versions == (1,) * schedule.workers
        assert not schedule.versions_used().any()


def test_a_worker_without_the_stage_keeps_none():
    columns = Columns.of([[Action("F", 0, 0)], [Action("F", 1, 0)], []])
    np.testing.assert_array_equal(live_versions(columns, None), [[1, 0, 0], [0, 1, 0]])


def test_backward_passes_out_of_order_are_refused():
    order = [["0F0", "0F1", "0B1", "0B0"]]
    schedule = Schedule.of(order, update_policy=UpdatePolicy())
    with pytest.raises(ValueError, match=r"finish micro-batches in order \(worker 0\)"):
        schedule.versions_used()


@pytest.mark.parametrize("rule", ["vertical_sync", "2bw"])
def test_one_version_for_all_stages_wants_one_worker_per_stage(rule):
    schedule = pipeline.pipedream(2, 6, replicas=(2, 1))
    schedule = replace(schedule, update_policy=UpdatePolicy(rule, 2))
    match = rf"UpdatePolicy\(rule=...\).*'stashing' or 'flush'.*several.*Got {rule}"
    with pytest.raises(ValueError, match=match):
        schedule.versions_used()


# --- any placement ---

SEVERAL = {
    "looped": lambda n, m: pipeline.looped_bfs(n, m, 3),
    "interleaved": lambda n, m: pipeline.interleaved(n, n * m, 2),
    "V": pipeline.zbv,
    "replicas": lambda n, m: pipeline.pipedream(n, m, replicas=[1 + m % 3] * n),
    "2bw": lambda n, m: pipeline.pipedream(n, n * m, policy="2bw"),
    "vertical sync": lambda n, m: pipeline.pipedream(n, m, policy="vertical_sync"),
    "flush": lambda n, m: pipeline.pipedream(n, m, update_every=2, policy="flush"),
}


@st.composite
def asynchronous(draw):
    """A family, several stages or workers each, with updates in between."""
    schedule = SEVERAL[draw(st.sampled_from(sorted(SEVERAL)))](
        draw(st.integers(1, 4)), draw(st.integers(1, 6))
    )
    if schedule.update_policy is None:
        policy = UpdatePolicy("stashing", draw(st.integers(1, 4)))
        schedule = replace(schedule, update_policy=policy)
    return schedule


def renumbered(schedule, ranks):
    """The same schedule, with another rank for each worker and one that is idle."""
    programs = [[] for _ in range(schedule.workers + 1)]
    for worker, rank in enumerate(ranks):
        programs[rank] = schedule.actions(worker)
    placement = tuple(tuple(ranks[w] for w in own) for own in schedule.placement)
    return Schedule.of(
        programs, placement=placement, update_policy=schedule.update_policy
    )


@settings(deadline=None, max_examples=30)
@given(schedule=asynchronous(), data=st.data())
def test_versions_do_not_depend_on_the_ranks(schedule, data):
    """Stage 0, from which vertical sync takes them, may be on the last worker."""
    every = range(schedule.workers + 1)
    ranks = data.draw(st.permutations(every))[:-1]
    other = renumbered(schedule, ranks)
    np.testing.assert_array_equal(other.versions_used(), schedule.versions_used())
    policy = schedule.update_policy
    kept = live_versions(other.columns, policy)
    np.testing.assert_array_equal(
        kept[:, ranks], live_versions(schedule.columns, policy)
    )
    assert kept.sum() == kept[:, ranks].sum()  # The idle one keeps none.


@settings(deadline=None, max_examples=30)
@given(schedule=asynchronous())
def test_each_stage_of_a_worker_keeps_versions_of_its_own(schedule):
    kept = live_versions(schedule.columns, schedule.update_policy)
    found = simulate(schedule, Costs(weight_bytes=2.0 ** np.arange(schedule.stages)))
    for worker in range(schedule.workers):
        expected = [
            kept_by_hand(schedule, worker, stage) if worker in workers else 0
            for stage, workers in enumerate(schedule.placement)
        ]
        assert kept[:, worker].tolist() == expected
        assert found.weight_versions[worker] == max(expected)
        held = sum(count * 2.0**stage for stage, count in enumerate(expected))
        assert found.weight_bytes[worker] == held
