"""The simulator beside a plain one, closed forms, and the limits of its size."""

import itertools
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jdist import pipeline
from jdist.pipeline import (
    Costs,
    Schedule,
    ScheduleError,
    simulate,
    split_drain,
)
from jdist.pipeline.schedule.actions import Action
from tests.pipeline.epochs import forward_only

SECONDS = ("forward", "backward", "backward_inputs", "backward_params")
BETWEEN = ("message_bytes", "latency", "bandwidth")

FAMILIES = {
    "forward_only": lambda n, m: forward_only(n, m),
    "gpipe": pipeline.gpipe,
    "one_f_one_b": pipeline.one_f_one_b,
    "interleaved": lambda n, m: pipeline.interleaved(n, m * n, 3),
    "looped_bfs": lambda n, m: pipeline.looped_bfs(n, m, 2),
    "zero_bubble": pipeline.zero_bubble,
    "zbv": pipeline.zbv,
    "v_half": pipeline.v_half,
    "v_min": pipeline.v_min,
    "dualpipe_v": lambda n, m: pipeline.dualpipe_v(n, m + 2 * n),
    "pipedream": lambda n, m: pipeline.pipedream(
        n, m, replicas=[1 + (n + j) % 3 for j in range(n)]
    ),
}


def one_by_one(schedule, cost):
    """The model of `simulate`'s docstring, one action at a time, without arrays.

    `cost(name, stage, micro_batch)` gives each number. Returns (start, end) by worker
    and action.
    """
    stages, last = schedule.stages, schedule.stages - 1
    turn, free = [0] * schedule.workers, [0.0] * schedule.workers
    programs = [schedule.actions(w) for w in range(schedule.workers)]
    with_weights = {a[1:] for p in programs for a in p if a.kind == "W"}
    arrived, link_free, found = {}, {}, {}
    while any(t < len(p) for t, p in zip(turn, programs, strict=True)):
        for worker, program in enumerate(programs):
            if turn[worker] == len(program):
                continue
            kind, stage, i = action = program[turn[worker]]
            needs = {
                "F": ("F", stage - 1, i) if stage else None,
                "B": ("B", stage + 1, i) if stage < last else ("F", stage, i),
                "W": None,
            }[kind]
            if needs and needs not in arrived:
                continue
            name = {"F": "forward", "W": "backward_params"}.get(kind) or (
                "backward_inputs" if (stage, i) in with_weights else "backward"
            )
            begin = max(free[worker], arrived[needs] if needs else 0.0)
            end = begin + cost(name, stage, i)
            found[worker, action] = (begin, end)
            free[worker], turn[worker] = end, turn[worker] + 1
            to = stage + {"F": 1, "B": -1, "W": stages}[kind]
            arrived[action] = end
            if 0 <= to < stages and schedule.worker(to, i) != worker:
                link = (worker, schedule.worker(to, i))
                pair = min(stage, to)
                wire = cost("message_bytes", pair, i) / cost("bandwidth", pair, i)
                left = max(end, link_free.get(link, 0.0)) + wire
                link_free[link] = left
                arrived[action] = left + cost("latency", pair, i)
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("case", range(3))
def test_every_time_is_that_of_a_plain_simulation(name, case, rng):
    """Random costs per stage and micro-batch, busy links, replicas: bit for bit."""
    n, m = [(1, 3), (3, 4), (4, 7)][case]
    schedule = FAMILIES[name](n, m)
    shape = (schedule.stages, schedule.micro_batches)
    between = (shape[0] - 1, shape[1])
    tables = {key: rng.uniform(0.5, 2, shape) for key in SECONDS}
    tables["message_bytes"] = rng.uniform(1e3, 4e3, between)
    tables["latency"] = rng.uniform(0, 0.3, between)
    tables["bandwidth"] = rng.uniform(1e3, 4e3, between)
    found = simulate(schedule, Costs(**tables))
    expected = one_by_one(schedule, lambda key, j, i: tables[key][j, i])
    got = {(r.worker, r[1:4]): (r.start, r.end) for r in found.records()}
    assert got == {(w, tuple(a)): times for (w, a), times in expected.items()}
    assert found.makespan == max(end for _, end in expected.values())


