"""A small language model whose stages have meshes of their own.

Unequal layers, a table that the first and the last one share, a parameter that is used
twice and one that is not used; sizes that differ, and that a model axis of 2 divides.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdist import pipeline, verify

WORDS, WIDTH, LENGTH, HEADS, INNER = 10, 4, 3, 2, 6
MICRO_BATCHES = 3

LAYOUTS = {
    "PP": ((1,), ("data",)),
    "PP x DP": ((2,), ("data",)),
    "PP x TP": ((2,), ("model",)),
    "PP x DP x TP": ((2, 2), ("data", "model")),
}
SCHEDULES = {
    "1F1B": pipeline.one_f_one_b(2, MICRO_BATCHES),
    "interleaved": pipeline.interleaved(2, 4, 2),
    "ZB-H1": pipeline.zero_bubble(2, MICRO_BATCHES),
    "GPipe": pipeline.gpipe(2, MICRO_BATCHES),
}
SPECS = {
    "embed": {"table": P(None, "model"), "unused": None},
    "attend": {"qkv": P(None, None, "model"), "out": P("model")},
    "expand": {"up": P(None, "model"), "down": P("model"), "mix": None},
    "head": {"table": P(None, "model"), "bias": P("model")},
}


def embed(params, tokens):
    return params["table"][tokens]


def attend(params, h):
    """Each head on the devices of its part of the model axis."""
    q, k, v = jnp.einsum("ntd,pdhe->pnthe", h, params["qkv"])
    scores = jnp.einsum("nthe,nshe->nhts", q, k)
    mixed = jnp.einsum("nhts,nshe->nthe", jax.nn.softmax(scores), v)
    return h + jnp.einsum("nthe,hed->ntd", mixed, params["out"])


def expand(params, h):
    """By columns and by rows, and a matrix that is used twice."""
    h = h + jnp.tanh(h @ params["up"]) @ params["down"]
    return h + jnp.tanh(h @ params["mix"]) @ params["mix"]


def head(params, h):
    return jnp.einsum("ntd,wd->ntw", h, params["table"]) + params["bias"][None, None]


LAYERS = {"embed": embed, "attend": attend, "expand": expand, "head": head}


class Part:
    """Some layers, one after another."""

    def __init__(self, names):
        self.names = names

    def __call__(self, params, value):
        for name in self.names:
            value = LAYERS[name](params[name], value)
        return value


@functools.cache
def parts(count):
    """The layers of each stage; the same objects again, so that programs are shared."""
    return [Part(names) for names in split(count)]


def split(count):
    names = list(LAYERS)
    return [names[k * 4 // count : (k + 1) * 4 // count] for k in range(count)]


def stages(count, **options):
    made = []
    for j, part in enumerate(parts(count)):
        tied = {f"{n}/table": "table" for n in part.names if n in ("embed", "head")}
        names = ("tokens",) if j == 0 else (f"h{j}",)
        made.append(pipeline.Stage(part, names, (f"h{j + 1}",), tied=tied, **options))
    return made


def losses(logits, batch):
    """The mean over the tokens of each example."""
    chosen = jax.nn.log_softmax(logits)
    found = -jnp.take_along_axis(chosen, batch["next"][..., None], -1)
    return found[..., 0].mean(-1)


def whole(own, batch):
    """The losses of the model in one piece; the head has no table of its own."""
    params = cut(own, 1)[0]
    return losses(parts(1)[0](params, batch["tokens"]), batch)


@functools.cache
def judge(reduction="mean"):
    return verify.gradients_judge(whole, reduction=reduction)


def cut(own, count):
    """The parameters of each stage, with a copy of the table at the head."""
    given = own | {"head": {"table": own["embed"]["table"], **own["head"]}}
    return [{name: given[name] for name in names} for names in split(count)]


def joined(grads):
    """The inverse of `cut`; the gradients of both copies are equal."""
    found = {name: tree for stage in grads for name, tree in stage.items()}
    np.testing.assert_array_equal(
        np.asarray(found["head"]["table"]), np.asarray(found["embed"]["table"])
    )
    own = {k: v for k, v in found["head"].items() if k != "table"}
    return found | {"head": own}


def problem(examples=11, dtype=np.float32, seed=0):
    """Parameters, a batch and weights of which one is 0."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    own = {
        "embed": {"table": normal(WORDS, WIDTH), "unused": normal(3)},
        "attend": {
            "qkv": normal(3, WIDTH, HEADS, 2),
            "out": normal(HEADS, 2, WIDTH),
        },
        "expand": {
            "up": normal(WIDTH, INNER),
            "down": normal(INNER, WIDTH),
            "mix": normal(WIDTH, WIDTH),
        },
        "head": {"bias": normal(WORDS)},
    }
    batch = {
        "tokens": rng.integers(0, WORDS, (examples, LENGTH)),
        "next": rng.integers(0, WORDS, (examples, LENGTH)),
    }
    weights = rng.uniform(0.1, 2, examples).astype(np.float32)
    weights[1] = 0
    return own, batch, weights


