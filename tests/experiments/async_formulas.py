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


def met(policy, replicas, every, j, i):
    """Replicas take micro-batches in turn, and each counts its own; `every` is of one.

    A worker of stage j is ahead of its backward passes by as many forward passes as
    the workers from there on, but itself, give each of the stage's.
    """
    if policy == "2bw":
        return max(0, i // every - 1)
    if policy == "flush":
        return i // every
    if policy == "vertical_sync":
        return max(0, (i - len(replicas) + 1) // every)
    ahead = (sum(replicas[j:]) - 1) // replicas[j]
    return max(0, (i // replicas[j] - ahead) // every)


# --- optimizers of one stage: `update(t, w, g, rate)` is w_{t+1} - w_t ---


class Momentum:
    """v <- 0.9 v + g; the update is -rate v."""

    v = g = 0.0

    def update(self, t, w, g, rate):
        self.v, self.g = 0.9 * self.v + g, g
        return -rate * self.v

    def direction(self, t, rate):
        return -rate * self.v

    def repeated(self, t, rate):
        """The next update, if the last gradient came again."""
        return -rate * (0.9 * self.v + self.g)


class Adam:
    m = s = 0.0

    def update(self, t, w, g, rate):
        self.m = B1 * self.m + (1 - B1) * g
        self.s = B2 * self.s + (1 - B2) * g**2
        return self.direction(t + 1, rate)

    def direction(self, t, rate):
        """Its last update, which is also what the code that repeats gradients takes."""
        if t == 0:
            return 0.0
        mean, square = self.m / (1 - B1**t), self.s / (1 - B2**t)
        return -rate * mean / (np.sqrt(square) + EPS)

    repeated = direction


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


class Rotated:
    """Matrices by basis rotation, biases by Adam."""

    def __init__(self, chain, j, options):
        self.chain, self.j, self.o, self.adam = chain, j, options, Adam()
        rows, columns = chain.shapes[j]
        self.m = self.v = np.zeros((rows, columns))
        self.left, self.right = np.zeros((rows, rows)), np.zeros((columns, columns))

    def update(self, t, w, g, rate):
        rest = self.adam.update(t, None, self.chain.bias(self.j, g), rate)
        g, k = self.chain.matrix(self.j, g), t + 1
        self.left = B2 * self.left + (1 - B2) * g @ g.T
        self.right = B2 * self.right + (1 - B2) * g.T @ g
        self.m = B1 * self.m + (1 - B1) * g
        if k == 1:
            self.begin()
        elif k % self.o["renewal"] == 0:
            self.renew()
        self.v = B2 * self.v + (1 - B2) * (self.U.T @ g @ self.V) ** 2
        turned = self.U.T @ self.m @ self.V
        if self.o["form"] == "code":
            scale = np.sqrt(1 - B2**k) / (1 - B1**k)
            turned = scale * turned / (np.sqrt(self.v) + self.o["eps"])
        else:
            turned = turned / np.sqrt(self.v + self.o["eps"])
        return np.concatenate([(-rate * self.U @ turned @ self.V.T).ravel(), rest])

    def begin(self):
        if self.o["source"] == "first":
            self.U, _, transposed = np.linalg.svd(self.m)
            self.V = transposed.T
        else:
            self.U = np.linalg.eigh(self.left)[1][:, ::-1]
            self.V = np.linalg.eigh(self.right)[1][:, ::-1]

    def renew(self):
        """The columns by falling estimates, then the first factors of QR."""
        if self.o["source"] == "first":
            by_u = np.argsort(-np.linalg.norm(self.m.T @ self.U, axis=0))
            by_v = np.argsort(-np.linalg.norm(self.m @ self.V, axis=0))
            powers = self.m @ self.V[:, by_v], self.m.T @ self.U[:, by_u]
        else:
            by_u = np.argsort([-u @ self.left @ u for u in self.U.T])
            by_v = np.argsort([-v @ self.right @ v for v in self.V.T])
            powers = self.left @ self.U[:, by_u], self.right @ self.V[:, by_v]
        self.U, self.V = (np.linalg.qr(power, mode="complete")[0] for power in powers)
        self.v = self.v[np.ix_(by_u, by_v)]


OPTIMIZERS = {"momentum": Momentum, "adam": Adam, "nadam": NAdam}


# --- rules: one object for each stage ---


class Stashed:
    """w_{t+1} = w_t + update(g at the versions that were met)."""

    def __init__(self, chain, j, n, delay, w, options):
        self.j, self.n, self.delay, self.o = j, n, delay, options
        self.optimizer = self.made(chain, j, options)
        self.w, self.rate = [w], options["rate"]
        self.publish(0)

    def made(self, chain, j, options):
        kind = options["optimizer"]
        return Muon(chain, j) if kind == "muon" else OPTIMIZERS[kind]()

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


class BasisRotation(Stashed):
    def made(self, chain, j, options):
        return Rotated(chain, j, options)


class OwnUpdate(Stashed):
    """PipeOptim's formula: to where its own update comes, then not at all."""

    beyond = 0

    def ahead(self, t, steps):
        name = "repeated" if self.o["repeats"] else "direction"
        return self.w[t] + steps * getattr(self.optimizer, name)(t, self.rate)

    def forward(self, t):
        return self.ahead(t, self.delay + self.beyond)

    def backward(self, t, version):
        return self.w[t]


class AfterOwnUpdate(OwnUpdate):
    """PipeOptim's code: one update further."""

    beyond = 1


class RoundTrip(OwnUpdate):
    """SpecTrain, with GPU k of N: s = k // 2 + N - k - 1 forward, k // 2 backward."""

    def forward(self, t):
        return self.ahead(t, self.j // 2 + self.n - self.j - 1)

    def backward(self, t, version):
        return self.ahead(t, self.j // 2)


class PipeMare(Stashed):
    delta = 0.0

    def backward(self, t, version):
        return self.w[t] - self.delay * self.delta

    def change(self, t, g, version):
        exponent = 1 - min((t + self.o["first"]) / self.o["anneal"], 1.0)
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
    "after own update": AfterOwnUpdate, "round trip": RoundTrip, "pipemare": PipeMare,
    "look ahead": LookAhead, "compensated": Compensated, "feedback": Feedback,
    "rotated": BasisRotation,
}  # fmt: skip


def serial(name, chain, params, batches, weights, policy, every, options):
    """All micro-batches, one after the other: the weights of each stage, the losses."""
    n, counts = len(params), options["replicas"]
    whole = [every * count for count in counts]  # micro-batches of a stage's update

    def version(j, i):
        return met(policy, counts, every, j, i)

    delays = [
        max(i // whole[j] - version(j, i) for i in range(len(batches)))
        for j in range(n)
    ]
    stages = [
        RULES[name](chain, j, n, delays[j], w, options) for j, w in enumerate(params)
    ]
    losses, sums, totals = [], [0.0] * n, [0.0] * n
    for i, (batch, own) in enumerate(zip(batches, weights, strict=True)):
        newest = [i // whole[j] for j in range(n)]
        versions = [version(j, i) for j in range(n)]
        forward = [stage.seen[v] for stage, v in zip(stages, versions, strict=True)]
        backward = [
            stage.backward(t, v)
            for stage, t, v in zip(stages, newest, versions, strict=True)
        ]
        loss, grads = chain.gradient(forward, backward, batch, own)
        losses.append(loss)
        for j, stage in enumerate(stages):
            sums[j] = sums[j] + own.sum() * grads[j]
            totals[j] += own.sum()
            if (i + 1) % whole[j] == 0:
                stage.update(newest[j], sums[j] / totals[j], versions[j])
                sums[j], totals[j] = 0.0, 0.0
    return [stage.w[-1] for stage in stages], losses
