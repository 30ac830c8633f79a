"""Rules of backward passes that act on one example and are not linear in its cotangent.

Each is the identity in the forward pass, and acts on a column of its own. Stages are
equal, so that one program can run them; beside its value each example has a number,
from which its draws are made.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jdist import pipeline

RULES = {
    "clipped": lambda g, number: jnp.clip(g, -0.03, 0.02),
    "signed": lambda g, number: 0.1 * jnp.sign(g),
    "rounded": lambda g, number: jnp.round(g * 16) / 16,
    # Rounded up or down by a draw, as in training in few bits.
    "noisy": lambda g, number: jnp.floor(g * 16 + _draws(number)) / 16,
}
WIDTH = len(RULES)
STAGES = 2


def _draws(numbers):
    """A uniform number for each example, whatever rows stand beside it."""

    def of_one(number):
        key = jax.random.fold_in(jax.random.key(3), number.astype(jnp.uint32))
        return jax.random.uniform(key, (), numbers.dtype)

    return jax.vmap(of_one)(numbers)


@jax.custom_vjp
def _ruled(h, number):
    return h


def _backward(number, g):
    columns = [rule(g[:, n], number) for n, rule in enumerate(RULES.values())]
    return jnp.stack(columns, -1), jnp.zeros_like(number)


_ruled.defvjp(lambda h, number: (h, number), _backward)


@jax.custom_vjp
def _injected(h, extra):
    """An auxiliary loss of each example, as mixture-of-experts trainers add it."""
    return h


_injected.defvjp(
    lambda h, extra: (h, extra), lambda extra, g: (g, jnp.full_like(extra, 0.25))
)


def stage(injects, params, value):
    h = _ruled(value["h"] @ params["w"], value["number"])
    if injects:
        h = _injected(h, (jax.nn.softmax(h) ** 2).sum(-1))
    return {"h": jnp.tanh(h) + params["b"][None], "number": value["number"]}


def losses(y, batch):
    """0 / 0 for a sequence without a token."""
    terms = (y["h"] - batch["target"]) ** 2 * batch["mask"]
    return terms.sum(-1) / batch["mask"].sum(-1)


@functools.cache
def stages(injects=True, **options):
    fn = functools.partial(stage, injects)
    return [
        pipeline.Stage(fn, ("x",), ("h",), **options),
        pipeline.Stage(fn, ("h",), ("y",), **options),
    ]


def problem(examples, seed=0, dtype=np.float64, empty=False):
    """Parameters, a batch and unequal weights.

    Args:
      examples: Number of examples.
      seed: Of all numbers.
      dtype: Of all arrays.
      empty: Whether some sequences have no token, and weight 0.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    params = [{"w": normal(WIDTH, WIDTH), "b": normal(WIDTH)} for _ in range(STAGES)]
    x = {"h": normal(examples, WIDTH), "number": np.arange(examples).astype(dtype)}
    mask = (rng.uniform(size=(examples, WIDTH)) < 0.6).astype(dtype)
    mask[:, 1] = 1
    weights = rng.uniform(0.1, 3, examples).astype(dtype)
    if empty:
        # The first ones, so that a micro-batch may have no other; and one elsewhere.
        mask[[0, 1, -2]], weights[[0, 1, -2]] = 0, 0
    batch = {"x": x, "target": normal(examples, WIDTH), "mask": mask}
    return params, batch, weights


def made(schedule, where=None, injects=True, own=(), **options):
    """A pipeline of the stages.

    Args:
      schedule: The schedule.
      where: Its devices or workers.
      injects: Whether stages add an auxiliary loss.
      own: Options of the stages that are True.
      **options: Options of the pipeline.
    """
    return pipeline.Pipeline(
        stages(injects, **dict.fromkeys(own, True)), losses, schedule, where, **options
    )


def on_workers(places=None):
    """A gradient with excluded examples, and a smaller one of all rules."""
    found = []
    for examples, injects in ((11, False), (7, True)):
        pipe = made(pipeline.zero_bubble(2, 3), places, injects)
        params, batch, weights = problem(examples, empty=not injects)
        own = pipe.value_and_grad(pipe.place(params), batch, weights)
        found.append(jax.tree.map(np.asarray, own))
    return found


def whole_gradient(params, batch, weights, injects=True, scale=1.0):
    """`jax.grad` of the weighted mean of the whole batch, of examples that count."""
    kept = weights > 0
    batch = jax.tree.map(lambda x: x[kept], batch)
    return _whole(params, batch, weights[kept] / weights[kept].sum(), injects, scale)


@functools.partial(jax.jit, static_argnums=3)
@jax.value_and_grad
def _whole(params, batch, shares, injects, scale):
    value = batch["x"]
    for own in params:
        value = stage(injects, own, value)
    return scale * (shares * losses(value, batch)).sum()


def close(found, expected, tolerance=1e-11):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
