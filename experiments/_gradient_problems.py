"""Fourteen small losses on which a judge of gradients can go wrong.

Sampled noise, dropout, sampled actions, casts, mixed precision, recurrence,
attention, tied embeddings, convolution, batch statistics, the largest and the smallest
loss, unequal weights. Each comes with the usual mistakes inside a loss of its kind and
with other ways to compute the same function.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Losses = Callable[[Any, Any], jax.Array]
"""`losses(params, batch)` returns one loss per example, `(examples,)`."""


@dataclass(frozen=True)
class GradientProblem:
    """A loss at a point, with usual mistakes inside it and equivalent programs.

    Attributes:
      name: The name in reports.
      losses: Computes one loss per example.
      params: Leaves by name; that of the last layer is called `readout`.
      batch: Arrays by name: `x`, and optionally `label` and `key`.
      weights: Weights of the examples, `(examples,)`; None for 1 each.
      reduction: As in `verify.gradients`.
      coupled: Whether examples influence each other; then only the mean is judged.
      coarse: Whether the loss computes in bfloat16, whatever the parameters' dtype.
      wrong: Losses with a usual mistake of this kind of model, by name.
      alike: The same function computed in another way, by name.
    """

    name: str
    losses: Losses
    params: dict[str, jax.Array]
    batch: dict[str, jax.Array]
    weights: np.ndarray | None = None
    reduction: str = "mean"
    coupled: bool = False
    coarse: bool = False
    wrong: Mapping[str, Losses] = field(default_factory=dict)
    alike: Mapping[str, Losses] = field(default_factory=dict)

    @property
    def examples(self) -> int:
        """The number of examples."""
        return len(self.batch["x"])

    @property
    def random(self) -> bool:
        """Whether the loss draws random numbers."""
        return "key" in self.batch


class Draw:
    """Random arrays of one dtype; values differ between dtypes by rounding only."""

    def __init__(self, name: str, seed: int, dtype: Any) -> None:
        self.rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
        self.dtype = dtype

    def normal(self, *shape: int, scale: float = 1.0) -> jax.Array:
        """Normally distributed numbers."""
        return jnp.asarray(self.rng.normal(size=shape) * scale, self.dtype)

    def matrix(self, rows: int, columns: int) -> jax.Array:
        """A random weight matrix that preserves the size of its operand."""
        return self.normal(rows, columns, scale=rows**-0.5)

    def labels(self, classes: int, *shape: int) -> jax.Array:
        """Random classes or tokens, int32."""
        return jnp.asarray(self.rng.integers(classes, size=shape), jnp.int32)

    def keys(self, count: int) -> jax.Array:
        """A PRNG key for each example."""
        return jax.random.split(jax.random.key(int(self.rng.integers(2**31))), count)

    def weights(self, count: int) -> np.ndarray:
        """Unequal weights of few bits, exact in bfloat16; the third is 0."""
        found = self.rng.integers(1, 16, count) / 4
        found[2] = 0
        return found


def problem(name: str, dtype: Any, seed: int) -> GradientProblem:
    """The problem of that name in `PROBLEMS`, in a floating dtype."""
    return PROBLEMS[name](Draw(name, seed, dtype))


def own_score(scores: jax.Array, label: jax.Array) -> jax.Array:
    """The score of each example's own class."""
    return jnp.take_along_axis(scores, label[:, None], axis=1)[:, 0]


def cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    """The cross-entropy of each example, `(examples,)`."""
    return -own_score(jax.nn.log_softmax(logits), label)


def detached(name: str, losses: Losses) -> Losses:
    """The loss with one parameter under `stop_gradient`."""
    stopped = jax.lax.stop_gradient

    def wrong(p: Any, b: Any) -> jax.Array:
        return losses({**p, name: stopped(p[name])}, b)

    return wrong


# --- without randomness ---


