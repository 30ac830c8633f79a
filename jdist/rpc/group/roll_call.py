"""Roll call: the processes of a run meet once, without becoming workers.

It is the rendezvous of a group of fixed size: rank 0 runs a coordinator, and every rank
joins it by a control channel. When the group is complete the coordinator ends, so that
its port is free for what the processes came for, such as the coordinator of
`jax.distributed`, which cannot say which process is missing.
"""

import hashlib
import itertools
import os
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from jdist._errors import value_error
from jdist.rpc.base.current import moment
from jdist.rpc.base.errors import RpcError
from jdist.rpc.base.options import RpcOptions
from jdist.rpc.base.posix import require_posix
from jdist.rpc.group.coordinator import NAME, Coordinator
from jdist.rpc.group.membership import LATE, MISFIT, NOT_UNIQUE
from jdist.rpc.group.rendezvous import KEY_VARIABLE
from jdist.rpc.wire.channel import Channel, ChannelClosed
from jdist.rpc.wire.frame import ANSWERS, REPLY, Frame
from jdist.rpc.wire.handshake import check_key
from jdist.rpc.wire.socket_transport import SocketTransport
from jdist.rpc.wire.sockets import once_known

_RETRY = 0.05
# Seconds beyond the deadline: rank 0 keeps it too, and knows which ranks are missing.
_GRACE = 5.0

# Without a key in the environment: any process that reaches the port may take part, as
# it may in what follows, since JAX's own coordinator authenticates no client.
_NO_KEY = hashlib.sha256(b"jdist roll call without a key").digest()
_JOIN = 1  # number of the request to join


class AbsentRanks(RpcError):
    """Some ranks were absent from a roll call.

    Attributes:
      ranks: The ranks that are known to be absent.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class RunPlace(NamedTuple):
    """One process's place in a run.

    Attributes:
      rank: Rank of the process.
      size: Number of processes.
      coordinator: `host:port` at which the others reach rank 0.
      bind: `host:port` at which rank 0 listens.
    """

    rank: int
    size: int
    coordinator: str
    bind: str


def roll_call(place: RunPlace, timeout: float) -> None:
    """Waits until every rank of the run has called this function.

    All ranks that came have the same outcome at the same moment. When it returns,
    rank 0 listens at its address no more. The processes prove to each other the key in
    `JDIST_CLUSTER_KEY`, if it is set.

    Args:
      place: This process's.
      timeout: Seconds to wait for the others.

    Raises:
      AbsentRanks: Some did not come in time, or rank 0 left; `ranks` says which.
      ValueError: Two processes have one rank, or not all have the same size.
      AuthenticationError: Rank 0 has another key.
      OSError: Rank 0 cannot listen at its address.
    """
    if place.size == 1:
        return
    require_posix("process_group")
    until = moment(timeout)
    key = os.environ.get(KEY_VARIABLE, "").encode()
    key = check_key(key, KEY_VARIABLE) if key else _NO_KEY
    coordinator = _listen(place, key, until) if place.rank == 0 else None
    try:
        at = _parsed(place.coordinator) if coordinator is None else coordinator.address
        # Nothing secret is sent, and the key itself never is: TLS would need packages
        # that a run over several machines does not need otherwise.
        with SocketTransport(f"rank{place.rank}", key, insecure=True) as transport:
            _attend(_connected(transport, at, place, timeout, until), place, until)
    finally:
        if coordinator is not None:
            coordinator.close("the roll call is over")


def _listen(place: RunPlace, key: bytes, until: float | None) -> Coordinator:
    host, port = _parsed(place.bind)

    def listen() -> SocketTransport:
        return SocketTransport(NAME, key, host, port, insecure=True)

    transport = once_known(host, until, listen)
    return Coordinator(transport, place.size, RpcOptions(), beats=False)


def _connected(
    transport: SocketTransport,
    at: object,
    place: RunPlace,
    timeout: float,
    until: float | None,
) -> Channel:
    def late() -> bool:
        return until is not None and time.monotonic() >= until

    pause = threading.Event()
    failed: Exception | None = None
    # Processes start in any order; rank 0 may not listen yet.
    while failed is None or not late():
        try:
            return transport.connect("", at, until)
        except (ChannelClosed, TimeoutError) as error:
            # An attempt for which no time was left does not say why.
            if failed is None or not late():
                failed = error
        pause.wait(_RETRY)
    raise AbsentRanks(
        f"Rank 0 of {place.size} did not answer rank {place.rank} at "
        f"{place.coordinator} within {timeout:g} s: {failed}.",
        (0,),
    ) from failed


def _attend(channel: Channel, place: RunPlace, until: float | None) -> None:
    """Joins, answers probes until the group is complete, and awaits rank 0's end."""
    late = None if until is None else until + _GRACE
    left = 0.0 if until is None else max(0.01, until - time.monotonic())
    meta = {
        "name": f"rank{place.rank}",
        "rank": place.rank,
        "world_size": place.size,
        "address": [],  # not to be called
        "timeout": left,
    }
    # A connection drops a frame whose number came before, so each answer has its own.
    numbers = itertools.count(_JOIN + 1)
    try:
        channel.send(Frame("group.join", _JOIN, meta, None, []), late)
        while True:
            frame = channel.receive(late)
            if frame.kind in ANSWERS and frame.id == _JOIN:
                break
            if "confirm" in frame.meta:
                meta = {"number": frame.meta["confirm"]}
                number = next(numbers)
                channel.send(Frame("group.confirm", number, meta, None, []), late)
    except (ChannelClosed, TimeoutError) as error:
        raise AbsentRanks(
            f"Rank 0 of {place.size} left while rank {place.rank} waited with it for "
            f"the others at {place.coordinator}.",
            (0,),
        ) from error
    if frame.kind != REPLY:
        raise _refused(frame)
    if place.rank:
        # The port is free once rank 0 has closed the channels.
        with suppress(ChannelClosed, TimeoutError):
            while True:
                channel.receive(late)


def _refused(frame: Frame) -> Exception:
    text, kind, numbers = (frame.meta[name] for name in ("error", "kind", "numbers"))
    if kind == LATE:
        return AbsentRanks(text, tuple(numbers))
    if kind == NOT_UNIQUE:
        rule = "must differ between processes"
        return value_error("RANK", rule, f"two of rank {numbers[0]}")
    if kind == MISFIT:
        rank, theirs, ours = numbers
        rule = f"must be {ours} for every process, and RANK below it"
        return value_error("WORLD_SIZE", rule, f"rank {rank} of {theirs}")
    return AbsentRanks(text, (0,))


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
