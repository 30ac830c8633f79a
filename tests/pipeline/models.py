"""A model of three stages that can tell: a parameter used twice, one unused, a value
that skips a stage, one that is taken twice, an integer, and inputs in the middle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jdist import pipeline, verify

SIZES = {"x": 3, "h": 5, "y": 2}


def encode(params, x):
    h = jnp.tanh(x @ params["w"] + params["b"][None])
    return h, h * h


def middle(params, h):
    return jnp.tanh(h @ params["w"] @ params["w"])


def decode(params, m, skip, h, bias):
    steps = params["steps"].astype(m.dtype)
    return (m + skip / steps) @ params["w"] + (h @ params["w"]) * bias[:, None]


def losses(y, batch):
    """One for each example."""
    return ((y - batch["target"]) ** 2).sum(-1)


def stages(**options):
    """The model, cut in three."""
    make = pipeline.Stage
    return [
        make(encode, ("x",), ("h", "skip"), **options),
        make(middle, ("h",), ("m",), **options),
        make(decode, ("m", "skip", "h", "bias"), ("y",), **options),
    ]


def forward(params, batch):
    """The model in one piece."""
    h, skip = encode(params[0], batch["x"])
    m = middle(params[1], h)
    return decode(params[2], m, skip, h, batch["bias"])


def whole_losses(params, batch):
    """The losses of the model in one piece."""
    return losses(forward(params, batch), batch)


@functools.cache
def judge(reduction="mean"):
    """Of the model in one piece; compiled once for all tests."""
    return verify.gradients_judge(whole_losses, reduction=reduction)


def problem(examples, seed=0, dtype=np.float32):
    """Parameters, a batch and weights; the batch has entries that nobody reads."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    params = [
        {"w": normal(3, 5), "b": normal(5), "unused": normal(2)},
        {"w": normal(5, 5)},
        {"w": normal(5, 2), "steps": np.int32(3)},
    ]
    batch = {
        "x": normal(examples, 3),
        "bias": normal(examples),
        "target": normal(examples, 2),
        "name": rng.integers(0, 9, (examples, 4)),
    }
    weights = rng.uniform(0.1, 2, examples).astype(dtype)
    weights[0] = 0
    return jax.tree.map(jnp.asarray, params), batch, weights


def step_by_step(pipe, params, batch, weights, kind):
    """The same compiled functions, stage by stage on one device: the bit-exact oracle.

    Written out by hand, without any of the executor's code.
    """
    from jdist.pipeline.run.micro_batch import split_batch
    from jdist.pipeline.run.stage_run import StageRun
    from jdist.reduction import Partial

    made = pipe.stages
    # The weights of a mean are shares of the batch, whose gradients are added.
    joined = "sum" if kind == "mean" else kind
    runs = [
        StageRun(
            stage, stage.compiled(pipe.wiring.from_batch(j), j), p, None, None, joined
        )
        for j, (stage, p) in enumerate(zip(made, params, strict=True))
    ]
    split = pipe.schedule.split

    def backward(stage, i, cotangents, share):
        found = runs[stage].backward(i, cotangents, share, bool(split[stage, i]))
        if split[stage, i]:
            runs[stage].backward_params(i)
        return found

    for part in split_batch(batch, weights, pipe.schedule.micro_batches, kind):
        i = part.number
        first = runs[0].forward(i, {"x": jnp.asarray(part.batch["x"])})
        second = runs[1].forward(i, {"h": first["h"]})
        bias = jnp.asarray(part.batch["bias"])
        third = runs[2].forward(i, {**first, **second, "bias": bias})
        read = {"target": jnp.asarray(part.batch["target"])}
        passes = pipe._loss.passes(part.batch, ("target",))
        found, d_values, _ = passes.both(third, read, part.weights)
        share = Partial(np.float32(0), None, part.total)
        if kind in ("max", "min"):
            share = Partial(found.value, None, found.weight)
        d_third = backward(2, i, d_values, share)
        d_second = backward(1, i, {"m": d_third["m"]}, share)
        d_first = {"h": d_second["h"] + d_third["h"], "skip": d_third["skip"]}
        backward(0, i, d_first, share)
    return [run.finished(run.partial()) for run in runs]
