"""Schedules by a solver, held against all schedules, the families and the stages."""

import contextlib
import functools
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jdist import Unavailable, pipeline, rpc, verify
from jdist.pipeline import Costs, Schedule, simulate, synthesize
from jdist.pipeline.schedule.actions import Action
from jdist.pipeline.synthesis import synthesizer
from jdist.pipeline.synthesis.problem import SchedulingProblem
from tests.pipeline import spmd_models
from tests.pipeline.models import judge, problem, step_by_step
from tests.pipeline.test_pipeline import apart, made, pipe_of, same

solver = pytest.mark.skipif(
    find_spec("ortools") is None, reason="needs the extra synthesize"
)


def orders(stage, split):
    """All orders of a stage's actions, F before B before W of each micro-batch."""
    kinds = [("F", "B", "W") if halves else ("F", "B") for halves in split]
    names = [f"{stage}{kind}{i}" for i, own in enumerate(kinds) for kind in own]
    for order in itertools.permutations(names):
        at = {name: place for place, name in enumerate(order)}
        chains = ([at[f"{stage}{k}{i}"] for k in own] for i, own in enumerate(kinds))
        if all(chain == sorted(chain) for chain in chains):
            yield order


@functools.cache
def every_schedule():
    """Of two stages on a worker each, and two micro-batches."""
    halves = list(itertools.product([False, True], repeat=2))
    programs = [[o for split in halves for o in orders(s, split)] for s in range(2)]
    found = []
    for pair in itertools.product(*programs):
        with contextlib.suppress(pipeline.ScheduleError):  # a circle
            found.append(Schedule.of(pair))
    return found


@solver
@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_is_shorter(seed):
    """Random costs, of each micro-batch or alike, whole multiples of a unit or not."""
    rng = np.random.default_rng(seed)
    shape = (2, 2) if seed else (2,)
    drawn = [rng.uniform(0.2, 2, shape) for _ in range(4)]
    if seed == 1:
        drawn = [np.ceil(8 * each) / 8 for each in drawn]
    names = ("forward", "backward", "backward_inputs", "backward_params")
    costs = Costs(
        **dict(zip(names, drawn, strict=True)),
        message_bytes=2.0,
        bandwidth=1.6,
        latency=0.375,
        activation_bytes=[5.0, 7.0],
        pending_bytes=[7.0, 2.0],
        weight_bytes=[11.0, 13.0],
    )
    played = [simulate(schedule, costs) for schedule in every_schedule()]
    makespans = np.array([one.makespan for one in played])
    peaks = np.array([one.peak_bytes for one in played])
    for memory in ([100.0, 100.0], [21.0, 22.0], [16.0, 20.0]):
        found = synthesize(costs, workers=2, micro_batches=2, memory=memory)
        expected = makespans[(peaks <= memory).all(axis=1)].min()
        assert found.makespan == pytest.approx(expected, rel=1e-4)
        # Rounded down to a millionth: far below that, and never above the shortest.
        assert (1 - 1e-4) * expected < found.lower_bound <= expected
        assert found.peak <= tuple(memory)


def weights_anywhere(passes, stages):
    """All orders of a worker's passes with a W after B of each of these stages."""
    if not stages:
        yield passes
        return
    first, *others = stages
    for order in weights_anywhere(passes, others):
        for at in range(order.index(f"{first}B0") + 1, len(order) + 1):
            yield (*order[:at], f"{first}W0", *order[at:])


@functools.cache
def every_placement():
    """All schedules of a micro-batch and four stages on two workers, none idle."""
    passes = [*(f"{s}F0" for s in range(4)), *(f"{s}B0" for s in (3, 2, 1, 0))]
    found = []
    for places in itertools.product(range(2), repeat=4):
        if len(set(places)) == 2:
            programs = []
            for worker in range(2):
                own = [s for s in range(4) if places[s] == worker]
                there = tuple(name for name in passes if int(name[0]) in own)
                splits = itertools.product([False, True], repeat=len(own))
                halves = (tuple(itertools.compress(own, split)) for split in splits)
                orders = (weights_anywhere(there, half) for half in halves)
                programs.append([*itertools.chain(*orders)])
            found += map(Schedule.of, itertools.product(*programs))
    return found