def linear_regression(draw: Draw) -> GradientProblem:
    """A thousand examples, such that the sum over the batch dominates the rounding."""

    def losses(p: Any, b: Any) -> jax.Array:
        return (b["x"] @ p["readout"] + p["bias"] - b["label"]) ** 2

    def reversed_features(p: Any, b: Any) -> jax.Array:
        score = b["x"][:, ::-1] @ p["readout"][::-1]
        return (score + p["bias"] - b["label"]) ** 2

    def product_and_sum(p: Any, b: Any) -> jax.Array:
        score = jnp.sum(b["x"] * p["readout"][None, :], axis=1)
        return (score + p["bias"] - b["label"]) ** 2

    def absolute(p: Any, b: Any) -> jax.Array:
        return jnp.abs(b["x"] @ p["readout"] + p["bias"] - b["label"])

    params = {"readout": draw.normal(6), "bias": draw.normal()}
    batch = {"x": draw.normal(1000, 6), "label": draw.normal(1000)}
    return GradientProblem(
        "linear regression", losses, params, batch,
        wrong={
            "a parameter detached": detached("bias", losses),
            "another loss": absolute,
        },
        alike={"features reversed": reversed_features, "sums": product_and_sum},
    )  # fmt: skip


def straight_through(x: jax.Array) -> jax.Array:
    """A ReLU whose derivative ignores its mask."""
    return x + jax.lax.stop_gradient(jax.nn.relu(x) - x)


def _mlp(p: Any, b: Any, activate: Any = jax.nn.relu, order: int = 1) -> jax.Array:
    h = activate(b["x"][:, ::order] @ p["input"][::order] + p["bias"][None, :])
    h = activate(h @ p["hidden"] + p["shift"][None, :])
    return h @ p["readout"]


def mlp(draw: Draw) -> GradientProblem:
    """Two ReLU layers, cross-entropy, unequal weights of which one is 0."""

    def losses(p: Any, b: Any, **options: Any) -> jax.Array:
        return cross_entropy(_mlp(p, b, **options), b["label"])

    def smoothed(p: Any, b: Any) -> jax.Array:
        scores = jax.nn.log_softmax(_mlp(p, b))
        return -0.9 * own_score(scores, b["label"]) - 0.1 * scores.mean(1)

    params = {
        "input": draw.matrix(5, 7), "bias": draw.normal(7, scale=0.3),
        "hidden": draw.matrix(7, 7), "shift": draw.normal(7, scale=0.3),
        "readout": draw.matrix(7, 3),
    }  # fmt: skip
    batch = {"x": draw.normal(61, 5), "label": draw.labels(3, 61)}
    return GradientProblem(
        "MLP", losses, params, batch, draw.weights(61),
        wrong={
            "ReLU's mask forgotten": partial(losses, activate=straight_through),
            "a parameter detached": detached("input", losses),
            "labels smoothed": smoothed,
        },
        alike={"features reversed": partial(losses, order=-1)},
    )  # fmt: skip


def casts(draw: Draw) -> GradientProblem:
    """Logits and losses are cast to float32, whatever the parameters' dtype."""

    def losses(p: Any, b: Any, temperature: float = 1.0) -> jax.Array:
        h = jnp.tanh(b["x"] @ p["input"] + p["bias"][None, :])
        logits = (h @ p["readout"]).astype(jnp.float32) / temperature
        return cross_entropy(logits, b["label"]).astype(jnp.float32)

    params = {
        "input": draw.matrix(6, 8), "bias": draw.normal(8), "readout": draw.matrix(8, 4)
    }  # fmt: skip
    batch = {"x": draw.normal(40, 6), "label": draw.labels(4, 40)}
    return GradientProblem(
        "casts", losses, params, batch, draw.weights(40),
        wrong={"another temperature": partial(losses, temperature=1.1)},
    )  # fmt: skip


def mixed_precision(draw: Draw) -> GradientProblem:
    """Parameters are cast to bfloat16, and the model computes in it."""

    def losses(p: Any, b: Any, activate: Any = jnp.tanh) -> jax.Array:
        low = jax.tree.map(lambda v: v.astype(jnp.bfloat16), p)
        h = activate(b["x"].astype(jnp.bfloat16) @ low["input"] + low["bias"][None, :])
        error = (h @ low["readout"]).astype(jnp.float32) - b["label"].astype(
            jnp.float32
        )
        return (error**2).sum(-1)

    params = {
        "input": draw.matrix(8, 12), "bias": draw.normal(12),
        "readout": draw.matrix(12, 3),
    }  # fmt: skip
    batch = {"x": draw.normal(64, 8), "label": draw.normal(64, 3)}
    return GradientProblem(
        "mixed precision", losses, params, batch, coarse=True,
        wrong={
            "a parameter detached": detached("input", losses),
            "another activation": partial(losses, activate=jnp.sin),
        },
    )  # fmt: skip


