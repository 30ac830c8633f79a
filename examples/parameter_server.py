"""A parameter server: one worker holds the net, others train it through calls.

torch: "Implementing a Parameter Server Using Distributed RPC Framework"
(rpc_param_server_tutorial, distributed/rpc/parameter_server.py of its examples). There
each trainer starts on its own and asks for the one server; here the server's process
makes it and passes a reference to the trainers. The data are random and dropout is left
out. As in torch, trainers step as soon as they are ready, so with several of them the
losses depend on their order.

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
    """Scores of the three classes, `(examples, 3)`, for `x`, `(examples, 8)`."""
    return jax.nn.relu(x @ net["w1"] + net["b1"]) @ net["w2"] + net["b2"]


def cross_entropy(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy over the examples."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=1)
    return -chosen.mean()


def batches(seed: int, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields a trainer's examples, `(BATCH, 8)`, and labels, `(BATCH,)`."""
    teacher = np.random.default_rng(1).normal(size=(8, 3))  # the same for all trainers
    rng = np.random.default_rng((seed, 2))
    for _ in range(steps):
        x = rng.normal(size=(BATCH, 8))
        yield x, (x @ teacher).argmax(axis=1)


class ParameterServer:
    """Holds the net on its worker; others call its methods through a reference."""

    def __init__(self) -> None:
        """Makes the net."""
        # The counterpart of torch's Parameter, here for a whole tree of arrays.
        self.net = autograd.variable(initial_net())

    def forward(self, x: np.ndarray) -> Any:
        """Returns the scores; the call carries the trainer's autograd context."""
        return autograd.apply(scores, self.net, x)

    def parameter_rrefs(self) -> list[rpc.RRef[Any]]:
        """References to the parameters, for a DistributedOptimizer."""
        return [rpc.RRef(self.net)]


def train(server: rpc.RRef[ParameterServer], seed: int, steps: int) -> list[float]:
    """Trains on one trainer; returns its losses."""
    parameters = server.rpc_sync().parameter_rrefs()
    # `optim.sgd` is passed as a function: the optimizer is made on the parameters'
    # worker.
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
    """The accuracy of the current net on examples that no trainer had."""
    x, labels = next(batches(seed=99, steps=1))
    # Outside of a context nothing is recorded, and a plain array comes back.
    return float((server.rpc_sync().forward(x).argmax(axis=1) == labels).mean())


def run(trainers: tuple[str, ...], steps: int) -> tuple[list[list[float]], float]:
    """Trains from the server; returns the losses of each trainer and the accuracy."""
    server = rpc.RRef(ParameterServer())
    training = [
        rpc.rpc_async(name, train, args=(server, seed, steps))
        for seed, name in enumerate(trainers)
    ]
    return rpc.wait_all(training), accuracy(server)


def work(rank: int) -> tuple[list[list[float]], float] | None:
    """Entry point of each process; the trainers only answer calls."""
    rpc.init_rpc(WORKERS[rank])
    found = run(WORKERS[1:], STEPS) if rank == 0 else None
    rpc.shutdown()  # waits for all calls
    return found


if __name__ == "__main__":
    losses, correct = rpc.spawn(work, nprocs=len(WORKERS))[0]
    for name, found in zip(WORKERS[1:], losses, strict=True):
        print(name, "loss", f"{found[0]:.3f} to {found[-1]:.3f}")
    print(f"accuracy {correct:.2f}")
