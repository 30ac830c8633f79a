"""A parameter server made of deferred calls: trainers get what the server applied."""

import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import rpc

TRAINERS = 3
ITERATIONS = 10
SHAPE = (6, 4)
_servers: dict[str, "Server"] = {}


class Sparse(NamedTuple):
    """Gradients of some rows; rows may come twice."""

    rows: np.ndarray
    values: np.ndarray


class Server:
    """Averages the gradients of a round when the last of them has come."""

    def __init__(self, dtype):
        self.lock = threading.Lock()
        self.params = np.zeros(SHAPE, dtype)
        self.applied = []
        self.given = {}
        self.round = rpc.Future()

    def take(self, trainer, grad):
        with self.lock:
            self.given[trainer] = grad
            answer = self.round
            if len(self.given) == TRAINERS:
                mean = average([self.given[i] for i in sorted(self.given)])
                self.params = self.params - mean
                self.applied.append(mean)
                self.given, self.round = {}, rpc.Future()
                answer.set_result((mean, self.params))
        return answer


def average(grads):
    """In the order of the trainers, so that every sum is the same to the bit."""
    total = np.zeros(SHAPE, np.float32)
    for grad in grads:
        if isinstance(grad, Sparse):
            np.add.at(total, grad.rows, grad.values)
        else:
            total += np.asarray(grad)
    return total / np.float32(TRAINERS)


def start_server(key):
    _servers[key] = Server(np.float32)


@rpc.async_execution
def exchange(key, trainer, grad):
    return _servers[key].take(trainer, grad)


def applied(key):
    return _servers[key].applied


def dense(trainer, iteration, params):
    rng = np.random.default_rng((trainer, iteration))
    target = jnp.asarray(rng.normal(size=SHAPE), jnp.float32)
    return jax.grad(lambda p: jnp.sum((p - target) ** 2))(jnp.asarray(params))


def sparse(trainer, iteration, params):
    rng = np.random.default_rng((trainer, iteration))
    rows = rng.integers(0, SHAPE[0], size=trainer + 2)
    noise = rng.normal(size=(trainer + 2, SHAPE[1])).astype(np.float32)
    return Sparse(rows, params[rows] - noise)


def train(key, gradient):
    trainer = rpc.get_worker_info().id
    if trainer == 0:
        return None
    params, told = np.zeros(SHAPE, np.float32), []
    for iteration in range(ITERATIONS):
        grad = gradient(trainer, iteration, params)
        mean, params = rpc.rpc_sync("worker0", exchange, args=(key, trainer, grad))
        told.append(mean)
    return told


@pytest.mark.parametrize("gradient", [dense, sparse])
def test_trainers_get_what_the_server_applied(cluster, gradient):
    key = f"{gradient.__name__} {cluster.kind}"
    cluster.run(0, start_server, key)
    _, *told = cluster.everywhere(train, key, gradient)
    kept = cluster.run(0, applied, key)
    params = np.zeros(SHAPE, np.float32)
    for iteration in range(ITERATIONS):
        trainers = range(1, TRAINERS + 1)
        expected = average([gradient(i, iteration, params) for i in trainers])
        for got in (kept, *told):
            np.testing.assert_array_equal(got[iteration], expected, strict=True)
        params = params - expected
