"""A small language model in any number of stages, on the text of Python's manual.

The text is `pydoc_data.topics`, which CPython ships for `help()`. The model has 32
halves of blocks, attention and MLP in turn, between an embedding and a head; stages are
runs of halves of equal length, so that 32 stages have one each.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments._asynchronous.compiled import MicroBatches
from jdist import pipeline

PyTree = Any
FIRST, LAST = 32, 126
"""The printable characters, which are tokens 1 to 95; all others are token 0."""
VOCABULARY = LAST - FIRST + 2


class Sizes(NamedTuple):
    """The sizes of the model and of its training.

    Attributes:
      width: Of the values between halves.
      halves: Their number; a multiple of each number of stages.
      heads: Of attention.
      length: Tokens of a sequence.
      batch: Sequences of an update.
      steps: Updates.
      test: Sequences of the held-out text.
    """

    width: int = 16
    halves: int = 32
    heads: int = 2
    length: int = 32
    batch: int = 8
    steps: int = 400
    test: int = 64


@lru_cache(maxsize=1)
def text() -> np.ndarray:
    """The tokens of all topics, `(characters,)`, uint8."""
    topics = importlib.import_module("pydoc_data.topics").topics
    whole = "\n".join(topics[name] for name in sorted(topics))
    codes = np.frombuffer(whole.encode("ascii", "replace"), np.uint8)
    printable = (codes >= FIRST) & (codes <= LAST)
    return np.where(printable, codes - (FIRST - 1), 0).astype(np.uint8)


def _sequences(part: np.ndarray, shape: tuple[int, ...], length: int, seed: Any) -> Any:
    starts = np.random.default_rng(seed).integers(len(part) - length, size=shape)
    rows = part[starts[..., None] + np.arange(length + 1)].astype(np.int32)
    return {"tokens": rows[..., :-1], "targets": rows[..., 1:]}


def training(sizes: Sizes, seed: int) -> MicroBatches:
    """A seed's micro-batches, one for each update, from nine tenths of the text."""
    whole = text()
    part = whole[: len(whole) * 9 // 10]
    shape = sizes.steps, sizes.batch
    shares = np.full(shape, 1 / sizes.batch, np.float32)
    totals = np.full(sizes.steps, sizes.batch, np.float32)
    batch = _sequences(part, shape, sizes.length, (seed, 1))
    return MicroBatches(batch, shares, totals)


def held_out(sizes: Sizes) -> dict[str, np.ndarray]:
    """Sequences from the last tenth of the text, the same for all seeds."""
    whole = text()
    part = whole[len(whole) * 9 // 10 :]
    return _sequences(part, (sizes.test,), sizes.length, 0)


# --- the model ---


def _normed(h: jax.Array) -> jax.Array:
    return h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6)


def embed(own: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Tokens and their places as vectors."""
    return own["table"][tokens] + own["places"][None]


def attend(own: Mapping[str, jax.Array], h: jax.Array, *, heads: int) -> jax.Array:
    """Causal self-attention, added to `h`, `(sequences, length, width)`."""
    many, length, width = h.shape
    both = _normed(h) @ own["qkv"]
    q, k, v = jnp.split(both.reshape(many, length, heads, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width / heads)
    later = np.triu(np.ones((length, length), bool), 1)
    scores = jnp.where(later[None, None], -1e9, scores)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return h + mixed.reshape(h.shape) @ own["out"]


def think(own: Mapping[str, jax.Array], h: jax.Array) -> jax.Array:
    """A layer of twice the width, added to `h`."""
    return h + jax.nn.gelu(_normed(h) @ own["up"]) @ own["down"]


def score(own: Mapping[str, jax.Array], h: jax.Array) -> jax.Array:
    """The logits of the next token."""
    return _normed(h) @ own["head"]


def losses_of(logits: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
    """The mean cross-entropy of each sequence, in nats per character."""
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1
    )
    return -chosen[..., 0].mean(-1)


def pieces(sizes: Sizes) -> list[Callable[[Any, jax.Array], jax.Array]]:
    """The functions of the model, in order."""
    kinds: list[Callable[[Any, jax.Array], jax.Array]]
    kinds = [partial(attend, heads=sizes.heads), think]
    return [embed, *(kinds * sizes.halves)[: sizes.halves], score]


def parameters(sizes: Sizes, seed: int) -> list[dict[str, np.ndarray]]:
    """Random weights of each piece."""
    rng = np.random.default_rng((seed, 2))
    width, inner = sizes.width, 2 * sizes.width

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        size = scale / np.sqrt(rows)
        return (size * rng.normal(size=(rows, columns))).astype(np.float32)

    # So that the sum over all halves keeps the size of its terms.
    late = sizes.halves**-0.5
    kinds = [
        lambda: {"qkv": matrix(width, 3 * width), "out": matrix(width, width, late)},
        lambda: {"up": matrix(width, inner), "down": matrix(inner, width, late)},
    ]
    table = {
        "table": rng.normal(size=(VOCABULARY, width)).astype(np.float32),
        "places": 0.1 * rng.normal(size=(sizes.length, width)).astype(np.float32),
    }
    middle = [kinds[number % 2]() for number in range(sizes.halves)]
    return [table, *middle, {"head": matrix(width, VOCABULARY)}]


class Through:
    """Several pieces, one after the other, as the function of a stage."""

    def __init__(self, parts: Sequence[Callable[..., jax.Array]]) -> None:
        self._parts = tuple(parts)

    def __call__(self, own: Sequence[PyTree], value: jax.Array) -> jax.Array:
        """Applies each piece with its weights."""
        for part, weights in zip(self._parts, own, strict=True):
            value = part(weights, value)
        return value


def cut(whole: Sequence[Any], stages: int) -> list[list[Any]]:
    """The pieces of each stage: equal runs of halves, with the ends at both ends.

    Raises:
      ValueError: The halves cannot be divided among the stages.
    """
    halves = len(whole) - 2
    if halves % stages:
        raise ValueError(f"{halves} halves must be a multiple of {stages} stages")
    run = halves // stages
    found = [list(whole[1 + j * run : 1 + (j + 1) * run]) for j in range(stages)]
    found[0].insert(0, whole[0])
    found[-1].append(whole[-1])
    return found


def staged(sizes: Sizes, stages: int) -> list[pipeline.Stage]:
    """The model as stages."""
    names = ["tokens", *(f"h{j}" for j in range(1, stages)), "logits"]
    return [
        pipeline.Stage(Through(own), (names[j],), (names[j + 1],))
        for j, own in enumerate(cut(pieces(sizes), stages))
    ]
