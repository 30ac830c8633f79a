"""Training and evaluation over many batches: steps, checkpoints, counts and a bar."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jdist import data_parallel, optim
from jdist.data_parallel import Metrics, Sampler, evaluate, fit, train_step
from tests.refilled import ALIGNED, UNALIGNED, buffer, refilled
from tests.replicas import over

MESH = Mesh(np.array(jax.devices()[:2]), ("data",))
MESHES = pytest.mark.parametrize("mesh", [MESH, 2], ids=["mesh", "one device"])
START = np.array([0.5, -1.0, 2.0])
OFFSETS = pytest.mark.parametrize("offset", [ALIGNED, UNALIGNED])


def losses(w, batch):
    x, y = batch
    return (x @ w - y) ** 2


@pytest.fixture
def data(rng):
    return rng.standard_normal((11, 3)), rng.standard_normal(11)


def spread(key, shape, dtype, **_):
    """Weights that can tell; to draw some compiles a second's worth of programs."""
    return np.linspace(-0.7, 0.9, np.prod(shape), dtype=dtype).reshape(shape)


def same(found, expected):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(a, b)


@MESHES
def test_fit_is_the_steps_one_by_one(mesh, data, tmp_path):
    """Saved after every second step and at the end, and resumed in the middle."""
    step = train_step(losses, optim.adam(lr=0.1), **over(mesh), max_norm=1.0)
    batches = list(Sampler(11, 4, seed=3).batches(data, **over(mesh)))
    state, each = step.init(START), []
    for batch, weights in batches:
        state, metrics = step(state, batch, weights)
        each.append(metrics)
    with data_parallel.TrainCheckpoints(tmp_path) as saved:
        found, metrics = fit(
            step,
            step.init(START),
            batches,
            checkpoints=saved,
            save_every=2,
        )
        same(found, state)
        assert saved.latest() == 3
        middle = saved.restore(step.init(START), step=2)
        rest, _ = fit(step, middle, iter(batches[2:]))
        same(rest, state)
    assert [float(m.loss) for m in metrics] == [float(m.loss) for m in each]
    assert [float(m.grad_norm) for m in metrics] == [float(m.grad_norm) for m in each]
    assert [int(m.examples) for m in metrics] == [4, 4, 3]
    assert [float(m.weight) for m in metrics] == [4.0, 4.0, 3.0]


def test_what_fit_counts(data):
    """Of weights on the host and on devices, of lists, and of none."""
    step = train_step(losses, optim.sgd(lr=0.1), replicas=2)
    batch = [part[:4] for part in data]
    weights = [0.5, 0, 3, 0.25]
    given = [(batch, None), batch, (batch, weights), (batch, np.array(weights))]
    given += [
        (batch, jnp.array(weights)),
        (batch, jnp.array([True, False, True, True])),
    ]
    _, found = fit(step, step.init(START), given)
    assert [int(m.examples) for m in found] == [4, 4, 3, 3, 3, 3]
    assert [float(m.weight) for m in found] == [4, 4, 3.75, 3.75, 3.75, 3]
    total = sum(float(m.weight) * float(m.loss) for m in found) / 22.25
    epoch = Metrics.combine(found)
    np.testing.assert_allclose(epoch.loss, total, rtol=1e-12)
    assert epoch[1:3] == (20, 22.25)


@pytest.mark.parametrize(
    ("mesh", "reduction"),
    [(MESH, "mean"), (MESH, "max"), *((2, r) for r in ("mean", "sum", "max", "min"))],
    ids=str,
)
def test_an_evaluation_is_that_of_one_large_batch(mesh, reduction, data, rng):
    """Ragged batches with unequal weights; the state is as it was, and in use."""
    step = train_step(
        losses, optim.sgd(lr=0.1), **over(mesh), reduction=reduction, accumulate=2
    )
    state = step.init(START)
    before = jax.tree.map(np.asarray, state)
    weights = rng.uniform(0.1, 3, 11)
    cuts = (slice(0, 5), slice(5, 6), slice(6, 11))
    batches = [
        data_parallel.shard_batch(
            jax.tree.map(lambda x, c=c: x[c], data), **over(mesh), weights=weights[c]
        )
        for c in cuts
    ]
    found = evaluate(step, state, iter(batches))
    each = (data[0] @ START - data[1]) ** 2
    expected = {
        "mean": np.average(each, weights=weights),
        "sum": np.sum(weights * each),
        "max": each.max(),
        "min": each.min(),
    }[reduction]
    np.testing.assert_allclose(found.loss, expected, rtol=1e-10)
    np.testing.assert_allclose(found.weight, weights.sum(), rtol=1e-6)
    assert found.examples == 11
    same(state, before)
    one = step.evaluate(state, *batches[0])
    assert int(one.examples) == 5
    np.testing.assert_allclose(one.weight, weights[:5].sum(), rtol=1e-6)


