"""A process group: the processes of one run, joined into one mesh.

    with data_parallel.process_group() as mesh:      # python -m jdist.launch --nproc 2
        step = data_parallel.train_step(loss_fn, optimizer, mesh)

In a process that is started alone the mesh has its own devices, so that the same
program runs in one process and in many. Communication is JAX's: `jax.distributed` with
gloo between CPUs, NCCL between GPUs, the interconnect between TPUs.

JAX does not end a failed run: a process that raises would wait at its exit for the
others (five minutes by default), and they for it, inside a collective. Here it leaves
at once. Its connections break, the others' collectives fail, and their errors name the
missing process. Observed on CPU with two processes:

    rank 1                             the others end
    it raises, or is killed            at once: the collective fails (`ProcessLost`)
    it freezes                         after `heartbeat` seconds: JAX aborts them
    it returns too early               after `timeout` seconds it raises `ProcessLost`,
                                       and the others' collectives fail
    rank 0 is killed                   at once: JAX aborts them, its coordinator is gone

`jdist.launch` ends the others in any of these cases and says which was first.
"""

from __future__ import annotations

import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import jax
import numpy as np
from jax.sharding import Mesh

from jdist._agreement import Records
from jdist._compat import abandon_distributed, distributed_client, require_backend
from jdist._errors import JdistError, check_positive_seconds, check_type, value_error
from jdist._scheduling import in_batch_class

if TYPE_CHECKING:
    from jdist.rpc.extension import RunPlace

VARIABLES = ("RANK", "WORLD_SIZE", "JAX_COORDINATOR_ADDRESS")
"""Variables that `jdist.launch` and `jdist.rpc.spawn` set for each process."""

# JAX's own variable, which a user may set, counts before the launcher's.
_BIND = ("JAX_COORDINATOR_BIND_ADDRESS", "JDIST_COORDINATOR_BIND_ADDRESS")
# Variables that count processes, and the remedy if nothing tells how to find them.
_ONE_OF_SEVERAL = {
    "WORLD_SIZE": "Set JAX_COORDINATOR_ADDRESS to host:port, as `jdist.launch` does.",
    "SLURM_NTASKS": 'Give `cluster="slurm"`.',
    "OMPI_COMM_WORLD_SIZE": 'Give `cluster="ompi"`.',
    "PMI_SIZE": 'Give `cluster="mpi4py"`.',
}
# Seconds to wait for the departure notes of others.
_PATIENCE = 2.0
# Seconds between two attempts to reach JAX's coordinator.
_PAUSE = 0.05
_LEFT = Records("jdist/left")
_ENDED = Records("jdist/ended")
# Text of errors by which collectives, or JAX's coordination, report a lost peer.
_SYMPTOM = re.compile("Gloo .*failed|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED")


class ProcessLost(JdistError):
    """A process of the group did not join, or was lost.

    Attributes:
      ranks: The ranks that are known to be missing.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class _DepartureNote(TypedDict):
    """A note in JAX's key-value store that a process leaves for the others."""

    moment: float
    """Time at which it left, in seconds since the epoch."""

    own: bool
    """Whether the failure is its own, and not that of a collective."""

    text: str
    """The first line of its error; empty if it reached the end of the block."""


@contextmanager
def process_group(
    *,
    axis: str = "data",
    cluster: str | None = None,
    timeout: float = 60.0,
    heartbeat: float = 30.0,
) -> Iterator[Mesh]:
    """Joins this process to the others of its run while the block runs.

    Enter it before the first JAX computation, and once per process: `jax.distributed`
    and its backend cannot be restarted with other settings. The processes are found

    - by `RANK`, `WORLD_SIZE` and `JAX_COORDINATOR_ADDRESS`, which `jdist.launch` and
      `jdist.rpc.spawn` set;
    - by JAX itself, if `cluster` says so, or if `jax.distributed.initialize` was called
      before (then it is not shut down here);
    - otherwise this process is alone.

    Args:
      axis: Name of the mesh's only axis.
      cluster: How JAX finds the processes: "slurm", "ompi", "mpi4py", "k8s" or "auto"
        (`cluster_detection_method` of `jax.distributed.initialize`).
      timeout: Seconds to wait for all to come at the start and to leave at the end.
      heartbeat: Seconds after which a process that gives no sign of life is lost.

    Yields:
      A mesh over all devices of all processes, in the order of their ranks.

    Raises:
      ProcessLost: Some did not come in time, which the message names; the block failed
        because a process was lost; or this one came to its end and others did not.
      ValueError: Only some of the variables are set, or they contradict each other; the
        environment says that this is one of several processes and not how to find
        them; a number of seconds is not positive.
      RuntimeError: A JAX computation has been done before.

    Example:
      >>> with process_group() as mesh:
      ...     mesh.axis_names
      ('data',)

    References:
      `torch.distributed.init_process_group`; docs/data_parallel.md, "Many processes".
    """
    check_type("process_group(axis=...)", axis, str, "must be a name, a str")
    check_positive_seconds("process_group(timeout=...)", timeout)
    check_positive_seconds("process_group(heartbeat=...)", heartbeat)
    owned = _join(cluster, timeout, heartbeat)
    try:
        with in_batch_class():  # XLA's and gloo's threads inherit it
            require_backend()
            devices = jax.devices()
        yield Mesh(np.array(devices), (axis,))
    # Interrupts too: the others would wait for a process that has left.
    except BaseException as error:
        # `sys.exit(0)` is no failure.
        failed = not isinstance(error, SystemExit) or bool(error.code)
        lost = _verdict(error) if owned and failed else None
        _leave(owned, failed=failed)
        if lost is not None:
            raise lost from error
        raise
    early = _early_end(timeout) if owned else None
    _leave(owned, failed=early is not None)
    if early is not None:
        raise early


