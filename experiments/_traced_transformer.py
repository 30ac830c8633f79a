"""A transformer with taps, its trainers, and switches for defects.

All defects are numbers passed to compiled programs, so that one program serves the
right trainer and all wrong ones. With `neutral` switches no defect has any effect,
exactly.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import pipeline
from jdist.verify import tap

EXAMPLES, TOKENS, WORDS = 12, 5, 7
WIDTH, HEADS, HIDDEN = 8, 2, 12
STAGES, MICRO_BATCHES, REPLICAS = 3, 4, 3
DROPPED = 0.1

Tree = Any


class Switches(NamedTuple):
    """Defects of each layer; arrays of shape `(layers,)`.

    Attributes:
      attention: Factor of the attention's output.
      mlp: Factor of the output of the multi-layer perceptron.
      attention_back: Factor of the cotangent of the attention's output.
      mlp_back: Factor of the cotangent of the perceptron's output.
      unmasked: Whether padding is attended to.
      other_key: Added to the number from which a dropout key is made.
      rounded: Whether the perceptron's output is rounded to bfloat16.
    """

    attention: Any
    mlp: Any
    attention_back: Any
    mlp_back: Any
    unmasked: Any
    other_key: Any
    rounded: Any


def neutral(layers: int) -> Switches:
    """Switches without a defect."""
    one, off = np.ones(layers, np.float32), np.zeros(layers, bool)
    return Switches(one, one, one, one, off, np.zeros(layers, np.int32), off)


# --- the model ---


def parameters(rng: np.random.Generator, dtype: Any, layers: int) -> Tree:
    """Random parameters; those of the layers are stacked."""

    def normal(*shape: int) -> jax.Array:
        scale = shape[-2] ** -0.5
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    def near_one(*shape: int) -> jax.Array:
        return jnp.asarray(rng.uniform(0.8, 1.2, size=shape), dtype)

    square = (layers, WIDTH, WIDTH)
    return {
        "embedding": normal(WORDS, WIDTH) * 2,
        "position": normal(TOKENS, WIDTH),
        "layers": {
            "norm": near_one(layers, WIDTH),
            "query": normal(*square),
            "key": normal(*square),
            "value": normal(*square),
            "out": normal(*square),
            "second_norm": near_one(layers, WIDTH),
            "up": normal(layers, WIDTH, HIDDEN),
            "down": normal(layers, HIDDEN, WIDTH),
        },
        "head": normal(WIDTH, WORDS),
    }


def examples(rng: np.random.Generator) -> tuple[Tree, np.ndarray]:
    """A batch of sentences of unequal lengths, and their numbers of tokens."""
    lengths = np.resize(np.arange(2, TOKENS + 1), EXAMPLES)
    rng.shuffle(lengths)
    batch = {
        "tokens": jnp.asarray(rng.integers(WORDS, size=(EXAMPLES, TOKENS))),
        "labels": jnp.asarray(rng.integers(WORDS, size=(EXAMPLES, TOKENS))),
        "mask": jnp.asarray(np.arange(TOKENS) < lengths[:, None]),
        "key": jax.random.split(jax.random.key(int(rng.integers(2**31))), EXAMPLES),
    }
    return batch, lengths.astype(np.float32)


@jax.custom_vjp
def scaled_back(x: jax.Array, factor: jax.Array) -> jax.Array:
    """The identity, with its cotangent multiplied by a factor."""
    return x


scaled_back.defvjp(
    lambda x, factor: (x, factor),
    lambda factor, c: (c * factor.astype(c.dtype), jnp.zeros_like(factor)),
)


def embedded(params: Tree, batch: Tree) -> jax.Array:
    """The first hidden state, `(examples, TOKENS, WIDTH)`."""
    return tap(params["embedding"][batch["tokens"]] + params["position"][None], "embed")


def logits_of(params: Tree, hidden: jax.Array) -> jax.Array:
    """The logits of each token, `(examples, TOKENS, WORDS)`."""
    return tap(normalized(hidden) @ params["head"], "logits")


def entropies(logits: jax.Array, batch: Tree) -> jax.Array:
    """Each example's mean cross-entropy over its tokens, in float32."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    own = jnp.take_along_axis(scores, batch["labels"][..., None], axis=-1)[..., 0]
    mask = batch["mask"].astype(jnp.float32)
    return -(mask * own).sum(axis=1) / mask.sum(axis=1)


