"""`jax.jit` that computes with the present values of what users' functions read.

`jax.jit` reads closures, global variables and attributes while it traces, once for each
set of shapes. After a change it would compute with the old value for shapes that it
knows and with the new one for others, in one run. Here each call checks guards. If they
fail, the function is traced anew, and compiled if its program is another one:

    guards hold?  -- yes -->  the compiled function
        | no
    contents equal?  -- yes -->  the compiled function
        | no, or they cannot be read completely and shapes are new
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

_comparing = threading.local()
"""Has `on` in a thread that asks for the known program of a version."""


class _NotTraced(Exception):
    """Raised where a version would have to be traced to tell its program."""


class GuardedJit:
    """A jitted function whose traces are not older than what the function reads.

    Args:
      fn: The function. What it calls of jdist does not change.
      user: Name of the public function that compiles, for warnings.
      reads: The users' functions that it calls, and other values of users that it
        reads, by name; the first gives its name to warnings.
      **options: Options of `jax.jit`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        user: str,
        reads: Mapping[str, object],
        **options: Any,
    ) -> None:
        self._fn, self._user, self._options = fn, user, options
        # Tells this function from others of the same code, whose versions do not count.
        self._which = object()
        reads = {name: x for name, x in reads.items() if x is not None}
        # A function that JAX jits may read what is being traced.
        self._reads = Watched(reads, user)
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
            if found is None:
                found = self._compared(arguments)
                self._by_signature.put(signature, found)
            return found

    def _compared(self, arguments: tuple[Any, ...]) -> Any:
        """The version, perhaps a new one, with the present program of these shapes."""
        known = {each: _known_program(each, arguments) for each in self._versions}
        if not any(known.values()):
            # What cannot be read may have changed as well: as this trace is of today,
            # those of other shapes are compared when they are used next.
            if self._by_signature is not None:
                self._by_signature.clear()
            return self._versions[0]
        fresh = self._version()
        program = identity_of(fresh.trace(*arguments).jaxpr)
        # Rather than in a new one, it is compiled in one that lacks these shapes: one
        # change makes one version, for all shapes.
        for wanted in (program, None):
            for version, of_it in known.items():
                if of_it == wanted:
                    return version
        self._versions = [fresh, *self._versions[: _MOST_VERSIONS - 1]]
        assert self._reads.contents is not None
        VERSIONS.note(self._user, self._reads.contents, self._which)
        return fresh

    def _version(self) -> Any:
        # A function object of its own, by which JAX finds traces again.
        @functools.wraps(self._fn)
        def run(*arguments: Any) -> Any:
            if getattr(_comparing, "on", False):
                raise _NotTraced
            found = self._fn(*arguments)
            # After the trace, which may write to what it reads, as one that counts
            # traces does.
            self._reads.note()
            return found

        return jax.jit(run, **self._options)


def _known_program(version: Any, arguments: tuple[Any, ...]) -> Hashable:
    """The program that a version was traced to for these arguments; else None."""
    # JAX has no public way to look into its cache of traces. It calls the function only
    # where the cache has no trace, and the exception then ends this one: a trace would
    # read the values of today, and pass for the program of another day.
    _comparing.on = True
    try:
        return identity_of(version.trace(*arguments).jaxpr)
    except _NotTraced:
        return None
    finally:
        _comparing.on = False
