"""Settings of started processes, in force before JAX is imported there.

The parent decides (`resolved`). The child applies those that are not environment
variables in `jdist/rpc/processes/trampoline.py`, before the first line of the user's
program. The parent's own process is not changed.
"""

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from jdist import _compilation_cache as compilation_cache
from jdist._errors import (
    check_at_least,
    check_flags,
    check_number,
    requirement,
    value_error,
)

# A block under 1 GiB comes from the heap and not from a mapping of its own; freed
# memory at the heap's top is kept; one arena serves all threads. Environment variables
# rather than `mallopt`, because they hold from the first allocation and survive `exec`.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_ARENA_MAX": "1",
}
_LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_LEAN = {"XLA_FLAGS": "--xla_cpu_enable_concurrency_optimized_scheduler=false"}
_DEVICES = r"--xla_force_host_platform_device_count=(\d+)"
_KERNEL_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LIBRARY_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings that `spawn` and `launch` apply to the processes that they start.

    docs/launch.md gives what each setting was measured to bring. Besides those below,
    environment variables are set; one that the user's environment already has is left
    as it is.

    - glibc's allocator keeps freed memory instead of returning and re-faulting it for
      each large array. Resident memory does not shrink.
    - It asks Linux for pages of 2 MiB in place of 4 KiB (glibc 2.35 or newer): a
      product reads its matrices with fewer page table walks, and fresh memory has fewer
      faults. Resident memory is rounded up to such pages.
    - In a process that has one core, XLA's CPU compiler orders each program for little
      memory. Its default serves threads that work side by side: of products that do not
      depend on each other all come first, and their results lie in memory until each is
      added to its sum.
    - The cores are divided among the thread pools of BLAS and OpenMP
      (`OMP_NUM_THREADS` and its kin).

    Attributes:
      batch_scheduling: Begin in the scheduling class `SCHED_BATCH` (Linux): a thread
        that wakes up does not interrupt the one that computes. Without it gloo's
        collectives wait for the scheduler's tick when a process has one core. A process
        that becomes a worker of rpc leaves the class; threads that JAX has started by
        then stay in it.
      callback_threads: Least size of XLA's thread pool (`PJRT_NPROC`). Each callback
        that blocks inside a jitted function occupies one of its threads; without a free
        thread no program runs. It is never less than twice the CPU devices that the
        environment gives a process: programs that run and programs that are launched
        take a thread for each device. 0 leaves XLA's own: the number of cores, or of
        devices if these are more.
      compilation_cache: Keep compiled programs for the next run, in JAX's persistent
        compilation cache: of each kind of processor at most 1 GiB when a run starts, in
        `$XDG_CACHE_HOME/jdist` or `~/.cache/jdist`.

    Raises:
      TypeError: A setting is no bool, or `callback_threads` no integer.
      ValueError: `callback_threads` is negative.

    Example:
      >>> ProcessSettings(callback_threads=0).batch_scheduling
      True
    """

    batch_scheduling: bool = True
    callback_threads: int = 8
    compilation_cache: bool = True

    def __post_init__(self) -> None:
        flags = dataclasses.asdict(self)
        threads = flags.pop("callback_threads")
        check_flags("ProcessSettings", **flags)
        argument = "ProcessSettings(callback_threads=...)"
        check_at_least(argument, threads, 0, ", which leaves the size to XLA")


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """The settings of one child as the parent has decided them.

    Attributes:
      variables: Environment variables to add.
      batch: Whether to change the scheduling class.
      cores: The only cores it may use; empty for those of its parent.
    """

    variables: Mapping[str, str]
    batch: bool
    cores: tuple[int, ...]


def resolved(
    settings: ProcessSettings | None,
    nprocs: int,
    cores: tuple[int, ...] = (),
    environment: Mapping[str, str] = os.environ,
) -> ResolvedSettings:
    """Resolve the settings of one of `nprocs` processes.

    Args:
      settings: The wanted settings; None for none.
      nprocs: How many processes share this machine.
      cores: The cores that this one is to be pinned to; empty for no pinning.
      environment: The user's variables, which win over the settings.

    Returns:
      The settings; what this platform lacks is left out.
    """
    if settings is None:
        return ResolvedSettings({}, False, cores)
    usable = len(cores) or max(1, len(available_cores()) // nprocs)
    found = dict.fromkeys(_LIBRARY_THREADS, str(usable))
    if _glibc():
        found |= _ALLOCATOR
    if _glibc() >= (2, 35) and _kernel_has_large_pages():
        found |= _LARGE_PAGES
    if usable == 1 and _knows_lean_programs():
        found |= _LEAN
    if settings.callback_threads:
        # At least XLA's own default, the number of cores.
        least = len(cores) or len(available_cores()), 2 * _cpu_devices(environment)
        found["PJRT_NPROC"] = str(max(settings.callback_threads, *least))
    # A folder of the user's own comes with the user's own limits.
    if settings.compilation_cache and compilation_cache.FOLDER not in environment:
        # No home, or one that cannot be written to: every run compiles.
        with contextlib.suppress(OSError):
            folder = compilation_cache.default_folder(environment)
            found |= compilation_cache.prepared(folder)
    own = {name: value for name, value in found.items() if name not in environment}
    return ResolvedSettings(own, settings.batch_scheduling, cores)


def _kernel_has_large_pages() -> bool:
    try:
        return "[never]" not in _KERNEL_PAGES.read_text()
    except OSError:
        return False


def _cpu_devices(environment: Mapping[str, str]) -> int:
    """How many CPU devices the environment tells JAX to make; 0 if it says nothing."""
    told = environment.get("JAX_NUM_CPU_DEVICES", "")
    if told.isdecimal():
        return int(told)
    flag = re.search(_DEVICES, environment.get("XLA_FLAGS", ""))
    return int(flag[1]) if flag else 0


def _knows_lean_programs() -> bool:
    # XLA aborts a process that passes a flag which it does not know, and a newer
    # release may have dropped this one.
    release = tuple(int(n) for n in metadata.version("jaxlib").split(".")[:2])
    return release < (0, 13)


def _glibc() -> tuple[int, ...]:
    """Return the version of the C library if it is glibc, else an empty tuple."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, ValueError, OSError):
        return ()
    return tuple(int(n) for n in version.split(".")) if name == "glibc" else ()


