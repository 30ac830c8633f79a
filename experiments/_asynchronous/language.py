"""A small language model, on the text of Python's manual.

The text is `pydoc_data.topics`, which CPython ships for `help()`. Halves of blocks are
attention and MLP in turn, between an embedding and a head.
"""

import importlib
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments._asynchronous.compiled import MicroBatches
from experiments._asynchronous.task import Piece, normed

FIRST, LAST = 32, 126
"""The printable characters, which are tokens 1 to 95; all others are token 0."""
VOCABULARY = LAST - FIRST + 2


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


class Language(NamedTuple):
    """A `Task`: the next character.

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

    @property
    def input(self) -> str:
        """Tokens."""
        return "tokens"

    @property
    def text(self) -> str:
        """The sizes and the data."""
        return (
            f"{self.halves} halves of blocks, width {self.width}; {self.steps} updates "
            f"of {self.batch} sequences of {self.length} characters of "
            "pydoc_data.topics; the last tenth of the text is held out; losses in "
            "nats per character"
        )

    def training(self, seed: int) -> MicroBatches:
        """Sequences from nine tenths of the text."""
        whole = text()
        part = whole[: len(whole) * 9 // 10]
        shape = self.steps, self.batch
        shares = np.full(shape, 1 / self.batch, np.float32)
        totals = np.full(self.steps, self.batch, np.float32)
        batch = _sequences(part, shape, self.length, (seed, 1))
        return MicroBatches(batch, shares, totals)

    def held_out(self) -> dict[str, np.ndarray]:
        """Sequences from the last tenth of the text."""
        whole = text()
        part = whole[len(whole) * 9 // 10 :]
        return _sequences(part, (self.test,), self.length, 0)

    def losses(self, outputs: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
        """The mean cross-entropy of each sequence."""
        chosen = jnp.take_along_axis(
            jax.nn.log_softmax(outputs), batch["targets"][..., None], axis=-1
        )
        return -chosen[..., 0].mean(-1)

    def pieces(self) -> list[Piece]:
        """Attention and MLP in turn, between an embedding and a head."""
        kinds: list[Piece] = [partial(attend, heads=self.heads), think]
        return [embed, *(kinds * self.halves)[: self.halves], score]

    def parameters(self, seed: int) -> list[dict[str, np.ndarray]]:
        """Normal numbers that keep the size of values."""
        rng = np.random.default_rng((seed, 2))
        width, inner = self.width, 2 * self.width

        def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
            size = scale / np.sqrt(rows)
            return (size * rng.normal(size=(rows, columns))).astype(np.float32)

        # So that the sum over all halves keeps the size of its terms.
        late = self.halves**-0.5
        kinds = [
            lambda: {
                "qkv": matrix(width, 3 * width),
                "out": matrix(width, width, late),
            },
            lambda: {"up": matrix(width, inner), "down": matrix(inner, width, late)},
        ]
        table = {
            "table": rng.normal(size=(VOCABULARY, width)).astype(np.float32),
            "places": 0.1 * rng.normal(size=(self.length, width)).astype(np.float32),
        }
        middle = [kinds[number % 2]() for number in range(self.halves)]
        return [table, *middle, {"head": matrix(width, VOCABULARY)}]


def embed(own: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Tokens and their places as vectors."""
    return own["table"][tokens] + own["places"][None]


def attend(own: Mapping[str, jax.Array], h: jax.Array, *, heads: int) -> jax.Array:
    """Causal self-attention, added to `h`, `(sequences, length, width)`."""
    many, length, width = h.shape
    both = normed(h) @ own["qkv"]
    q, k, v = jnp.split(both.reshape(many, length, heads, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width / heads)
    later = np.triu(np.ones((length, length), bool), 1)
    scores = jnp.where(later[None, None], -1e9, scores)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return h + mixed.reshape(h.shape) @ own["out"]


def think(own: Mapping[str, jax.Array], h: jax.Array) -> jax.Array:
    """A layer of twice the width, added to `h`."""
    return h + jax.nn.gelu(normed(h) @ own["up"]) @ own["down"]


def score(own: Mapping[str, jax.Array], h: jax.Array) -> jax.Array:
    """The logits of the next token."""
    return normed(h) @ own["head"]
