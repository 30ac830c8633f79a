"""Addresses of workers, and sockets that listen or connect to them.

A worker listens on TCP and, for peers of its machine, on a Unix socket, which is twice
as fast and can pass memory. On Linux the Unix socket's name is abstract,
so no file is left whatever happens; elsewhere it is a file in a folder that only this
user may enter.
"""

import contextlib
import errno
import ipaddress
import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jdist._errors import value_error
from jdist.rpc.wire.channel import ChannelClosed
from jdist.rpc.wire.stream import leave_to_parent

LOOPBACK = "127.0.0.1"
_BACKLOG = 1024
_ON_LINUX = sys.platform == "linux"
T = TypeVar("T")

_OUTWARD = ("192.0.2.1", 9)  # RFC 5737: never a real host; nothing is sent


class Address(NamedTuple):
    """The addresses at which a worker listens.

    Attributes:
      host: Name or number of its machine, as others reach it.
      port: TCP port.
      unix: Name of its Unix socket, "@..." for an abstract one; empty: it has none.
        It is random, so on another machine no socket has it.
    """

    host: str
    port: int
    unix: str = ""


def parse_address(address: Any) -> Address:
    """Parses an address that `SocketTransport.address` gave, or `(host, port)`.

    Raises:
      ValueError: It is neither.

    Example:
      >>> parse_address(["127.0.0.1", 29500]).port
      29500
    """
    fields = tuple(address) if isinstance(address, list | tuple) else ()
    kinds = tuple(type(field) for field in fields)
    if kinds not in ((str, int), (str, int, str)) or not 0 < fields[1] < 1 << 16:
        rule = "must be (host, port) or another transport's address"
        raise value_error("connect(address=...)", rule, address)
    return Address(*fields)


class Listener:
    """The listening sockets of one worker, not blocking.

    Args:
      host: Interface to listen on; "" or "0.0.0.0" or "::" for all.
      port: TCP port; 0 for any free one.

    Attributes:
      sockets: The sockets from which connections are accepted.
      address: The addresses given to other workers.

    Raises:
      OSError: The host is not of this machine, or the port is taken.
    """

    def __init__(self, host: str, port: int) -> None:
        self._folder = ""
        tcp = _listening(host, port)
        self.sockets = [tcp]
        self.address = Address(_reachable(host, tcp), tcp.getsockname()[1])
        try:
            self._listen_on_unix()
        except OSError:
            self.close()
            raise
        for listening in self.sockets:
            listening.setblocking(False)
            leave_to_parent(listening)

    def close(self) -> None:
        """Stops listening and leaves nothing behind; any number of times."""
        for listening in self.sockets:
            listening.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _listen_on_unix(self) -> None:
        if _ON_LINUX:
            name = f"@jdist-{secrets.token_hex(16)}"
        else:
            self._folder = tempfile.mkdtemp(prefix="jdist-")
            name = str(Path(self._folder) / "socket")
        listening = socket.socket(socket.AF_UNIX)
        self.sockets.append(listening)
        listening.bind(_unix_name(name))
        listening.listen(_BACKLOG)
        self.address = self.address._replace(unix=name)


class Attempt:
    """An attempt to connect, which another thread may give up.

    Attributes:
      given_up: Why it was given up, or None.
    """

    def __init__(self) -> None:
        self.given_up: str | None = None
        self._socket: socket.socket | None = None

    def uses(self, sock: socket.socket) -> None:
        """Sets the socket that is about to be connected.

        Raises:
          ChannelClosed: The attempt was given up.
        """
        # In this order: `give_up` looks in the other one.
        self._socket = sock
        if self.given_up is not None:
            raise ChannelClosed(self.given_up)

    def give_up(self, reason: str) -> None:
        """Wakes the thread that connects; any thread, any number of times."""
        self.given_up = self.given_up or reason
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is not connected, or closed
                self._socket.shutdown(socket.SHUT_RDWR)


def dial(address: Address, deadline: float | None, attempt: Attempt) -> socket.socket:
    """Connects to a worker: by a Unix socket on this machine, else by TCP.

    Raises:
      ChannelClosed: No process listens there, or the attempt was given up.
      TimeoutError: The machine did not answer in time.
      OSError: This process may open no more files.
    """
    if address.unix:
        found = _dial_unix(address.unix, attempt)
        if found is not None:
            return found
    where = f"{address.host}:{address.port}"
    if deadline is not None and time.monotonic() >= deadline:
        raise TimeoutError(f"no time was left to connect to {where}")
    try:
        return _dial_tcp(address, deadline, attempt)
    except TimeoutError as error:
        raise TimeoutError(f"{where} did not answer in time") from error
    except OSError as error:
        if isinstance(error, ChannelClosed) or out_of_files(error):
            raise
        raise ChannelClosed(f"no worker listens at {where} ({error})") from error


