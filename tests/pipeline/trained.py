"""A model to be trained, whose steps depend on all that a training state holds."""

import jax
import jax.numpy as jnp
import numpy as np

from jdist import optim, pipeline

EXAMPLES = 7
KEY = 11


def noisy(params, x, key):
    keep = jax.random.bernoulli(key, 0.7, x.shape)
    return jnp.tanh(jnp.where(keep, x, 0) @ params["w"] + params["b"][None])


def centred(params, state, h):
    centre = 0.5 * state["mean"] + 0.5 * h.mean(0)
    after = {"mean": jax.lax.stop_gradient(centre), "seen": state["seen"] + len(h)}
    return (h - centre[None]) @ params["w"] / params["n"].astype(h.dtype), after


def losses(y, batch):
    return ((y - batch["target"]) ** 2).sum(-1)


def made(places=None, micro_batches=3, **options):
    """Two stages, one of which draws and one of which counts; an optimizer each."""
    stages = [
        pipeline.Stage(noisy, ("x",), ("h",), keyed=True),
        pipeline.Stage(centred, ("h",), ("y",), stateful=True),
    ]
    defaults = {
        "optimizer": [optim.adamw(lr=0.05), optim.sgd(lr=0.1, momentum=0.9)],
        "max_norm": 0.5,
    }
    schedule = pipeline.one_f_one_b(2, micro_batches)
    options = defaults | options
    return pipeline.Pipeline(stages, losses, schedule, places, **options)


def start(pipe, seed=0):
    """A state before the first step."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = [
        {"w": normal(3, 5), "b": normal(5)},
        {"w": normal(5, 2), "n": jnp.int32(2)},
    ]
    states = [None, {"mean": normal(5), "seen": jnp.int32(0)}]
    return pipe.init(params, states, jax.random.key(KEY))


def batch_of(step):
    """Another batch and other weights for each step."""
    rng = np.random.default_rng(100 + step)
    rows = {"x": (EXAMPLES, 3), "target": (EXAMPLES, 2)}
    batch = {k: rng.normal(size=s).astype(np.float32) for k, s in rows.items()}
    return batch, rng.uniform(0.1, 2, EXAMPLES).astype(np.float32)


def steps(pipe, state, count):
    """So many steps; the losses too."""
    found = []
    for _ in range(count):
        state, metrics = pipe.train_step(state, *batch_of(state.step))
        found.append(float(metrics.loss))
    return state, found


def numbers(state):
    """All leaves as NumPy arrays, by path."""
    pairs = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(keys): bits(leaf) for keys, leaf in pairs}


def bits(leaf):
    if jnp.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def same(found, expected):
    """Of two dictionaries of `numbers`: every bit."""
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        assert found[path].dtype == leaf.dtype, path
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
