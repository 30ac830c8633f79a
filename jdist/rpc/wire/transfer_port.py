"""Large arrays from device to device, past the wire.

The sender offers an array under a number; the frame brings the number, shape and dtype;
the receiver pulls the array straight onto its device and says so. What the receiver
gets is what the wire would have brought.

An offer holds a copy in the sender's device memory. It is over when the receiver says
that it has the arrays, or could not get them; when their channel closes; and, with the
next offer, after `LIFETIME` seconds. All offers of a worker together hold at most
`Transfer.most_bytes`: what is beyond that goes by the wire, so receivers that never
pull cost no more.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jdist._compat import ArrayServer, array_server, detached
from jdist.rpc.base.errors import TransferFailed
from jdist.rpc.rref.keeper import Keeper
from jdist.rpc.wire.transfer import Transfer

LIFETIME = 300.0
"""Seconds after which an offer that nobody took is withdrawn."""


class _Offer(NamedTuple):
    owner: object
    nbytes: int
    end: float


class Port:
    """What one worker offers to others and pulls from them.

    Args:
      settings: See there.
      name: Of the worker.
      host: The interface to listen on; it begins with the first array.
      device: Where pulled arrays are placed; None for JAX's default.

    Attributes:
      sent, received: How many arrays went this way.
    """

    def __init__(
        self, settings: Transfer, name: str, host: str, device: jax.Device | None
    ) -> None:
        self._settings = settings
        self._host = host
        self._device = device
        self._lock = threading.Lock()
        self._offers: dict[int, _Offer] = {}
        self._bytes = 0
        self._later = Keeper(f"{name} transfers", _do_all)
        self.sent = self.received = 0

    @property
    def address(self) -> str:
        """Where others pull from."""
        return self._server.address

    @property
    def offers(self) -> int:
        """How many offers nobody has taken yet."""
        with self._lock:
            return len(self._offers)

    def wants(self, leaf: Any) -> bool:
        """Whether a leaf of a frame goes this way, if there is room."""
        if not isinstance(leaf, jax.Array) or leaf.nbytes < self._settings.least_bytes:
            return False
        on_cpu = next(iter(leaf.devices())).platform == "cpu"
        return self._settings.cpu or not on_cpu

    def offer(self, arrays: Sequence[jax.Array], owner: object) -> int | None:
        """Offers arrays: the number to pull them by. None when there is no room.

        Waits for those that are being computed, and raises what a computation did.

        Args:
          arrays: Copied, so that they may be donated.
          owner: For whom `settle` and `drop` are called.
        """
        self._expire(time.monotonic())
        number = secrets.randbits(64)
        size = sum(array.nbytes for array in arrays)
        with self._lock:
            if self._bytes + size > self._settings.most_bytes:
                return None
            self._bytes += size
            self._offers[number] = _Offer(owner, size, time.monotonic() + LIFETIME)
        try:
            jax.block_until_ready(arrays)
            copies = jax.block_until_ready([detached(array) for array in arrays])
            self._server.offer(number, copies, 2 * LIFETIME)
        except BaseException:
            self._forget(number)
            raise
        with self._lock:
            self.sent += len(arrays)
        return number

    def settle(self, number: int, owner: object, taken: bool) -> None:
        """The receiver has the arrays, or will not get them; nobody else may say so."""
        with self._lock:
            offer = self._offers.get(number)
        if offer is not None and offer.owner is owner:
            self._forget(number)
            if not taken:
                self._server.withdraw(number)

    def drop(self, owner: object) -> None:
        """Withdraws what was offered for `owner` and not taken."""
        with self._lock:
            left = [n for n, offer in self._offers.items() if offer.owner is owner]
        for number in left:
            self.settle(number, owner, taken=False)

    def pull(
        self, address: str, number: int, kinds: list[Any], until: float
    ) -> list[jax.Array]:
        """The arrays offered under this number at another worker's address.

        Args:
          address: What `address` is there.
          number: What `offer` returned.
          kinds: Of each array, as `array_kind` makes it.
          until: In seconds of `time.monotonic()`.

        Raises:
          TransferFailed: They have not come by then, or will not come.
        """
        started = time.monotonic()
        try:
            arrays = self._server.pull(address, number, kinds, self._device, until)
        except TimeoutError as error:
            waited = time.monotonic() - started
            raise TransferFailed(f"it had not come after {waited:.3g} s") from error
        except (
            Exception
        ) as error:  # an address of the peer's choice, an experimental API
            raise TransferFailed(f"it cannot be pulled: {error}") from error
        with self._lock:
            self.received += len(arrays)
        return arrays

    def later(self, action: Callable[[], None]) -> None:
        """Has something sent that a reading thread must not wait for."""
        self._later.start()
        self._later.drop(action)

    def close(self) -> None:
        """Withdraws everything; the channels are closed."""
        self._later.close()
        self._expire(float("inf"))

    def _expire(self, now: float) -> None:
        with self._lock:
            late = [
                (number, offer.owner)
                for number, offer in self._offers.items()
                if offer.end <= now
            ]
        for number, owner in late:
            self.settle(number, owner, taken=False)

    def _forget(self, number: int) -> None:
        with self._lock:
            offer = self._offers.pop(number, None)
            self._bytes -= 0 if offer is None else offer.nbytes

    @property
    def _server(self) -> ArrayServer:
        return array_server(self._host, self._device)


def _do_all(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        action()