def once_known(host: str, until: float | None, use: Callable[[], T]) -> T:
    """Calls `use`, again while the name of the host that it needs is not known.

    A cluster starts programs before it publishes their machines' names.

    Args:
      host: The name, for the message.
      until: The moment at which to give up; None for never.
      use: What looks the name up.

    Raises:
      TimeoutError: No address of this name was found.
    """
    pause, seconds = threading.Event(), 0.01
    while True:
        try:
            return use()
        except socket.gaierror as error:
            if until is not None and time.monotonic() + seconds >= until:
                text = f"no address of the host {host!r} is known here ({error})"
                raise TimeoutError(text) from error
        pause.wait(seconds)
        seconds = min(2 * seconds, 0.25)


def out_of_files(error: BaseException) -> bool:
    """Whether a socket could not be made because too many files are open."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def is_unix(sock: socket.socket) -> bool:
    """Whether the other side is on this machine and memory can be passed to it."""
    return sock.family == socket.AF_UNIX


def is_loopback(host: str) -> bool:
    """Whether what is sent to this host never leaves the machine."""
    try:
        found = socket.getaddrinfo(host, None) if host else []
    except OSError:
        return False
    numbers = [ipaddress.ip_address(str(entry[4][0]).split("%")[0]) for entry in found]
    # An IPv4 address may be written as one of IPv6.
    plain = [getattr(one, "ipv4_mapped", None) or one for one in numbers]
    return bool(plain) and all(number.is_loopback for number in plain)


def same_user(sock: socket.socket) -> bool:
    """Whether the other end of a Unix socket belongs to the same user."""
    # Elsewhere the permissions of the socket's folder ensure it.
    if not _ON_LINUX:
        return True
    credentials = struct.Struct("3i")
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return bool(credentials.unpack(data)[1] == os.geteuid())


def _dial_unix(name: str, attempt: Attempt) -> socket.socket | None:
    """Connect by a Unix socket; None where TCP should be tried."""
    with contextlib.ExitStack() as unless_connected:
        unix = unless_connected.enter_context(socket.socket(socket.AF_UNIX))
        attempt.uses(unix)
        # Without waiting: if the listener's queue is full, TCP's may not be.
        unix.setblocking(False)
        try:
            unix.connect(_unix_name(name))
            if not same_user(unix):
                return None
        except OSError:
            return None
        unless_connected.pop_all()
        return unix


def _dial_tcp(
    address: Address, deadline: float | None, attempt: Attempt
) -> socket.socket:
    """Connect by TCP, or raise the error of the host's last address."""
    failed: OSError | None = None
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, there in found:
        # At least a millisecond: with a timeout of 0 no address could be reached.
        left = None if deadline is None else max(1e-3, deadline - time.monotonic())
        with contextlib.ExitStack() as unless_connected:
            tcp = unless_connected.enter_context(socket.socket(family, kind, protocol))
            attempt.uses(tcp)
            tcp.settimeout(left)
            try:
                tcp.connect(there)
                # TCP lets a socket connect to itself if the kernel gave it the very
                # port that it connects to.
                if tcp.getsockname() == tcp.getpeername():
                    raise OSError("it reached itself")
            except TimeoutError:
                raise
            except OSError as error:
                failed = error
                continue
            unless_connected.pop_all()
            return tcp
    assert failed is not None  # getaddrinfo returns at least one address, or raises
    raise failed


def _listening(host: str, port: int) -> socket.socket:
    """Make a listening TCP socket; for all interfaces in both families if possible."""
    if host in ("", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    # A name may have addresses of either family.
    found = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, _, _, _, there = min(found, key=lambda one: one[0] != socket.AF_INET)
    return socket.create_server(there, family=family, backlog=_BACKLOG)


def _unix_name(name: str) -> str:
    return "\0" + name[1:] if name.startswith("@") else name


def _reachable(host: str, listening: socket.socket) -> str:
    """Return the address for others; for all interfaces the outward one."""
    if host not in ("", "0.0.0.0", "::"):
        # In numbers: a name may not be known yet to all of them.
        return str(listening.getsockname()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_OUTWARD)
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK  # without a network no other machine can reach it anyway