def at_random(rng, stages, workers, micro_batches):
    """Any placement and any order that does not wait in a circle, W at will."""
    placement = tuple((int(w),) for w in rng.integers(0, workers, stages))
    done, programs = set(), [[] for _ in range(workers)]
    todo = [
        Action(kind, stage, i)
        for kind in "FBW"
        for stage in range(stages)
        for i in range(micro_batches)
        if kind != "W" or rng.random() < 0.5
    ]
    while todo:
        ready = []
        for action in todo:
            kind, stage, i = action
            needs = {
                "F": [("F", stage - 1, i)] if stage else [],
                "B": [("F", stage, i)] + [("B", stage + 1, i)] * (stage < stages - 1),
                "W": [("B", stage, i)],
            }[kind]
            if done.issuperset(needs):
                ready.append(action)
        chosen = ready[rng.integers(len(ready))]
        todo.remove(chosen)
        done.add(tuple(chosen))
        programs[placement[chosen.stage][0]].append(chosen)
    return Schedule.of(programs, placement=placement)


def test_any_order_that_works(rng):
    """Random schedules are valid, survive CSV, and are timed as by the plain one."""
    for _ in range(25):
        stages, workers, m = (int(x) for x in rng.integers(1, 5, 3))
        schedule = at_random(rng, stages, workers, m).validate()
        assert Schedule.from_csv(schedule.to_csv()) == schedule
        tables = {key: rng.uniform(0.5, 2, (stages, m)) for key in SECONDS}
        tables |= {key: rng.uniform(0.5, 2, (stages - 1, m)) for key in BETWEEN}
        expected = one_by_one(schedule, lambda key, j, i, t=tables: t[key][j, i])
        found = simulate(schedule, Costs(**tables))
        got = {(r.worker, r[1:4]): (r.start, r.end) for r in found.records()}
        assert got == {(w, tuple(a)): times for (w, a), times in expected.items()}


def test_a_link_carries_one_message_at_a_time():
    """Three activations of 4 s each arrive at 1 + 4, 5 + 4, 9 + 4, latency apart."""
    costs = Costs(forward=1, message_bytes=8, bandwidth=2, latency=0.5)
    found = simulate(forward_only(2, 3), costs)
    starts = [r.start for r in found.records() if r.stage == 1]
    assert starts == [5.5, 9.5, 13.5]