def test_no_backward_pass_in_an_evaluation(data):
    """The compiled program has one product, where a step has two."""
    step = train_step(losses, optim.sgd(lr=0.1), replicas=1)
    state, batch = step.init(START), tuple(part[:4] for part in data)
    needed = state._replace(opt_state=None)
    programs = (
        step.evaluated.lower(needed, batch, None).as_text(),
        step.lower(state, batch).as_text(),
    )
    assert [text.count("dot_general") for text in programs] == [1, 2]


def test_modules_are_evaluated_in_evaluation_mode(rng):
    """By their averages and without dropout; the averages stay as they are."""

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(5)
            self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.last = nnx.Linear(3, 1, kernel_init=spread, rngs=rngs)

        def __call__(self, x):
            return self.last(self.dropout(self.norm(x)))[:, 0]

    def own_losses(net, batch):
        outputs = net(batch[0])
        return (outputs - batch[1]) ** 2, outputs

    with jax.numpy_dtype_promotion("standard"):
        x, y = (rng.standard_normal(s).astype("float32") for s in ((8, 3), (8,)))
        made = data_parallel.from_nnx(Net(), own_losses)
        step = train_step(
            made.loss_fn,
            optim.sgd(lr=0.1),
            replicas=2,
            has_aux=True,
            in_evaluation=made.in_evaluation,
        )
        key = jax.random.key(2)
        state = step.init(made.params, states=made.states, key=key)
        state, _ = fit(step, state, [((x, y), None)] * 2)
        found = step.evaluate(state, (x, y))
        model = made.module(state.params, state.states)
        model.eval()
        outputs = nnx.jit(Net.__call__)(model, x)
        np.testing.assert_allclose(found.aux.reshape(8), outputs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.loss, np.mean((outputs - y) ** 2), rtol=1e-5)
        training = train_step(made.loss_fn, optim.sgd(), replicas=2, has_aux=True)
        assert float(training.evaluate(state, (x, y)).loss) != float(found.loss)


@pytest.mark.parametrize("kind", [tuple, list])
def test_one_batch_in_place_of_a_list_of_batches(kind, data):
    """Its arrays would be taken for batches, one after the other."""
    step = train_step(losses, optim.sgd(lr=0.1), replicas=1)
    state = step.init(START)
    for loop in (fit, evaluate):
        rule = rf"^`{loop.__name__}\(batches\)` must be .* Got one batch, arrays .*"
        with pytest.raises(ValueError, match=rule + r"`\[\(batch, None\)\]`\.$"):
            loop(step, state, kind(data))
    # Arrays of which each is a batch, for a loss that would take both together too.
    sums = train_step(
        lambda w, b: sum(jax.tree.leaves(b)) * w, optim.sgd(lr=0.1), replicas=1
    )
    fit(sums, sums.init(jnp.ones(())), kind([data[1], data[1]]))


def test_what_is_refused(data):
    step = train_step(losses, optim.sgd(lr=0.1), replicas=2)
    state = step.init(START)
    with pytest.raises(ValueError, match=r"fit\(save_every=...\)` must be at least 1"):
        fit(step, state, [], save_every=0)
    for name, wrong in {
        "save_every": 2.5,
        "batches": {"x": data[0]},
        "checkpoints": "folder",
        "state": START,
    }.items():
        given = {"step": step, "state": state, "batches": [], name: wrong}
        with pytest.raises(TypeError, match=rf"^`fit\({name}(=...)?\)` must .*Got "):
            fit(**given)
    with pytest.raises(
        ValueError, match=r"`batches` must be .*Got a tuple of 3\. Put a"
    ):
        fit(step, state, [(*data, None)])
    assert fit(step, state, []) == (state, [])
    with pytest.raises(ValueError, match=r"must have one entry at least\. Got none"):
        evaluate(step, state, [])
    with pytest.raises(
        ValueError, match=r"evaluate\(batch=...\)` must have a multiple"
    ):
        evaluate(step, state, [(data, None)])
    _, metrics = step(state, tuple(part[:4] for part in data))
    with pytest.raises(
        ValueError, match=r"how many examples.*`fit` and `evaluate` coun"
    ):
        Metrics.combine([metrics])
    with pytest.raises(ValueError, match=r"`evaluate\(state=...\)` must hold arrays"):
        step.evaluate(state, tuple(part[:4] for part in data))
    parts = [metrics._replace(loss=3.0, examples=1, weight=0.5)]
    assert Metrics.combine(parts) == Metrics(3.0, 1, 0.5)