# --- the start ---


def _join(cluster: str | None, timeout: float, heartbeat: float) -> bool:
    """Starts `jax.distributed` if there are others to join; returns whether it did."""
    if jax.distributed.is_initialized():
        return False  # By the caller, who also shuts it down.
    place = _place(os.environ)
    if place is None and cluster is None:
        _check_alone(os.environ)
        return False
    initialize = partial(
        jax.distributed.initialize,
        # JAX takes whole seconds.
        initialization_timeout=math.ceil(timeout),
        shutdown_timeout_seconds=math.ceil(timeout),
        heartbeat_timeout_seconds=math.ceil(heartbeat),
    )
    if place is None:
        _detect(cluster, initialize)
    elif place.size == 1:
        return False
    else:
        _call_roll(place, timeout)
        initialize(
            coordinator_address=place.coordinator,
            coordinator_bind_address=place.bind,
            num_processes=place.size,
            process_id=place.rank,
            local_device_ids=_own_devices(os.environ),
            # The launcher's variables take precedence over a cluster that JAX detects.
            cluster_detection_method="deactivate",
        )
    return True


def _call_roll(place: RunPlace, timeout: float) -> None:
    """Waits for all processes to start, and names those that do not."""
    # `jax.distributed` would end all processes and name none.
    from jdist.rpc.extension import AbsentRanks, roll_call

    until = time.monotonic() + timeout
    try:
        roll_call(place, timeout)
    except AbsentRanks as absent:
        if absent.ranks == (0,):  # out of reach, or gone: the text says which
            raise ProcessLost(str(absent), absent.ranks) from absent
        raise ProcessLost(
            f"{_ranks(absent.ranks)} of {place.size} did not come within {timeout:g} "
            "s. Each process must be started with its RANK and call `process_group`.",
            absent.ranks,
        ) from absent
    # Rank 0 listens itself, in `initialize`.
    if place.rank:
        _await_listener(place, until, timeout)


def _await_listener(place: RunPlace, until: float, timeout: float) -> None:
    """Waits until JAX's coordinator listens."""
    # A client that finds no listener waits a whole second before it retries.
    host, _, port = place.coordinator.rpartition(":")
    pause = threading.Event()
    while True:
        # A timeout of 0 would mean not to wait at all, and a negative one is refused.
        left = max(_PAUSE, until - time.monotonic())
        try:
            # An IPv6 address stands in brackets before a port.
            socket.create_connection((host.strip("[]"), int(port)), left).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ProcessLost(
                    f"Rank 0 of {place.size} did not answer rank {place.rank} at "
                    f"{place.coordinator} within {timeout:g} s: {error}.",
                    (0,),
                ) from error
        pause.wait(_PAUSE)


def _place(environment: Mapping[str, str]) -> RunPlace | None:
    """This process's place in the run, from the launcher's variables; or None."""
    given = [name for name in VARIABLES if name in environment]
    if "JAX_COORDINATOR_ADDRESS" not in given:
        return None
    # Only where there are several processes: rpc adds a quarter to the import time.
    from jdist.rpc.extension import RunPlace

    if len(given) < len(VARIABLES):
        missing = ", ".join(name for name in VARIABLES if name not in given)
        rule = f"must be set together with {missing}"
        remedy = "Start the program by `python -m jdist.launch`."
        raise value_error(", ".join(given), rule, "a part", remedy)
    rank, size = (_number(name, environment[name]) for name in VARIABLES[:2])
    if not 0 <= rank < size:
        raise value_error("RANK", f"must be in 0..{size - 1}", rank)
    coordinator = environment["JAX_COORDINATOR_ADDRESS"]
    port = coordinator.rpartition(":")[2]
    told = (environment[name] for name in _BIND if name in environment)
    return RunPlace(rank, size, coordinator, next(told, f"[::]:{port}"))


def _own_devices(environment: Mapping[str, str]) -> list[int] | None:
    """One GPU for each of several processes on a machine.

    None for all devices, or for those in `JAX_LOCAL_DEVICE_IDS`.
    """
    # Two processes on one GPU would each reserve most of its memory.
    several = environment.get("LOCAL_WORLD_SIZE", "1") != "1"
    if not several or "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    return [_number("LOCAL_RANK", environment.get("LOCAL_RANK", ""))]


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise value_error(name, "must be a number", text)
    return int(text)


