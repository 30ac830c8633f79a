"""What is no schedule, cost, plan or stage is refused in words, with its value."""

import inspect
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jdist import optim, pipeline
from jdist.pipeline import Costs, Layer, Profile, Schedule, ScheduleError, UpdatePolicy
from jdist.pipeline.schedule.actions import Action
from tests.wrong_types import FOREIGN, Tensor, refused

TWO = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
LAYERS = tuple(Layer(f"l{i}", "", 1.0, 2.0, (8.0,), 4.0) for i in range(3))
PROFILE = Profile.chain(LAYERS)
STAGES = [
    pipeline.Stage(lambda w, x: x * w, ("x",), ("h",)),
    pipeline.Stage(lambda w, h: h * w, ("h",), ("y",)),
]


def loss(y, batch):
    return (y - batch["t"]) ** 2


def parts(**change):
    """A schedule's arguments, and one changed."""
    made = pipeline.one_f_one_b(2, 4)
    names = inspect.signature(Schedule).parameters
    return {name: getattr(made, name) for name in names} | change


def changed(**change):
    return Schedule(**parts(**change))


def costs(**change):
    return pipeline.simulate(pipeline.gpipe(2, 3), Costs(**change))


def layer(**change):
    return Profile((replace(LAYERS[0], **change),), ())


def pipe(**change):
    given = {"stages": STAGES, "loss_fn": loss, "schedule": pipeline.gpipe(2, 3)}
    return pipeline.Pipeline(**given | change)


MESH = Mesh(np.array(jax.devices()[:2]), ("data",))
BATCH = {"x": np.arange(3.0), "t": np.ones(3)}


def module(**change):
    given = {"name": "l", "fn": lambda w, x: x * w, "params": 1.0}
    return pipeline.stages_from_modules([pipeline.Module(**given | change)], [0])


def layers():
    return [nnx.Linear(2, 2, rngs=nnx.Rngs(0))]