@MESHES
@OFFSETS
def test_each_batch_is_read_before_the_next_is_asked_for(mesh, offset, rng):
    """A step of 4 MiB still runs when the loader fills its buffer again."""
    rows = rng.standard_normal((1024, 1024)).astype(np.float32)
    w = rng.standard_normal((1024, 64)).astype(np.float32)
    factors = rng.uniform(1, 9, 7).astype(np.float32)
    weights = rng.uniform(0.5, 3, 1024).astype(np.float32)

    def loader():
        memory = buffer((1024,), offset)
        for batch, factor in zip(refilled(rows, factors, offset), factors, strict=True):
            memory[...] = weights * factor
            yield batch, memory
            memory[...] = np.nan

    step = train_step(
        lambda w, x: jnp.abs(x @ w).mean(-1), optim.sgd(lr=0.0), **over(mesh)
    )
    own = np.average(np.abs(rows @ w).mean(-1), weights=weights)
    _, found = fit(step, step.init(w), loader())
    np.testing.assert_allclose(
        [x.loss for x in found], own * factors, rtol=1e-5
    )  # float32
    total = evaluate(step, step.init(w), loader())
    expected = own * (factors**2).sum() / factors.sum()
    np.testing.assert_allclose(total.loss, expected, rtol=1e-5)


@MESHES
@OFFSETS
def test_init_copies_the_arrays_of_numpy(mesh, offset, rng):
    """Before it returns: the caller may write to them at once."""
    params = buffer((1 << 20,), offset)
    params[...] = rng.standard_normal(1 << 20)
    expected = params.copy()
    step = train_step(lambda w, x: x * w.sum(), optim.sgd(), **over(mesh))
    local = data_parallel.LocalSGD(
        lambda w, x: x * w.sum(), optim.sgd(), **over(mesh), period=2
    )
    masters = optim.with_master_weights(optim.sgd(), compute_dtype=jnp.bfloat16)
    makers = [
        lambda: step.init(params).params,
        lambda: data_parallel.replicate(params, **over(mesh)),
        lambda: local.init(params).params[1],
        lambda: masters.init(params).masters,
    ]
    for make in makers:
        found = make()
        params[...] = np.nan
        np.testing.assert_array_equal(found, expected)
        params[...] = expected


@MESHES
def test_a_batch_that_is_a_pair_is_not_taken_for_one_with_weights(mesh, data):
    """Targets would be weights, unseen where the loss takes the inputs alone."""
    x, y = data
    x, y = jnp.asarray(x[:8]), jnp.abs(jnp.asarray(y[:8]))
    step = train_step(losses, optim.sgd(lr=0.0), **over(mesh))
    told = r"`{}\(batches\)` .* Got a pair that the loss function takes as one batch\. "
    told += r"Give `\(batch, None\)` for a batch that is a pair"
    for name, call in {"fit": fit, "evaluate": evaluate}.items():
        with pytest.raises(ValueError, match=told.format(name)):
            call(step, step.init(START), [(x, y)])
    expected = np.mean((np.asarray(x) @ START - np.asarray(y)) ** 2)
    _, found = fit(step, step.init(START), [((x, y), None)])
    np.testing.assert_allclose(found[0].loss, expected, rtol=1e-5)
    # Weights made by hand, of a batch that is a pair and of one that is an array.
    weights = np.linspace(0.3, 2.0, 8)
    own = (np.asarray(x) @ START - np.asarray(y)) ** 2
    total = evaluate(step, step.init(START), [((x, y), weights)])
    np.testing.assert_allclose(total.loss, np.average(own, weights=weights), rtol=1e-5)
    alone = train_step(lambda w, x: (x @ w) ** 2, optim.sgd(lr=0.0), **over(mesh))
    total = evaluate(alone, alone.init(START), [(x, list(weights))])
    own = (np.asarray(x) @ START) ** 2
    np.testing.assert_allclose(total.loss, np.average(own, weights=weights), rtol=1e-5)
