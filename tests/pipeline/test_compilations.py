"""Each program is compiled once, and nothing after the first step."""

import itertools
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim, pipeline, rpc
from jdist._compat import Ahead
from jdist.pipeline.run.stage_run import StageRun
from jdist.reduction import Partial
from tests.pipeline import models, trained
from tests.pipeline.epochs import asynchronous, paired

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
            pipe = trained.made(pipeline.Workers(names))
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


@pytest.mark.parametrize("reduction", ["mean", "max"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_each_program_is_compiled_once(programs, reduction, schedule):
    """The backward pass of the first micro-batch is that of all others."""
    jax.clear_caches()
    stages = models.stages()
    devices = jax.devices()[:3]
    pipe = pipeline.Pipeline(
        stages, models.losses, schedule, devices, reduction=reduction
    )
    params, batch, weights = models.problem(6)
    pipe.value_and_grad(params, batch, weights)
    found = [name for name in programs() if name.startswith("jit(body_")]
    assert len(found) == len(set(found))
    backward = [name for name in found if "_forward" not in name]
    assert len(backward) == 3 + schedule.split.any(axis=1).sum()


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
        share = Partial(np.float32(-0.0), None, np.float32(2))
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
        pipe = asynchronous(
            models.stages(), models.losses, optimizer=optim.sgd(lr=0.1),
            update_every=every,
        )  # fmt: skip
        params, batch, weights = models.problem(4)
        programs()
        pipe.train_epoch(pipe.init(params), paired([batch] * 4, [weights] * 4))
        counts.append(len([name for name in programs() if "_backward" in name]))
    assert counts == [3, 3]


# --- compiled ahead, by workers in several processes ---


def around(params, x):
    """Two values, one of which skips a stage."""
    return jnp.tanh(x @ params), (x @ params).sum(-1)


def masked(params, h):
    """An output that has no cotangent."""
    return h @ params, h.argmax(-1)


def joined_values(params, m, skip, best):
    return m @ params + (skip * best.astype(skip.dtype))[:, None]


def squares(y, batch):
    return ((y - batch["target"]) ** 2).sum(-1)


def branching(schedule, places, reduction="mean", **options):
    stages = [
        pipeline.Stage(around, ("x",), ("h", "skip"), **options),
        pipeline.Stage(masked, ("h",), ("m", "best"), **options),
        pipeline.Stage(joined_values, ("m", "skip", "best"), ("y",), **options),
    ]
    return pipeline.Pipeline(stages, squares, schedule, places, reduction=reduction)


def problem_of_branches(examples):
    rng = np.random.default_rng(3)
    shapes = (3, 4), (4, 5), (5, 2)
    params = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    batch = {"x": (examples, 3), "target": (examples, 2)}
    return params, {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in batch.items()
    }


TWO_FOR_ONE = pipeline.Schedule.of(
    [
        [f"0F{i}" for i in range(4)] + [f"0B{i}" for i in range(4)],
        ["1F0", "1F2", "1B0", "1B2"],
        ["1F1", "1F3", "1B1", "1B3"],
        [text for i in range(4) for text in (f"2F{i}", f"2B{i}")],
    ],
    placement=((0,), (1, 2), (3,)),
)
AHEAD = {
    "1F1B": (pipeline.one_f_one_b(3, 4), 8, {}),
    "unequal micro-batches": (pipeline.one_f_one_b(3, 4), 10, {}),
    "split": (pipeline.zero_bubble(3, 4), 8, {}),
    "some split": (pipeline.split_drain(pipeline.one_f_one_b(3, 4)), 8, {}),
    "recomputed": (pipeline.gpipe(3, 4), 8, {"recompute": True}),
    "max": (pipeline.one_f_one_b(3, 4), 8, {"reduction": "max"}),
    "a stage of two workers": (TWO_FOR_ONE, 8, {}),
    "a worker of two stages": (pipeline.interleaved(1, 4, 3), 8, {}),
    "evaluation": (pipeline.one_f_one_b(3, 4), 10, {}),
}


def first_call(names, case):
    schedule, examples, options = AHEAD[case]
    params, batch = problem_of_branches(examples)

    def work(name):
        with rpc.use_worker(name):
            pipe = branching(schedule, pipeline.Workers(names), **options)
            if case == "evaluation":
                return np.asarray(pipe.evaluate(pipe.place(params), batch).loss)
            loss, grads = pipe.value_and_grad(pipe.place(params), batch)
            return np.asarray(loss), jax.tree.map(np.asarray, grads)

    with rpc.local_cluster(names), ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(work, names))


def first_epoch(names, case):
    """Of PipeDream, without macro-batches and with them."""
    params, batch = problem_of_branches(4)
    kept = optim.with_master_weights(
        optim.sgd(lr=0.1), compute_dtype=jnp.float16, loss_scale=8.0
    )
    options = {
        "epoch": {"optimizer": optim.sgd(lr=0.1)},
        "epoch of macro-batches": {"optimizer": optim.sgd(lr=0.1), "update_every": 2},
        "epoch with a loss scale": {"optimizer": kept, "update_every": 2},
    }[case]
    if "scale" in case:
        batch = {name: x.astype(np.float16) for name, x in batch.items()}

    def work(name):
        with rpc.use_worker(name):
            made = branching(pipeline.one_f_one_b(3, 1), None)
            places = pipeline.Workers(names)
            pipe = asynchronous(made.stages, squares, places, **options)
            state, metrics = pipe.train_epoch(pipe.init(params), [batch] * 4)
            return metrics.losses, jax.tree.map(np.asarray, state.params)

    with rpc.local_cluster(names), ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(work, names))


