"""JAX's persistent compilation cache: compiled programs, kept in files between runs.

JAX finds a program by a hash of its text, its compile options, XLA's flags and the
versions of jaxlib and XLA, and keeps none that calls back into Python. What it reads is
the machine code that it once wrote, so results have the same bits. It does not look at
the processor: the code of one may be illegal on another, hence a folder for each kind.

JAX can bound the cache itself (`jax_compilation_cache_max_size`). It then needs the
package filelock, and reads a file for each entry whenever it adds one, under a lock
that all processes wait for. Here the folder is cut to its size before a run instead.
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
"""The variable in which JAX is told the folder."""

SIZE = 2**30
"""Bytes that a run may find in the folder."""

_KEEP_ALL = {
    # By default JAX keeps what took a second to compile: hardly any program for CPUs.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The user's folder for it: `$XDG_CACHE_HOME/jdist`, or `~/.cache/jdist`.

    Raises:
      OSError: The user has no home.
    """
    given = environment.get("XDG_CACHE_HOME", "")
    if Path(given).is_absolute():
        return Path(given) / "jdist"
    try:
        return Path.home() / ".cache" / "jdist"
    except RuntimeError as error:
        raise OSError(str(error)) from error


@cache
def prepared(folder: Path, size: int = SIZE) -> Mapping[str, str]:
    """Makes the folder, deletes what was not used for longest, and tells JAX of it.

    Args:
      folder: Of all processors; made if need be, for its owner alone.
      size: Bytes of programs that may stay in the folder of this processor.

    Returns:
      JAX's environment variables, for this process before it imports JAX and for those
      that it starts.

    Raises:
      OSError: The folder cannot be made or read.
    """
    own = folder / _processor()
    # Its programs are run: others must not be able to write there.
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    _cut(own, size)
    return {FOLDER: str(own), **_KEEP_ALL}


def switch_on() -> None:
    """Has this process, and those that it starts, use the user's folder.

    Unless the environment names another, or `JAX_ENABLE_COMPILATION_CACHE=false` is
    set, which JAX itself obeys.
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
    # JAX has read its variables already.
    jax.config.update("jax_compilation_cache_dir", variables[FOLDER])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _processor() -> str:
    """A name for processors that run the same machine code."""
    kind = [platform.machine()]
    # Outside Linux the file is missing, and homes are rarely shared between machines.
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        of_one_core = iter(lambda: next(lines, "").strip(), "")
        kind += [line for line in of_one_core if line.startswith(_DESCRIBES)]
    digest = hashlib.sha256("\n".join(kind).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:12]}"


# Of x86 and of ARM.
_DESCRIBES = ("vendor_id", "model", "flags", "CPU ", "Features")


def _cut(folder: Path, size: int) -> None:
    """Deletes files, those not used for longest first, until `size` bytes are left."""
    found = []
    for path in folder.iterdir():
        # Another run may be cutting the folder too.
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            used = max(status.st_atime, status.st_mtime)
            found.append((used, status.st_size, path))
    total = sum(length for _, length, _ in found)
    for _, length, path in sorted(found):
        if total <= size:
            return
        path.unlink(missing_ok=True)
        total -= length
