"""Three workers of which one does something else than the others, again and again.

After each such call all of them train on, and what they find is compared, bit for bit,
with a pipeline of one process that has seen the good batches alone. Every batch bears
its number on both sides of the model, so that inputs of one and labels of another make
another loss.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jdist import optim, pipeline, rpc
from tests.pipeline.faults import Planted, planted

NAMES = ["worker0", "worker1", "worker2"]
PLACES = pipeline.Workers(NAMES)
WORKERS, MICRO_BATCHES, EXAMPLES, WIDTH = 3, 4, 9, 3
LOSS = WORKERS
"""In the place of a stage."""


def tap_of(stage):
    """The identity, whose forward or backward pass raises where that is planted."""

    def look(which, value):
        from tests.pipeline.faults import pass_by

        pass_by(stage, which)
        return np.asarray(value)

    looks = {w: functools.partial(look, w) for w in ("forward", "backward")}

    def asked(which, value):
        shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
        return jax.pure_callback(looks[which], shape, value)

    @jax.custom_vjp
    def tap(value):
        return asked("forward", value)

    tap.defvjp(lambda v: (tap(v), None), lambda _, d: (asked("backward", d),))
    return tap


TAPS = [tap_of(stage) for stage in (*range(WORKERS), LOSS)]


def first(params, x):
    return jnp.tanh(TAPS[0](x @ params["w"])) + x[:, :1]


def second(params, h):
    return TAPS[1](h) @ params["w"] + h


def third(params, m):
    return TAPS[2](m) @ params["w"]


def losses(y, batch):
    return (TAPS[LOSS](y - batch["t"]) ** 2).sum(-1)


def made(places=None, **options):
    stages = [
        pipeline.Stage(first, ("x",), ("h",)),
        pipeline.Stage(second, ("h",), ("m",)),
        pipeline.Stage(third, ("m",), ("y",)),
    ]
    options = {"optimizer": optim.sgd(lr=0.01, momentum=0.9), "max_norm": 2.0} | options
    schedule = pipeline.one_f_one_b(WORKERS, MICRO_BATCHES)
    return pipeline.Pipeline(stages, losses, schedule, places, **options)


def start(pipe):
    rng = np.random.default_rng(7)
    shapes = [(WIDTH, 4), (4, 4), (4, 2)]
    return pipe.init(
        [{"w": jnp.asarray(rng.normal(size=s), jnp.float32) / 2} for s in shapes]
    )


def batch_of(number):
    """Its number stands in the inputs and in the labels."""
    rng = np.random.default_rng(number)
    x = rng.normal(size=(EXAMPLES, WIDTH)).astype(np.float32)
    t = rng.normal(size=(EXAMPLES, 2)).astype(np.float32)
    weights = rng.uniform(0.5, 2, EXAMPLES).astype(np.float32)
    return {"x": x + number % 17, "t": t + number % 17}, weights


CALLS = ("train_step", "value_and_grad", "evaluate")


def called(pipe, call, state, batch, weights, **overrides):
    """One of the calls of a pipeline."""
    if call == "train_step":
        return pipe.train_step(state, batch, weights, **overrides)
    if call == "value_and_grad":
        return pipe.value_and_grad(state.params, batch, weights)
    return pipe.evaluate(state, batch, weights)


# --- what the worker that is drawn does instead ---


def nan_weight(pipe, call, state, batch, weights, at):
    weights = weights.copy()
    weights[at] = np.nan
    called(pipe, call, state, batch, weights)


def too_few(pipe, call, state, batch, weights, at):
    fewer = {name: rows[:2] for name, rows in batch.items()}
    called(pipe, call, state, fewer, weights[:2])


def one_fewer(pipe, call, state, batch, weights, at):
    fewer = {name: rows[:-1] for name, rows in batch.items()}
    called(pipe, call, state, fewer, weights[:-1])


def ragged(pipe, call, state, batch, weights, at):
    called(pipe, call, state, batch | {"t": batch["t"][:5]}, weights)


def no_mapping(pipe, call, state, batch, weights, at):
    called(pipe, call, state, [batch["x"]], weights)


def entries_missing(pipe, call, state, batch, weights, at):
    """Those that its stage or the loss takes; of the second worker all."""
    taken = {0: {"x"}, 1: {"x", "t"}, 2: {"t"}}[pipe.own[0]]
    left = {name: rows for name, rows in batch.items() if name not in taken}
    called(pipe, call, state, left, weights)


def bad_rate(pipe, call, state, batch, weights, at):
    pipe.train_step(state, batch, weights, lr=-1.0)


def unknown_number(pipe, call, state, batch, weights, at):
    pipe.train_step(state, batch, weights, temperature=1.0)


def another_rate(pipe, call, state, batch, weights, at):
    pipe.train_step(state, batch, weights, lr=0.02)


def a_tree_missing(pipe, call, state, batch, weights, at):
    called(pipe, call, state._replace(params=state.params[:-1]), batch, weights)


def another_step(pipe, call, state, batch, weights, at):
    pipe.train_step(state._replace(step=state.step + 1), batch, weights)


def another_batch(pipe, call, state, batch, weights, at):
    """Of the same sizes, and with the same weights."""
    called(pipe, call, state, batch_of(int(batch["x"].sum()) + 99_991)[0], weights)


def other_weights(pipe, call, state, batch, weights, at):
    called(pipe, call, state, batch, weights[::-1].copy())


def one_sided(pipe, call, state, batch, weights, at):
    """Another call with the same batch, as `if rank == 0: evaluate(...)` makes."""
    others = [other for other in CALLS if other != call]
    called(pipe, others[at % 2], state, batch, weights)


def meets_others(pipe, call, state, batch, weights, at):
    pipe.communicator.gather(at, "PipelineCheckpoints.save")


def raises_forward(pipe, call, state, batch, weights, at):
    with planted(pipe.own[0], "forward", at):
        called(pipe, call, state, batch, weights)


def raises_backward(pipe, call, state, batch, weights, at):
    """Of the first stage's last micro-batch, for one, when all others are done."""
    call = "train_step" if call == "evaluate" else call
    with planted(pipe.own[0], "backward", at):
        called(pipe, call, state, batch, weights)


