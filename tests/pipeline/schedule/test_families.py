"""Every family for all n and m up to 8: valid, as long as published, as frugal."""

import itertools
from functools import partial

import numpy as np
import pytest

from jdist import pipeline
from jdist.pipeline.schedule import memory
from jdist.pipeline.schedule.actions import Action
from jdist.pipeline.schedule.update_policy import UpdatePolicy
from tests.pipeline.epochs import forward_only

UP_TO_8 = range(1, 9)
PAIRS = list(itertools.product(UP_TO_8, UP_TO_8))
CHUNKS = (1, 2, 3, 4)

# Clocks and activations held by worker j, from the sources named in each family's file;
# a pending weight gradient of ZB-H1 holds cotangents, too, and counts as two.
ONE_STAGE = {
    "forward_only": (lambda n, m: m + n - 1, lambda n, m, j: m),
    "gpipe": (lambda n, m: 2 * (m + n - 1), lambda n, m, j: m),
    "one_f_one_b": (lambda n, m: 2 * (m + n - 1), lambda n, m, j: min(m, n - j)),
    "pipedream": (lambda n, m: 2 * (m + n - 1), lambda n, m, j: min(m, n - j)),
    "pipedream_2bw": (lambda n, m: 2 * (m + n - 1), lambda n, m, j: min(m, n - j)),
    "pipedream_flush": (
        lambda n, m: 2 * (m + -(-m // n) * (n - 1)),
        lambda n, m, j: min(m, n - j),
    ),
    "zero_bubble": (
        lambda n, m: 3 * m + n - 1 if m >= n else 2 * (m + n) - 1,
        lambda n, m, j: min(m, n) + min(m, j + 1),
    ),
}


MADE = {
    "forward_only": forward_only,
    "pipedream_2bw": partial(pipeline.pipedream, policy="2bw"),
    "pipedream_flush": partial(pipeline.pipedream, policy="flush"),
}


@pytest.mark.parametrize("name", ONE_STAGE)
def test_one_stage_per_worker(name):
    """Valid, the published clocks exactly, the published memory reached or less."""
    clocks, alive = ONE_STAGE[name]
    for n, m in PAIRS:
        make = MADE.get(name) or getattr(pipeline, name)
        schedule = make(n, m).validate()
        assert schedule.clocks == clocks(n, m), (n, m)
        found = schedule.peak_activations
        bound = tuple(alive(n, m, j) for j in range(n))
        assert found == bound, (n, m)
        if name != "zero_bubble":
            assert schedule.peak_in_flight == bound
        elif m >= n:
            assert schedule.peak_in_flight == tuple(n - j for j in range(n))


@pytest.mark.parametrize("chunks", CHUNKS)
def test_interleaved(chunks):
    """Worker j is 2 (n - j - 1) + (v - 1) n forward passes ahead."""
    for n, m in PAIRS:
        if m >= n and m % n:
            continue
        schedule = pipeline.interleaved(n, m, chunks).validate()
        late = (chunks - 1) * max(0, n - m)
        assert schedule.clocks == 2 * (m * chunks + n - 1 + late)
        ahead = [2 * (n - j - 1) + (chunks - 1) * min(n, m) + 1 for j in range(n)]
        assert schedule.peak_activations == tuple(min(a, m * chunks) for a in ahead)


def test_interleaved_with_rounds_longer_than_the_pipeline():
    """As many rounds as whole pipelines fit, of equal size: 7 in one round of 7."""
    for n, m in PAIRS:
        rounds = max(1, m // n)
        if m % rounds:
            with pytest.raises(ValueError, match=f"multiple of its {rounds} rounds"):
                pipeline.interleaved(n, m, chunks=2)
        elif m >= n:
            schedule = pipeline.interleaved(n, m, chunks=3).validate()
            assert schedule.clocks == 2 * (3 * m + n - 1)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_looped_bfs(chunks):
    """The interleaved schedule's clocks for m >= n, and everything alive."""
    for n, m in PAIRS:
        schedule = pipeline.looped_bfs(n, m, chunks).validate()
        late = (chunks - 1) * max(0, n - m)
        assert schedule.clocks == 2 * (m * chunks + n - 1 + late)
        assert schedule.peak_activations == (m * chunks,) * n


def test_one_chunk_is_the_plain_schedule():
    for n, m in PAIRS:
        assert pipeline.looped_bfs(n, m, 1).columns == pipeline.gpipe(n, m).columns
    assert pipeline.interleaved(4, 8, 1).clocks == pipeline.one_f_one_b(4, 8).clocks


def test_zbv():
    """No idle clock between a worker's first and last action, from m = 2n - 1 on."""
    for n, m in PAIRS:
        schedule = pipeline.zbv(n, m).validate()
        assert max(schedule.peak_in_flight) <= 2 * n
        assert schedule.clocks == max(6 * m + n - 1, 4 * (m + n) - 2)
        if m < 2 * n - 1:
            continue
        assert schedule.clocks == 6 * m + n - 1
        assert schedule.peak_in_flight == (2 * n,) * n
        deferring = [max(2 * n + 1, n + 1 + 3 * j) for j in range(n)]
        assert schedule.peak_activations == tuple(deferring)
        for j, (begin, end) in enumerate(itertools.pairwise(schedule.columns.first)):
            assert schedule.actions(j)[0] == Action("F", j, 0)
            assert schedule.clock[end - 1] - schedule.clock[begin] + 1 == 6 * m


def half_clocks(n, m):
    """Below n / 2 micro-batches the way through all stages is not hidden."""
    even = 1 - n % 2
    return max(6 * m + (7 * n - 7 + 3 * even) // 2, 5 * m + 4 * n - 3 + 2 * even)


def min_clocks(n, m):
    return 6 * m + max(4 * n - 5 + 2 * (n % 3 == 0), 0)


@pytest.mark.parametrize("make", [pipeline.v_half, pipeline.v_min])
def test_building_blocks_with_controllable_memory(make):
    """The published memory from F to W, the clocks promised, and less idle than 1F1B.

    Each number of the docstrings is reached.
    """
    half = make is pipeline.v_half
    for n, m in itertools.product(range(1, 13), range(1, 21)):
        schedule = make(n, m).validate()
        kept = n // 2 + 1 if half else (n + 4) // 3
        from_f_to_w = memory.peaks(
            schedule.columns, memory.held(schedule.columns, 1, 1)
        )
        assert from_f_to_w.max() == min(2 * kept, 2 * m)
        idle = schedule.clocks - 6 * m
        # V-Min's turns for n = 3, 6 .. delay a second micro-batch only.
        if m > 1:
            assert schedule.clocks == (half_clocks if half else min_clocks)(n, m)
        if m <= n:
            continue
        assert max(schedule.peak_activations) == 2 * kept + (n > 1 or not half) + 1
        assert max(schedule.peak_in_flight) == 2 * (n // (2 if half else 3) + 1)
        published = 3.5 * n if half else 4 * n
        assert published - 5 <= idle <= min(published - 2, 6 * (n - 1))


def test_dualpipe_v():
    """2n + 1 half-size stages' activations on every worker; too few are refused."""
    for n in range(1, 5):
        for m in range(1, 2 * n):
            with pytest.raises(ValueError, match=f"at least {2 * n}, one per stage"):
                pipeline.dualpipe_v(n, m)
        for m in range(2 * n, 2 * n + 9):
            schedule = pipeline.dualpipe_v(n, m).validate()
            assert schedule.peak_activations == (2 * n + 1,) * n
            assert schedule.clocks == 4 * m + 2 * n - 1


def test_v_placement():
    made = (pipeline.zbv, pipeline.dualpipe_v, pipeline.v_half, pipeline.v_min)
    for schedule in (make(3, 6) for make in made):
        assert schedule.placement == ((0,), (1,), (2,), (2,), (1,), (0,))
        assert schedule.workers == 3
        assert schedule.stages == 6


def test_replicas_take_turns(rng):
    """Valid for random replicas; forward and backward of a micro-batch together."""
    for _ in range(60):
        n, m = (int(x) for x in rng.integers(1, 7, 2))
        counts = [int(x) for x in rng.integers(1, 5, n)]
        schedule = pipeline.pipedream(n, m, replicas=counts).validate()
        assert schedule.workers == sum(counts)
        for stage, count in enumerate(counts):
            first = sum(counts[:stage])
            for i in range(m):
                assert schedule.worker(stage, i) == first + i % count
            ahead = (sum(counts[stage:]) - 1) // count
            for turn in range(count):
                program = schedule.actions(first + turn)
                own = len(range(turn, m, count))
                expected = "F" * min(own, ahead + (own > ahead))
                assert "".join(a.kind for a in program).startswith(expected)
                held = min(own, ahead + 1)
                assert schedule.peak_activations[first + turn] == held


def test_pipedream_says_how_it_updates():
    assert pipeline.pipedream(3, 5).update_policy == UpdatePolicy("stashing", 1)
    synced = pipeline.pipedream(3, 5, update_every=4, policy="vertical_sync")
    assert synced.update_policy == UpdatePolicy("vertical_sync", 4)
    for policy in ("2bw", "flush"):
        found = pipeline.pipedream(3, 6, policy=policy)
        assert found.update_policy == UpdatePolicy(policy, 3)
    assert pipeline.one_f_one_b(3, 5).update_policy is None


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: pipeline.gpipe(0, 3), r"gpipe\(n=...\).*at least 1. Got 0"),
        (lambda: pipeline.gpipe(2, True), r"gpipe\(m=...\).*Got True"),
        (lambda: pipeline.one_f_one_b(2, 1.5), r"one_f_one_b\(m=...\).*Got 1.5"),
        (lambda: pipeline.interleaved(2, 4, 0), r"interleaved\(chunks=...\)"),
        (lambda: pipeline.looped_bfs(2, 4, 0), r"looped_bfs\(chunks=...\)"),
        (lambda: pipeline.zero_bubble(2, 0), r"zero_bubble\(m=...\)"),
        (lambda: pipeline.zbv(0, 2), r"zbv\(n=...\)"),
        (lambda: pipeline.v_half(0, 2), r"v_half\(n=...\)"),
        (lambda: pipeline.v_min(2, 0), r"v_min\(m=...\)"),
        (lambda: pipeline.pipedream(2, 4, replicas=(1,)), "each of 2 stages. Got"),
        (lambda: pipeline.pipedream(2, 4, replicas=(1, 0)), r"replicas=...\).*Got 0"),
        (lambda: pipeline.pipedream(2, 4, update_every=0), "update_every=...|every="),
        (
            lambda: MADE["pipedream_2bw"](4, 8, update_every=3),
            "at least the 4 stag",
        ),
        (
            lambda: MADE["pipedream_flush"](4, 8, update_every=0),
            "every=.*at least 1",
        ),
    ],
)
def test_bad_numbers_are_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_numpy_integers_are_integers():
    assert pipeline.gpipe(np.int64(2), np.int32(3)) == pipeline.gpipe(2, 3)