def compiled_in(record):
    names = r"Compiling (jit\((body_|both|losses).*?) with .*?\. Argument"
    found = re.match(names, record)
    return found and found.group(1)


EPOCHS = ["epoch", "epoch of macro-batches", "epoch with a loss scale"]


@pytest.mark.parametrize("case", [*AHEAD, *EPOCHS])
def test_workers_compile_their_stages_before_the_first_micro_batch(
    caplog, monkeypatch, case
):
    """All of them, and no other programs than without that."""
    run, count = first_epoch, 3
    if case in AHEAD:
        run, count = first_call, AHEAD[case][0].workers
    names = [f"ahead{rank}" for rank in range(count)]
    compile_all, told = Ahead.compile, []

    def compile_and_say(ahead):
        compile_all(ahead)
        logging.getLogger("jax").warning("compiled ahead")

    with jax.log_compiles():
        jax.clear_caches()
        with monkeypatch.context() as patched:
            patched.setattr(Ahead, "compile", compile_and_say)
            found = run(names, case)
        ahead = [(record.threadName, record.message) for record in caplog.records]
        caplog.clear()
        jax.clear_caches()
        with monkeypatch.context() as patched:
            patched.setattr(Ahead, "compile", lambda ahead: None)
            expected = run(names, case)
        before = [record.message for record in caplog.records]
    done = set()
    for thread, message in ahead:
        if message == "compiled ahead":
            done.add(thread)
        elif compiled_in(message):
            told.append(compiled_in(message))
            assert thread not in done, message
    assert len(done) == len(names)
    assert sorted(told) == sorted(filter(None, map(compiled_in, before)))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_workers_compile_at_the_same_time(monkeypatch):
    """No compilation ends before those of all workers have begun."""
    compile_all, meeting = Ahead.compile, threading.Barrier(3)

    def compile_slowly(ahead):
        meeting.wait(60.0)
        compile_all(ahead)

    monkeypatch.setattr(Ahead, "compile", compile_slowly)
    first_call(["worker0", "worker1", "worker2"], "1F1B")
    assert not meeting.broken


def test_nothing_is_computed_ahead():
    """A stage that calls back is called for its micro-batches alone."""
    called = []

    def noted(params, x):
        jax.debug.callback(lambda x: called.append(float(x)), x.sum())
        return x * params

    names = ["alone"]
    with rpc.local_cluster(names), rpc.use_worker(names[0]):
        pipe = pipeline.Pipeline(
            [pipeline.Stage(noted, ("x",), ("y",))],
            lambda y, batch: y,
            pipeline.gpipe(1, 2),
            pipeline.Workers(names),
        )
        batch = {"x": np.float32([1, 2, 3, 4])}
        pipe.value_and_grad(pipe.place([np.float32(2)]), batch)
        jax.effects_barrier()
    assert sorted(called) == [3, 7]


# --- compiled ahead, in one process ---


def wide(params, x):
    return x @ params


def tanh_layer(params, h):
    return jnp.tanh(h @ params)