def data_raises(pipe, call, state, batch, weights, at):
    def batches():
        yield from ()
        raise Planted("planted in the data")

    pipeline.fit(pipe, state, batches())


def data_ends(pipe, call, state, batch, weights, at):
    pipeline.fit(pipe, state, [])


DEVIATIONS = {
    nan_weight: r"must be finite and not negative",
    too_few: r"must have an example for each of the 4 |must be called by all",
    one_fewer: r"must be called by all workers alike\. Got .* with 8 examples",
    ragged: r"leaves all have the same first dimension",
    no_mapping: r"must be a dict|must have an example for each|must be called by all",
    entries_missing: r"must output '[xt]', or the batch have it|no leaves at all",
    bad_rate: r"`sgd.step\(lr=...\)` must be at least 0",
    unknown_number: r"has no hyperparameter 'temperature'",
    another_rate: r"must be called by all workers alike\. Got .*lr=0\.02",
    a_tree_missing: r"must be a list of 3 trees",
    another_step: r"must be called by all workers alike\. Got .* of step \d+",
    another_batch: r"same batch, weights and key .* another entry 't' and entry 'x'",
    other_weights: r"same batch, weights and key .* Got another weights",
    one_sided: r"must be called by all workers alike\. Got ",
    meets_others: r"must be called by all workers alike\. Got .*Checkpoints.save",
    raises_forward: r"planted in the forward pass of stage",
    raises_backward: r"planted in the backward pass of stage",
    data_raises: r"planted in the data",
    data_ends: r"must be called by all workers alike\. Got .*the end of fit",
}
"""What may go wrong, and what all workers are told."""

TRAINS = {bad_rate, unknown_number, another_rate, another_step, raises_backward}
"""Those in which the others train."""
FITS = {data_raises, data_ends}


def told(deviate, rank, culprit, pipe, call, state, data, at):
    """What a worker is told in a call in which one of them deviates."""
    batch, weights = data
    try:
        if rank == culprit:
            deviate(pipe, call, state, batch, weights, at)
        elif deviate in FITS:
            pipeline.fit(pipe, state, [(batch, weights)])
        else:
            called(pipe, call, state, batch, weights)
    except rpc.RpcTimeout as late:
        raise AssertionError(f"{deviate.__name__}: {late}") from late
    except Exception as error:  # noqa: BLE001 - which it is, the test looks at
        return "\n".join([f"{error}", *getattr(error, "__notes__", [])])
    return "no error"


def draws(seed, count):
    """What every draw told this worker: each deviation once, and then at random.

    A good step follows each of them.
    """
    rng = np.random.default_rng(seed)
    rank = NAMES.index(rpc.get_worker_info().name)
    pipe, alone = made(PLACES), made()
    state, expected = start(pipe), start(alone)
    known = list(DEVIATIONS)
    chosen = [*known, *(known[i] for i in rng.integers(len(known), size=count))]
    found = []
    for draw, deviate in enumerate(chosen):
        call = CALLS[rng.integers(3)]
        culprit, at = (int(rng.integers(n)) for n in (WORKERS, MICRO_BATCHES))
        if deviate in TRAINS:
            call = "train_step"
        data = batch_of(2 * draw)
        text = told(deviate, rank, culprit, pipe, call, state, data, at)
        found.append((deviate.__name__, call, culprit, text))
        data = batch_of(2 * draw + 1)
        state, metrics = pipe.train_step(state, *data)
        expected, wanted = alone.train_step(expected, *data)
        same_step(rank, state, metrics, expected, wanted, found)
    return found


def same_step(rank, state, metrics, expected, wanted, found):
    """The bits of one process that saw the good batches alone."""
    assert state.step == expected.step, found
    for field in ("loss", "grad_norm"):
        pair = np.asarray(getattr(metrics, field)), np.asarray(getattr(wanted, field))
        assert pair[0] == pair[1], (field, pair, found[-1])
    for name in ("params", "opt_states"):
        mine = jax.tree.leaves(getattr(state, name)[rank])
        others = jax.tree.leaves(getattr(expected, name)[rank])
        for a, b in zip(mine, others, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(found[-1]))
