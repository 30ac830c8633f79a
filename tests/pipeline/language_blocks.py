"""A small language model of equal blocks, between an embedding and a head.

The embedding reads two entries of the batch, a parameter of it is not used, and its
table is the head's as well. Sizes differ, and a model axis of 2 divides them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jdist import pipeline

WORDS, WIDTH, INNER, LENGTH = 10, 4, 6, 3
BLOCK = {
    "up": P(None, "model"),
    "down": P("model"),
    "mix": None,
    "bias": P("model"),
    "scale": None,
    "steps": None,
}
FIRST = {"table": P(None, "model"), "places": None, "gain": None, "unused": None}
LAST = {"table": P("model"), "bias": P("model"), "steps": None}


def embed(params, tokens, places):
    return params["table"][tokens] * params["gain"] + params["places"][places]


def block(params, h):
    """A matrix that is used twice, a scalar, an integer."""
    steps = params["steps"].astype(h.dtype)
    h = h + jnp.tanh(h @ params["up"]) @ params["down"]
    h = h + jnp.tanh(h @ params["mix"]) @ params["mix"]
    return h + params["bias"][None, None] * (params["scale"] / steps)


def head(params, h):
    return jnp.einsum("ntd,wd->ntw", h, params["table"]) + params["bias"][None, None]


def dropped(fn, rate):
    """The same with dropout at its end."""

    def noisy(params, *given):
        *values, key = given
        found = fn(params, *values)
        kept = jax.random.bernoulli(key, rate, found.shape)
        return jnp.where(kept, found / rate, 0)

    return noisy


NOISY = {
    "first": dropped(embed, 0.7),
    "block": dropped(block, 0.8),
    "last": dropped(head, 0.6),
}
QUIET = {"first": embed, "block": block, "last": head}


def losses(logits, batch):
    """The mean over the tokens of each example."""
    chosen = jax.nn.log_softmax(logits)
    found = -jnp.take_along_axis(chosen, batch["next"][..., None], -1)
    return found[..., 0].mean(-1)


def stages(count, keyed=()):
    """Equal stages, without their ends."""
    made = NOISY if "block" in keyed else QUIET
    names = ["x", *(f"h{j}" for j in range(1, count)), "y"]
    return [
        pipeline.Stage(
            made["block"], (names[j],), (names[j + 1],), keyed="block" in keyed
        )
        for j in range(count)
    ]


def ends(keyed=(), tied=True):
    """What is before the stages, and after them."""
    shared = {"table": "table"} if tied else {}
    each = {
        "first": (("tokens", "places"), ("x",)),
        "last": (("y",), ("logits",)),
    }
    return {
        name: pipeline.Stage(
            (NOISY if name in keyed else QUIET)[name],
            inputs,
            outputs,
            keyed=name in keyed,
            tied=shared,
        )
        for name, (inputs, outputs) in each.items()
    }


def pipeline_of(schedule, places, keyed=(), tied=True, first=True, **options):
    """The model at such places; without its ends it takes "x"."""
    made = stages(schedule.stages, keyed)
    if first:
        made = pipeline.with_ends(made, **ends(keyed, tied))
    return pipeline.Pipeline(made, losses, schedule, places, **options)


def specs(pipe, divided=True):
    """Of the parameters of each stage, or None where nothing is divided."""
    count = len(pipe.stages)
    if not divided:
        return [None] * count
    return with_ends(FIRST, [BLOCK] * count, LAST)


def with_ends(first, own, last):
    """The trees of the stages, of which two have an end more."""
    if len(own) == 1:
        return [(first, own[0], last)]
    return [(first, own[0]), *own[1:-1], (own[-1], last)]


def blocks(count, dtype, seed=0):
    """The parameters of equal stages."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.5, dtype)

    return [
        {
            "block": {
                "up": normal(WIDTH, INNER),
                "down": normal(INNER, WIDTH),
                "mix": normal(WIDTH, WIDTH),
                "bias": normal(WIDTH),
                "scale": jnp.asarray(rng.normal() + 2, dtype),
                "steps": jnp.asarray(3, jnp.int32),
            }
        }
        for _ in range(count)
    ]


def problem(count, dtype=np.float32, examples=11, seed=1):
    """Parameters with those of the ends, a batch, and weights of which one is 0."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    table = normal(WORDS, WIDTH)
    first = {
        "table": table,
        "places": normal(LENGTH, WIDTH),
        "gain": jnp.asarray(1.3, dtype),
        "unused": normal(2),
    }
    last = {"table": table, "bias": normal(WORDS), "steps": jnp.asarray(1, jnp.int32)}
    own = [tree["block"] for tree in blocks(count, dtype)]
    batch = {
        "tokens": rng.integers(0, WORDS, (examples, LENGTH)),
        "places": rng.permuted(np.tile(np.arange(LENGTH), (examples, 1)), axis=1),
        "next": rng.integers(0, WORDS, (examples, LENGTH)),
    }
    weights = rng.uniform(0.1, 2, examples).astype(np.float32)
    weights[1] = 0
    return with_ends(first, own, last), batch, weights


def whole_losses(params, batch):
    """The losses of the model in one piece; its tables are two."""
    (first, *own), (*rest, last) = params[0], params[-1]
    own = [*own, *params[1:-1], *rest]
    h = embed(first, batch["tokens"], batch["places"])
    for each in own:
        h = block(each, h)
    return losses(head(last, h), batch)
