"""A transformer in two stages on two processes, with GPipe's schedule.

torch: "Introduction to Distributed Pipeline Parallelism" (pipelining_tutorial). There
each rank deletes the layers that it does not own and calls the schedule in its own way;
here the stages are lists of layers, and all processes make the same calls with the same
batch. The net is smaller, and its blocks have self-attention only and no dropout. The
optimizer, which torch's tutorial leaves out, belongs to the pipeline.

    python examples/transformer_pipeline.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdist import optim, pipeline, rpc

DIM, LAYERS, HEADS, VOCABULARY = 16, 2, 2, 20
SEQUENCES, LENGTH, MICRO_BATCHES, LR = 8, 6, 4, 0.2


class Block(nnx.Module):
    """Attention and a net with one hidden layer, each followed by a layer norm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """Initializes random weights."""
        self.attention = nnx.MultiHeadAttention(HEADS, DIM, decode=False, rngs=rngs)
        self.norm1, self.norm2 = (nnx.LayerNorm(DIM, rngs=rngs) for _ in range(2))
        self.up = nnx.Linear(DIM, 4 * DIM, rngs=rngs)
        self.down = nnx.Linear(4 * DIM, DIM, rngs=rngs)

    def __call__(self, h: jax.Array) -> jax.Array:
        """Maps `h`, `(sequences, length, DIM)`, to the same shape."""
        h = self.norm1(h + self.attention(h))
        return self.norm2(h + self.down(nnx.relu(self.up(h))))


def halves() -> list[list[nnx.Module]]:
    """The layers of both stages; a stage may also be a single module."""
    rngs = nnx.Rngs(0)
    embedding = nnx.Embed(VOCABULARY, DIM, rngs=rngs)
    blocks = [Block(rngs) for _ in range(LAYERS)]
    output = nnx.Linear(DIM, VOCABULARY, rngs=rngs)
    cut = LAYERS // 2
    return [[embedding, *blocks[:cut]], [*blocks[cut:], output]]


def cross_entropies(scores: jax.Array, batch: Any) -> jax.Array:
    """The loss of each sequence; the pipeline takes the mean over the batch."""
    targets = batch["targets"][..., None]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), targets, axis=-1)
    return -chosen[..., 0].mean(axis=1)


def batch() -> dict[str, np.ndarray]:
    """Random tokens and the tokens that follow them, `(SEQUENCES, LENGTH)`."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCABULARY, (SEQUENCES, LENGTH + 1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def train(places: Any, steps: int = 10) -> list[float]:
    """Returns the losses; `places` are workers, or a device for each stage."""
    made = pipeline.stages_from_nnx(halves(), names=("tokens", "h", "scores"))
    schedule = pipeline.gpipe(len(made.stages), MICRO_BATCHES)
    opt = optim.sgd(lr=LR)
    pipe = pipeline.Pipeline(
        made.stages, cross_entropies, schedule, places, optimizer=opt
    )
    state = pipe.init(made.params, made.states)
    losses = []
    for _ in range(steps):
        state, metrics = pipe.train_step(state, batch())
        losses.append(float(metrics.loss))
    return losses


def work(rank: int) -> list[float]:
    """Entry point of each process; returns the losses."""
    rpc.init_rpc(f"worker{rank}")
    losses = train(pipeline.Workers(["worker0", "worker1"]))
    rpc.shutdown()
    return losses


if __name__ == "__main__":
    print(pipeline.gpipe(2, MICRO_BATCHES))  # the table of actions
    for rank, losses in enumerate(rpc.spawn(work, nprocs=2)):
        print("rank", rank, "losses", *(f"{loss:.4f}" for loss in losses))
