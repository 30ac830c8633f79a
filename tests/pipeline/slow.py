"""Workers that take longer than rpc's timeout, and what the others do meanwhile.

What takes long is found in this module while a stage is traced: it is no part of its
program.
"""

import contextlib
import os
import signal
import threading
import time
from collections import Counter

import jax
import numpy as np

from jdist import optim, pipeline, rpc
from tests.pipeline.epochs import asynchronous
from tests.pipeline.models import losses, middle, problem, stages
from tests.pipeline.places import workers

TIMEOUT = 0.4
"""Seconds; the default timeout of these workers."""

PLACES = workers(3)
_pauses = []


def set_pauses(*pauses):
    """What happens from now on in this process whenever the second stage is traced."""
    _pauses[:] = pauses


def pause():
    for each in _pauses:
        each()


def for_long():
    time.sleep(2 * TIMEOUT)


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def slow_middle(params, h):
    from tests.pipeline import slow

    slow.pause()
    return middle(params, h)


def slow_stages():
    whole = stages()
    whole[1] = pipeline.Stage(slow_middle, ("h",), ("m",))
    return whole


@contextlib.contextmanager
def impatient(pipe, places):
    """The block has a short timeout, if there are several workers, who have met."""
    if places is None:
        yield
        return
    pipe.communicator.gather(None, "the beginning")
    before = rpc.set_rpc_timeout(TIMEOUT)
    try:
        yield
    finally:
        rpc.set_rpc_timeout(before)


def steps(places, *pauses):
    """Two steps of training; the losses, and this process's parameters."""
    pipe = pipeline.Pipeline(
        slow_stages(),
        losses,
        pipeline.one_f_one_b(3, 3),
        places,
        optimizer=optim.adam(lr=0.1),
    )
    params, batch, weights = problem(6)
    state, found = pipe.init(params), []
    if pauses:
        set_pauses(*pauses)
    with impatient(pipe, places):
        for _ in range(2):
            state, metrics = pipe.train_step(state, batch, weights)
            found.append(np.asarray(metrics.loss))
    return found, jax.tree.map(np.asarray, state.params)


def name_of_the_lost(*pauses):
    """Which worker was lost in `steps`, and the text of the error."""
    try:
        steps(PLACES, *pauses)
    except rpc.WorkerLost as error:
        return error.worker, str(error)
    return "no error", ""


def epoch(places, slow_data=None):
    """An epoch of PipeDream: the losses, and this process's parameters."""
    runtime = asynchronous(slow_stages(), losses, places, optimizer=optim.sgd(lr=0.1))
    params, batch, _ = problem(4)

    def batches():
        for number in range(4):
            if slow_data is not None and number == 1:
                slow_data()
            yield batch

    with impatient(runtime, places):
        state, metrics = runtime.train_epoch(runtime.init(params), batches(), total=4)
    return metrics.losses, jax.tree.map(np.asarray, state.params)


class Questions:
    """Counts the answers of workers that they are at work, by who has asked."""

    def __init__(self):
        self.awaited = 0
        self._told = Counter()
        self._enough = threading.Event()

    def note(self, caller, answer):
        if answer == 0.0:
            self._told[caller.name] += 1
            if min(self._told["worker0"], self._told["worker2"]) >= 3:
                self._enough.set()

    def await_some(self):
        """Goes on once both others have asked more than once, whatever they wait for.

        Each time they ask two workers.
        """
        self.awaited += 1
        assert self._enough.wait(60.0), "the other workers have not asked"
