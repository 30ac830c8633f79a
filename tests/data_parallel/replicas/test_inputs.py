"""What a step is given: optimizers, donated states, lists, and arrays elsewhere."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jdist import data_parallel, optim
from jdist.data_parallel.step import train_step
from tests.replicas import over

DEVICES = np.array(jax.devices())
MESHES = pytest.mark.parametrize(
    "mesh", [Mesh(DEVICES[:2], ("data",)), 2], ids=["mesh", "one device"]
)
WEIGHTS = [1, 0.5, 3, 0, 2, 0.25]


def losses(params, batch):
    x, y = batch
    return (x @ (params["w"] * jnp.asarray(params["n"], x.dtype)) - y) ** 2


@pytest.fixture
def given(rng):
    """Parameters with an integer among them, and a batch, on the host."""
    params = {"w": rng.standard_normal(3), "n": np.array([1, -2, 3])}
    return params, (rng.standard_normal((6, 3)), rng.standard_normal(6))


def reference(params, batch):
    """One step of SGD on all examples."""

    def mean(w):
        return jnp.average(losses({**params, "w": w}, batch), weights=np.array(WEIGHTS))

    loss, grad = jax.value_and_grad(mean)(jnp.asarray(params["w"]))
    return loss, params["w"] - 0.1 * grad


def stepped(step, state, batch, weights=None):
    state, metrics = step(state, batch, WEIGHTS if weights is None else weights)
    return metrics.loss, state.params["w"]


@functools.cache
def programs(mesh):
    """A step, a gradient function and local SGD, compiled once for many tests."""
    opt = optim.sgd(lr=0.1, momentum=0.5)  # The first step is without momentum.
    return (
        data_parallel.train_step(losses, opt, **over(mesh)),
        data_parallel.value_and_grad(losses, **over(mesh)),
        data_parallel.LocalSGD(losses, optim.sgd(lr=0.1), **over(mesh), period=1),
    )


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


# --- optimizers ---

MESH = Mesh(DEVICES[:2], ("data",))
TAKERS = {
    "train_step(optimizer=...)": lambda o: data_parallel.train_step(
        losses, o, replicas=2
    ),
    "zero(optimizer=...)": lambda o: data_parallel.zero(o, MESH),
    "averaged(optimizer=...)": lambda o: data_parallel.averaged(o, "data"),
    "LocalSGD(optimizer=...)": lambda o: data_parallel.LocalSGD(
        losses, o, replicas=2, period=2
    ),
    "with_master_weights(optimizer=...)": optim.with_master_weights,
    "as_optax(optimizer=...)": optim.as_optax,
    "by_label(optimizers={'x': ...})": lambda o: optim.by_label({"x": o}, "x"),
}


@pytest.mark.parametrize("argument", TAKERS)
def test_what_is_no_optimizer_is_refused_with_the_way_out(argument):
    wrong = {
        "a GradientTransformationExtraArgs": optax.adam(0.1),
        "a function": optim.adam,
        "a type": Mesh,
        "a float": 0.1,
        "None": None,
    }
    for said, stranger in wrong.items():
        expected = (
            f"`{argument}` must be an optimizer of jdist.optim. Got {said}. Call a "
            "constructor, as `optim.adam(lr=1e-3)`, or wrap an optax transformation, "
            "`optim.from_optax(...)`."
        )
        with pytest.raises(TypeError, match=re.escape(expected)):
            TAKERS[argument](stranger)
    TAKERS[argument](optim.adam())


# --- states ---


@MESHES
def test_a_state_that_was_donated_is_refused(mesh, given):
    """By its path, before the program runs; a copy and a fresh one work."""
    params, batch = given
    step, fn, local = programs(mesh)
    state = step.init(params)
    copy = jax.tree.map(jnp.copy, state)
    expected = stepped(step, state, batch)
    refused = r"`step\(state=...\)` must hold arrays that are in use. Got one at step "
    with pytest.raises(ValueError, match=refused + "whose buffer was donated"):
        step(state, batch)
    close(stepped(step, copy, batch), expected)
    state = local.init(params)
    local.step(state, batch)
    with pytest.raises(ValueError, match=refused):
        local.step(state, batch)
    with pytest.raises(ValueError, match=r"`average\(state=...\)` must hold arrays"):
        local.average(state)
    gone = jax.tree.map(jnp.asarray, params)
    gone["w"].delete()
    with pytest.raises(ValueError, match=r"`fn\(params, batch\)` .* Got one at 0/w"):
        fn(gone, batch)


@MESHES
def test_jit_of_a_step(mesh, given):
    """Alone, and within another function; the state is then jit's to donate."""
    params, batch = given
    step = data_parallel.train_step(losses, optim.sgd(lr=0.1), **over(mesh))
    weights = jnp.array(WEIGHTS)
    expected = reference(*given)
    for jitted in (
        jax.jit(step, donate_argnums=0),
        jax.jit(lambda *args: step(*args)),
    ):
        close(stepped(jitted, step.init(params), batch, weights), expected)
    hooked = data_parallel.train_step(
        losses, optim.sgd(lr=0.1), **over(mesh), hook=data_parallel.hooks.bf16()
    )
    loss, _ = stepped(jax.jit(hooked), hooked.init(params), batch, weights)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-12)


