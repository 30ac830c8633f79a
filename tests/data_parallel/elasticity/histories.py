"""Elastic runs in one process whose replicas die and join at given moments.

A replica's data tells when it is read, which is when a share is computed: so a history
is given by how many shares a replica computes before it dies, and after how many shares
of worker 0 another replica joins. All of them compute, however late their threads
start: worker 0 waits for the first share of each.
"""

import threading
import time
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jdist import data_parallel, optim, rpc

EXAMPLES = 37
X = np.random.default_rng(3).integers(-3, 4, (EXAMPLES, 3)).astype(np.float32)
Y = np.random.default_rng(5).integers(-3, 4, EXAMPLES).astype(np.float32)
WEIGHTS = np.arange(EXAMPLES) % 4.0
# NumPy's: `make fuzz` sets the number of devices after it has imported this.
PARAMS = {
    "w": np.array([1.0, 2.0, -3.0], np.float32),
    "twice": np.array(2.0, np.float32),
    "no": np.ones(2, np.float32),
}


def exact_loss(params, batch):
    """Linear: sums of small integers are exact in any order."""
    x, y = batch
    return x @ params["w"] + 2 * y * params["twice"]


def curved_loss(params, batch):
    x, y = batch
    return (jnp.tanh(x @ params["w"] * params["twice"]) + params["twice"] - y) ** 2


def exact_run(steps):
    """Parameters and losses of `exact_loss` under a sum, by integers."""
    sampler = data_parallel.Sampler(EXAMPLES, 16, seed=1)
    w, twice, losses = np.array([1, 2, -3]), 2, []
    while len(losses) < steps:
        order = sampler.order(len(losses) // sampler.steps)
        for start in range(0, EXAMPLES, 16):
            rows = order[start : start + 16]
            x, y, k = (a[rows].astype(int) for a in (X, Y, WEIGHTS))
            losses.append(int(k @ (x @ w + 2 * y * twice)))
            w, twice = w - k @ x, twice - int(k @ (2 * y))
    return {"w": w, "twice": twice}, losses


class Died(Exception):
    """A replica has died."""


class Watched:
    """Data that calls `before(shares)` when a share of it is read."""

    def __init__(self, array, before):
        self.shape, self._array, self._before = array.shape, array, before
        self.shares = 0

    def __getitem__(self, rows):
        if not isinstance(rows, slice):
            self.shares += 1
            self._before(self.shares)
        return self._array[rows]


def elastic_run(loss, reduction, **options):
    return data_parallel.Elastic(
        loss,
        optim.sgd(lr=1.0 if loss is exact_loss else 0.05),
        data_parallel.Sampler(EXAMPLES, 16, seed=1),
        reduction=reduction,
        **options,
    )


class Finished(NamedTuple):
    """What a replica has returned."""

    state: data_parallel.TrainState
    losses: dict[int, float]


class History:
    """Runs an elastic run in this process.

    Args:
      run: The run.
      deaths: Shares that a replica computes before it dies, by its number.
      joins: Shares that worker 0 computes before each newcomer joins.
      **options: Of the run.

    Attributes:
      results: What each replica returned or raised, by its number.
    """

    def __init__(self, run, replicas, deaths=(), joins=(), pauses=(), **options):
        self._run = run
        self._deaths = dict(deaths)
        self._joins = list(joins)
        self._pauses = dict(pauses)
        self._options = {"epochs": 2} | options
        self._came = {number: threading.Event() for number in range(1, replicas)}
        self._threads = []
        self.results = {}
        with rpc.elastic_cluster("w0") as self._join:
            for number in range(1, replicas):
                self._join(f"w{number}")
            self._numbers = replicas
            for number in range(replicas):
                self._start(number)
            for thread in self._threads:  # Also those that are begun meanwhile.
                thread.join(20)
                assert not thread.is_alive()

    def _start(self, number):
        thread = threading.Thread(target=self._replica, args=(number,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _replica(self, number):
        with rpc.use_worker(f"w{number}"):
            data = (Watched(X, lambda shares: self._before(number, shares)), Y)
            try:
                found = self._run.run(PARAMS, data, WEIGHTS, **self._options)
                self.results[number] = Finished(*found)
            except Exception as error:  # noqa: BLE001 - tests look at it
                self.results[number] = error
            if number in self._came:  # One that is expelled before its first share.
                self._came[number].set()

    def _before(self, number, shares):
        if number in self._came:
            self._came[number].set()
        if number == 0:
            # One that comes now has no share of this step, but of the next one: so each
            # wait has an end, and is twice as long as the last one.
            end = time.monotonic() + min(0.05 * 2**shares, 3)
            for came in self._came.values():
                came.wait(max(0, end - time.monotonic()))
        if number == 0 and shares in self._joins:
            self._joins.remove(shares)
            newcomer, self._numbers = self._numbers, self._numbers + 1
            self._join(f"w{newcomer}")
            self._came[newcomer] = threading.Event()
            self._start(newcomer)
        if shares in self._pauses.get(number, {}):
            self._pauses[number][shares].wait(30)
        if self._deaths.get(number) == shares:
            if number:  # Without rank 0 there is no group that could be looked at.
                rpc.shutdown()
            raise Died

    def finished(self):
        """What the replicas that did not die returned, by number."""
        for number, result in self.results.items():
            if isinstance(result, Exception) and number not in self._deaths:
                raise result
        found = self.results.items()
        return {n: one for n, one in found if not isinstance(one, Exception)}
