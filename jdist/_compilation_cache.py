"""JAX's persistent compilation cache: compiled programs, kept in files between runs.

JAX identifies a program by a hash of its text, its compile options, XLA's flags and the
versions of jaxlib and XLA. (Before 0.12 it did not store programs that call back into
Python.) A cached program is the machine code that was compiled before, so results have
the same bits. Each kind of processor has a folder of its own, cut to a maximum size
before a run.
"""

import contextlib
import hashlib
import os
import platform
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FOLDER = "JAX_COMPILATION_CACHE_DIR"
"""The environment variable that tells JAX the folder of its cache."""

SIZE = 2**30
"""Largest size of the folder at the start of a run, in bytes."""

_KEEP_ALL = {
    # By default JAX keeps what took a second to compile: hardly any program for CPUs.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The user's cache folder: `$XDG_CACHE_HOME/jdist`, or `~/.cache/jdist`.

    Raises:
      OSError: The user has no home.
    """
    given = environment.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    if Path(given).is_absolute():
        return Path(given) / "jdist"
    try:
        return Path.home() / ".cache" / "jdist"
    except RuntimeError as error:
        raise OSError(str(error)) from error


@cache
def prepared(folder: Path, size: int = SIZE) -> Mapping[str, str]:
    """Creates the folder, evicts the least recently used files, returns JAX's settings.

    Args:
      folder: The folder of all processors; created if need be, for its owner alone.
      size: Bytes of programs that may stay in the folder of this processor.

    Returns:
      JAX's environment variables, for this process before it imports JAX and for those
      that it starts.

    Raises:
      OSError: The folder cannot be made or read.
    """
    # JAX's hash leaves the processor out, and the code of one may be illegal on
    # another.
    own = folder / _processor()
    # Files in it are executed: other users must not be able to write there.
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Not by `jax_compilation_cache_max_size`: JAX then needs the package filelock, and
    # for every entry that it adds reads a file per entry, under a lock that all
    # processes wait for.
    _cut(own, size)
    return {FOLDER: str(own), **_KEEP_ALL}


def switch_on() -> None:
    """Enables the user's cache folder in this process and in those that it starts.

    Has no effect if the environment names another folder, or if
    `JAX_ENABLE_COMPILATION_CACHE=false` is set, which JAX itself obeys.
    """
    import jax

    if FOLDER in os.environ:
        return
    try:
        variables = prepared(default_folder())
    except OSError as error:
        warnings.warn(f"compiled programs are not kept: {error}", stacklevel=2)
        return
    os.environ.update(variables)
    # The import above has read the variables: this process needs the values as well.
    jax.config.update("jax_compilation_cache_dir", variables[FOLDER])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _processor() -> str:
    """A name for processors that run the same machine code."""
    kind = [platform.machine()]
    # Outside Linux the file is missing, and homes are rarely shared between machines.
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        # The file has a paragraph for each core, and the first describes all.
        of_one_core = iter(lambda: next(lines, "").strip(), "")
        kind += [line for line in of_one_core if line.startswith(_DESCRIBES)]
    digest = hashlib.sha256("\n".join(kind).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:12]}"


# Names on x86 and on ARM.
_DESCRIBES = ("vendor_id", "model", "flags", "CPU ", "Features")


def _cut(folder: Path, size: int) -> None:
    """Deletes files, those not used for longest first, until `size` bytes are left."""
    found = []
    for path in folder.iterdir():
        # Another run may be cutting the folder too.
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            # Reading a file sets the first, unless the file system is mounted without
            # access times; writing it sets the second.
            used = max(status.st_atime, status.st_mtime)
            found.append((used, status.st_size, path))
    total = sum(length for _, length, _ in found)
    for _, length, path in sorted(found):
        if total <= size:
            return
        path.unlink(missing_ok=True)
        total -= length
