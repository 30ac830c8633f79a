"""Each program is compiled once, and nothing after the first step."""

import re
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, pipeline, rpc
from jdist.pipeline.run.stage_run import MicroBatchShare, StageRun
from tests.pipeline import models, trained

DEVICES = {
    "anywhere": (None, jnp.asarray),
    "the first": ((0, 0), jnp.asarray),
    "two": ((0, 1), np.asarray),
    "others": ((5, 3), jnp.asarray),
}
SCHEDULES = {
    "1F1B": pipeline.one_f_one_b(3, 3),
    "zero bubble": pipeline.zero_bubble(3, 3),
}


@pytest.fixture
def programs(caplog):
    """`programs()`: names and shapes of what was compiled since it was last asked."""

    def taken():
        found = [
            match.group(1)
            for record in caplog.records
            if (
                match := re.match(
                    r"Compiling (jit\(.*?\) with .*?)\. Argument", record.message
                )
            )
        ]
        caplog.clear()
        return found

    with jax.log_compiles():
        yield taken


def placed(places):
    return places and [jax.devices()[number] for number in places]


@pytest.mark.parametrize(("places", "put"), DEVICES.values(), ids=DEVICES)
def test_nothing_compiles_after_the_first_step(programs, places, put):
    """A stage with keys, one with a state; micro-batches of two sizes, clipping."""
    pipe = trained.made(placed(places))
    state = trained.start(pipe)
    batch, weights = jax.tree.map(put, trained.batch_of(0))
    counts = []
    for _ in range(3):
        state, _ = pipe.train_step(state, batch, weights)
        counts.append(len(programs()))
    assert counts[1:] == [0, 0]


def test_nothing_compiles_after_the_first_step_of_workers(programs):
    names = ["once0", "once1"]

    def begin(name):
        with rpc.use_worker(name):
            pipe = trained.made(names)
            return name, pipe, trained.start(pipe)

    def step(run):
        name, pipe, state = run
        with rpc.use_worker(name):
            return name, pipe, pipe.train_step(state, *trained.batch_of(0))[0]

    with rpc.local_cluster(names), ThreadPoolExecutor(2) as threads:
        runs, counts = list(threads.map(begin, names)), []
        for _ in range(3):
            runs = list(threads.map(step, runs))
            counts.append(len(programs()))
    assert counts[1:] == [0, 0]


@pytest.mark.parametrize(
    ("reduction", "joined"), [("mean", False), ("mean", True), ("max", False)]
)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_each_program_is_compiled_once(programs, reduction, joined, schedule):
    """The backward pass of the first micro-batch is that of all others."""
    jax.clear_caches()
    stages = models.stages(join_weight_gradients=joined)
    devices = jax.devices()[:3]
    pipe = pipeline.Pipeline(
        stages, models.losses, schedule, devices, reduction=reduction
    )
    params, batch, weights = models.problem(6)
    pipe.value_and_grad(params, batch, weights)
    found = [name for name in programs() if name.startswith("jit(body_")]
    assert len(found) == len(set(found))
    backward = [name for name in found if "_forward" not in name]
    in_two = 3 if joined else schedule.split.any(axis=1).sum()
    assert len(backward) == 3 + in_two


@pytest.mark.parametrize("kind", ["mean", "sum", "max", "min"])
def test_the_first_micro_batch_is_added_to_nothing(kind, rng):
    """Not a bit of its gradient changes, nor the sign of a zero."""
    stage = pipeline.Stage(lambda w, x: x * w[None], ("x",), ("y",))
    compiled = stage.compiled(frozenset(), 0)
    w = jnp.float32([1, -2, 0, 5])
    x = jnp.asarray([[-0.0, 0.0, 3.5, -1e-30]], jnp.float32)
    found = []
    for single in (False, True):
        run = StageRun(stage, compiled, w, None, None, kind, single)
        run.forward(0, {"x": x})
        share = MicroBatchShare(np.float32(-0.0), np.float32(2))
        run.backward(0, {"y": jnp.ones_like(x)}, share, False)
        found.append(run.partial())
    first, second = (jax.tree.map(np.asarray, part) for part in found)
    for one, other in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
        if kind in ("mean", "sum"):
            assert one.tobytes() == other.tobytes()


def test_an_epoch_of_macro_batches_compiles_no_more_than_one_of_micro_batches(programs):
    """Of which each has an update of its own, and is added to nothing."""
    counts = []
    for every in (1, 2):
        jax.clear_caches()
        pipe = pipeline.PipeDream(
            models.stages(), models.losses, optimizer=optim.sgd(lr=0.1),
            update_every=every,
        )  # fmt: skip
        params, batch, weights = models.problem(4)
        programs()
        pipe.train_epoch(pipe.init(params), [batch] * 4, [weights] * 4)
        counts.append(len([name for name in programs() if "_backward" in name]))
    assert counts == [3, 3]
