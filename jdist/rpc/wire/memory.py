"""Shared memory for large arrays between processes of one machine, lent and reused.

A sender copies an array into memory that has a descriptor (`memfd_create`) and passes
the descriptor over the Unix socket; the receiver maps the same memory. One copy instead
of two, and half the processor time of a socket. But the kernel takes two to three times
as long to provide *new* memory of this kind as the socket takes to copy. So it pays
only when memory is used again, and the sender must learn that the receiver has let go
of it. The kernel tells it:

- The sender opens the memory a second time, takes a shared `flock` on this second
  opening, and passes it. The lock belongs to the opening, which lives as long as any
  descriptor or *mapping* of it does, in whatever process, or in a socket's queue.
- Before the sender writes again it asks for the exclusive lock on its own opening. It
  gets that exactly when the second one is gone everywhere: the receiver dropped its
  array, or was killed.

So there are no release messages, and nothing is left after `kill -9`: memory without a
descriptor is gone. The memory is sealed against shrinking, so that a sender cannot make
the receiver's reads fail (SIGBUS). It is mapped privately: what the receiver writes
into its array stays there.
"""

import contextlib
import mmap
import os
import sys
import threading
from typing import Any

import numpy as np

from jdist.rpc.base.errors import ProtocolError

with contextlib.suppress(ImportError):  # On Windows, where it is not `available`.
    import fcntl

THRESHOLD = 4 << 20
"""Size in bytes below which arrays are copied through the socket, which is as fast up
to here."""

BUDGET = 256 << 20
"""Bytes of memory that one worker keeps for arrays on their way; then sockets copy."""

_STEP = 2 << 20  # sizes are rounded up, so that arrays of similar size share memory
_SLACK = 4  # memory serves arrays down to this fraction of its size

# Before 3.13 Python keeps a descriptor per mapping: at most BUDGET / THRESHOLD a peer.
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


class _Block:
    """Memory with a descriptor and this process's mapping of it."""

    def __init__(self, size: int) -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.size = size
        self.descriptor = os.memfd_create("jdist", flags)
        try:
            os.ftruncate(self.descriptor, size)
            # A sender that shrank it would end the receiver's reads with SIGBUS.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self.bytes = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)
        except BaseException:
            os.close(self.descriptor)
            raise

    def try_take(self) -> bool:
        """Reserves the memory; returns False if a receiver holds it."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def share(self) -> int:
        """Makes a descriptor to pass on; free once its copies are gone."""
        # Opened, not duplicated: a lock belongs to the opening, and a duplicate would
        # share this one's.
        path = f"/proc/self/fd/{self.descriptor}"
        passed = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        # No other thread can take the lock in between: the block is out of the pool.
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        fcntl.flock(passed, fcntl.LOCK_SH)
        return passed

    def close(self) -> None:
        os.close(self.descriptor)


class MemoryPool:
    """The memory through which one worker sends its large arrays.

    It grows up to a budget and keeps what it has. When everything is lent the caller
    sends through the socket, which any receiver can force by keeping its arrays; so
    neither side can make the other run out of memory or descriptors.

    Args:
      budget: Most bytes to keep.

    Example:
      >>> pool = MemoryPool()
      >>> descriptor = pool.lend(memoryview(b"large"))
      >>> bytes(receive(descriptor, 5))
      b'large'
      >>> pool.close()
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self._budget = budget
        self._blocks: list[_Block] = []
        self._kept = 0
        self._closed = False
        self._lock = threading.Lock()

    def lend(self, data: memoryview) -> int | None:
        """Copies `data` into free memory; returns a descriptor to pass on and close.

        None when there is no free memory within the budget, or no descriptor.
        """
        block = self._take(data.nbytes)
        if block is None:
            return None
        try:
            # NumPy, unlike a memoryview, copies without holding the interpreter.
            source = np.frombuffer(data, np.uint8)
            np.copyto(block.bytes[: source.size], source)
            return block.share()
        except OSError:
            return None  # no descriptors: the socket still works
        finally:
            self._give_back(block)

    def close(self) -> None:
        """Releases all memory; lent memory lives until its receivers drop it."""
        with self._lock:
            self._closed = True
            blocks, self._blocks, self._kept = self._blocks, [], 0
        for block in blocks:
            block.close()

    def _take(self, size: int) -> _Block | None:
        with self._lock:
            # The latest first: its pages are the likeliest to be in the caches.
            for block in reversed(self._blocks):
                if size <= block.size <= max(size * _SLACK, _STEP) and block.try_take():
                    self._blocks.remove(block)
                    return block
            rounded = -(-size // _STEP) * _STEP
            if self._closed or not self._make_room(rounded):
                return None
            self._kept += rounded
        try:
            return _Block(rounded)
        except OSError:
            # No descriptors or no memory: the socket still works.
            with self._lock:
                self._kept -= rounded
            return None

    def _make_room(self, size: int) -> bool:
        """Drops free memory, the oldest first, until `size` more fits the budget."""
        for block in list(self._blocks):
            if self._kept + size > self._budget and block.try_take():
                self._blocks.remove(block)
                self._kept -= block.size
                block.close()
        return self._kept + size <= self._budget

    def _give_back(self, block: _Block) -> None:
        with self._lock:
            if not self._closed:
                self._blocks.append(block)
                return
        block.close()


def receive(descriptor: int, size: int) -> memoryview:
    """Maps received memory and closes its descriptor.

    Args:
      descriptor: As received; closed in every case.
      size: Bytes that the sender says it has written.

    Returns:
      Writable bytes; what is written stays in this process.

    Raises:
      ProtocolError: Not such memory: smaller than promised, or able to shrink.
    """
    try:
        if not 0 < size <= os.fstat(descriptor).st_size:
            raise ProtocolError(f"A memory descriptor has not its {size} bytes.")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("A memory descriptor is not sealed against shrinking.")
        access = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(
            descriptor, size, flags=mmap.MAP_PRIVATE, prot=access, **_UNTRACKED
        )
    except (OSError, ValueError) as error:
        raise ProtocolError(f"A memory descriptor cannot be used: {error}.") from error
    finally:
        os.close(descriptor)
    return memoryview(mapped)


def available() -> bool:
    """Return whether this platform supports it: Linux with /proc."""
    if not hasattr(os, "memfd_create"):
        return False
    pool = MemoryPool()
    try:
        descriptor = pool.lend(memoryview(b"1"))
        return descriptor is not None and bytes(receive(descriptor, 1)) == b"1"
    except (OSError, ProtocolError):
        return False
    finally:
        pool.close()


def close_all(descriptors: list[int]) -> None:
    """Close descriptors that were passed on or will not be claimed."""
    while descriptors:
        os.close(descriptors.pop())
