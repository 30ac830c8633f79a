"""A small Llama on eight devices: two stages, each over data and model axes.

torch: "Large Scale Transformer model training with Tensor Parallel" (TP_tutorial), on
two axes. There each layer has a plan of how it is parallelized, and its number of heads
is divided by hand; here weights have shardings, and the layers are those of one device.
The model is smaller and in a pipeline, and learns the bytes of Python's own sources. A
sequence that padding fills up counts by its tokens.

    python examples/language_model.py                            # eight devices
    python -m jdist.launch --nproc 2 examples/language_model.py  # two hosts of four
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdist import optim, pipeline, rpc

FILES = ("bisect.py", "heapq.py", "queue.py", "shlex.py", "textwrap.py")
LENGTH, SEQUENCES, MICRO_BATCHES, LR = 32, 16, 4, 3e-3


# --- the model ---


@dataclass(frozen=True)
class Sizes:
    """Of a model; the head has the embedding's weights if it is tied."""

    vocabulary: int = 256
    width: int = 32
    blocks: int = 2
    heads: int = 4
    kv_heads: int = 2
    inner: int = 64
    theta: float = 1e4
    dropout: float = 0.0
    tied: bool = True


def rotated(x: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding; `x` is `(sequences, length, heads, size)`."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[1]), theta ** (-jnp.arange(half) / half))
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Block(nnx.Module):
    """Grouped-query attention and SwiGLU, each behind a norm."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        """Random weights."""
        width, inner = sizes.width, sizes.inner
        self.size, self.theta = width // sizes.heads, sizes.theta
        few = sizes.kv_heads * self.size

        def linear(rows: int, columns: int) -> nnx.Linear:
            return nnx.Linear(rows, columns, use_bias=False, rngs=rngs)

        self.norm1, self.norm2 = (nnx.RMSNorm(width, rngs=rngs) for _ in range(2))
        self.q, self.o = linear(width, width), linear(width, width)
        self.k, self.v = linear(width, few), linear(width, few)
        self.gate, self.up = linear(width, inner), linear(width, inner)
        self.down = linear(inner, width)
        self.drop = nnx.Dropout(sizes.dropout, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        """`h` is `(sequences, length, width)`."""
        x = self.norm1(h)
        heads = (*h.shape[:2], -1, self.size)
        q, k, v = (part(x).reshape(heads) for part in (self.q, self.k, self.v))
        q, k = rotated(q, self.theta), rotated(k, self.theta)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        h = h + self.drop(self.o(mixed.reshape(h.shape)))
        x = self.norm2(h)
        return h + self.drop(self.down(nnx.silu(self.gate(x)) * self.up(x)))


class Head(nnx.Module):
    """Scores of the next token."""

    def __init__(self, sizes: Sizes, embed: nnx.Embed, rngs: nnx.Rngs) -> None:
        """Random weights, or the embedding's."""
        width, words = sizes.width, sizes.vocabulary
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.out: nnx.Embed | nnx.Linear = embed
        if not sizes.tied:
            self.out = nnx.Linear(width, words, use_bias=False, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        """Scores `(sequences, length, vocabulary)` in float32 or wider."""
        x, out = self.norm(h), self.out
        scores = out.attend(x) if isinstance(out, nnx.Embed) else out(x)
        return scores.astype(jnp.promote_types(scores.dtype, jnp.float32))


def layers(sizes: Sizes, seed: int = 0) -> list[nnx.Module]:
    """Embedding, blocks and head."""
    rngs = nnx.Rngs(seed)
    embed = nnx.Embed(sizes.vocabulary, sizes.width, rngs=rngs)
    blocks = [Block(sizes, rngs) for _ in range(sizes.blocks)]
    return [embed, *blocks, Head(sizes, embed, rngs)]


def losses_of(scores: jax.Array, batch: Any) -> jax.Array:
    """Mean cross-entropy of each sequence over its own tokens."""
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(scores), batch["targets"][..., None], axis=-1
    )[..., 0]
    mask = batch["mask"].astype(chosen.dtype)
    return -(chosen * mask).sum(1) / jnp.maximum(mask.sum(1), 1)


# --- the text ---


def sequences() -> dict[str, np.ndarray]:
    """All pieces of the files; the last piece of each is filled up, with mask 0."""
    tokens, real = [], []
    for name in FILES:
        text = np.frombuffer(Path(os.__file__).with_name(name).read_bytes(), np.uint8)
        for start in range(0, len(text) - 1, LENGTH):
            piece = text[start : start + LENGTH + 1]
            tokens.append(np.pad(piece, (0, LENGTH + 1 - len(piece))))
            real.append(np.arange(LENGTH) < len(piece) - 1)
    rows = np.array(tokens, np.int32)
    mask = np.array(real, np.float32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "mask": mask}


def batches(steps: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Random sequences; the last of each batch is a file's end, with padding."""
    every, rng = sequences(), np.random.default_rng(seed)
    ends = np.flatnonzero(every["mask"].sum(1) < LENGTH)
    found = []
    for _ in range(steps):
        rows = rng.integers(0, len(every["mask"]), SEQUENCES)
        rows[-1] = rng.choice(ends)
        found.append({name: x[rows] for name, x in every.items()})
    return found


# --- parallelism ---

COLUMNS, ROWS = P(None, "model"), P("model")
SHARDED = dict.fromkeys(("q", "k", "v", "gate", "up", "kernel"), COLUMNS)
SHARDED |= dict.fromkeys(("o", "down", "embedding"), ROWS)


def meshes(devices: Sequence[jax.Device], shape: tuple[int, int, int]) -> list[Mesh]:
    """A mesh for each stage; `shape` has the sizes of stages, data and model."""
    rows = np.array(devices[: math.prod(shape)]).reshape(shape)
    return [Mesh(own, ("data", "model")) for own in rows]


def spec(path: Any, _: Any) -> P:
    """How a weight is divided, by the first name in its path that says it."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return next((SHARDED[name] for name in names if name in SHARDED), P())


def pipelined(
    modules: Sequence[nnx.Module],
    schedule: pipeline.Schedule,
    places: Sequence[Any],
    **options: Any,
) -> tuple[pipeline.Pipeline, pipeline.FromModules]:
    """The layers in as many stages as the schedule has, about equally many in each."""
    cuts = np.linspace(0, len(modules), schedule.stages + 1).astype(int)
    groups = [modules[a:b] for a, b in pairwise(cuts.tolist())]
    names = ["tokens", *(f"h{k}" for k in range(1, schedule.stages)), "scores"]
    made = pipeline.stages_from_nnx(groups, names)
    pipe = pipeline.Pipeline(made.stages, losses_of, schedule, places, **options)
    return pipe, made


# --- training ---


def train(
    places: Sequence[Any], schedule: pipeline.Schedule, steps: int, **options: Any
) -> Any:
    """Returns the losses and a function that makes the trained layers."""
    options["optimizer"] = optim.adam(lr=LR)
    pipe, made = pipelined(layers(Sizes()), schedule, places, **options)
    specs = jax.tree_util.tree_map_with_path(spec, made.params)
    params = pipe.place(made.params, specs)
    state = pipe.init(params, made.states, jax.random.key(0))
    losses = []
    for batch in batches(steps):
        state, metrics = pipe.train_step(state, batch, batch["mask"].sum(1))
        losses.append(float(metrics.loss))
    return losses, lambda: made.modules(state.params, state.states)


if __name__ == "__main__":
    schedule, rank = pipeline.one_f_one_b(2, MICRO_BATCHES), os.environ.get("RANK")
    # Before JAX is used; else a CPU is one device.
    jax.config.update("jax_num_cpu_devices", 8 if rank is None else 4)
    if rank is None:
        losses, _ = train(meshes(jax.devices(), (2, 2, 2)), schedule, 30)
    else:  # a process for each stage
        rpc.init_rpc(f"worker{rank}")
        (own,) = meshes(jax.local_devices(), (1, 2, 2))
        losses, _ = train(["worker0", "worker1"], schedule, 30, mesh=own)
        rpc.shutdown()
    if rank in (None, "0"):
        print("losses", *(f"{loss:.3f}" for loss in losses))