WRONG = {
    "of": (lambda v: Schedule.of(v), [5, None, [1], "0F0", [["0F0"], 3]]),
    "Schedule.of(placement": (
        lambda v: Schedule.of(TWO, placement=v),
        [5, (1, 0), "ab"],
    ),
    "Schedule.of(update_policy": (
        lambda v: Schedule.of(TWO, update_policy=v),
        ["2bw", 0, {}],
    ),
    "Schedule(columns": (lambda v: changed(columns=v), [TWO, None]),
    "Schedule(placement": (lambda v: changed(placement=v), [None, 2, (0, 1), "ab"]),
    "Schedule(update_policy": (lambda v: changed(update_policy=v), ["flush", False]),
    "Schedule(family": (lambda v: changed(family=v), ["1F1B", 3]),
    "from_csv": (Schedule.from_csv, [None, 3, b"0F0,0B0"]),
    "parse": (Action.parse, [None, 3, b"0F0"]),
    "one_f_one_b(replicas": (
        lambda v: pipeline.one_f_one_b(2, 4, replicas=v),
        [2, 1.5],
    ),
    "gpipe(replicas": (lambda v: pipeline.gpipe(2, 4, replicas=v), [2, object()]),
    "pipedream(replicas": (lambda v: pipeline.pipedream(2, 4, replicas=v), [2, 1.5]),
    "split_drain": (pipeline.split_drain, ["1F1B", None, 3]),
    "simulate(schedule": (pipeline.simulate, ["1F1B", None, 3]),
    "simulate(costs": (lambda v: pipeline.simulate(pipeline.gpipe(2, 3), v), [{}, 0]),
    "Costs(forward": (lambda v: costs(forward=v), ["9", None, {}, [[1], "a"], 1j]),
    "Costs(bandwidth": (lambda v: costs(bandwidth=v), ["9", None, ("a", "b")]),
    "records": (pipeline.Timeline.from_records, [3, None, "ab", [1], [("a", "b")]]),
    "Profile(layers": (lambda v: Profile(v, ()), [None, 3, "ab", ["l0"]]),
    "Profile(edges": (lambda v: Profile(LAYERS, v), [None, 3, "ab", [1], [("l0", 1)]]),
    "chain": (Profile.chain, [None, 3, "ab", ["l0"]]),
    "(layers": (lambda v: layer(name=v), [None, 3, ["a"]]),
    "(layers=...)` must have finite": (lambda v: layer(forward=v), ["9", None, [1.0]]),
    "(layers=...)` must": (
        lambda v: layer(activation_bytes=v),
        ["9", None, 8.0, ("a",)],
    ),
    "partition(profile": (lambda v: pipeline.partition(v, 2, 1e9), [None, LAYERS]),
    "partition(bandwidths": (
        lambda v: pipeline.partition(PROFILE, 2, v),
        ["9", None, 1j, True, ["9"], np.array(["9"])],
    ),
    "partition(memory": (
        lambda v: pipeline.partition(PROFILE, 2, 1e9, memory=v),
        ["9", [1.0], True],
    ),
    "partition(replicate": (
        lambda v: pipeline.partition(PROFILE, 2, 1e9, replicate=v),
        ["False", None, 1],
    ),
    "load_profile(path": (pipeline.load_profile, [None, 3, ["a"]]),
    "load_plan(path": (pipeline.load_plan, [None, 3, ["a"]]),
    "Stage(inputs": (lambda v: pipeline.Stage(loss, v), [None, 3, [1], "x"]),
    "Stage(fn": (pipeline.Stage, [None, 3, "tanh"]),
    "Stage(in_evaluation": (
        lambda v: pipeline.Stage(loss, in_evaluation=v),
        [3, "tanh", True],
    ),
    "Stage(stateful": (lambda v: pipeline.Stage(loss, stateful=v), [None, 1, "no"]),
    "Stage(keyed": (lambda v: pipeline.Stage(loss, keyed=v), [None, 1, np.zeros(2)]),
    "Pipeline(has_aux": (lambda v: pipe(has_aux=v), [None, 1, "False"]),
    "OneProgram(overlap": (
        lambda v: pipeline.OneProgram(MESH, overlap=v),
        [None, 0, ""],
    ),
    "OneProgram(mesh": (pipeline.OneProgram, [None, 3, [MESH]]),
    "Meshes(meshes": (pipeline.Meshes, [None, 3, "ab", MESH]),
    "Workers(names": (pipeline.Workers, [None, 3, "worker0", [0, 1]]),
    "Workers(mesh": (lambda v: pipeline.Workers(["worker0"], mesh=v), [3, [MESH]]),
    "with_ends(stages": (pipeline.with_ends, [None, 3, "ab", [loss]]),
    "value_and_grad(weights": (
        lambda v: pipe().value_and_grad([1.0, 1.0], BATCH, v),
        ["abc", [1.0, "a", 2.0], [[1.0], [2.0, 3.0]], {}, np.full(3, 1j)],
    ),
    "timed(pipe": (lambda v: pipeline.timed(v, dict), [None, loss]),
    "timed(step": (lambda v: pipeline.timed(pipe(), v), [None, 3]),
    "Metrics.combine(found": (pipeline.Metrics.combine, [3, "ab", [1.0], (1.0, 2.0)]),
    "Module('l', fn": (lambda v: module(fn=v), [None, 3, "tanh"]),
    "Module('l', in_evaluation": (lambda v: module(in_evaluation=v), [3, "tanh"]),
    "Module('l', inputs": (lambda v: module(inputs=v), [None, "x", [1]]),
    "Module('l', outputs": (lambda v: module(outputs=v), [None, "x", [1]]),
    "Module('l', tied": (lambda v: module(tied=v), [None, "w", [("w", "v")]]),
    "name=": (lambda v: module(name=v), [None, 3, ["l"]]),
    "stages_from_nnx(modules": (pipeline.stages_from_nnx, [None, 3, "ab", {}]),
    "stages_from_nnx(names": (
        lambda v: pipeline.stages_from_nnx(layers(), v),
        [3, "xy", [1, 2]],
    ),
    "stages_from_nnx(inputs": (
        lambda v: pipeline.stages_from_nnx(layers(), inputs=v),
        [None, 3, "x", [("x",)]],
    ),
    "stages_from_nnx(tied": (
        lambda v: pipeline.stages_from_nnx(layers(), tied=v),
        [None, 3, "w", {"w": 3}],
    ),
    "modules_from_nnx(layers": (pipeline.modules_from_nnx, [None, 3, "ab", layers()]),
    "modules_from_nnx(outputs": (
        lambda v: pipeline.modules_from_nnx({"a": layers()[0]}, outputs=v),
        [None, 3, "x"],
    ),
    "Pipeline(stages": (lambda v: pipe(stages=v), [None, 3, "ab", [loss, loss]]),
    "Pipeline(loss_fn": (lambda v: pipe(loss_fn=v), [None, 3, "mse"]),
    "Pipeline(loss_inputs": (lambda v: pipe(loss_inputs=v), [3, "y", [1]]),
    "Pipeline(optimizer": (
        lambda v: pipe(optimizer=v).init([1.0, 1.0]),
        [3, "sgd", optim.sgd],
    ),
    "Pipeline(max_norm": (lambda v: pipe(max_norm=v), ["1", [1.0], True]),
    "Pipeline(places": (lambda v: pipe(places=v), [3, "ab", MESH, ["a", "b"]]),
    "PipelineCheckpoints(pipe": (
        lambda v: pipeline.PipelineCheckpoints("folder", v),
        [None, "pipe"],
    ),
    "profile(layers": (lambda v: pipeline.profile(v, {}), [None, 3, [loss]]),
    "profile(batch": (lambda v: pipeline.profile([], v), [None, 3, [1]]),
    "stages_from_modules(modules": (
        lambda v: pipeline.stages_from_modules(v, [0]),
        [None, 3, [loss]],
    ),
}
"""What the message names, the call, and values of wrong types."""