@MESHES
def test_integer_parameters_are_left_alone(mesh, given):
    """As torch, in which only floating tensors can require a gradient."""
    params, batch = given
    plain, fn, local = programs(mesh)
    wrapped = optim.from_optax(optax.sgd(0.1))
    options = {"accumulate": 3, "max_norm": 1e6}
    for step in (
        plain,
        data_parallel.train_step(losses, wrapped, **over(mesh), **options),
    ):
        state, metrics = step(step.init(params), batch, WEIGHTS)
        close((metrics.loss, state.params["w"]), reference(*given))
        assert state.params["n"].dtype == params["n"].dtype
        np.testing.assert_array_equal(state.params["n"], params["n"])
    assert fn(params, batch, WEIGHTS)[1]["n"] is None
    state, _ = local.step(local.init(params), batch, WEIGHTS)
    for row in state.params["n"]:
        np.testing.assert_array_equal(row, params["n"])
    close([local.average(state)["w"]], [reference(*given)[1]])


# --- arrays that are ready ---


@pytest.fixture
def ready(mesh, given):
    """A step that has taken arrays as they are twice, and the arrays of a third one."""
    params, batch = given
    step, _, _ = programs(mesh)
    shards, weights = data_parallel.shard_batch(batch, **over(mesh), weights=WEIGHTS)
    # Committed to devices also where replicas share one.
    state = jax.tree.map(lambda x: jax.device_put(x, x.sharding), step.init(params))
    for _ in range(2):
        state, _ = step(state, shards, weights)
    return step, state, shards, weights


@MESHES
def test_they_are_looked_at_once(ready, monkeypatch):
    step, state, shards, weights = ready
    for check in ("prepared", "brought", "rows_in"):
        monkeypatch.delattr(train_step, check)
    state, _ = step(state, shards, weights)
    step(state, shards, weights)


@MESHES
def test_a_good_call_excuses_no_later_one(ready):
    """The same structure, shapes and dtypes; nothing of the state is donated then."""
    step, state, shards, weights = ready
    far = jax.devices()[3]
    first, second = shards
    gone = jnp.copy(second)
    gone.delete()
    moved = jax.device_put(state.params["w"], far)
    refused = {
        "step(batch=...)` must hold arrays that are in use. Got one at 0/1 whose": (
            (state, (first, gone), weights)
        ),
        "step(state=...)` must hold arrays that are in use. Got one at params/w ": (
            (state._replace(params={**state.params, "w": gone}), shards, weights)
        ),
        "step(state=...)` must lie on the step's devices": (
            (state._replace(params={**state.params, "w": moved}), shards, weights)
        ),
        "step(state=...)` must be a TrainState. Got a tuple": (
            (tuple(state), shards, weights)
        ),
        "step(weights=...)` must be finite and at least 0. Got -1": (
            (state, shards, -np.ones_like(weights))
        ),
    }
    for message, arguments in refused.items():
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            step(*arguments)
    far_shards = jax.device_put(shards, far)
    loss = step(jax.tree.map(jnp.copy, state), far_shards, weights)[1].loss
    np.testing.assert_allclose(step(state, shards, weights)[1].loss, loss, rtol=1e-12)


@MESHES
def test_shapes_and_dtypes_are_checked_whenever_they_are_new(mesh, ready):
    step, state, shards, weights = ready
    x, y = shards
    refused = {
        "multiple of 2 rows, one or more for each replica and micro-batch. Got 5": (
            ((x[:5], y[:5]), None)
        ),
        "multiple of 2 rows, one or more for each replica and micro-batch. Got 0": (
            ((x[:0], y[:0]), None)
        ),
        "`step(batch=...)` needs a batch whose leaves all have the same first": (
            ((x, y[:4]), weights)
        ),
        "the examples. Got 0: 6, 1: a scalar.": ((x, y[0]), weights),
        "the examples. Got 0: 6, 1: a scalar. ": ((x, 1.0), weights),
        "one batch. Got a str at 1. Give what is in it": ((x, "y"), weights),
        "the examples. Got no leaves at all": ((), weights),
        "step(weights=...)` must be one per row, shape (6,). Got shape (4,)": (
            (shards, weights[:4])
        ),
    }
    for message, (batch, given) in refused.items():
        for _ in range(2):  # No refusal is taken for a compiled program.
            with pytest.raises((ValueError, TypeError)) as error:
                step(state, batch, given)
            assert message.strip() in str(error.value)
    step(state, shards, weights)
    # The same shapes, but losses that are no floating numbers.
    plain = data_parallel.train_step(lambda w, y: y, optim.sgd(lr=0.1), **over(mesh))
    state, _ = plain(plain.init(jnp.ones(())), y, weights)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"one real loss per example.*Got int64"):
            plain(state, y.astype(int), weights)
    plain(state, y, weights)