def normalized(x: jax.Array) -> jax.Array:
    """Normalises by the root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-3)


def layers(
    params: Tree,
    hidden: jax.Array,
    batch: Tree,
    switches: Switches | None,
    numbers: np.ndarray | jax.Array,
) -> jax.Array:
    """Applies several layers.

    Args:
      params: Stacked parameters of these layers.
      hidden: The hidden states, `(examples, TOKENS, WIDTH)`.
      batch: The batch, of which mask and keys are read.
      switches: Switches of these layers; None for a program without them.
      numbers: The indices of the layers in the whole model.
    """

    def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        p, s, number = own
        mixed = _attention(p, x, batch, s, number)
        if s is not None:
            mixed = mixed * s.attention.astype(mixed.dtype)
        mixed = tap(mixed, "attention")
        if s is not None:
            mixed = scaled_back(mixed, s.attention_back)
        x = x + mixed
        second = normalized(x) * p["second_norm"][None, None]
        out = jax.nn.gelu(second @ p["up"]) @ p["down"]
        if s is not None:
            narrow = out.astype(jnp.bfloat16).astype(out.dtype)
            out = jnp.where(s.rounded, narrow, out * s.mlp.astype(out.dtype))
        out = tap(out, "mlp")
        if s is not None:
            out = scaled_back(out, s.mlp_back)
        return x + out, None

    return jax.lax.scan(layer, hidden, (params, switches, jnp.asarray(numbers)))[0]


def _attention(p: Tree, x: jax.Array, batch: Tree, s: Any, number: Any) -> jax.Array:
    count = len(x)
    first = normalized(x) * p["norm"][None, None]
    query, key, value = (
        (first @ p[name]).reshape(count, TOKENS, HEADS, -1)
        for name in ("query", "key", "value")
    )
    scores = jnp.einsum("nqhd,nkhd->nhqk", query, key) / 2
    seen = batch["mask"][:, None, None, :]
    if s is not None:
        seen = seen | s.unmasked
        number = number + s.other_key
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e4))
    mixed = jnp.einsum("nhqk,nkhd->nqhd", weights, value).reshape(count, TOKENS, WIDTH)

    def kept(key: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, number)
        return jax.random.bernoulli(own, 1 - DROPPED, (TOKENS, WIDTH))

    return jnp.where(jax.vmap(kept)(batch["key"]), mixed / (1 - DROPPED), 0) @ p["out"]


def losses(params: Tree, batch: Tree, switches: Switches | None = None) -> jax.Array:
    """The loss of each example; the judge differentiates it without switches."""
    hidden = embedded(params, batch)
    numbers = np.arange(_depth(params))
    hidden = layers(params["layers"], hidden, batch, switches, numbers)
    return entropies(logits_of(params, hidden), batch)


def _depth(params: Tree) -> int:
    return len(params["layers"]["norm"])


# --- trainers: (params, batch, weights, switches, shares) -> (loss, gradient) ---


Trainer = Callable[[Tree, Tree, np.ndarray, Switches, np.ndarray], tuple[Any, Tree]]
"""A function that returns the loss and the gradient.

