"""Who is there: asked before `jax.distributed` starts, which cannot say who is missing.

Where a process does not come, JAX ends all others when its deadline passes, from C++,
without a name. So rank 0 first listens where JAX's coordinator will, and hears each
rank; then it tells everybody that all are there, or who is not.

    rank r -> rank 0    "r of n\\n"
    rank 0 -> rank r    "here\\n"            everybody came: go on
                        "missing 2, 5\\n"    the deadline passed
                        "refused why\\n"     two processes of one rank, another n

A connection that says anything else is a stranger's and is closed.
"""

import re
import selectors
import socket
import threading
import time
from typing import NamedTuple

from jdist._errors import JdistError, requirement

_LONGEST_LINE = 2**16
_RETRY = 0.05
_HELLO = re.compile(r"(\d{1,9}) of (\d{1,9})\n")


class ProcessLost(JdistError):
    """A process of the group did not come, or is gone.

    Attributes:
      ranks: Those that are known to be missing.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class Place(NamedTuple):
    """One process's place among all.

    Attributes:
      rank: Its number.
      size: How many there are.
      coordinator: `host:port` of rank 0's coordinator.
      bind: `host:port` at which rank 0 listens for the others.
    """

    rank: int
    size: int
    coordinator: str
    bind: str


def roll_call(place: Place, timeout: float) -> None:
    """Returns when every process of the group has called it.

    Args:
      place: This process's.
      timeout: Seconds to wait for the others.

    Raises:
      ProcessLost: Some did not come in time; the message and `ranks` say which.
      ValueError: Two processes have one rank, or not all have the same size.
      OSError: Rank 0 cannot listen at its address.
    """
    deadline = time.monotonic() + timeout
    if place.size == 1:
        return
    if place.rank == 0:
        _Register(place, deadline, timeout).take()
    else:
        _answer(place, deadline, timeout)


# --- rank 0 ---


class _Register:
    """Rank 0's list of who came."""

    def __init__(self, place: Place, deadline: float, timeout: float) -> None:
        self._place = place
        self._deadline = deadline
        self._timeout = timeout
        self._present: dict[int, socket.socket] = {}
        self._heard: dict[socket.socket, bytes] = {}

    def take(self) -> None:
        """Waits for all, and tells them."""
        try:
            with (
                selectors.DefaultSelector() as selector,
                _listening(self._place.bind) as door,
            ):
                selector.register(door, selectors.EVENT_READ)
                self._wait(selector, door)
            # Nobody listens any more: whoever is answered next is JAX's coordinator.
            self._tell("here")
        except ProcessLost as problem:
            self._tell(f"missing {listed(problem.ranks)}")
            raise
        except ValueError as problem:
            self._tell(f"refused {problem}")
            raise
        finally:
            for connection in self._heard:
                connection.close()

    def _missing(self) -> tuple[int, ...]:
        return tuple(r for r in range(1, self._place.size) if r not in self._present)

    def _wait(self, selector: selectors.BaseSelector, door: socket.socket) -> None:
        while missing := self._missing():
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise _did_not_come(self._place, missing, self._timeout)
            for key, _ in selector.select(left):
                if key.fileobj is door:
                    connection, _ = door.accept()
                    connection.setblocking(False)
                    self._heard[connection] = b""
                    selector.register(connection, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(selector, key.fileobj)

    def _hear(
        self, selector: selectors.BaseSelector, connection: socket.socket
    ) -> None:
        try:
            data = connection.recv(64)
        except OSError:
            data = b""
        self._heard[connection] += data
        text = self._heard[connection].decode("ascii", "replace")
        if data and (match := _HELLO.fullmatch(text)):
            self._enter(connection, *map(int, match.groups()))
        elif not data or len(text) > 64 or "\n" in text:
            # One who left again, or a stranger.
            self._present = {
                rank: other
                for rank, other in self._present.items()
                if other is not connection
            }
            selector.unregister(connection)
            del self._heard[connection]
            connection.close()

    def _enter(self, connection: socket.socket, rank: int, size: int) -> None:
        known = self._place.size
        if size != known or not 0 < rank < known:
            rule = f"must be {known} for every process, and RANK below it"
            raise ValueError(requirement("WORLD_SIZE", rule, f"rank {rank} of {size}"))
        if rank in self._present:
            rule = "must differ between processes"
            raise ValueError(requirement("RANK", rule, f"two of rank {rank}"))
        self._present[rank] = connection

    def _tell(self, text: str) -> None:
        for connection in self._heard:
            connection.settimeout(1.0)
            try:
                connection.sendall(f"{text}\n".encode())
            except OSError:
                continue  # It left; JAX's own start will notice.


def _listening(address: str) -> socket.socket:
    host, port = _host_and_port(address)
    wildcard = host in ("", "::", "0.0.0.0")
    six = ":" in host or (wildcard and socket.has_dualstack_ipv6())
    return socket.create_server(
        ("" if wildcard else host, port),
        family=socket.AF_INET6 if six else socket.AF_INET,
        dualstack_ipv6=wildcard and six,
    )


# --- the others ---


def _answer(place: Place, deadline: float, timeout: float) -> None:
    with _connected(place, deadline, timeout) as connection:
        reply = _asked(connection, f"{place.rank} of {place.size}\n", deadline)
    verdict, _, rest = reply.strip().partition(" ")
    if verdict == "here":
        # JAX's client would wait a second after a first attempt that came too early.
        _connected(place, deadline, timeout).close()
        return
    if verdict == "missing":
        missing = tuple(int(rank) for rank in rest.split(", "))
        raise _did_not_come(place, missing, timeout)
    if verdict == "refused":
        raise ValueError(rest)
    raise ProcessLost(
        f"Rank 0 of {place.size} left while rank {place.rank} waited with it for the "
        f"others at {place.coordinator}.",
        (0,),
    )


def _connected(place: Place, deadline: float, timeout: float) -> socket.socket:
    pause = threading.Event()
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection(
                _host_and_port(place.coordinator), timeout=max(left, _RETRY)
            )
        except OSError as error:
            if left <= _RETRY:
                raise ProcessLost(
                    f"Rank 0 of {place.size} did not answer rank {place.rank} at "
                    f"{place.coordinator} within {timeout:g} s: {error}.",
                    (0,),
                ) from error
            pause.wait(_RETRY)


def _asked(connection: socket.socket, text: str, deadline: float) -> str:
    """Rank 0's answer; empty if it is gone. It knows the deadline better than we do."""
    connection.settimeout(max(0.0, deadline - time.monotonic()) + 5.0)
    try:
        connection.sendall(text.encode())
        reply = b""
        while not reply.endswith(b"\n") and len(reply) < _LONGEST_LINE:
            data = connection.recv(4096)
            if not data:
                break
            reply += data
    except OSError:
        return ""
    return reply.decode("utf-8", "replace")


# --- both ---


def _did_not_come(place: Place, missing: tuple[int, ...], seconds: float) -> Exception:
    who = f"{'rank' if len(missing) == 1 else 'ranks'} {listed(missing)}"
    return ProcessLost(
        f"{who[0].upper()}{who[1:]} of {place.size} did not come within {seconds:g} s. "
        "Each process must be started with its RANK and call `process_group`.",
        missing,
    )


def listed(ranks: tuple[int, ...]) -> str:
    """Ranks for a message."""
    return ", ".join(map(str, ranks))


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