def lstm(draw: Draw) -> GradientProblem:
    """Seven steps of an LSTM cell by `scan`."""
    size, steps = 6, 7

    def cell(
        p: Any, carry: Any, x: jax.Array, cut: bool = False, frozen: bool = False
    ) -> Any:
        h, c = jax.lax.stop_gradient(carry) if cut else carry
        gates = x @ p["input"] + h @ p["hidden"] + p["bias"]
        i, f, g, o = jnp.split(gates, 4)
        f = jax.lax.stop_gradient(jax.nn.sigmoid(f)) if frozen else jax.nn.sigmoid(f)
        c = f * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c

    def outputs(p: Any, x: jax.Array, frozen: bool = False) -> jax.Array:
        start = (jnp.zeros(size, x.dtype), jnp.zeros(size, x.dtype))
        (h, _), _ = jax.lax.scan(
            lambda carry, row: (cell(p, carry, row, frozen=frozen), None), start, x
        )
        return h

    def unrolled(p: Any, x: jax.Array, cut: int = -1) -> jax.Array:
        carry = (jnp.zeros(size, x.dtype), jnp.zeros(size, x.dtype))
        for t in range(steps):
            carry = cell(p, carry, x[t], cut=t == cut)
        return carry[0]

    def losses(p: Any, b: Any, model: Any = outputs) -> jax.Array:
        h = jax.vmap(lambda x: model(p, x))(b["x"])
        return ((h @ p["readout"] - b["label"]) ** 2).sum(-1)

    params = {
        "input": draw.matrix(3, 4 * size), "hidden": draw.matrix(size, 4 * size),
        "bias": draw.normal(4 * size, scale=0.3), "readout": draw.matrix(size, 2),
    }  # fmt: skip
    batch = {"x": draw.normal(29, steps, 3), "label": draw.normal(29, 2)}
    return GradientProblem(
        "LSTM", losses, params, batch, draw.weights(29),
        wrong={
            "backpropagation truncated": partial(
                losses, model=partial(unrolled, cut=steps - 2)
            ),
            "a gate detached": partial(losses, model=partial(outputs, frozen=True)),
        },
        alike={"unrolled": partial(losses, model=unrolled)},
    )  # fmt: skip


def attention(draw: Draw) -> GradientProblem:
    """One causal head with a residual connection; four square matrices of one shape."""
    length, size = 5, 6

    def losses(
        p: Any, b: Any, mask: bool = True, detach: bool = False, scale: float = 1.0
    ) -> jax.Array:
        x = b["x"]
        q, k, v = (x @ p[name] for name in ("query", "keys", "value"))
        scores = jnp.einsum("bik,bjk->bij", q, k) * (scale / np.sqrt(size))
        if mask:
            seen = jnp.tril(jnp.ones((length, length), bool))[None]
            scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
        shares = jax.nn.softmax(scores)
        shares = jax.lax.stop_gradient(shares) if detach else shares
        y = x + jnp.einsum("bij,bjk->bik", shares, v) @ p["readout"]
        return ((y - b["label"]) ** 2).mean((1, 2))

    def one_by_one(p: Any, b: Any) -> jax.Array:
        def one(x: jax.Array, label: jax.Array) -> jax.Array:
            single = {"x": x[None], "label": label[None]}
            return losses(p, single)[0]

        return jax.lax.map(lambda row: one(*row), (b["x"], b["label"]))

    names = ("query", "keys", "value", "readout")
    params = {name: draw.matrix(size, size) for name in names}
    batch = {
        "x": draw.normal(23, length, size), "label": draw.normal(23, length, size)
    }  # fmt: skip
    return GradientProblem(
        "attention", losses, params, batch,
        wrong={
            "the mask forgotten": partial(losses, mask=False),
            "softmax detached": partial(losses, detach=True),
            "another temperature": partial(losses, scale=1.1),
        },
        alike={"one by one": one_by_one},
    )  # fmt: skip


