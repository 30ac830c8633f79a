"""A small Llama on eight devices: two stages, each over data and model axes.

torch: "Large Scale Transformer model training with Tensor Parallel" (TP_tutorial), on
two axes. There each layer has a parallelization plan, and its number of heads is
divided by hand; here weights have shardings, and the layers are those of one device.
The model is smaller, runs in a pipeline and learns the bytes of Python's own sources. A
padded sequence is weighted by its number of real tokens.

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
    """The sizes of a model; with `tied` the head shares the embedding's weights."""

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
    """Grouped-query attention and a SwiGLU layer, each after an RMS norm."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        """Initializes random weights."""
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
        """Maps `h`, `(sequences, length, width)`, to the same shape."""
        x = self.norm1(h)
        heads = (*h.shape[:2], -1, self.size)
        q, k, v = (part(x).reshape(heads) for part in (self.q, self.k, self.v))
        q, k = rotated(q, self.theta), rotated(k, self.theta)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        h = h + self.drop(self.o(mixed.reshape(h.shape)))
        x = self.norm2(h)
        return h + self.drop(self.down(nnx.silu(self.gate(x)) * self.up(x)))


class Head(nnx.Module):
    """The last norm and the scores of the next token."""

    def __init__(self, sizes: Sizes, embed: nnx.Embed, rngs: nnx.Rngs) -> None:
        """Makes random weights, or shares those of the embedding."""
        width, words = sizes.width, sizes.vocabulary
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.out: nnx.Embed | nnx.Linear = embed
        if not sizes.tied:
            self.out = nnx.Linear(width, words, use_bias=False, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        """Returns scores, `(sequences, length, vocabulary)`, in float32 or wider."""
        x, out = self.norm(h), self.out
        scores = out.attend(x) if isinstance(out, nnx.Embed) else out(x)
        # The cross-entropy needs more precision than bfloat16 scores have.
        return scores.astype(jnp.promote_types(scores.dtype, jnp.float32))


def layers(sizes: Sizes, seed: int = 0) -> list[nnx.Module]:
    """The embedding, the blocks and the head."""
    rngs = nnx.Rngs(seed)
    embed = nnx.Embed(sizes.vocabulary, sizes.width, rngs=rngs)
    blocks = [Block(sizes, rngs) for _ in range(sizes.blocks)]
    return [embed, *blocks, Head(sizes, embed, rngs)]


def losses_of(scores: jax.Array, batch: Any) -> jax.Array:
    """The mean cross-entropy of each sequence over its real tokens."""
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(scores), batch["targets"][..., None], axis=-1
    )[..., 0]
    mask = batch["mask"].astype(chosen.dtype)
    # A sequence of padding alone has no tokens; it has loss 0, not NaN.
    return -(chosen * mask).sum(1) / jnp.maximum(mask.sum(1), 1)


# --- the text ---


def sequences() -> dict[str, np.ndarray]:
    """All pieces of the files; the last piece of each is padded, with mask 0."""
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
    """Batches of random sequences, the last of which is the padded end of a file."""
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
    """A mesh for each stage; `shape` is the numbers of stages, data and model."""
    rows = np.array(devices[: math.prod(shape)]).reshape(shape)
    return [Mesh(own, ("data", "model")) for own in rows]


def spec(path: Any, _: Any) -> P:
    """The sharding of a weight, by the first name on its path that has one."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return next((SHARDED[name] for name in names if name in SHARDED), P())


def pipelined(
    modules: Sequence[nnx.Module],
    schedule: pipeline.Schedule,
    places: Any,
    **options: Any,
) -> tuple[pipeline.Pipeline, pipeline.FromModules]:
    """Splits the layers evenly into the stages of the schedule."""
    cuts = np.linspace(0, len(modules), schedule.stages + 1).astype(int)
    groups = [modules[a:b] for a, b in pairwise(cuts.tolist())]
    names = ["tokens", *(f"h{k}" for k in range(1, schedule.stages)), "scores"]
    made = pipeline.stages_from_nnx(groups, names)
    pipe = pipeline.Pipeline(made.stages, losses_of, schedule, places, **options)
    return pipe, made


# --- training ---


def train(places: Any, schedule: pipeline.Schedule, steps: int, **options: Any) -> Any:
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
    # Must come before JAX initializes its backend; the default is one CPU device.
    jax.config.update("jax_num_cpu_devices", 8 if rank is None else 4)
    if rank is None:
        losses, _ = train(meshes(jax.devices(), (2, 2, 2)), schedule, 30)
    else:  # a process for each stage
        rpc.init_rpc(f"worker{rank}")
        (own,) = meshes(jax.local_devices(), (1, 2, 2))
        workers = pipeline.Workers(["worker0", "worker1"], mesh=own)
        losses, _ = train(workers, schedule, 30)
        rpc.shutdown()
    if rank in (None, "0"):
        print("losses", *(f"{loss:.3f}" for loss in losses))
