"""Rules of asynchronous pipelines as serial programs in float64, from their formulas.

The model is a chain of stages h -> tanh(h @ w + b). A stage's weights are one vector.
Nothing here is shared with the compiled form: versions come from the publications'
formulas, and gradients are written by hand.
"""

from itertools import pairwise

import numpy as np

B1, B2, EPS = 0.9, 0.999, 1e-8


class Chain:
    """The model, by the widths of its values."""

    def __init__(self, widths):
        self.widths = widths
        self.shapes = list(pairwise(widths))

    def matrix(self, j, vector):
        rows, columns = self.shapes[j]
        return vector[: rows * columns].reshape(rows, columns)

    def bias(self, j, vector):
        return vector[-self.shapes[j][1] :]

    def gradient(self, forward, backward, batch, weights):
        """Of the weighted mean of the losses, when passes see different weights.

        Activations are those of the forward pass: products with a weight matrix are the
        only place where a backward pass reads weights.
        """
        values = [batch["x"]]
        for j, vector in enumerate(forward):
            pre = values[-1] @ self.matrix(j, vector) + self.bias(j, vector)
            values.append(np.tanh(pre))
        off = values[-1] - batch["target"]
        loss = weights @ (off**2).sum(1) / weights.sum()
        back = 2 * off * (weights / weights.sum())[:, None]
        found = [None] * len(backward)
        for j in reversed(range(len(backward))):
            back = back * (1 - values[j + 1] ** 2)
            found[j] = np.concatenate([(values[j].T @ back).ravel(), back.sum(0)])
            back = back @ self.matrix(j, backward[j]).T
        return loss, found


# --- which version a micro-batch meets, from 0, with n stages numbered from 0 ---