# --- weights ---


@MESHES
def test_weights_are_lists_integers_and_booleans_too(mesh, given):
    params, batch = given
    step, fn, local = programs(mesh)
    for weights in (WEIGHTS, tuple(WEIGHTS), np.array(WEIGHTS)):
        close([fn(params, batch, weights)[0]], reference(*given)[:1])
        close(stepped(step, step.init(params), batch, weights), reference(*given))
        close(
            [local.step(local.init(params), batch, weights)[1]], reference(*given)[:1]
        )
    whole, mask = [2, 1, 0, 1, 3, 0], [True, True, False, True, False, True]
    for weights in (whole, np.array(whole), mask, np.array(mask)):
        found, _ = fn(params, batch, weights)
        expected = np.average(losses(params, batch), weights=weights)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    for call in (
        lambda w: fn(params, batch, w),
        lambda w: step(step.init(params), batch, w),
    ):
        with pytest.raises(
            ValueError, match=r"weights=...\)` must be one per row, sha"
        ):
            call(WEIGHTS[:4])
        with pytest.raises(ValueError, match=r"must be finite and at least 0\. Got -1"):
            call([1, -1, 1, 1, 1, 1])


# --- devices ---


@MESHES
@pytest.mark.parametrize("where", [0, 3])
def test_arrays_of_another_device_are_moved(mesh, where, given):
    """Batches, weights and parameters alike; 0 is one of the mesh's own devices."""
    there = jax.devices()[where]
    params, batch = given
    weights = jnp.array(WEIGHTS)
    far_params, far_batch, far_weights = jax.device_put((params, batch, weights), there)
    step, fn, _ = programs(mesh)
    expected = reference(*given)
    close(stepped(step, step.init(params), far_batch, far_weights), expected)
    close(stepped(step, step.init(far_params), batch, weights), expected)
    momenta = step.optimizer.init(far_params)
    state = step.init(params, opt_state=momenta)
    close(stepped(step, state, batch, far_weights), expected)
    for p, b, w in ((params, far_batch, weights), (far_params, batch, far_weights)):
        close([fn(p, b, w)[0]], expected[:1])
    close([far_batch[0]], [batch[0]])  # Still there: copies were moved.


def test_a_state_of_another_mesh_is_refused(given):
    params, batch = given
    step, other = (
        data_parallel.train_step(losses, optim.sgd(lr=0.1), Mesh(part, ("data",)))
        for part in (DEVICES[:2], DEVICES[2:4])
    )
    state = step.init(params)
    names = [", ".join(map(str, part)) for part in (DEVICES[2:4], DEVICES[:2])]
    expected = f"must lie on the step's devices, {names[0]}. Got step on {names[1]}. "
    with pytest.raises(ValueError, match=expected + "Make it by `init`"):
        other(state, batch)
    close(stepped(step, state, batch), reference(*given))  # Nothing was donated.


@pytest.fixture
def mixed_dtypes():
    """optax itself divides floats by integer counts, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("mixed_dtypes")
@MESHES
def test_an_optax_state_resumes_on_the_devices_at_hand(mesh, given, tmp_path):
    """What no parameter places, counts and loss scales, meets the others there."""
    params, batch = optim.compute_copies(given, jnp.float32)
    for number, opt in enumerate(
        (
            optim.from_optax(optax.adam(0.1)),
            optim.with_master_weights(
                optim.from_optax(optax.adam(0.1)),
                compute_dtype=jnp.float32,
                loss_scale=optim.DynamicLossScale(init_scale=8.0),
            ),
        )
    ):
        step = data_parallel.train_step(losses, opt, **over(mesh))
        opt_state = opt.init(params) if number else None

        def start(step=step, params=params, opt_state=opt_state):
            return step.init(params, opt_state=opt_state)

        with data_parallel.TrainCheckpoints(tmp_path / str(number)) as saved:
            state, _ = step(start(), batch)
            saved.save(state)
            again = saved.restore(start())
        for _ in range(2):
            state, _ = step(state, batch)
            again, _ = step(again, batch)
        for a, b in zip(*map(jax.tree.leaves, (state, again)), strict=True):
            np.testing.assert_array_equal(a, b)
