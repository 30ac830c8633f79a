"""The walks of docs/architecture.md, made: each notes the functions that it passes.

A walk is recorded by `sys.setprofile`, on all threads of all processes that take part,
after a few calls that compile what they need. Moments are those of the machine's one
monotonic clock, so that the records of two processes can be put in order.
"""

import json
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from jdist import autograd, optim, pipeline, rpc

LIBRARY = f"{Path(rpc.__file__).parents[1]}/"
WARM_UP = 2


class Record:
    """The functions of jdist that this process calls while it is switched on."""

    def __init__(self):
        self.events = []
        self.on = False

    def start(self):
        """Watches this thread and all that begin later."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def stop(self):
        """Watches nothing more."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _profile(self, frame, event, _):
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(LIBRARY):
            file = code.co_filename.removeprefix(LIBRARY)
            self.events.append((time.monotonic_ns(), file, code.co_qualname))


RECORD = Record()


def switch(on):
    """Called by the first worker on the others."""
    RECORD.on = on


def worker(rank, walk, folder):
    """The program of one of two processes; the first one walks."""
    RECORD.start()
    rpc.init_rpc(f"worker{rank}", allow=(__name__,))
    if rank == 0:
        for turn in range(WARM_UP + 1):
            if turn == WARM_UP:
                rpc.rpc_sync("worker1", switch, args=(True,))
                RECORD.on = True
            {"rpc_sync": call, "gradient": gradient}[walk]()
        RECORD.on = False
        rpc.rpc_sync("worker1", switch, args=(False,))
    rpc.shutdown()
    RECORD.stop()
    Path(folder, f"{rank}.json").write_text(json.dumps(RECORD.events))


def call():
    """One synchronous call."""
    return rpc.rpc_sync("worker1", jnp.add, args=(1.0, 2.0))


def gradient():
    """One call forwards, and backwards."""
    x = autograd.variable(jnp.arange(6.0).reshape(2, 3))
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", jnp.sin, args=(x,))
        autograd.backward(context_id, [(y * y).sum()])
        return autograd.get_gradients(context_id)[x]


def of_workers(walk, folder):
    """The stations of a walk between two processes, in order."""
    rpc.spawn(worker, args=(walk, str(folder)), nprocs=2)
    events = []
    for rank in (0, 1):
        events += json.loads(Path(folder, f"{rank}.json").read_text())
    return [(file, function) for _, file, function in sorted(events)]


def of_a_micro_batch():
    """The stations of a training step of two stages and one micro-batch."""
    stages = [
        pipeline.Stage(lambda p, x: jnp.tanh(x @ p), inputs=("x",), outputs=("h",)),
        pipeline.Stage(lambda p, h: h @ p, inputs=("h",), outputs=("y",)),
    ]
    pipe = pipeline.Pipeline(
        stages,
        lambda y, batch: ((y - batch["t"]) ** 2).sum(-1),
        pipeline.one_f_one_b(2, 1),
        optimizer=optim.sgd(lr=0.1),
    )
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((3, 5), (5, 2), (4, 3), (4, 2))
    one, two, x, t = map(jax.random.normal, keys, shapes)
    state, batch = pipe.init([one, two]), {"x": x, "t": t}
    for _ in range(WARM_UP):
        state, _ = pipe.train_step(state, batch)
    record = Record()
    before = sys.getprofile()
    record.on = True
    sys.setprofile(record._profile)
    try:
        pipe.train_step(state, batch)
    finally:
        sys.setprofile(before)
    return [(file, function) for _, file, function in record.events]
