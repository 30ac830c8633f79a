"""What is no mesh, batch, loss or step is refused in words, with its value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jdist import data_parallel, optim, reduction
from jdist.data_parallel import Sampler, TrainCheckpoints, hooks
from tests.wrong_types import FOREIGN, Tensor, refused

BATCH = {"x": np.arange(6, dtype=np.float32), "t": np.ones(6, np.float32)}
OPTIMIZER = optim.sgd(lr=0.1)


def loss(w, batch):
    return (w * batch["x"] - batch["t"]) ** 2


def gradient(**change):
    fn = data_parallel.value_and_grad(**{"loss_fn": loss, "replicas": 2} | change)
    return fn(jnp.float32(1), BATCH)


def step(**change):
    given = {"loss_fn": loss, "optimizer": OPTIMIZER, "replicas": 2}
    return data_parallel.train_step(**given | change)


def local(**change):
    given = {"loss_fn": loss, "optimizer": OPTIMIZER, "replicas": 2, "period": 2}
    return data_parallel.LocalSGD(**given | change)


def state():
    return step().init(jnp.float32(1))


def shard(**change):
    return data_parallel.shard_batch(**{"batch": BATCH, "replicas": 2} | change)


def fit(**change):
    given = {"step": step(), "state": state(), "batches": [BATCH]}
    return data_parallel.fit(**given | change)


def evaluate(**change):
    given = {"step": step(), "state": state(), "batches": [BATCH]}
    return data_parallel.evaluate(**given | change)


def shards(**change):
    return next(Sampler(6, 2).shards(**{"replicas": 2} | change))


def elastic(**change):
    given = {"loss_fn": loss, "optimizer": OPTIMIZER, "sampler": Sampler(6, 2)}
    return data_parallel.Elastic(**given | change)


def run(**change):
    return elastic().run(**{"params": 1.0, "data": BATCH} | change)


def group(**change):
    with data_parallel.process_group(**change):
        pytest.fail("refused")


FUNCTIONS = [None, 3, "mse", [loss]]
FLAGS = [None, 1, "False", np.zeros(2)]
STATES = [None, 1.0, {"w": 1.0}, []]
BATCHES = [None, 3, BATCH, "ab", np.float32(1), list]
WEIGHTS = ["abcdef", [1.0, "a"], [[1.0], [2.0, 3.0]], {}, object(), np.full(6, 1j)]

WRONG = {
    "shard_batch(batch=...)` must be a pytree of arrays": (
        lambda v: shard(batch={"x": np.array(v), "t": np.ones(2)}),
        [["a", "b"], [b"a", b"b"], [object(), object()]],
    ),
    "shard_batch(mesh": (lambda v: shard(replicas=None, mesh=v), [None, 2, 2.0, "2"]),
    "shard_batch(replicas": (lambda v: shard(replicas=v), [True, 2.0, "2"]),
    "shard_batch(sizes": (
        lambda v: shard(sizes=v),
        [3, "33", [1.5, 4.5], np.array([2.5, 3.5])],
    ),
    "shard_batch(rows": (lambda v: shard(rows=v), [3.0, "3", [3], True]),
    "shard_batch(weights": (lambda v: shard(weights=v), WEIGHTS),
    "shard_batch(data_axis": (lambda v: shard(data_axis=v), [None, 0, ["data"]]),
    "value_and_grad(loss_fn": (lambda v: gradient(loss_fn=v), FUNCTIONS),
    "value_and_grad(data_axis": (lambda v: gradient(data_axis=v), [None, 0, ["data"]]),
    "value_and_grad(bucket_cap_mb": (
        lambda v: gradient(bucket_cap_mb=v),
        ["1", b"1", {}, [1.0, None], [["w"]]],
    ),
    "fn(weights": (
        lambda v: data_parallel.value_and_grad(loss, replicas=2)(1.0, BATCH, v),
        WEIGHTS,
    ),
    "train_step(loss_fn": (lambda v: step(loss_fn=v), FUNCTIONS),
    "train_step(in_evaluation": (lambda v: step(in_evaluation=v), FUNCTIONS[1:]),
    "train_step(has_aux": (lambda v: step(has_aux=v), FLAGS),
    "train_step(accumulate": (lambda v: step(accumulate=v), [None, 2.0, "2", True]),
    "fit(step": (lambda v: fit(step=v), [None, loss, local()]),
    "fit(state": (lambda v: fit(state=v), STATES),
    "fit(batches": (lambda v: fit(batches=v), BATCHES),
    "fit(checkpoints": (lambda v: fit(checkpoints=v), ["folder", True]),
    "evaluate(step": (lambda v: evaluate(step=v), [None, loss, local()]),
    "evaluate(state": (lambda v: evaluate(state=v), STATES),
    "evaluate(batches": (lambda v: evaluate(batches=v), BATCHES),
    "Metrics.combine(found": (data_parallel.Metrics.combine, [3, "ab", [1.0]]),
    "LocalSGD(loss_fn": (lambda v: local(loss_fn=v), FUNCTIONS),
    "LocalSGD(period": (lambda v: local(period=v), [None, 2.0, "2", True]),
    "LocalSGD(start": (lambda v: local(start=v), [None, 2.0, "2", True]),
    "LocalSGD(group_size": (lambda v: local(group_size=v), [None, 1.0, "1"]),
    "step(state": (lambda v: local().step(v, BATCH), [None, 1.0, (1, 2)]),
    "average(state": (lambda v: local().average(v), [None, 1.0, (1, 2)]),
    "from_nnx(loss_fn": (
        lambda v: data_parallel.from_nnx(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), v),
        FUNCTIONS,
    ),
    "init(params": (
        lambda v: step().init(v),
        ["w", {"w": "text"}, object(), loss],
    ),
    "replicate(mesh": (
        lambda v: data_parallel.replicate(1.0, v),
        [None, 2, True, 2.0, "2"],
    ),
    "assign_buckets(leaves": (
        lambda v: data_parallel.assign_buckets(v, [8.0]),
        [None, 3, "ab", [1.0]],
    ),
    "assign_buckets(limits": (
        lambda v: data_parallel.assign_buckets([jnp.ones(3)], v),
        [None, 8.0, "8", ["8"]],
    ),
    "Elastic(loss_fn": (lambda v: elastic(loss_fn=v), FUNCTIONS),
    "Elastic(optimizer": (lambda v: elastic(optimizer=v), [None, 3, optim.sgd]),
    "Elastic(sampler": (lambda v: elastic(sampler=v), [None, 2, Sampler]),
    "Elastic(slots": (lambda v: elastic(slots=v), [2.0, "2", True]),
    "Elastic(folder": (lambda v: elastic(folder=v), [3, True, b"folder"]),
    "Elastic(timeout": (lambda v: elastic(timeout=v), [None, "60", [60.0]]),
    "Elastic.run(name": (lambda v: run(name=v), [None, 3]),
    "Elastic.run(min_replicas": (lambda v: run(min_replicas=v), [None, 1.0, "1"]),
    "Elastic.run(params": (lambda v: run(params=v), ["w", {"w": object()}]),
    "Elastic.run(weights": (lambda v: run(weights=v), WEIGHTS),
    "Elastic.run(epochs": (lambda v: run(epochs=v), [None, 1.0, "1"]),
    "process_group(axis": (lambda v: group(axis=v), [None, 0, ["data"]]),
    "process_group(timeout": (lambda v: group(timeout=v), [None, "60", [60.0]]),
    "bf16(hook": (hooks.bf16, [3, hooks.all_reduce, "fp16"]),
    "error_feedback(hook": (hooks.error_feedback, [None, hooks.bf16]),
    "switch(then": (
        lambda v: hooks.switch(hooks.bf16(), v, at=2),
        [None, hooks.all_reduce],
    ),
    "switch(at": (
        lambda v: hooks.switch(hooks.bf16(), hooks.all_reduce(), at=v),
        [None, 2.0, "2", True],
    ),
    "int8_per_channel(channel": (hooks.int8_per_channel, [None, 2.0, "2"]),
    "power_sgd(rank": (lambda v: hooks.power_sgd(rank=v), [None, 2.0, "2"]),
    "power_sgd(warm_start": (lambda v: hooks.power_sgd(warm_start=v), FLAGS),
    "Sampler(examples": (lambda v: Sampler(v, 2), [None, 6.0, "6", True]),
    "Sampler(shuffle": (lambda v: Sampler(6, 2, shuffle=v), FLAGS),
    "shards(replicas": (lambda v: shards(replicas=v), [None, 2.0, "2", True]),
    "shards(epoch": (lambda v: shards(epoch=v), [None, 1.0, "1"]),
    "shards(start": (lambda v: shards(start=v), [None, 1.0, "1"]),
    "shards(ranks": (lambda v: shards(ranks=v), [1, "0", [0.0]]),
}
"""What the message names, the call, and values of wrong types."""


@pytest.mark.parametrize("named", WRONG)
def test_a_wrong_type(named):
    refused(*WRONG[named], named)


W = {"w": np.ones(2, np.float32)}
X = np.ones((6, 2), np.float32)


def losses(params, x):
    return (x @ params["w"]) ** 2


def of_step(call, *given, **options):
    made = data_parallel.train_step(losses, OPTIMIZER, replicas=2)
    return getattr(made, call)(*given, **options)


def begun():
    return of_step("init", W)


def local_step(batch):
    made = data_parallel.LocalSGD(losses, OPTIMIZER, replicas=2, period=2)
    return made.step(made.init(W), batch)


UNREADABLE = {
    r"shard_batch\(batch=...\)": lambda x: data_parallel.shard_batch(x, replicas=2),
    r"fn\(batch=...\)": lambda x: data_parallel.value_and_grad(losses, replicas=2)(
        W, x
    ),
    r"step\(batch=...\)": lambda x: of_step("__call__", begun(), x),
    r"lower\(batch=...\)": lambda x: of_step("lower", begun(), x),
    r"evaluate\(batch=...\)": lambda x: of_step("evaluate", begun(), x),
    r"step\(batch=...\) ": local_step,
}
"""Calls that take a batch."""
UNREADABLE_PARAMS = {
    r"fn\(params=...\)": lambda w: data_parallel.value_and_grad(losses, replicas=2)(
        w, X
    ),
    r"init\(params=...\)": lambda w: of_step("init", w),
    r"init\(states=...\)": lambda w: of_step("init", W, states=w),
    r"init\(opt_state=...\)": lambda w: of_step("init", W, opt_state=w),
    r"init\(params=...\) ": lambda w: local().init(w),
    r"replicate\(params=...\)": lambda w: data_parallel.replicate(w, replicas=2),
    r"weighted_mean\(tree=...\)": (lambda w: reduction.weighted_mean(w, 1.0, "data")),
}


@pytest.mark.parametrize("named", UNREADABLE)
def test_batches_that_jax_cannot_read(named):
    """Of another framework, or of texts; said where it is given, with its path."""
    start = rf"^`{named.strip()}` "
    with pytest.raises(
        TypeError, match=rf"{start}{FOREIGN}\(root\).*Convert it, as by"
    ):
        UNREADABLE[named](Tensor(6, 2))
    with pytest.raises(TypeError, match=rf"{start}.*Got a numpy.ndarray at \(root\)"):
        UNREADABLE[named](np.array(["text"] * 6))


@pytest.mark.parametrize("named", UNREADABLE)
def test_batches_that_are_iterators_or_lists(named):
    start = r"^`.*\(.*\)` must be a pytree of arrays, one batch\. "
    for batch, got in [
        ((x for x in X), r"Got a generator at \(root\)\. Take one batch of it: `next"),
        ([[1.0, 2.0]] * 6, r"Got a list of numbers at \(root\)\. `numpy.asarray` mak"),
    ]:
        with pytest.raises(TypeError, match=start + got):
            UNREADABLE[named](batch)


@pytest.mark.parametrize("named", UNREADABLE_PARAMS)
def test_parameters_that_jax_cannot_read(named):
    start, call = rf"^`{named.strip()}` ", UNREADABLE_PARAMS[named]
    with pytest.raises(TypeError, match=rf"{start}{FOREIGN}w.*Convert it, as by"):
        call({"w": Tensor(2)})
    with pytest.raises(TypeError, match=rf"{start}.*Got a str at w"):
        call({"w": "text"})


def test_weights_of_another_framework_are_converted():
    loss, _ = data_parallel.value_and_grad(losses, replicas=2)(W, X, Tensor(6))
    assert float(loss) == 4


def test_specs_that_are_none():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    for specs, got in ((3, "3"), ({"w": "model"}, "'model'")):
        opt = data_parallel.zero(OPTIMIZER, mesh, specs=specs)
        rule = r"^`zero\(specs=...\)` must have a PartitionSpec or None for each param"
        with pytest.raises(TypeError, match=rf"{rule}.*Got {got}"):
            opt.init(W)


OUT_OF_RANGE = {
    r"value_and_grad\(method=...\)` must be one of .*Got array": (
        lambda: gradient(method=np.zeros(2))
    ),
    r"train_step\(accumulate=...\)` must be .*at least 1. Got 0": (
        lambda: step(accumulate=0)
    ),
    r"LocalSGD\(period=...\)` must be at least 1. Got 0": lambda: local(period=0),
    r"shards\(replicas=...\)` must be at least 1. Got 0": lambda: shards(replicas=0),
    r"shards\(epoch=...\)` must be at least 0. Got -1": lambda: shards(epoch=-1),
    r"replicate\(replicas=...\)` must be at least 1. Got 0": (
        lambda: data_parallel.replicate(1.0, replicas=0)
    ),
    r"train_step\(mesh=...\)` must be left out where `replicas=2` is given. Got Mesh": (
        lambda: step(mesh=Mesh(np.array(jax.devices()[:2]), ("data",)))
    ),
}


@pytest.mark.parametrize("match", OUT_OF_RANGE)
def test_a_value_out_of_range(match):
    with pytest.raises(ValueError, match=match):
        OUT_OF_RANGE[match]()


@pytest.mark.parametrize(
    ("hook", "got"),
    [
        (lambda state, bucket: None, "None"),
        (lambda state, bucket: bucket, "a Bucket"),
        (lambda state, bucket: (state, bucket.buffer), "for the bucket"),
        (
            lambda state, bucket: (state, bucket.replaced(bucket.buffer[1:])),
            "not float",
        ),
    ],
)
def test_what_a_hook_returns(hook, got):
    with pytest.raises(ValueError, match=rf"hook=.*must return \(state, .*{got}"):
        gradient(hook=hook)


def test_integers_of_numpy_and_an_iterator_are_taken(tmp_path):
    """What resembles a wrong type, and is none."""
    sampler = Sampler(np.int64(6), np.int32(3), shuffle=np.bool(False))
    batches = sampler.batches(BATCH, replicas=2, rows=np.int8(3))
    made = step(accumulate=np.int64(1), has_aux=np.bool(False), hook=hooks.bf16())
    saved = TrainCheckpoints(tmp_path)
    last, found = data_parallel.fit(
        made,
        made.init(jnp.float32(1)),
        batches,
        checkpoints=saved,
        save_every=np.int64(1),
    )
    assert int(last.step) == 2 == saved.latest()
    assert data_parallel.Metrics.combine(tuple(found)).examples == 6
