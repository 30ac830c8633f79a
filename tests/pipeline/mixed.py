"""A model in 16 bits of which each stage can be made to overflow, alone.

The gradient of `extra` at stage j is a sum over the entries "boom<j>" of the batch. It
is zero before and after, so that nothing else sees these entries.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jdist import optim, pipeline
from jdist._tree import wide_dtype

RATE = 1 / 16
"""A power of two: steps divided by it are gradients again."""
START = 2.0**12
BOOM = 250.0
"""At this size the sum of a stage overflows, scaled by `START`."""
DYNAMIC = optim.DynamicLossScale(START, growth_interval=2)


def encode(params, x, boom):
    w = params["w"]
    h = jnp.tanh(x.astype(w.dtype) @ w + params["b"][None])
    return h + lifted(params, boom), h * h


def middle(params, h, boom):
    return jnp.tanh(h @ params["w"] @ params["w"]) + lifted(params, boom)


def decode(params, m, skip, boom):
    return (m + skip) @ params["w"] + lifted(params, boom)


def lifted(params, boom):
    return params["extra"] * boom.astype(params["extra"].dtype)[:, None]


def losses(y, batch):
    y = y.astype(wide_dtype(y.dtype))
    return ((y - batch["target"].astype(y.dtype)) ** 2).sum(-1)


def whole_losses(params, batch):
    """The losses of the model in one piece."""
    h, skip = encode(params[0], batch["x"], batch["boom0"])
    m = middle(params[1], h, batch["boom1"])
    return losses(decode(params[2], m, skip, batch["boom2"]), batch)


def optimizer(scale, dtype=jnp.float16, **options):
    """SGD on masters."""
    sgd = optim.sgd(lr=RATE, **options)
    return optim.with_master_weights(sgd, compute_dtype=dtype, loss_scale=scale)


def made(schedule, places=None, scale=START, **options):
    """The model, cut in three."""
    stages = [
        pipeline.Stage(encode, ("x", "boom0"), ("h", "skip")),
        pipeline.Stage(middle, ("h", "boom1"), ("m",)),
        pipeline.Stage(decode, ("m", "skip", "boom2"), ("y",)),
    ]
    options = {"optimizer": optimizer(scale)} | options
    return pipeline.Pipeline(stages, losses, schedule, places, **options)


def start(seed=0):
    """Parameters in full precision."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    shapes = [((3, 5), (5,)), ((5, 5), None), ((5, 2), None)]
    found = [{"w": normal(*w), "extra": np.float32(0)} for w, _ in shapes]
    found[0]["b"] = normal(5)
    found[1]["unused"] = normal(2)
    found[2]["count"] = np.int32(3)
    return found


def batch_of(step, booming=None, examples=12):
    """Another batch and other weights for each step; one stage may overflow.

    Four micro-batches are of one size, for float16 is slow to compile.
    """
    rng = np.random.default_rng(100 + step)
    batch = {
        "x": rng.normal(size=(examples, 3)).astype(np.float32),
        "target": rng.normal(size=(examples, 2)).astype(np.float32) + 2,
    }
    for stage in range(3):
        size = BOOM if stage == booming else 0.0
        batch[f"boom{stage}"] = np.full(examples, size, np.float32)
    return batch, rng.uniform(0.5, 2, examples).astype(np.float32)


def steps(booming, places=None):
    """Clipped steps with a dynamic scale, a stage overflowing here and there: of
    this process the parameters and optimizer states at the end, and all norms."""
    pipe = made(pipeline.one_f_one_b(3, 4), places, DYNAMIC, max_norm=1.0)
    state, norms = pipe.init(start()), []
    for step, stage in enumerate(booming):
        state, metrics = pipe.train_step(state, *batch_of(step, stage))
        norms.append(float(metrics.grad_norm))
    pairs = [(state.params[j], state.opt_states[j]) for j in pipe.own]
    return jax.tree.map(np.asarray, (pairs, norms))