@pytest.mark.parametrize("named", WRONG)
def test_a_wrong_type(named):
    refused(*WRONG[named], named)


OUT_OF_RANGE = {
    r"Schedule\(micro_batches": lambda: changed(micro_batches=0),
    r"Schedule\(placement=...\)` must have a worker": lambda: changed(placement=()),
    r"actions\(worker\)` must be one of 2 workers": (
        lambda: pipeline.gpipe(2, 3).actions(2)
    ),
    r"actions\(worker=": lambda: pipeline.gpipe(2, 3).actions(-1),
    r"partition\(memory": lambda: pipeline.partition(PROFILE, 2, 1e9, memory=np.nan),
    r"Pipeline\(max_norm=...\)` must be at least 0": lambda: pipe(max_norm=np.nan),
    r"Got '9'": lambda: pipeline.gpipe("9", 3),
}


@pytest.mark.parametrize("match", OUT_OF_RANGE)
def test_a_value_out_of_range(match):
    with pytest.raises(ValueError, match=match):
        OUT_OF_RANGE[match]()


@pytest.mark.parametrize("every", [1, 2])
def test_2bw_with_fewer_micro_batches_per_update_than_stages(every):
    """A micro-batch would enter before its version exists."""
    made = replace(pipeline.one_f_one_b(4, 8), update_policy=UpdatePolicy("2bw", every))
    with pytest.raises(
        ScheduleError, match=r"'versions' .*updates that it must follow"
    ):
        made.validate()


def test_a_flush_without_drains():
    made = pipeline.pipedream(3, 6, policy="flush")
    assert made.validate() is made
    undrained = replace(pipeline.one_f_one_b(3, 6), update_policy=made.update_policy)
    with pytest.raises(ScheduleError, match=r"\(worker 0, action 0F3\): .*must drain"):
        undrained.validate()
    # All backward passes after all forward passes: one version, but old gradients.
    late = replace(pipeline.gpipe(3, 6), update_policy=made.update_policy)
    with pytest.raises(ScheduleError, match="must drain"):
        late.validate()


ONE = pipeline.Stage(lambda w, x: x @ w, ("x",), ("y",))
W, X = np.ones((2, 3), np.float32), {"x": np.ones((4, 2), np.float32), "note": ["a"]}


def sole(places=None, **options):
    given = pipeline.gpipe(1, 2), places
    options = {"optimizer": optim.sgd()} | options
    return pipeline.Pipeline([ONE], lambda y, batch: y.sum(-1), *given, **options)


@pytest.mark.parametrize(
    ("named", "path", "call"),
    [
        (r"value_and_grad\(params\)", "0", lambda w, x: sole().value_and_grad([w], X)),
        (r"value_and_grad\(batch\)", "x", lambda w, x: sole().value_and_grad([W], x)),
        (r"evaluate\(batch\)", "x", lambda w, x: sole().evaluate([W], x)),
        (r"init\(params\)", "0", lambda w, x: sole().init([w])),
        (r"place\(params\)", "0", lambda w, x: sole().place([w])),
    ],
)
def test_arrays_of_another_framework(named, path, call):
    with pytest.raises(TypeError, match=rf"^`Pipeline.{named}` {FOREIGN}{path}\. Conv"):
        call(Tensor(2, 3), {"x": Tensor(4, 2)})


def test_batches_that_are_iterators_or_lists():
    start = r"^`Pipeline.*` must be a pytree of arrays, one batch\. "
    for batch, got in [
        (iter(X["x"]), r"Got an iterator at x\. Take one batch of it: `next"),
        (X["x"].tolist(), r"Got a list of numbers at x\. `numpy.asarray` makes"),
    ]:
        for call in (sole().value_and_grad, sole().evaluate):
            with pytest.raises(TypeError, match=start + got):
                call([W], {"x": batch})


def test_specs_that_are_none():
    pipe = sole(pipeline.Meshes([MESH], data_axis="data"))
    rule = r"^`Pipeline.place\(specs\)` must have a PartitionSpec or None for each par"
    with pytest.raises(TypeError, match=rf"{rule}.*Got 3"):
        pipe.place([W], [3])
