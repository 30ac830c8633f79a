"""A parameter server: one worker holds the net, others train it through calls.

torch: "Implementing a Parameter Server Using Distributed RPC Framework"
(rpc_param_server_tutorial, distributed/rpc/parameter_server of its examples). There
each trainer starts by itself and asks for the one server; here the server's process
makes it and hands its trainers a reference. The data are random and dropout is left
out. As in torch, trainers step whenever they are ready, so with several of them the
losses depend on who comes first.

    python examples/parameter_server.py
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import autograd, optim, rpc

WORKERS = ("server", "trainer1", "trainer2")
STEPS, BATCH, LR = 60, 32, 0.1


def initial_net() -> Any:
    """Random weights of a net with one hidden layer."""
    rng = np.random.default_rng(0)
    w1, w2 = rng.normal(size=(8, 16)) / 8**0.5, rng.normal(size=(16, 3)) / 16**0.5
    net = {"w1": w1, "b1": np.zeros(16), "w2": w2, "b2": np.zeros(3)}
    return jax.tree.map(jnp.asarray, net)


def scores(net: Any, x: jax.Array) -> jax.Array:
    """Of the three classes, for each example of `x`, `(examples, 8)`."""
    return jax.nn.relu(x @ net["w1"] + net["b1"]) @ net["w2"] + net["b2"]


def cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over the examples."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=1)
    return -chosen.mean()


def batches(seed: int, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A trainer's examples and labels."""
    teacher = np.random.default_rng(1).normal(size=(8, 3))  # the same for all trainers
    rng = np.random.default_rng((seed, 2))
    for _ in range(steps):
        x = rng.normal(size=(BATCH, 8))
        yield x, (x @ teacher).argmax(axis=1)


class ParameterServer:
    """Lives on the worker that makes it; others call its methods by a reference."""

    def __init__(self) -> None:
        """Makes the net."""
        # torch's Parameter: arrays that want a gradient, a whole tree of them at once.
        self.net = autograd.variable(initial_net())

    def forward(self, x: np.ndarray) -> Any:
        """Scores; the trainer's autograd context comes along with its call."""
        return autograd.apply(scores, self.net, x)

    def parameter_rrefs(self) -> list[rpc.RRef[Any]]:
        """What a DistributedOptimizer is given."""
        return [rpc.RRef(self.net)]


def train(server: rpc.RRef[ParameterServer], seed: int, steps: int) -> list[float]:
    """What a trainer does; returns its losses."""
    parameters = server.rpc_sync().parameter_rrefs()
    # A function that makes the optimizer: it is made where the parameters are.
    opt = autograd.DistributedOptimizer(optim.sgd, parameters, lr=LR)
    losses = []
    for x, labels in batches(seed, steps):
        with autograd.context() as context_id:
            found = server.rpc_sync().forward(x)
            loss = autograd.apply(cross_entropy, found, labels)
            autograd.backward(context_id, [loss])
            opt.step(context_id)  # no zero_grad: each context has its own gradients
        losses.append(float(loss.value))
    return losses


def accuracy(server: rpc.RRef[ParameterServer]) -> float:
    """Of the net as it is, on examples that no trainer had."""
    x, labels = next(batches(seed=99, steps=1))
    # Outside of a context nothing is recorded across workers: a plain array comes back.
    return float((server.rpc_sync().forward(x).argmax(axis=1) == labels).mean())


def run(trainers: tuple[str, ...], steps: int) -> tuple[list[list[float]], float]:
    """What the server does; returns each trainer's losses and the accuracy."""
    server = rpc.RRef(ParameterServer())
    training = [
        rpc.rpc_async(name, train, args=(server, seed, steps))
        for seed, name in enumerate(trainers)
    ]
    return rpc.wait_all(training), accuracy(server)


def work(rank: int) -> tuple[list[list[float]], float] | None:
    """What each process does: the trainers only wait to be called."""
    rpc.init_rpc(WORKERS[rank])
    found = run(WORKERS[1:], STEPS) if rank == 0 else None
    rpc.shutdown()  # waits for all calls
    return found


if __name__ == "__main__":
    losses, correct = rpc.spawn(work, nprocs=len(WORKERS))[0]
    for name, found in zip(WORKERS[1:], losses, strict=True):
        print(name, "loss", f"{found[0]:.3f} to {found[-1]:.3f}")
    print(f"accuracy {correct:.2f}")