def meshes(layout, count=2):
    """For each worker a mesh of devices of its own."""
    shape, names = LAYOUTS[layout]
    size = int(np.prod(shape))
    devices = jax.local_devices()[: count * size]
    return [
        Mesh(np.array(devices[k * size : (k + 1) * size]).reshape(shape), names)
        for k in range(count)
    ]


def specs(layout, count):
    """The specifications of each stage, of axes that its mesh has."""
    axes = LAYOUTS[layout][1]

    def known(spec):
        if spec is None or "model" in axes:
            return spec
        return P()

    kept = jax.tree.map(known, SPECS, is_leaf=lambda x: x is None or isinstance(x, P))
    return [{name: kept[name] for name in names} for names in split(count)]


def made(layout, schedule="1F1B", **options):
    """A pipeline, and a function that places what `cut` makes."""
    chosen = SCHEDULES[schedule]
    stage_options = options.pop("stage", {})
    pipe = pipeline.Pipeline(
        stages(chosen.stages, **stage_options),
        losses,
        chosen,
        meshes(layout),
        **options,
    )
    return pipe, lambda own: placed(pipe, layout, own)


def placed(pipe, layout, own):
    count = len(pipe.stages)
    return pipe.place(cut(own, count), specs(layout, count))


def candidate(layout, schedule, weights, **options):
    """For the judge; the layout of every gradient is its parameter's."""
    pipe, place = made(layout, schedule, **options)

    def run(own, batch):
        params = place(own)
        loss, grads = pipe.value_and_grad(params, batch, weights)
        same_places(grads, params)
        return loss, joined(grads)

    return run


def same_places(found, like):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim), (a.sharding, b.sharding)


def normalized(params, state, x, key):
    """Statistics over the examples, which padding would change; then dropout."""
    mean = x.mean(0)
    h = (x - mean[None]) @ params["w"]
    # The compiler would divide the second over the model axis, as it does h.
    after = {"mean": mean, "square": (h * h).mean(0)}
    state = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state, after)
    return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0.0), state


def read_out(params, h):
    return jnp.tanh(h) @ params["w"]


def with_aux(y, batch):
    found = ((y - batch["target"]) ** 2).sum(-1)
    return found, {"largest": found.max()}


def stateful(places=None, **options):
    """Stages with a state, a key and an auxiliary output."""
    made_of = [
        pipeline.Stage(normalized, ("x",), ("h",), stateful=True, keyed=True),
        pipeline.Stage(read_out, ("h",), ("y",)),
    ]
    schedule = pipeline.one_f_one_b(2, 3)
    return pipeline.Pipeline(
        made_of, with_aux, schedule, places, has_aux=True, **options
    )


def stateful_problem():
    """Their parameters and states, a batch and weights."""
    rng = np.random.default_rng(4)
    params = [{"w": rng.normal(size=(4, 6))}, {"w": rng.normal(size=(6, 2))}]
    states = [{"mean": rng.normal(size=4), "square": rng.normal(size=6)}, None]
    batch = {"x": rng.normal(size=(11, 4)), "target": rng.normal(size=(11, 2))}
    return params, states, batch, rng.uniform(0.1, 2, 11)