def _check_alone(environment: Mapping[str, str]) -> None:
    """Checks that this is not one of N separate runs where one run of N was meant."""
    for name, remedy in _ONE_OF_SEVERAL.items():
        count = environment.get(name, "1")
        if count.isdecimal() and int(count) > 1:
            rule = f"must say how to find the other processes: {name} is {count}"
            remedy = f"{remedy} Or unset {name}, if this process is alone."
            raise value_error("process_group(cluster=...)", rule, None, remedy)


def _detect(cluster: str | None, initialize: Callable[..., None]) -> None:
    try:
        initialize(cluster_detection_method=None if cluster == "auto" else cluster)
    except (ValueError, KeyError, ImportError) as error:
        rule = "must be a kind of cluster that JAX finds here"
        got = f"{cluster!r}, and JAX says: {error!r}"
        raise value_error("process_group(cluster=...)", rule, got) from error


# --- the end ---


def _early_end(timeout: float) -> ProcessLost | None:
    """Waits for all processes at the end of the block.

    Returns:
      None if all came in time.
    """
    # JAX has a barrier, but after its deadline it aborts all processes from C++, and
    # names those that are still working.
    if distributed_client() is None:
        return None
    rank, size = jax.process_index(), jax.process_count()
    try:
        _ENDED.leave(rank, None)
        early = list(_ENDED.wait(lambda found: len(found) == size, timeout))
        moment = time.time()
        if len(early) == size:
            return None
        # Other processes read this note when their collectives fail.
        _LEFT.leave(rank, _DepartureNote(moment=moment, own=True, text=""))
    except jax.errors.JaxRuntimeError:
        return _lost((0,), size, time.time())
    return _ended(early, size, moment)


def _ended(early: Sequence[int], size: int, moment: float) -> ProcessLost:
    others = [rank for rank in range(size) if rank not in early]
    who, rest = (_ranks(tuple(ranks)) for ranks in (early, others))
    return ProcessLost(
        f"{who} of {size} came to the end of the run before {_clock(moment)}, and "
        f"{rest[0].lower()}{rest[1:]} did not: lost, or with more steps to take. All "
        "processes must take the same number of steps: `Sampler` and `Join` see to "
        "that where they have unequal data.",
        tuple(early),
    )


def _leave(owned: bool, *, failed: bool) -> None:
    if not owned:
        return
    if failed:
        # Others are inside a collective and will never reach the shutdown.
        abandon_distributed()
    else:
        jax.distributed.shutdown()


def _verdict(error: BaseException) -> ProcessLost | None:
    """Leaves a note for the others; names the processes that caused the failure.

    Returns:
      None if the failure is this process's own.
    """
    if distributed_client() is None:  # JAX has shut down: the interpreter exits.
        return None
    rank, size = jax.process_index(), jax.process_count()
    # A failure during the dispatch of a step is raised as a ValueError.
    kinds = (jax.errors.JaxRuntimeError, ValueError)
    suffers = isinstance(error, kinds) and bool(_SYMPTOM.search(str(error)))
    moment = time.time()
    note = _DepartureNote(moment=moment, own=not suffers, text=_first_line(error))

    def is_clear(notes: Mapping[int, _DepartureNote]) -> bool:
        """Whether one names a cause, or all have arrived."""
        return len(notes) == size or any(note["own"] for note in notes.values())

    try:
        _LEFT.leave(rank, note)
        if not suffers:
            return None
        notes = _LEFT.wait(is_clear, _PATIENCE)
    except jax.errors.JaxRuntimeError:
        # The coordinator is lost as well.
        return _lost((0,), size, moment)
    return _blamed(notes, size, moment)


def _blamed(
    notes: Mapping[int, _DepartureNote], size: int, moment: float
) -> ProcessLost | None:
    # The earliest cause counts: later failures follow from it.
    own = [(note["moment"], rank) for rank, note in notes.items() if note["own"]]
    early = sorted(rank for rank, note in notes.items() if not note["text"])
    if early and min(own)[1] in early:
        return _ended(early, size, min(own)[0])
    if own:
        moment, rank = min(own)
        return ProcessLost(
            f"Rank {rank} of {size} left the run at {_clock(moment)}: "
            f"{notes[rank]['text']}",
            (rank,),
        )
    # Without a note a process was killed, or is frozen.
    silent = tuple(rank for rank in range(size) if rank not in notes)
    return _lost(silent, size, moment) if silent else None


def _lost(ranks: tuple[int, ...], size: int, moment: float) -> ProcessLost:
    were = "was" if len(ranks) == 1 else "were"
    return ProcessLost(
        f"{_ranks(ranks)} of {size} {were} lost: a collective failed at "
        f"{_clock(moment)}, and no word came from there. Start the run again from its "
        "last checkpoint.",
        ranks,
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    who = "Rank" if len(ranks) == 1 else "Ranks"
    return f"{who} {', '.join(map(str, ranks))}"


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _first_line(error: BaseException) -> str:
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}"
