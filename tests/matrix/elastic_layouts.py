"""`data_parallel.Elastic` against one device: runs whose replicas die and join.

The first step is that of a run of one epoch, the second that of a run of two, both of
which begin with the first parameters. Functions of a layout for `verify.fuzz`, whose
process imports them.
"""

import threading

import jax
import jax.numpy as jnp
import numpy as np

from jdist import data_parallel, optim, rpc
from jdist.matrix.row import precision_of_caller
from tests.data_parallel.elasticity.histories import Died, Watched

EXAMPLES, WIDTH = 13, 3

AXES = {
    "replicas": (1, 2, 3, 4),
    "dies": (0, 1, 2),
    "joins": (0, 1, 2),
    "slots": (None, 1, 5, 13),
    "weights": (False, True),
    "momentum": (False, True),
    "sum": (False, True),
}
MODEL = ("weights", "momentum", "sum")


def valid(layout):
    """Whether there is a replica beside the first one that can die."""
    return layout["dies"] == 0 or layout["replicas"] > 1


def problem(layout):
    one, two, three = jax.random.split(jax.random.key(3), 3)
    params = {"w": jax.random.normal(one, (WIDTH,), jnp.float32), "b": jnp.float32(0.5)}
    batch = {
        "x": jax.random.normal(two, (EXAMPLES, WIDTH), jnp.float32),
        "y": jax.random.normal(three, (EXAMPLES,), jnp.float32),
    }
    weights = jnp.arange(EXAMPLES, dtype=jnp.float32) % 4
    return params, batch, weights if layout["weights"] else None


def loss(params, batch):
    return (jnp.tanh(batch["x"] @ params["w"]) + params["b"] - batch["y"]) ** 2


def optimizer(layout):
    return optim.sgd(lr=0.0625, momentum=0.5 if layout["momentum"] else 0.0)


def claim(layout):
    weights = problem(layout)[2]
    total = EXAMPLES if weights is None else weights.sum()

    def update(params, gradient, state):
        factor = jnp.float32(total if layout["sum"] else 1)
        gradient = jax.tree.map(lambda g: factor * g, gradient)
        return optimizer(layout).step(params, gradient, state)

    return loss, update, optimizer(layout).init


def trainer(layout, fault=False):
    """The parameters after one more epoch, whatever happens to the replicas."""
    run = data_parallel.Elastic(
        loss,
        optimizer(layout),
        data_parallel.Sampler(EXAMPLES, EXAMPLES, seed=1),
        reduction="sum" if layout["sum"] else "mean",
        slots=layout["slots"],
    )
    first, _, weights = problem(layout)
    if fault and layout["dies"]:
        weights = jnp.arange(1.0, 1 + EXAMPLES, dtype=jnp.float32)

    def step(params, state, batch):
        epochs = 1 if np.array_equal(params["w"], first["w"]) else 2
        found = ElasticHistory(layout, run, first, batch, weights, epochs).found
        return jax.tree.map(jnp.asarray, (found.params, found.opt_state))

    return step


class ElasticHistory:
    """One run, of which `found` is the state of the replica that stays.

    The last replica dies after `dies` shares of its own, and another one joins after
    `joins` shares of the first.
    """

    def __init__(self, layout, run, params, batch, weights, epochs):
        self._layout, self._run = layout, run
        self._given = params, batch, weights, epochs
        self._errors, self._threads = [], []
        with precision_of_caller(), rpc.elastic_cluster("w0") as self._join:
            for number in range(1, layout["replicas"]):
                self._join(f"w{number}")
                self._start(number)
            self.found = self._replica(0)
            for thread in self._threads:
                thread.join(60)
        if self._errors:
            raise RuntimeError("a replica failed") from self._errors[0]

    def _start(self, number):
        thread = threading.Thread(target=self._caught, args=(number,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _caught(self, number):
        try:
            self._replica(number)
        except Died:
            pass
        except rpc.RpcError as error:
            # One that comes too late has no part in it.
            if " over" not in str(error):
                self._errors.append(error)

    def _replica(self, number):
        params, batch, weights, epochs = self._given
        with rpc.use_worker(f"w{number}"):
            watched = Watched(batch["x"], lambda shares: self._before(number, shares))
            data = {"x": watched, "y": batch["y"]}
            living = self._layout["replicas"] - bool(self._layout["dies"])
            options = {"epochs": epochs, "min_replicas": living}
            return self._run.run(params, data, weights, **options)[0]

    def _before(self, number, shares):
        last = self._layout["replicas"] - 1
        if number == 0 and shares == self._layout["joins"]:
            self._join(f"w{last + 1}")
            self._start(last + 1)
        if number == last and number and shares == self._layout["dies"]:
            rpc.shutdown()
            raise Died