@solver
@pytest.mark.parametrize("placement", ["balanced", "free"])
def test_no_placement_is_better(rng, placement):
    """Random costs; messages between workers, and weights that bind one to the other.

    For a micro-batch all schedules of all places; for more, the optimum of each.
    """
    names = ("forward", "backward", "backward_inputs", "backward_params")
    costs = Costs(
        **{name: rng.uniform(0.2, 2, 4) for name in names},
        message_bytes=[1.0, 2.0, 1.0],
        bandwidth=5.0,
        latency=[0.375, 0.0, 0.75],
        activation_bytes=[5.0, 7.0, 3.0, 2.0],
        pending_bytes=[7.0, 2.0, 5.0, 2.0],
        weight_bytes=[11.0, 13.0, 17.0, 5.0],
    )
    given = {"workers": 2, "chunks": 2}
    places = {}
    for schedule in every_placement():
        places.setdefault(schedule.placement, []).append(simulate(schedule, costs))
    if placement == "balanced":
        places = {
            own: all_ for own, all_ in places.items() if sum(own, ()).count(0) == 2
        }
    played = [timeline for own in places.values() for timeline in own]
    makespans = np.array([one.makespan for one in played])
    peaks = np.array([one.peak_bytes for one in played])
    chosen = set()
    for memory in ([100.0, 100.0], [28.0, 40.0], [50.0, 24.0]):
        found = synthesize(
            costs, micro_batches=1, memory=memory, placement=placement, **given
        )
        expected = makespans[(peaks <= memory).all(axis=1)].min()
        assert found.makespan == pytest.approx(expected, rel=1e-4)
        assert (1 - 1e-4) * expected < found.lower_bound <= expected
        assert found.peak <= tuple(memory)
        chosen.add(found.schedule.placement)
    assert len(chosen) > 1
    found = synthesize(costs, micro_batches=3, placement=placement, memory=60, **given)
    assert found.gap < 1e-4
    best = [
        synthesize(costs, micro_batches=3, placement=own, memory=60, **given).makespan
        for own in ((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0))
    ]
    assert found.makespan <= min(best) * (1 + 1e-4)
    if placement == "balanced":
        assert found.makespan == pytest.approx(min(best), rel=1e-4)


@solver
def test_equal_costs_give_the_families_or_better():
    """Each under its own memory: proved, and some are not the best that fits in it."""
    costs = Costs(activation_bytes=3.0, weight_bytes=5.0)
    better = set()
    for family, options in (
        (pipeline.one_f_one_b(3, 5), {}),
        (pipeline.gpipe(2, 3), {}),
        (pipeline.zero_bubble(3, 5), {}),
        (pipeline.interleaved(2, 4, 2), {"chunks": 2}),
        (pipeline.zbv(2, 3), {"chunks": 2, "placement": "v"}),
        (pipeline.v_half(2, 3), {"chunks": 2, "placement": "v"}),
        (pipeline.v_min(2, 3), {"chunks": 2, "placement": (0, 1, 1, 0)}),
    ):
        known = simulate(family, costs)
        found = synthesize(
            costs,
            workers=family.workers,
            micro_batches=family.micro_batches,
            memory=known.peak_bytes,
            **options,
        )
        assert found.schedule.placement == family.placement
        assert all(a <= b for a, b in zip(found.peak, known.peak_bytes, strict=True))
        assert found.makespan <= known.makespan
        assert found.gap == 0
        if found.makespan < known.makespan:
            better.add(family.name)
    # ZB-H1 and ZBV have no idle time to save.
    assert better == {"1F1B", "GPipe", "interleaved 1F1B", "V-Half", "V-Min"}


UNEQUAL = Costs(
    forward=[1.0, 2.0, 1.5],
    backward=[2.5, 4.5, 3.0],
    backward_inputs=[1.0, 2.5, 1.0],
    backward_params=[1.5, 2.0, 2.0],
    latency=0.25,
    activation_bytes=[4.0, 3.0, 2.0],
)


@solver
@pytest.mark.parametrize("memory", [None, (12, 9, 4)])
def test_what_is_found_is_what_is_simulated_and_run(memory):
    """Bit for bit the stages one by one, on any devices, and the whole's gradient."""
    found = synthesize(UNEQUAL, workers=3, micro_batches=4, memory=memory)
    schedule = found.schedule.validate()
    assert schedule.name == "synthesized"
    played = simulate(schedule, UNEQUAL)
    assert (played.makespan, played.peak_bytes) == (found.makespan, found.peak)
    families = (pipeline.one_f_one_b, pipeline.zero_bubble)
    assert found.makespan < min(simulate(f(3, 4), UNEQUAL).makespan for f in families)
    assert found.gap == pytest.approx(0, abs=1e-12)
    params, batch, weights = problem(7)
    pipe = made(schedule, apart())
    loss, grads = pipe.value_and_grad(pipe.place(params), batch, weights)
    near = made(schedule)
    same(jax.device_get((loss, grads)), near.value_and_grad(params, batch, weights))
    if memory is None:
        same(grads, step_by_step(pipe, params, batch, weights, "mean"))
    judge()(
        params, batch, {"found": pipe_of(near, weights)}, weights=weights
    ).raise_if_failed()


