"""Arrays from one process's devices to another's, by `jax.experimental.transfer`.

What is measured on CPU with 0.10.2, and not documented:

- A pull of what is not offered waits for ever, on both sides, and so does one from an
  address where nobody listens. An error of the peer, or its death, makes the pulled
  array raise.
- Offers that have expired are dropped when the next offer is made, not before. An offer
  made again replaces the first one.
- What is offered is not copied: when the array is deleted or donated, the pull fails.
- A server's sockets and threads stay until the process ends, whatever becomes of it.
- "localhost" as the address to listen on means all interfaces.
"""

import datetime
import functools
import ipaddress
import socket
import threading
import time
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jax.sharding import SingleDeviceSharding

from jdist._compat.runtime import default_device, double_precision

_PAST = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_LONGEST_PAUSE = 1e-3


class ArrayServer:
    """Offers arrays of this process to others, and pulls theirs.

    Args:
      client: The backend whose arrays these are.
      host: Name or number of the interface to listen on.

    Attributes:
      address: For the pulls of others.

    Raises:
      ImportError: This JAX has no `jax.experimental.transfer`.
      jax.errors.JaxRuntimeError: It cannot be started for this backend.
    """

    def __init__(self, client: Any, host: str) -> None:
        from jax.experimental import transfer

        at = _numeric(host)
        self._server: Any = transfer.start_transfer_server(client, at, [at])
        self.address: str = self._server.address()
        self._peers: dict[str, Any] = {}
        self._lock = threading.Lock()

    def offer(self, number: int, arrays: list[jax.Array], seconds: float) -> None:
        """Lets whoever knows the number (64 bits) pull the arrays, once.

        Args:
          number: New, and not to be guessed.
          arrays: On one device each; nobody deletes or donates them.
          seconds: The offer may be forgotten after that.
        """
        self._server.await_pull(number, arrays, timeout=_in(seconds))

    def withdraw(self, number: int) -> None:
        """Forgets an offer, and with it the memory."""
        self._server.await_pull(number, [_nothing()], timeout=_PAST)

    def pull(
        self,
        address: str,
        number: int,
        kinds: list[jax.core.ShapedArray],
        device: jax.Device | None,
        until: float,
    ) -> list[jax.Array]:
        """The arrays that another server offers under this number.

        Args:
          address: Of that server.
          number: Of the offer.
          kinds: Their shapes, dtypes, and whether the types are weak.
          device: The results are committed to it; None for the default, not committed.
          until: In seconds of `time.monotonic()`.

        Raises:
          TimeoutError: They have not come by then.
          jax.errors.JaxRuntimeError: They will not come.
        """
        target = default_device() if device is None else device
        sharding = SingleDeviceSharding(target)
        with double_precision():
            wanted = [
                jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)
                for kind in kinds
            ]
        try:
            left = until - time.monotonic()
            arrays = self._peer(address).pull(number, wanted, timeout=_in(left))
            for array in arrays:
                _wait(array, until)
        except BaseException:
            with self._lock:
                self._peers.pop(address, None)  # The connection may be broken.
            raise
        # Pulled arrays are committed, and their types are not weak.
        return [
            xla_client.batched_device_put(
                kind, sharding, [array], [target], device is not None, enable_x64=True
            )
            for kind, array in zip(kinds, arrays, strict=True)
        ]

    def _peer(self, address: str) -> Any:
        with self._lock:
            if address not in self._peers:
                self._peers[address] = self._server.connect(address)
            return self._peers[address]


@functools.cache
def _server(client: Any, host: str) -> ArrayServer:
    return ArrayServer(client, host)


_starting = threading.Lock()


def array_server(host: str, device: jax.Device | None) -> ArrayServer:
    """This process's server for the backend of `device` on an interface.

    It is started once, and stays: nothing can end it.
    """
    with _starting:
        return _server((device or default_device()).client, host)


def array_kind(
    shape: tuple[int, ...], dtype: np.dtype, weak: bool
) -> jax.core.ShapedArray:
    """What an array to be pulled is like."""
    return jax.core.ShapedArray(shape, dtype, weak_type=weak)


def detached(array: jax.Array) -> jax.Array:
    """A copy on one device that nobody else can delete or donate.

    Of what is on several devices, the whole on the first of them.
    """
    if array.is_fully_replicated:
        array = array.addressable_data(0)
    return jax.device_put(array, array.addressable_shards[0].device, may_alias=False)


def _wait(array: Any, until: float) -> None:
    """Waits for an array, but not for ever as `block_until_ready` does."""
    pause, seconds = threading.Event(), 1e-5
    while not array.is_ready():
        if time.monotonic() >= until:
            raise TimeoutError("the array was not there in time")
        pause.wait(seconds)
        seconds = min(2 * seconds, _LONGEST_PAUSE)
    array.block_until_ready()


def _in(seconds: float) -> datetime.datetime:
    # With its time zone: one without is taken for UTC in some zones.
    now = datetime.datetime.now(datetime.UTC)
    return now + datetime.timedelta(seconds=max(0.0, seconds))


@functools.cache
def _nothing() -> jax.Array:
    return jax.device_put(np.zeros(1, np.uint8))


def _numeric(host: str) -> str:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    number = ipaddress.ip_address(str(found[0][4][0]).split("%")[0])
    return f"[{number}]:0" if number.version == 6 else f"{number}:0"