def of_equal_stages(places, evaluate):
    """A value, and gradients unless it is evaluated, of a first call."""
    rng = np.random.default_rng(8)
    shapes = {"x": (10, 3), "target": (10, 5)}
    batch = {k: rng.normal(size=of).astype(np.float32) for k, of in shapes.items()}
    sizes = (3, 5), (5, 5), (5, 5), (5, 5)
    params = [rng.normal(size=size).astype(np.float32) for size in sizes]
    bodies = [wide, tanh_layer, tanh_layer, tanh_layer]
    stages = [
        pipeline.Stage(body, (name,), (put,))
        for body, name, put in zip(bodies, "xabc", "abcy", strict=True)
    ]
    made = pipeline.one_f_one_b(4, 4)
    pipe = pipeline.Pipeline(stages, squares, made, placed(places))
    if evaluate:
        return np.asarray(pipe.evaluate(pipe.place(params), batch).loss)
    return jax.tree.map(np.asarray, pipe.value_and_grad(pipe.place(params), batch))


@pytest.mark.parametrize("evaluate", [False, True], ids=["gradient", "evaluation"])
@pytest.mark.parametrize("places", [None, (0, 1, 2, 3)], ids=["one device", "four"])
def test_stages_of_one_process_compile_at_the_same_time(
    caplog, monkeypatch, places, evaluate
):
    """Before the first micro-batch, each once; no other programs, and no other bits.

    No compilation ends before another one has begun.
    """
    numbers, meeting = itertools.count(), threading.Barrier(2)
    compile_one, compile_all = jax.stages.Lowered.compile, Ahead.compile
    compiled = []

    def compile_together(lowered):
        compiled.append(lowered)
        if next(numbers) < 2:
            meeting.wait(60.0)
        return compile_one(lowered)

    def compile_and_say(ahead):
        compile_all(ahead)
        logging.getLogger("jax").warning("compiled ahead")

    with jax.log_compiles():
        jax.clear_caches()
        with monkeypatch.context() as patched:
            patched.setattr(jax.stages.Lowered, "compile", compile_together)
            patched.setattr(Ahead, "compile", compile_and_say)
            found = of_equal_stages(places, evaluate)
        ahead = [record.message for record in caplog.records]
        caplog.clear()
        jax.clear_caches()
        with monkeypatch.context() as patched:
            patched.setattr(Ahead, "compile", lambda ahead: None)
            expected = of_equal_stages(places, evaluate)
        without = [record.message for record in caplog.records]
    done = ahead.index("compiled ahead")
    first, later = (
        sorted(filter(None, map(compiled_in, part)))
        for part in (ahead[:done], ahead[done:])
    )
    assert first == sorted(filter(None, map(compiled_in, without)))
    assert not later
    # What was lowered before is found again, and would be compiled a second time.
    lowered = [m for m in ahead[:done] if m.startswith("Compiling")]
    assert len(compiled) == len([m for m in lowered if "convert_element" not in m])
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_error_of_the_compiler_is_raised_as_it_is(monkeypatch):
    """And the next call compiles."""
    expected = of_equal_stages(None, evaluate=True)

    def failing(lowered):
        raise RuntimeError("no room for 17 kernels")

    with monkeypatch.context() as patched:
        patched.setattr(jax.stages.Lowered, "compile", failing)
        with pytest.raises(RuntimeError, match=r"^no room for 17 kernels$"):
            of_equal_stages(None, evaluate=True)
    np.testing.assert_array_equal(of_equal_stages(None, evaluate=True), expected)


def test_stages_of_one_function_share_their_programs(programs, rng):
    """All but the first, whose input is of the batch and has no cotangent."""
    jax.clear_caches()

    def layer(w, x):
        return jnp.tanh(x @ w)

    def gradient(functions):
        names = ["x", "a", "b", "c", "y"]
        ways = zip(functions, itertools.pairwise(names), strict=True)
        stages = [pipeline.Stage(fn, (one,), (other,)) for fn, (one, other) in ways]
        schedule = pipeline.one_f_one_b(4, 4)
        pipe = pipeline.Pipeline(stages, lambda y, batch: y.mean(axis=1), schedule)
        found = pipe.value_and_grad(params, {"x": x})
        return found, [name for name in programs() if name.startswith("jit(body_")]

    params = list(rng.normal(size=(4, 3, 3)).astype(np.float32))
    x = rng.normal(size=(8, 3)).astype(np.float32)
    shared, compiled = gradient([layer] * 4)
    assert len(compiled) == 4
    # Functions of equal code, each of them with programs of its own.
    own, compiled = gradient([lambda w, x: jnp.tanh(x @ w) for _ in range(4)])
    assert len(compiled) == 8
    jax.tree.map(np.testing.assert_array_equal, shared, own)