@solver
@pytest.mark.parametrize("placement", ["v", "free"])
def test_other_executors(placement):
    """Of equal stages: one program, within the bound; workers, to the bit."""
    # Where the solver chooses, one worker has the slow stage alone.
    slow = np.array([1.0, 1.0, 1.0, 1.0 if placement == "v" else 3.0])
    costs = Costs(forward=slow, backward=2 * slow, latency=0.5, activation_bytes=1.0)
    given = {"chunks": 2, "placement": placement}
    found = synthesize(costs, workers=2, micro_batches=3, memory=6, **given)
    assert found.schedule.name == "synthesized"
    expected = ((0,), (1,), (1,), (0,)) if placement == "v" else ((0,),) * 3 + ((1,),)
    assert found.schedule.placement == expected
    params, batch, weights = spmd_models.problem(4, 11)
    stages = spmd_models.stages(4)

    def pipe(places=None):
        return pipeline.Pipeline(stages, spmd_models.losses, found.schedule, places)

    own = pipe().value_and_grad(params, batch, weights)
    # All actions in one place, one after the other, in the order of their starts.
    played = sorted(simulate(found.schedule, costs).records(), key=lambda r: r.start)
    serial = [Action(*record[1:4]) for record in played]
    alone = pipeline.Pipeline(stages, spmd_models.losses, Schedule.of([serial]))
    same(own, alone.value_and_grad(params, batch, weights))
    candidates = {"own": own}
    if placement == "v":  # one program has as many stages on each device
        one = pipe(pipeline.OneProgram(Mesh(np.array(jax.devices()[:2]), ("stage",))))
        candidates["one program"] = one.value_and_grad(params, batch, weights)
    verify.gradients(
        spmd_models.whole_losses,
        params,
        batch,
        {name: lambda *_, given=given: given for name, given in candidates.items()},
        weights=weights,
    ).raise_if_failed()
    names = ["first", "second"]

    def on_worker(name):
        with rpc.use_worker(name), jax.enable_x64(jax.config.jax_enable_x64):
            made = pipe(pipeline.Workers(names))
            return made.value_and_grad(made.place(params), batch, weights)

    with rpc.local_cluster(names), ThreadPoolExecutor(2) as threads:
        (loss, first), (_, second) = threads.map(on_worker, names)
    grads = [(first, second)[w][s] for s, (w,) in enumerate(expected)]
    same(jax.device_get((loss, grads)), jax.device_get(own))


@solver
def test_time_over():
    """The best family that fits, or better, with a bound of all schedules."""
    costs = Costs(forward=np.arange(1.0, 9.0), backward=3.5, activation_bytes=1.0)
    found = synthesize(costs, workers=8, micro_batches=24, memory=8, seconds=0.01)
    whole = simulate(pipeline.one_f_one_b(8, 24), costs)
    assert 0 < found.lower_bound <= found.makespan <= whole.makespan
    assert 0 <= found.gap < 0.5


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 1, 0), (1, 0, 1, 0)])
def test_the_search_begins_within_the_memory(rng, placement):
    """With as many micro-batches in flight as fit: 1F1B's where memory is plenty."""
    given = placement, 7
    sizes = {
        name: rng.integers(1, 9, (4, 7))
        for name in ("forward", "backward", "activation_bytes")
    }
    costs = Costs(**sizes, weight_bytes=rng.integers(1, 9, 4))
    problem = SchedulingProblem.of(costs, *given)
    plenty = synthesizer._in_flight(problem)
    if placement == (0, 1, 2, 3):
        family = pipeline.one_f_one_b(4, 7)
        assert all(plenty.actions(w) == family.actions(w) for w in range(4))
    known = simulate(plenty.validate(), costs)
    smallest = problem.smallest_limit(placement)
    makespans = []
    for part in np.linspace(0, 1, 9):
        limit = smallest + part * (max(known.peak_bytes) - smallest)
        own = synthesizer._in_flight(replace(problem, limit=limit))
        played = simulate(own.validate(), costs)
        assert (np.array(played.peak_bytes) <= limit).all()
        makespans.append(played.makespan)
    assert makespans[0] > makespans[-1]