def test_activations_and_cotangents_do_not_share_a_link():
    """Full duplex: a cotangent does not wait for an activation under way."""
    order = [["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]]
    order += [[a.replace("0", "1", 1) for a in ("0F0", "0B0", "0F1", "0B1")]]
    order[1] += ["1F2", "1B2"]
    costs = Costs(forward=1, backward=1, message_bytes=3)
    found = simulate(Schedule.of(order), Costs(**{**vars(costs), "bandwidth": 1}))
    assert [r.start for r in found.records()][3] == 1 + 3 + 1 + 1 + 3


def test_neighbours_on_one_worker_send_nothing():
    """The turn of the V, and everything on one worker."""
    slow = Costs(latency=1000.0)
    alone = simulate(pipeline.interleaved(1, 4, chunks=3), slow)
    assert alone.makespan == 4 * 3 * 3
    assert alone.bubble == 0
    found = simulate(pipeline.zbv(2, 1), Costs(latency=[10.0, 1000.0, 100.0]))
    assert 110 * 2 < found.makespan < 1000


# --- closed forms ---

PAIRS = list(itertools.product(range(1, 9), range(1, 9)))


@pytest.mark.parametrize(
    "make",
    [
        pipeline.gpipe,
        pipeline.one_f_one_b,
        pipeline.pipedream,
        partial(pipeline.pipedream, policy="2bw"),
    ],
)
def test_the_bubble_of_plain_schedules(make):
    """(n - 1)(F + B) on every worker, whatever F and B are."""
    for (n, m), (f, b) in itertools.product(PAIRS, [(1, 2), (3, 1), (2, 2)]):
        schedule = make(n, m)
        found = simulate(schedule, Costs(forward=f, backward=b))
        assert found.makespan == (m + n - 1) * (f + b)
        assert found.busy == (m * (f + b),) * n
        assert found.bubble == pytest.approx((n - 1) / (m + n - 1), abs=1e-15)


def test_the_bubble_of_forward_only():
    for n, m in PAIRS:
        found = simulate(forward_only(n, m), Costs(forward=3))
        assert found.makespan == 3 * (m + n - 1)


@pytest.mark.parametrize("name", ["interleaved", "looped_bfs"])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_the_bubble_of_looped_schedules(name, chunks):
    """(n - 1)(F + B) / v: v stages of a v-th each."""
    for n, rounds in itertools.product(range(1, 9), (1, 2, 3)):
        m = n * rounds
        costs = Costs(forward=4 / chunks, backward=8 / chunks)
        found = simulate(getattr(pipeline, name)(n, m, chunks), costs)
        assert found.makespan == 12 * m + (n - 1) * 12 / chunks


def test_the_bubble_of_zero_bubble():
    """(n - 1)(F + B - W) for m >= n, with W no longer than the other two."""
    for (n, m), (f, b, w) in itertools.product(
        PAIRS, [(1, 1, 1), (5, 5, 4), (4, 5, 3)]
    ):
        if m < n:
            continue
        costs = Costs(forward=f, backward_inputs=b, backward_params=w)
        found = simulate(pipeline.zero_bubble(n, m), costs)
        assert found.makespan == m * (f + b + w) + (n - 1) * (f + b - w)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_the_bubble_of_a_split_drain(name):
    """(n - 1)(F + B - W) for W no longer than F; never more than without it."""
    for (n, m), (f, b, w) in itertools.product(
        PAIRS, [(1, 1, 1), (5, 6, 4), (4, 3, 3), (1, 2, 3)]
    ):
        costs = Costs(forward=f, backward=b + w, backward_inputs=b, backward_params=w)
        whole = getattr(pipeline, name)(n, m)
        found = simulate(split_drain(whole), costs)
        least = (m + n - 1) * (f + b + w) - (n - 1) * w
        assert least <= found.makespan <= simulate(whole, costs).makespan
        if w <= f:
            assert found.makespan == least


def test_zero_bubble_beats_one_f_one_b():
    """By (n - 1) 2 W, where both do the same work."""
    for n, m in PAIRS:
        if m < n:
            continue
        split = Costs(forward=1, backward=2)
        saved = (
            simulate(pipeline.one_f_one_b(n, m), split).makespan
            - simulate(pipeline.zero_bubble(n, m), split).makespan
        )
        assert saved == 2 * (n - 1)


def test_the_bubble_of_zbv():
    """None between a worker's first action and its last, when F = B = W."""
    for n in range(1, 6):
        for m in range(2 * n - 1, 12):
            found = simulate(pipeline.zbv(n, m))
            records = list(found.records())
            for worker in range(n):
                own = [r for r in records if r.worker == worker]
                assert own[-1].end - own[0].start == found.busy[worker] == 6 * m


def test_the_bubble_of_dualpipe_v():
    """(n - 1)(F + B - 2W): below the published (n - 1)(F&B + B - 3W) with F&B = F + B.

    There the two actions of a pair end together; here the first one's result leaves
    when it is ready.
    """
    halves = [(1, 1, 1), (10, 10, 9), (10, 11, 9), (11, 10, 10), (10, 10, 5)]
    for n, (f, i, w) in itertools.product(range(1, 6), halves):
        b = i + w
        costs = Costs(forward=f, backward=b, backward_inputs=i, backward_params=w)
        for m in range(2 * n, 14):
            found = simulate(pipeline.dualpipe_v(n, m), costs)
            bubble = found.makespan - 2 * m * (f + b)
            assert bubble == (n - 1) * (f + b - 2 * w)
            assert bubble <= (n - 1) * (f + b + b - 3 * w)


def test_without_a_flush_the_bubble_vanishes():
    """PipeDream over an epoch: one fill and one drain, however many micro-batches."""
    bubbles = [simulate(pipeline.pipedream(4, m)).bubble for m in (8, 80, 800)]
    assert bubbles == pytest.approx([3 / 11, 3 / 83, 3 / 803])


# --- memory ---


def test_bytes_of_activations(rng):
    """Live bytes at each moment, added up one action at a time."""
    schedule = pipeline.zero_bubble(3, 7)
    table = rng.uniform(1, 9, (3, 7))
    found = simulate(schedule, Costs(activation_bytes=table, weight_bytes=[5, 6, 7]))
    for worker in range(3):
        held, peak = 0.0, 0.0
        for kind, stage, i in schedule.actions(worker):
            # Activations; in their place as much again of cotangents; nothing.
            held += {"F": 1, "B": 1, "W": -2}[kind] * table[stage, i]
            peak = max(peak, held)
        assert found.activation_bytes[worker] == pytest.approx(peak, rel=1e-12)
    assert found.weight_bytes == (5, 6, 7)
    assert found.peak_bytes[1] == found.activation_bytes[1] + 6


def test_bytes_of_weights_count_versions_and_stages():
    found = simulate(pipeline.pipedream(3, 9), Costs(weight_bytes=[1, 10, 100]))
    assert found.weight_bytes == (3, 20, 100)
    found = simulate(pipeline.zbv(2, 4), Costs(weight_bytes=[1, 10, 100, 1000]))
    assert found.weight_bytes == (1001, 110)


SIZE = """
    from pathlib import Path
    from jdist.pipeline import Costs, one_f_one_b, simulate
    schedule = one_f_one_b(1024, 4096)
    found = simulate(schedule, Costs(message_bytes=1.0, bandwidth=1e3, latency=1e-3))
    assert len(found.start) == 2 * 1024 * 4096
    assert found.peak_activations == tuple(range(1024, 0, -1))
    # Not by getrusage, whose maximum goes on from that of the process before exec.
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    print(int(peak) * 1024)
"""


def test_a_thousand_stages_fit_in_two_gib():
    """8.4 million actions with messages, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SIZE)],
        capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * 2**30


# --- refusals ---


def test_a_circle_is_refused():
    circle = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    with pytest.raises(ScheduleError, match="circle"):
        simulate(Schedule.of(circle))


@pytest.mark.parametrize(
    ("costs", "match"),
    [
        ({"forward": [1, 2]}, r"Costs\(forward=...\).*each of 3 stages.*shape \(2,\)"),
        ({"latency": [1, 2, 3]}, r"latency=...\).*each of 2 pairs.*shape \(3,\)"),
        ({"backward": np.ones((3, 5))}, r"\(3, 4\) of them.*shape \(3, 5\)"),
    ],
)
def test_costs_of_the_wrong_length_are_refused(costs, match):
    with pytest.raises(ValueError, match=match):
        simulate(pipeline.gpipe(3, 4), Costs(**costs))


@pytest.mark.parametrize(
    ("costs", "match"),
    [
        ({"forward": -1.0}, r"Costs\(forward=...\).*at least 0.*Got -1.0"),
        ({"backward": float("nan")}, r"backward=...\).*finite"),
        ({"bandwidth": 0.0}, r"bandwidth=...\).*above 0"),
        ({"bandwidth": [1.0, float("nan")]}, r"bandwidth=...\).*above 0"),
        ({"latency": np.ones((1, 1, 1))}, "a number, one per stage"),
    ],
)
def test_bad_costs_are_refused(costs, match):
    with pytest.raises(ValueError, match=match):
        Costs(**costs)
