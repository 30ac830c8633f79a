"""How soon do the other stages know that one of them was killed?

Three processes, a stage each, take step after step. One of them kills itself while it
works; the step of the others fails with a `WorkerLost` that has its name. The time is
measured from just before the kill to the later one of the two errors.
"""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._goals import Goal
from benchmarks._harness import Case, timing
from jdist import pipeline, rpc
from jdist.rpc.group.rendezvous import ReservedPort

ROUNDS = 8
NAMES = ["stage0", "stage1", "stage2"]
KILLED = 1
SECONDS = 0.3
"""Seconds of work before the stage is killed: some hundred steps."""


def measure() -> list[Case]:
    """Measures rounds with a new group each."""
    late = [_round() for _ in range(ROUNDS)]
    found = timing(late)
    goal = Goal("until both others know", found, 1.0, unit=" s")
    note = f"the longest of {ROUNDS} took {max(late):.4f} s"
    shown = {"known on both others": found}
    return [Case("three stages", shown, note=note, goals=[goal])]


def _round() -> float:
    start, key = multiprocessing.get_context("spawn"), rpc.new_cluster_key()
    with ReservedPort() as reserved:
        ends = [start.Pipe(duplex=False) for _ in NAMES]
        processes = [
            start.Process(target=_stage, args=(rank, reserved.port, key, sender))
            for rank, (_, sender) in enumerate(ends)
        ]
        for process in processes:
            process.start()
        when = [receiver.recv() for receiver, _ in ends]
        for process in processes:
            process.join()
    return max(when) - when[KILLED]


def _stage(rank: int, port: int, key: str, report: Connection) -> None:
    """Takes steps until a stage is lost; reports the time of the error."""
    rpc.init_rpc(
        NAMES[rank],
        rank=rank,
        world_size=len(NAMES),
        coordinator=("127.0.0.1", port),
        options=rpc.RpcOptions(key=key),
    )
    step = _step()
    if rank == KILLED:
        threading.Timer(SECONDS, _die, (report,)).start()
    try:
        while True:
            step()
    except rpc.WorkerLost as error:
        if error.worker != NAMES[KILLED]:
            raise
        report.send(time.monotonic())  # `monotonic` is one clock for the whole machine
    rpc.shutdown(graceful=False)


def _step() -> Any:
    stages = [
        pipeline.Stage(lambda w, x: jnp.tanh(x @ w), (a,), (b,))
        for a, b in ("xg", "gh", "hy")
    ]
    schedule = pipeline.one_f_one_b(3, 4)
    workers = pipeline.Workers(NAMES)
    pipe = pipeline.Pipeline(stages, lambda y, batch: y.sum(-1), schedule, workers)
    params = pipe.place([jnp.eye(64)] * 3)
    batch = {"x": jnp.ones((8, 64))}
    jax.block_until_ready(pipe.value_and_grad(params, batch))
    return lambda: pipe.value_and_grad(params, batch)


def _die(report: Connection) -> None:
    report.send(time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)
