"""Helpers of tests of the distributed optimizer: variables, gradients, optimizers.

Gradients of chosen values are put into a context by hand, where a test is about what
the optimizer does with them.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import autograd, optim, rpc
from jdist.autograd.contexts import here
from tests.rpc.rref.common import PATIENCE, gate

SHAPES = {"w": (3, 2), "b": (4,)}
CONFIGURATIONS = {
    "adagrad": (optim.adagrad, {"lr": 0.05, "lr_decay": 0.1}),
    "adam": (optim.adam, {"lr": 1e-2, "amsgrad": True}),
    "adamw": (optim.adamw, {"lr": 0.05, "amsgrad": True}),
    "sgd": (optim.sgd, {"lr": 0.05}),
    "nesterov": (
        optim.sgd,
        {"lr": 1e-3, "momentum": 1.0, "weight_decay": 1.0, "nesterov": True},
    ),
    "adadelta": (optim.adadelta, {"rho": 0.95}),
    "rmsprop": (optim.rmsprop, {"lr": 0.05, "centered": True}),
    "adamax": (optim.adamax, {"lr": 0.05}),
    "rprop": (optim.rprop, {"lr": 0.05}),
    "nadam": (optim.nadam, {"lr": 0.05}),
    "radam": (optim.radam, {"lr": 0.05}),
    "asgd": (optim.asgd, {"lr": 0.05}),
}
"""Those of torch's own test, and the rest."""


def numbers(*seed, shape=(3, 2), dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def tree(*seed, dtype=np.float32):
    """A variable's value, or a gradient of it."""
    return {
        name: numbers(*seed, i, shape=shape, dtype=dtype)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


# --- on the owner ---


def make(value):
    return autograd.variable(jax.tree.map(jnp.asarray, value))


def value_of(rref):
    return jax.tree.map(np.asarray, rref.local_value().value)


def put(context_id, gradients):
    """Gradients of variables here, as if a backward pass had brought them."""
    context = here().get_or_create(context_id)
    with context.lock:
        for rref, gradient in gradients:
            variable = rref.local_value()
            context.gradients[variable] = jax.tree.map(
                _placed, variable.value, gradient, is_leaf=lambda x: x is None
            )


def _placed(value, gradient):
    """A gradient is where its variable is."""
    if gradient is None:
        return None
    array = jnp.asarray(gradient)
    return jax.device_put(array, value.sharding) if value.committed else array


# --- on whoever has the optimizer ---


def remote_variables(values):
    """References to variables of these values; by owner, in the order given."""
    return [rpc.remote(owner, make, args=(value,)) for owner, value in values]


def step(dist_opt, rrefs, gradients, **options):
    """One step with chosen gradients; None where there is none."""
    with autograd.context() as context_id:
        give(context_id, rrefs, gradients)
        return dist_opt.step(context_id, **options)


def give(context_id, rrefs, gradients):
    owners = {rref.owner_name() for rref in rrefs}
    for owner in sorted(owners):
        mine = [
            (rref, gradient)
            for rref, gradient in zip(rrefs, gradients, strict=True)
            if rref.owner_name() == owner and gradient is not None
        ]
        if mine:
            rpc.rpc_sync(owner, put, args=(context_id, mine))


def values_of(rrefs):
    return [rpc.rpc_sync(rref.owner(), value_of, args=(rref,)) for rref in rrefs]


# --- on one device ---


def local_steps(opt, values, gradients, **overrides):
    """The same steps on one device; the values after each."""
    run = jax.jit(opt.step)
    params = jax.tree.map(jnp.asarray, list(values))
    state, found = opt.init(params), []
    for each in gradients:
        grads = [
            jax.tree.map(lambda leaf: None, value) if grad is None else grad
            for value, grad in zip(values, each, strict=True)
        ]
        params, state = run(params, grads, state, **overrides)
        found.append(jax.tree.map(np.asarray, params))
    return found


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(one, other, strict=True)


# --- optimizers that travel by name ---


def clipped(rate):
    """With momentum, and one count for all parameters."""
    return optax.chain(
        optax.clip(0.5),
        optax.trace(0.9),
        optax.scale_by_schedule(lambda count: -rate / (1 + count.astype(jnp.float32))),
    )


def halving(count):
    """A schedule."""
    return 0.1 / (1 + count.astype(jnp.float32))


def no_optimizer(**options):
    return options


def scaled_loss():
    return optim.with_master_weights(
        optim.sgd(lr=0.1), compute_dtype=jnp.float16, loss_scale=8.0
    )


def masters(lr):
    return optim.with_master_weights(optim.adam(lr=lr), compute_dtype=jnp.bfloat16)


def masters_here(lr, name):
    """Those, but on one worker an error."""
    if rpc.get_worker_info().name == name:
        raise ArithmeticError("No optimizer.")
    return masters(lr)


def fails_at_once(text):
    raise ValueError(f"Error creating optimizer. {text}")


def failing(worker, text):
    """Fails when that worker compiles a step, which it does for shapes of its own."""
    inner = optim.sgd(lr=0.25)

    def step_tree(params, grads, state, overrides):
        if rpc.get_worker_info().name == worker:
            raise ArithmeticError(text)
        return inner.step_tree(params, grads, state, overrides)

    return optim.Optimizer("failing", inner.init_tree, step_tree, inner.hyperparameters)


log = []
"""Of this process: what the optimizers of `watched` did."""


def watched(name, wait):
    """Says when its first step begins and ends, and waits in between if told so."""
    inner = optim.sgd(lr=1.0)

    def step_tree(params, grads, state, overrides):
        # Runs once for a pattern of gradients, when the step is compiled.
        log.append((name, "begins"))
        gate(f"{name} is in").set()
        if wait:
            assert gate(f"{name} may end").wait(PATIENCE)
        log.append((name, "ends"))
        return inner.step_tree(params, grads, state, overrides)

    return optim.Optimizer("watched", inner.init_tree, step_tree)


def in_thread(body, *args, **kwargs):
    """Runs it as this worker on another thread; join it for what it returned."""
    name, outcome = rpc.get_worker_info().name, []

    def run():
        with rpc.use_worker(name):
            try:
                outcome.append((body(*args, **kwargs), None))
            except Exception as error:  # noqa: BLE001 - it is the test's to look at
                outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join(PATIENCE)
        assert outcome, f"{body} has not finished"
        return outcome[0]

    return join


def noisy():
    """Random numbers by a typed key in the state."""

    def init(params):
        return {"key": jax.random.key(3)}

    def step_tree(params, grads, state, overrides):
        key, now = jax.random.split(state["key"])
        noise = jax.random.normal(now, ())
        new = jax.tree.map(lambda p, g: p - g * noise.astype(p.dtype), params, grads)
        return new, {"key": key}

    return optim.Optimizer("noisy", init, step_tree)