@solver
def test_a_long_search_within_memory_begins_with_a_pattern(monkeypatch, rng):
    """Which is shorter than what it would begin with otherwise."""
    costs = Costs(forward=rng.uniform(1, 2, 3), backward=3, activation_bytes=1)
    problem = SchedulingProblem.of(costs, (0, 1, 2), 10)
    start = synthesizer._in_flight(replace(problem, limit=np.full(3, 2)))
    monkeypatch.setattr(synthesizer, "LONG", 10)
    begun = []

    def searched(problem, known, makespan, seconds):
        begun.append((known, seconds))
        return known, 0.0

    monkeypatch.setattr(synthesizer, "_searched", searched)
    found = synthesize(costs, workers=3, micro_batches=10, memory=2, seconds=60)
    assert begun == [(found.schedule, pytest.approx(40))]
    assert found.schedule.name == "synthesized"
    assert max(found.peak) <= 2
    assert found.makespan < simulate(start, costs).makespan


def test_the_smallest_memory_is_told_and_is_enough(monkeypatch):
    """A micro-batch at a time; where that is the only way no solver is needed."""
    costs = Costs(
        activation_bytes=[[3.0, 5.0], [7.0, 2.0], [1.0, 1.0], [4.0, 11.0]],
        weight_bytes=[1.0, 2.0, 3.0, 4.0],
    )
    given = {"workers": 2, "micro_batches": 2, "chunks": 2, "placement": "v"}
    told = r"at least the weights and one micro-batch's .* \[21.0, 13.0\] bytes. Got 20"
    with pytest.raises(ValueError, match=told):
        synthesize(costs, **given, memory=20.5)
    with pytest.raises(ValueError, match=r"memory=.*\[21.0, 13.0\]"):
        synthesize(costs, **given, memory=[21, 12])
    if find_spec("ortools"):
        # Any places need 19 on one worker: 21 if stages 0 and 3 are together.
        chosen = given | {"placement": "balanced"}
        told = r"\[1[03].0, 19.0\]|\[19.0, 1[03].0\]"
        with pytest.raises(ValueError, match=told):
            synthesize(costs, **chosen, memory=18.5)
        with pytest.raises(ValueError, match=r"\[19.0, 1[03].0\]"):
            synthesize(costs, **chosen, memory=[15, 11])
        found = synthesize(costs, **chosen, memory=19)
        assert max(found.peak) == 19
        found = synthesize(costs, **given, memory=[21, 13])
        assert found.peak == (21.0, 13.0)
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(Unavailable, match=r"needs OR-Tools: pip install .*synthesize"):
        synthesize(costs, **given, memory=[21, 13])
    assert synthesize(Costs(), workers=1, micro_batches=3).gap == 0


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"workers": 0}, ValueError, r"synthesize\(workers=...\).*at least 1. Got 0"),
        ({"micro_batches": 1.5}, ValueError, r"micro_batches=...\).*Got 1.5"),
        ({"chunks": 0}, ValueError, r"synthesize\(chunks=...\).*Got 0"),
        ({"costs": 3}, TypeError, r"synthesize\(costs\)` must be Costs"),
        ({"costs": Costs(forward=[1.0] * 3)}, ValueError, "each of 2 stages"),
        ({"seconds": 0}, ValueError, "above 0 seconds. Got 0"),
        ({"placement": "loop"}, ValueError, "'looped'.*'v'"),
        ({"placement": (0, 0)}, ValueError, "each of 2 workers 1 times.*Got"),
        ({"placement": 3}, TypeError, "each of 2 workers 1 times"),
        ({"memory": "8"}, ValueError, "must be bytes, for all workers or for each"),
        ({"memory": [8, 8, 8]}, ValueError, "must be bytes, for all workers"),
        ({"memory": np.nan}, ValueError, r"\[1.0, 1.0\] bytes. Got nan"),
        (
            {"costs": Costs(activation_bytes=[np.pi, 1.0]), "memory": 4},
            ValueError,
            "multiples of a common unit",
        ),
    ],
)
def test_bad_arguments_are_refused(change, kind, match):
    costs = Costs(forward=[1.0, 2.0], activation_bytes=1.0)
    given = {"costs": costs, "workers": 2, "micro_batches": 4, **change}
    with pytest.raises(kind, match=match):
        synthesize(given.pop("costs"), **given)