def met(policy, n, every, j, i):
    ahead = {"stashing": n - 1 - j, "vertical_sync": n - 1}
    if policy == "2bw":
        return max(0, i // every - 1)
    if policy == "flush":
        return i // every
    return max(0, (i - ahead[policy]) // every)


# --- optimizers of one stage: `update(t, w, g, rate)` is w_{t+1} - w_t ---


class Momentum:
    """v <- 0.9 v + g; the update is -rate v."""

    v = 0.0

    def update(self, t, w, g, rate):
        self.v = 0.9 * self.v + g
        return -rate * self.v

    def direction(self, t, rate):
        return -rate * self.v


class Adam:
    m = s = 0.0

    def update(self, t, w, g, rate):
        self.m = B1 * self.m + (1 - B1) * g
        self.s = B2 * self.s + (1 - B2) * g**2
        return self.direction(t + 1, rate)

    def direction(self, t, rate):
        if t == 0:
            return 0.0
        mean, square = self.m / (1 - B1**t), self.s / (1 - B2**t)
        return -rate * mean / (np.sqrt(square) + EPS)


class NAdam:
    """Dozat's, with the schedule of its momentum that torch has."""

    m = s = 0.0
    product = 1.0

    def update(self, t, w, g, rate):
        first = 0.99
        mu, later = (first * (1 - 0.5 * 0.96 ** (k * 0.004)) for k in (t + 1, t + 2))
        self.product *= mu
        self.m = first * self.m + (1 - first) * g
        self.s = B2 * self.s + (1 - B2) * g**2
        root = np.sqrt(self.s / (1 - B2 ** (t + 1))) + EPS
        step = (1 - mu) / (1 - self.product) * g
        step = step + later / (1 - self.product * later) * self.m
        return -rate * step / root


class Muon:
    """Matrices by Muon, with Nesterov momentum 0.95 and five steps; biases by Adam."""

    def __init__(self, chain, j):
        self.chain, self.j, self.m, self.adam = chain, j, 0.0, Adam()

    def update(self, t, w, g, rate):
        rest = self.adam.update(t, None, self.chain.bias(self.j, g), rate)
        g = self.chain.matrix(self.j, g)
        self.m = 0.95 * self.m + 0.05 * g
        x = 0.05 * g + 0.95 * self.m
        rows, columns = x.shape
        x = x / max(np.sqrt((x**2).sum()), 1e-7)
        for _ in range(5):
            # The shorter side: the same number, and less of it.
            if rows > columns:
                square = x.T @ x
                x = 3.4445 * x + x @ (-4.775 * square + 2.0315 * square @ square)
            else:
                square = x @ x.T
                x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
        size = rate * np.sqrt(max(1, rows / columns))
        return np.concatenate([(-size * x).ravel(), rest])


OPTIMIZERS = {"momentum": Momentum, "adam": Adam, "nadam": NAdam}


# --- rules: one object for each stage ---


class Stashed:
    """w_{t+1} = w_t + update(g at the versions that were met)."""

    def __init__(self, chain, j, n, delay, w, options):
        self.j, self.n, self.delay, self.o = j, n, delay, options
        kind = options["optimizer"]
        self.optimizer = Muon(chain, j) if kind == "muon" else OPTIMIZERS[kind]()
        self.w, self.rate = [w], options["rate"]
        self.publish(0)

    def publish(self, t):
        """Keeps what forward passes that meet version t see."""
        self.seen = [*getattr(self, "seen", []), self.forward(t)]

    def forward(self, t):
        return self.w[t]

    def backward(self, t, version):
        return self.seen[version]

    def change(self, t, g, version):
        return self.optimizer.update(t, self.w[t], g, self.rate)

    def update(self, t, g, version):
        self.w.append(self.w[t] + self.change(t, g, version))
        self.publish(t + 1)


class Unstashed(Stashed):
    def backward(self, t, version):
        return self.w[t]


class OwnUpdate(Stashed):
    """Predicted to where its own update comes: tau ahead, then not at all."""

    def forward(self, t):
        return self.w[t] + self.delay * self.optimizer.direction(t, self.rate)

    def backward(self, t, version):
        return self.w[t]


class RoundTrip(Stashed):
    """SpecTrain, with GPU k of N: s = k // 2 + N - k - 1 forward, k // 2 backward."""

    def forward(self, t):
        s = self.j // 2 + self.n - self.j - 1
        return self.w[t] + s * self.optimizer.direction(t, self.rate)

    def backward(self, t, version):
        return self.w[t] + self.j // 2 * self.optimizer.direction(t, self.rate)


class PipeMare(Stashed):
    delta = 0.0

    def backward(self, t, version):
        return self.w[t] - self.delay * self.delta

    def change(self, t, g, version):
        exponent = 1 - min(t / self.o["anneal"], 1.0)
        rate = self.rate / max(self.delay, 1) ** exponent
        found = self.optimizer.update(t, self.w[t], g, rate)
        gamma = np.exp(-2 / self.delay) if self.delay else 0.0
        self.delta = gamma * self.delta + (1 - gamma) * found
        return found


class LookAhead(Stashed):
    def d(self, t):
        return self.o["gamma"] * (self.w[t] - self.w[t - 1]) if t else 0.0

    def forward(self, t):
        return self.w[t] + self.d(t)

    def change(self, t, g, version):
        return self.d(t) - self.rate * (1 - self.o["gamma"]) * g


class Compensated(Stashed):
    square = 0.0

    def change(self, t, g, version):
        strength = self.o["strength"]
        if self.o["adaptive"] is not None:
            m = self.o["adaptive"]
            self.square = m * self.square + (1 - m) * g**2
            strength = strength / np.sqrt(self.square + 1e-7)
        g = g + strength * g**2 * (self.w[t] - self.w[version])
        return self.optimizer.update(t, self.w[t], g, self.rate)


class Feedback(Stashed):
    def change(self, t, g, version):
        u = self.optimizer.update(t, self.w[t], g, self.rate)
        before, self.before = getattr(self, "before", u), u
        return u + self.o["strength"] * (u - before)


RULES = {
    "stashed": Stashed, "unstashed": Unstashed, "own update": OwnUpdate,
    "round trip": RoundTrip, "pipemare": PipeMare, "look ahead": LookAhead,
    "compensated": Compensated, "feedback": Feedback,
}  # fmt: skip


def serial(name, chain, params, batches, weights, policy, every, options):
    """All micro-batches, one after the other: the weights of each stage, the losses."""
    n = len(params)
    delays = [
        max(i // every - met(policy, n, every, j, i) for i in range(len(batches)))
        for j in range(n)
    ]
    stages = [
        RULES[name](chain, j, n, delays[j], w, options) for j, w in enumerate(params)
    ]
    losses, sums, total = [], 0.0, 0.0
    for i, (batch, own) in enumerate(zip(batches, weights, strict=True)):
        t = i // every
        versions = [met(policy, n, every, j, i) for j in range(n)]
        pairs = list(zip(stages, versions, strict=True))
        forward = [stage.seen[v] for stage, v in pairs]
        backward = [stage.backward(t, v) for stage, v in pairs]
        loss, grads = chain.gradient(forward, backward, batch, own)
        losses.append(loss)
        sums = sums + own.sum() * np.array([*grads, None], object)[:-1]
        total += own.sum()
        if (i + 1) % every == 0:
            for (stage, v), g in zip(pairs, sums / total, strict=True):
                stage.update(t, g, v)
            sums, total = 0.0, 0.0
    return [stage.w[-1] for stage in stages], losses
