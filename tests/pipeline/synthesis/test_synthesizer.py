"""Schedules by a solver, held against all schedules, the families and the stages."""

import contextlib
import functools
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jdist import Unavailable, pipeline, rpc, verify
from jdist.pipeline import Costs, Schedule, simulate, synthesize
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
def test_other_executors():
    """Of equal stages in a V: one program, within the bound; workers, to the bit."""
    costs = Costs(activation_bytes=1.0)
    v = {"chunks": 2, "placement": "v"}
    found = synthesize(costs, workers=2, micro_batches=3, memory=4, **v)
    assert found.schedule.name == "synthesized"
    params, batch, weights = spmd_models.problem(4, 11)
    stages = spmd_models.stages(4)

    def pipe(places=None):
        return pipeline.Pipeline(stages, spmd_models.losses, found.schedule, places)

    one = pipe(pipeline.OneProgram(Mesh(np.array(jax.devices()[:2]), ("stage",))))
    own = pipe().value_and_grad(params, batch, weights)
    candidates = {"one program": one.value_and_grad(params, batch, weights), "own": own}
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
    grads = [first[0], second[1], second[2], first[3]]
    same(jax.device_get((loss, grads)), jax.device_get(own))


@solver
def test_time_over():
    """The best family that fits, or better, with a bound of all schedules."""
    costs = Costs(forward=np.arange(1.0, 9.0), backward=3.5, activation_bytes=1.0)
    found = synthesize(costs, workers=8, micro_batches=24, memory=8, seconds=0.01)
    whole = simulate(pipeline.one_f_one_b(8, 24), costs)
    assert 0 < found.lower_bound <= found.makespan <= whole.makespan
    assert 0 <= found.gap < 0.5


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