`shares` are factors of each part's result before the sum: 1 for each in a right
trainer."""


@jax.jit
def _part(params: Tree, rows: Tree, own: jax.Array, switches: Switches) -> Any:
    """Loss and gradient of a part: the sum of its losses, each times its share."""
    return jax.value_and_grad(lambda p: jnp.sum(own * losses(p, rows, switches)))(
        params
    )


def accumulated(
    params: Tree,
    batch: Tree,
    weights: np.ndarray,
    switches: Switches,
    shares: np.ndarray,
    narrow: bool = False,
) -> tuple[Any, Tree]:
    """Micro-batches one after another, summed in float32 or in bfloat16."""
    size = len(weights) // MICRO_BATCHES
    kind = jnp.bfloat16 if narrow else np.float32
    total: Any = None
    for i, share in enumerate(shares):
        chosen = slice(i * size, (i + 1) * size)
        rows = jax.tree.map(lambda x, r=chosen: x[r], batch)
        own = jnp.asarray(weights[chosen] / weights.sum())
        found = _part(params, rows, own, switches)
        # NumPy rounds each sum; XLA may keep float32 between sums of 16-bit numbers.
        wide = jax.tree.map(lambda x: np.asarray(x, np.float32), found)
        terms = jax.tree.map(lambda x, f=share: (f * x).astype(kind), wide)
        total = terms if total is None else jax.tree.map(np.add, total, terms)
    loss, gradient = total
    return np.float32(loss), _in_dtypes(params, gradient)


@jax.jit
def _replicas(
    params: Tree, batch: Tree, own: jax.Array, switches: Switches, shares: jax.Array
) -> Any:
    def local(rows: Tree, own: jax.Array, share: jax.Array) -> Any:
        found = jax.value_and_grad(
            lambda p: jnp.sum(own * losses(p, rows, switches))
        )(params)  # fmt: skip
        wide = jax.tree.map(lambda x: share * x.astype(jnp.float32), found)
        return jax.lax.psum(wide, "data")

    found = jax.vmap(local, axis_name="data")(batch, own, shares)
    return jax.tree.map(lambda x: x[0], found)


@jax.jit
def _shards(
    params: Tree, batch: Tree, own: jax.Array, switches: Switches, shares: jax.Array
) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:REPLICAS]), ("data",))
    cut, same = jax.P("data"), jax.P()

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(same, cut, cut, same, cut),
        out_specs=same,
        check_vma=False,
    )
    def local(
        params: Tree, rows: Tree, own: jax.Array, switches: Switches, share: jax.Array
    ) -> Any:
        found = _part(params, rows, own, switches)
        wide = jax.tree.map(lambda x: share[0] * x.astype(jnp.float32), found)
        return jax.lax.psum(wide, "data")

    return local(params, batch, own, switches, shares)


def sharded(
    params: Tree,
    batch: Tree,
    weights: np.ndarray,
    switches: Switches,
    shares: np.ndarray,
) -> tuple[Any, Tree]:
    """Replicas on devices by `jax.shard_map`, and the sum over them."""
    own = jnp.asarray(weights / weights.sum())
    loss, gradient = _shards(params, batch, own, switches, jnp.asarray(shares))
    return loss, _in_dtypes(params, gradient)


def data_parallel(
    params: Tree,
    batch: Tree,
    weights: np.ndarray,
    switches: Switches,
    shares: np.ndarray,
) -> tuple[Any, Tree]:
    """Replicas on one device by `jax.vmap`, and the sum over them."""
    split = jax.tree.map(lambda x: x.reshape(REPLICAS, -1, *x.shape[1:]), batch)
    own = jnp.asarray(weights / weights.sum()).reshape(REPLICAS, -1)
    loss, gradient = _replicas(params, split, own, switches, jnp.asarray(shares))
    return loss, _in_dtypes(params, gradient)


def _in_dtypes(params: Tree, gradient: Tree) -> Tree:
    return jax.tree.map(lambda p, g: jnp.asarray(g).astype(p.dtype), params, gradient)


def piped() -> Trainer:
    """Three stages in jdist's pipeline under 1F1B."""

    def first(p: Tree, tokens: Any, mask: Any, key: Any) -> jax.Array:
        hidden = embedded(p, {"tokens": tokens})
        return _stage_layers(p, hidden, mask, key)

    def last(p: Tree, h1: Any, mask: Any, key: Any) -> jax.Array:
        return logits_of(p, _stage_layers(p, h1, mask, key))

    pipe = pipeline.Pipeline(
        [
            pipeline.Stage(first, ("tokens", "mask", "key"), ("h0",)),
            pipeline.Stage(_stage_layers, ("h0", "mask", "key"), ("h1",)),
            pipeline.Stage(last, ("h1", "mask", "key"), ("logits",)),
        ],
        entropies,
        pipeline.one_f_one_b(STAGES, MICRO_BATCHES),
    )

    def trainer(
        params: Tree,
        batch: Tree,
        weights: np.ndarray,
        switches: Switches,
        shares: np.ndarray,
    ) -> tuple[Any, Tree]:
        loss, found = pipe.value_and_grad(_cut(params, switches), batch, weights)
        gradient = {
            "embedding": found[0]["embedding"],
            "position": found[0]["position"],
            "layers": jax.tree.map(
                lambda *x: jnp.concatenate(x), *(stage["layers"] for stage in found)
            ),
            "head": found[-1]["head"],
        }
        return loss, gradient

    return trainer


def _stage_layers(p: Tree, hidden: Any, mask: Any, key: Any) -> jax.Array:
    rows = {"mask": mask, "key": key}
    return layers(p["layers"], hidden, rows, Switches(*p["switches"]), p["numbers"])


def _cut(params: Tree, switches: Switches) -> list[Tree]:
    """The parameters of each stage, which include the switches."""
    numbers = jnp.arange(_depth(params))
    each = len(numbers) // STAGES
    stages: list[Tree] = []
    for i in range(STAGES):
        rows = slice(i * each, (i + 1) * each)
        stages.append(
            {
                "layers": jax.tree.map(lambda x, r=rows: x[r], params["layers"]),
                "switches": [jnp.asarray(x[rows]) for x in switches],
                "numbers": numbers[rows],
            }
        )
    stages[0] |= {name: params[name] for name in ("embedding", "position")}
    stages[-1] |= {"head": params["head"]}
    return stages
