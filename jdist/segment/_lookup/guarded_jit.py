"""`jax.jit` that computes with the present values of what users' functions read.

`jax.jit` reads closures, global variables and attributes while it traces, once for each
set of shapes. After a change it would compute with the old value for shapes that it
knows and with the new one for others, in one run. Here each call checks guards. If they
fail, the function is traced anew, and compiled if its program is another one:

    guards hold?  -- yes -->  the compiled function
        | no, or something cannot be read and shapes are new
    program for these shapes as before?  -- yes -->  the compiled function
        | no
    another version is compiled
"""

import functools
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from jdist._lru_cache import LRUCache
from jdist.segment._lookup.cache import VERSIONS
from jdist.segment._lookup.contents import Watched
from jdist.segment._lookup.program_key import identity_of
from jdist.segment._lookup.traced import signature_of

_MOST_VERSIONS = 16
_SIGNATURES = 256

_thread = threading.local()
"""Has `traced` in a thread that has traced a version."""


class GuardedJit:
    """A jitted function whose traces are not older than what the function reads.

    Args:
      fn: The function. What it calls of jdist does not change.
      user: Name of the public function that compiles, for warnings.
      reads: The users' functions that it calls, and other values of users that it
        reads, by name; the first gives its name to warnings.
      retraces_unread: Whether a function of which something cannot be read is traced
        in each call, and not for new shapes only.
      **options: Options of `jax.jit`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        user: str,
        reads: Mapping[str, object],
        retraces_unread: bool = False,
        **options: Any,
    ) -> None:
        self._fn, self._user, self._options = fn, user, options
        self._retraces_unread = retraces_unread
        # Tells this function from others of the same code, whose versions do not count.
        self._which = object()
        reads = {name: x for name, x in reads.items() if x is not None}
        # A function that JAX jits may read what is being traced.
        self._reads = Watched(reads, user)
        # Oldest first.
        self._versions = [self._version()]
        # None as long as the contents are complete and as they were: then every trace
        # of the only version is of these contents.
        self._by_signature: LRUCache[Hashable, Any] | None = None
        self._lock = threading.RLock()

    def __call__(self, *arguments: Any) -> Any:
        """The result of the function."""
        # Written out for the common case, which takes no lock.
        contents = self._reads.contents
        if self._by_signature is None and contents is not None and contents.hold():
            return self._versions[0](*arguments)
        return self._current(arguments)(*arguments)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """As of what `jax.jit` returns."""
        lowered: jax.stages.Lowered = self._current(arguments).lower(*arguments)
        return lowered

    def trace(self, *arguments: Any) -> jax.stages.Traced:
        """As of what `jax.jit` returns."""
        traced: jax.stages.Traced = self._current(arguments).trace(*arguments)
        return traced

    def _cache_size(self) -> int:
        return sum(version._cache_size() for version in self._versions)

    def _current(self, arguments: tuple[Any, ...]) -> Any:
        """The jitted function for these arguments."""
        with self._lock:
            before = self._reads.contents
            if not self._reads.holds():
                now = self._reads.note()
                if before is None:
                    VERSIONS.note(self._user, now, self._which)
                if before is not None or not now.complete:
                    self._by_signature = LRUCache(_SIGNATURES)
            if self._by_signature is None:
                return self._versions[0]
            signature = signature_of(arguments)
            found = self._by_signature.get(signature)
            contents = self._reads.contents
            unread = contents is not None and not contents.complete
            if found is None or (unread and self._retraces_unread):
                found = self._compared(arguments, self._by_signature)
                self._by_signature.put(signature, found)
            return found

    def _compared(
        self, arguments: tuple[Any, ...], known: LRUCache[Hashable, Any]
    ) -> Any:
        """The version, perhaps a new one, with the present program of these shapes."""
        fresh = program = None
        for version in self._versions:
            # JAX runs the function only where it knows no trace of these shapes.
            _thread.traced = False
            found = version.trace(*arguments)
            if _thread.traced:
                # Of today, so that no other is needed. What cannot be read may have
                # changed as well: other shapes are compared when they are used next.
                known.clear()
                return version
            if fresh is None:
                fresh = self._version()
                program = identity_of(fresh.trace(*arguments).jaxpr)
            if identity_of(found.jaxpr) == program:
                return version
        self._versions = [*self._versions[1 - _MOST_VERSIONS :], fresh]
        assert self._reads.contents is not None
        VERSIONS.note(self._user, self._reads.contents, self._which)
        return fresh

    def _version(self) -> Any:
        # A function object of its own, by which JAX finds traces again.
        @functools.wraps(self._fn)
        def run(*arguments: Any) -> Any:
            found = self._fn(*arguments)
            # After the trace, which may write to what it reads, as one that counts
            # traces does.
            self._reads.note()
            _thread.traced = True
            return found

        return jax.jit(run, **self._options)