def embedding(draw: Draw) -> GradientProblem:
    """A table that is looked up and, transposed, read out: a tied parameter."""
    words = 13

    def losses(
        p: Any, b: Any, lookup: Any = None, first: Any = None, last: Any = None
    ) -> jax.Array:
        table = p["readout"]
        rows = (first or (lambda t: t))(table)
        found = rows[b["x"]] if lookup is None else lookup(rows, b["x"])
        h = jnp.tanh(found.mean(1) @ p["hidden"])
        return cross_entropy(h @ (last or (lambda t: t))(table).T, b["label"])

    def one_hot(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return jax.nn.one_hot(tokens, words, dtype=table.dtype) @ table

    stop = jax.lax.stop_gradient
    params = {"readout": draw.normal(words, 5), "hidden": draw.matrix(5, 5)}
    batch = {"x": draw.labels(words, 37, 4), "label": draw.labels(words, 37)}
    return GradientProblem(
        "tied embedding", losses, params, batch, draw.weights(37),
        wrong={
            "a tied parameter counted once": partial(losses, first=stop),
            "tied, and the readout forgotten": partial(losses, last=stop),
        },
        alike={"one-hot products": partial(losses, lookup=one_hot)},
    )  # fmt: skip


def convolution(draw: Draw) -> GradientProblem:
    """Convolution, ReLU, max-pooling and a dense layer."""
    numbers = ("NHWC", "HWIO", "NHWC")

    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=numbers
        )

    def by_offsets(x: jax.Array, kernel: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        parts = [
            padded[:, i : i + x.shape[1], j : j + x.shape[2]] @ kernel[i, j]
            for i in range(3)
            for j in range(3)
        ]
        return sum(parts[1:], parts[0])

    def losses(
        p: Any, b: Any, convolve: Any = convolved, activate: Any = jax.nn.relu
    ) -> jax.Array:
        h = activate(convolve(b["x"], p["kernel"]) + p["bias"][None, None, None, :])
        examples, side = h.shape[:2]
        pooled = h.reshape(examples, side // 2, 2, side // 2, 2, -1).max((2, 4))
        return cross_entropy(pooled.reshape(examples, -1) @ p["readout"], b["label"])

    params = {
        "kernel": draw.normal(3, 3, 2, 4, scale=0.25), "bias": draw.normal(4),
        "readout": draw.matrix(36, 3),
    }  # fmt: skip
    batch = {"x": draw.normal(19, 6, 6, 2), "label": draw.labels(3, 19)}
    return GradientProblem(
        "convolution", losses, params, batch, draw.weights(19),
        wrong={
            "ReLU's mask forgotten": partial(losses, activate=straight_through),
            "a parameter detached": detached("kernel", losses),
        },
        alike={"sum over offsets": partial(losses, convolve=by_offsets)},
    )  # fmt: skip


def batch_norm(draw: Draw) -> GradientProblem:
    """Batch normalisation, in which examples influence each other."""

    def normalised(h: jax.Array, shards: int = 1, detach: bool = False) -> jax.Array:
        parts = h.reshape(shards, -1, h.shape[-1])
        mean, variance = parts.mean(1, keepdims=True), parts.var(1, keepdims=True)
        if detach:
            mean, variance = jax.lax.stop_gradient((mean, variance))
        return ((parts - mean) * jax.lax.rsqrt(variance + 1e-3)).reshape(h.shape)

    def losses(p: Any, b: Any, **options: Any) -> jax.Array:
        h = normalised(b["x"] @ p["input"], **options)
        h = jnp.tanh(h * p["gain"][None, :] + p["bias"][None, :])
        return ((h @ p["readout"] - b["label"]) ** 2).sum(-1)

    params = {
        "input": draw.matrix(5, 8), "gain": 1 + draw.normal(8, scale=0.2),
        "bias": draw.normal(8, scale=0.2), "readout": draw.matrix(8, 2),
    }  # fmt: skip
    batch = {"x": draw.normal(36, 5), "label": draw.normal(36, 2)}
    return GradientProblem(
        "batch statistics", losses, params, batch, coupled=True,
        wrong={
            "local batch statistics": partial(losses, shards=4),
            "statistics detached": partial(losses, detach=True),
        },
    )  # fmt: skip


def _extreme(name: str, reduction: str, draw: Draw) -> GradientProblem:
    def losses(p: Any, b: Any) -> jax.Array:
        h = jnp.tanh(b["x"] @ p["input"] + p["bias"][None, :])
        return jnp.max((h @ p["readout"] - b["label"]) ** 2, axis=1)

    params = {
        "input": draw.matrix(4, 6), "bias": draw.normal(6), "readout": draw.matrix(6, 3)
    }  # fmt: skip
    batch = {"x": draw.normal(17, 4), "label": draw.normal(17, 3)}
    return GradientProblem(
        name, losses, params, batch, draw.weights(17), reduction,
        wrong={"a parameter detached": detached("input", losses)},
    )  # fmt: skip


# --- with random numbers ---


def sampled_noise(draw: Draw) -> GradientProblem:
    """Normal noise on the inputs, drawn in their dtype."""

    def losses(p: Any, b: Any, size: float = 1.0) -> jax.Array:
        def one(x: jax.Array, key: jax.Array) -> jax.Array:
            noise = jax.random.normal(key, x.shape, x.dtype)
            h = jnp.tanh((x + size * noise) @ p["input"])
            return (h @ p["readout"]) ** 2

        return jax.vmap(one)(b["x"], b["key"])

    params = {"input": draw.matrix(8, 6), "readout": draw.normal(6)}
    batch = {"x": draw.normal(64, 8), "key": draw.keys(64)}
    return GradientProblem(
        "sampled noise", losses, params, batch,
        wrong={
            "the noise forgotten": partial(losses, size=0.0),
            "the noise halved": partial(losses, size=0.5),
        },
    )  # fmt: skip


def dropout(draw: Draw) -> GradientProblem:
    """Dropout by `bernoulli` with a Python number as its rate."""

    def losses(p: Any, b: Any, rate: float = 0.3, scale: float = 0.7) -> jax.Array:
        def one(x: jax.Array, key: jax.Array) -> jax.Array:
            h = jnp.tanh(x @ p["input"] + p["bias"])
            h = jnp.where(jax.random.bernoulli(key, 1 - rate, h.shape), h / scale, 0)
            return h @ p["readout"]

        found = jax.vmap(one)(b["x"], b["key"])
        return ((found - b["label"]) ** 2).sum(-1)

    params = {
        "input": draw.matrix(6, 9), "bias": draw.normal(9, scale=0.3),
        "readout": draw.matrix(9, 2),
    }  # fmt: skip
    batch = {
        "x": draw.normal(48, 6), "label": draw.normal(48, 2), "key": draw.keys(48)
    }  # fmt: skip
    return GradientProblem(
        "dropout", losses, params, batch, draw.weights(48),
        wrong={
            "the mask forgotten": partial(losses, rate=0.0),
            "kept units not scaled up": partial(losses, scale=1.0),
            "another rate": partial(losses, rate=0.35),
        },
    )  # fmt: skip


def sampled_action(draw: Draw) -> GradientProblem:
    """REINFORCE: the log-probability of a sampled action, times a reward."""

    def losses(p: Any, b: Any, greedy: bool = False, shift: int = 0) -> jax.Array:
        def one(x: jax.Array, reward: jax.Array, key: jax.Array) -> jax.Array:
            logits = jnp.tanh(x @ p["input"]) @ p["readout"]
            # The sample must not contribute to the gradient; its score does.
            fixed = jax.lax.stop_gradient(logits)
            drawn = jax.random.categorical(key, fixed)
            action = jnp.argmax(fixed) if greedy else drawn
            scores = jax.nn.log_softmax(logits)
            return -scores[(action + shift) % scores.size] * reward

        return jax.vmap(one)(b["x"], b["label"], b["key"])

    params = {"input": draw.matrix(4, 7), "readout": draw.matrix(7, 5)}
    batch = {"x": draw.normal(64, 4), "label": draw.normal(64), "key": draw.keys(64)}
    return GradientProblem(
        "sampled action", losses, params, batch,
        wrong={
            "greedy for sampled": partial(losses, greedy=True),
            "another action's score": partial(losses, shift=1),
        },
    )  # fmt: skip


PROBLEMS: dict[str, Callable[[Draw], GradientProblem]] = {
    "linear regression": linear_regression,
    "dropout": dropout,
    "MLP": mlp,
    "sampled noise": sampled_noise,
    "sampled action": sampled_action,
    "casts": casts,
    "mixed precision": mixed_precision,
    "LSTM": lstm,
    "attention": attention,
    "tied embedding": embedding,
    "convolution": convolution,
    "batch statistics": batch_norm,
    "largest loss": partial(_extreme, "largest loss", "max"),
    "smallest loss": partial(_extreme, "smallest loss", "min"),
}
