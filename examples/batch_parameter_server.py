"""A parameter server that waits for all trainers' gradients and steps once.

torch: "Implementing Batch RPC Processing Using Asynchronous Executions"
(rpc_async_execution, distributed/rpc/batch/parameter_server.py of its examples). torch
sends the model itself; here only its weights travel, as a tree of arrays, and the model
is a small net instead of ResNet-50. Gradients are summed in the order of the trainers,
not of their arrival, so that every run gives the same bits.

    python examples/batch_parameter_server.py
"""

import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import optim, rpc

WORKERS = ("server", "trainer1", "trainer2")
STEPS, BATCH = 40, 16


def initial_net() -> Any:
    """Random weights of a net with one hidden layer."""
    rng = np.random.default_rng(0)
    net = {
        "w1": rng.normal(size=(6, 10)) / 6**0.5,
        "w2": rng.normal(size=(10, 2)) / 10**0.5,
    }
    return jax.tree.map(jnp.asarray, net)


@jax.jit
@jax.value_and_grad
def loss_and_gradient(net: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error, differentiated with respect to the net."""
    return ((jnp.tanh(x @ net["w1"]) @ net["w2"] - y) ** 2).mean()


def batches(trainer: int, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields a trainer's inputs `(BATCH, 6)` and targets `(BATCH, 2)`."""
    teacher = np.random.default_rng(1).normal(size=(6, 2))  # the same for all trainers
    rng = np.random.default_rng((trainer, 2))
    for _ in range(steps):
        x = rng.normal(size=(BATCH, 6))
        yield x, np.tanh(x @ teacher)


class BatchUpdateParameterServer:
    """Holds the net and takes one step for the gradients of all trainers."""

    def __init__(self, trainers: int) -> None:
        """Makes the net and its optimizer."""
        self.net = initial_net()
        self.optimizer = optim.sgd(lr=0.2, momentum=0.9)
        self.state = self.optimizer.init(self.net)
        self.trainers = trainers
        self.lock = threading.Lock()
        self.gradients: dict[int, Any] = {}
        self.next_net: rpc.Future[Any] = rpc.Future()

    def get_net(self) -> Any:
        """The current weights."""
        return self.net

    # The decorator completes the call when the future does, so that no thread waits.
    # Unlike torch's, it also applies to methods that are not static.
    @rpc.async_execution
    def update_and_fetch_net(self, trainer: int, gradient: Any) -> rpc.Future[Any]:
        """Adds a gradient; returns a future of the net after the step with all."""
        with self.lock:
            self.gradients[trainer] = gradient
            answer = self.next_net
            if len(self.gradients) < self.trainers:
                return answer
            # In the order of the trainers: floating-point sums depend on it.
            given = [self.gradients[i] for i in range(self.trainers)]
            mean = jax.tree.map(lambda *g: sum(g) / len(g), *given)
            self.net, self.state = self.optimizer.step(self.net, mean, self.state)
            self.gradients, self.next_net = {}, rpc.Future()
        answer.set_result(self.net)  # completes the calls of all trainers
        return answer


def train(server: rpc.RRef[Any], trainer: int, steps: int) -> list[float]:
    """Trains on one trainer; returns its losses."""
    net, losses = server.rpc_sync().get_net(), []
    for x, y in batches(trainer, steps):
        loss, gradient = loss_and_gradient(net, x, y)
        net = server.rpc_sync().update_and_fetch_net(trainer, gradient)
        losses.append(float(loss))
    return losses


def run(trainers: tuple[str, ...], steps: int) -> list[list[float]]:
    """Trains from the server; returns the losses of each trainer."""
    server = rpc.RRef(BatchUpdateParameterServer(len(trainers)))
    training = [
        rpc.rpc_async(name, train, args=(server, i, steps))
        for i, name in enumerate(trainers)
    ]
    return rpc.wait_all(training)


def work(rank: int) -> list[list[float]] | None:
    """Entry point of each process; the trainers only answer calls."""
    rpc.init_rpc(WORKERS[rank])
    losses = run(WORKERS[1:], STEPS) if rank == 0 else None
    rpc.shutdown()
    return losses


if __name__ == "__main__":
    by_step = np.transpose(rpc.spawn(work, nprocs=len(WORKERS))[0])
    for step in range(0, STEPS, 5):
        print("step", step, "losses", *(f"{loss:.4f}" for loss in by_step[step]))