def available_cores() -> list[int]:
    """Return the cores that this process may use, one per physical core first."""
    # Two hardware threads of one core share its arithmetic units, so processes pinned
    # to them would slow each other down: the second threads come last.
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    allowed = sorted(os.sched_getaffinity(0))
    return sorted(allowed, key=lambda core: (_place_in_core(core), core))


def _place_in_core(core: int) -> int:
    """Return 0 for the first hardware thread of a physical core, 1 for the second."""
    try:
        siblings = Path(_SIBLINGS.format(core)).read_text()
    except OSError:
        return 0
    return _listed(siblings).index(core)


def _listed(text: str) -> list[int]:
    """Parse the kernel's notation of sets: `"0,4-5"` is 0, 4 and 5."""
    ends = [part.split("-") for part in text.strip().split(",")]
    return [n for end in ends for n in range(int(end[0]), int(end[-1]) + 1)]


def settings_of_each(
    call: str, settings: ProcessSettings | None, nprocs: int, cores: int
) -> list[ResolvedSettings]:
    """Resolves the settings of each of `nprocs` processes of this machine.

    Args:
      call: Function and argument that give the number of cores, for the messages.
      settings: The wanted settings; None leaves every process as its parent is.
      nprocs: How many processes.
      cores: Cores of its own for each process; 0 for no pinning.

    Raises:
      ValueError: A negative number, or there are not enough cores.
      NotImplementedError: This platform cannot pin processes.
    """
    shares = _shares(call, nprocs, cores)
    return [resolved(settings, nprocs, share) for share in shares]


def _shares(call: str, nprocs: int, each: int) -> list[tuple[int, ...]]:
    """Gives each of `nprocs` processes `each` cores of its own."""
    rule = "must be a number of cores per process, or 0 for no pinning"
    check_number(call, each, rule, lambda n: n >= 0, whole=True)
    if each and not hasattr(os, "sched_setaffinity"):
        rule = f"must be 0 here: {sys.platform} cannot pin a process to a core"
        raise NotImplementedError(requirement(call, rule, each))
    cores = available_cores()
    if nprocs * each > len(cores):
        rule = f"must leave {nprocs} processes cores of their own"
        got = f"{each} per process, with {len(cores)} cores to use"
        raise value_error(call, rule, got, "Start fewer processes or do not pin them.")
    return [tuple(cores[i * each : (i + 1) * each]) for i in range(nprocs)]
