"""Settings of started processes, in force before JAX is imported there.

The parent decides (`resolved`). The child applies those that are not environment
variables in `jdist/rpc/processes/trampoline.py`, before the first line of the user's
program, and reports the outcome (`applied`). The parent's own process is not changed.
"""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from jdist import _compilation_cache as compilation_cache
from jdist._errors import check_at_least, check_flags, check_number, requirement
from jdist._scheduling import SETTINGS

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
_NOT_GLIBC = "not applied: the C library is not glibc"
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings that `spawn` and `launch` apply to the processes that they start.

    docs/launch.md gives what each setting was measured to bring. A variable that the
    user's environment already has is left as it is.

    Attributes:
      batch_scheduling: Begin in the scheduling class `SCHED_BATCH` (Linux): a thread
        that wakes up does not interrupt the one that computes. Without it gloo's
        collectives wait for the scheduler's tick when a process has one core. A process
        that becomes a worker of rpc leaves the class; threads that JAX has started by
        then stay in it.
      keep_freed_memory: Let glibc's allocator keep freed memory instead of returning
        and re-faulting it for each large array. Resident memory does not shrink.
      large_pages: Let glibc's allocator (2.35 or newer) ask Linux for pages of 2 MiB in
        place of 4 KiB: a product reads its matrices with fewer page table walks, and
        fresh memory has fewer faults. Resident memory is rounded up to such pages.
      lean_programs: In a process that has one core, let XLA's CPU compiler order each
        program for little memory. Its default serves threads that work side by side:
        of products that do not depend on each other all come first, and their results
        lie in memory until each is added to its sum.
      callback_threads: Least size of XLA's thread pool (`PJRT_NPROC`). Each callback
        that blocks inside a jitted function occupies one of its threads; without a free
        thread no program runs. It is never less than twice the CPU devices that the
        environment gives a process: programs that run and programs that are launched
        take a thread for each device. 0 leaves XLA's own: the number of cores, or of
        devices if these are more.
      compilation_cache: Keep compiled programs for the next run, in JAX's persistent
        compilation cache: of each kind of processor at most 1 GiB when a run starts, in
        `$XDG_CACHE_HOME/jdist` or `~/.cache/jdist`.
      share_cores: Divide the cores among the thread pools of BLAS and OpenMP
        (`OMP_NUM_THREADS` and its kin).

    Raises:
      TypeError: A setting is no bool, or `callback_threads` no integer.
      ValueError: `callback_threads` is negative.

    Example:
      >>> ProcessSettings(callback_threads=0).batch_scheduling
      True
    """

    batch_scheduling: bool = True
    keep_freed_memory: bool = True
    large_pages: bool = True
    lean_programs: bool = True
    callback_threads: int = 8
    compilation_cache: bool = True
    share_cores: bool = True

    def __post_init__(self) -> None:
        fields = dataclasses.fields(ProcessSettings)
        own: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields}
        threads = own.pop("callback_threads")
        check_flags("ProcessSettings", **own)
        argument = "ProcessSettings(callback_threads=...)"
        check_at_least(argument, threads, 0, ", which leaves the size to XLA")


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """The settings of one child as the parent has decided them.

    Attributes:
      variables: Environment variables to add.
      batch: Whether to change the scheduling class.
      cores: The only cores it may use; empty for those of its parent.
      notes: The outcome of each setting, in words; completed by the child.
    """

    variables: Mapping[str, str]
    batch: bool
    cores: tuple[int, ...]
    notes: Mapping[str, str]


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
      The settings. One that this platform lacks is left out and its note says why.
    """
    notes = {"cores": ",".join(map(str, cores)) or "not pinned"}
    if settings is None:
        return ResolvedSettings({}, False, cores, notes)
    usable = len(cores) or max(1, len(available_cores()) // nprocs)
    if compilation_cache.FOLDER in environment:
        # A folder of the user's own comes with the user's own limits.
        settings = dataclasses.replace(settings, compilation_cache=False)
    variables: dict[str, str] = {}
    groups = _groups(settings, cores, usable, environment)
    for setting, (group, note) in groups.items():
        kept = [f"{name}={environment[name]}" for name in group if name in environment]
        said = f"as the environment has it: {' '.join(kept)}" if kept else note
        # Some of the group still apply, and what they do is the note.
        notes[setting] = f"{note}; {said}" if 0 < len(kept) < len(group) else said
        variables |= {k: v for k, v in group.items() if k not in environment}
    return ResolvedSettings(variables, settings.batch_scheduling, cores, notes)


Variables = tuple[Mapping[str, str], str]
"""The variables of a setting, none where it is not applied, and a note on it."""


def _groups(
    settings: ProcessSettings,
    cores: tuple[int, ...],
    usable: int,
    environment: Mapping[str, str],
) -> dict[str, Variables]:
    found: dict[str, Variables] = {}
    if settings.keep_freed_memory:
        found["allocator"] = _allocator()
    if settings.large_pages:
        found["pages"] = _pages()
    if settings.lean_programs and usable == 1:
        found["programs"] = _programs()
    if settings.callback_threads:
        # At least XLA's own default, the number of cores.
        least = len(cores) or len(available_cores()), 2 * _cpu_devices(environment)
        pool = str(max(settings.callback_threads, *least))
        found["callback threads"] = {"PJRT_NPROC": pool}, pool
    if settings.compilation_cache:
        found["compilation cache"] = _compilation_cache(environment)
    if settings.share_cores:
        threads = str(usable)
        found["library threads"] = dict.fromkeys(_LIBRARY_THREADS, threads), threads
    return found


def _allocator() -> Variables:
    return (_ALLOCATOR, "keeps freed memory") if _glibc() else ({}, _NOT_GLIBC)


def _pages() -> Variables:
    version = _glibc()
    if not version:
        return {}, _NOT_GLIBC
    if version < (2, 35):
        return {}, "not applied: glibc is older than 2.35"
    try:
        offered = "[never]" not in _KERNEL_PAGES.read_text()
    except OSError:
        offered = False
    if not offered:
        return {}, "not applied: Linux gives none"
    return _LARGE_PAGES, "of 2 MiB where possible"


def _cpu_devices(environment: Mapping[str, str]) -> int:
    """How many CPU devices the environment tells JAX to make; 0 if it says nothing."""
    told = environment.get("JAX_NUM_CPU_DEVICES", "")
    if told.isdecimal():
        return int(told)
    flag = re.search(_DEVICES, environment.get("XLA_FLAGS", ""))
    return int(flag[1]) if flag else 0


def _programs() -> Variables:
    # XLA aborts a process that passes a flag which it does not know, and a newer
    # release may have dropped this one.
    release = tuple(int(n) for n in metadata.version("jaxlib").split(".")[:2])
    if release >= (0, 13):
        return {}, "not applied: a newer jaxlib"
    return _LEAN, "in little memory"


def _compilation_cache(environment: Mapping[str, str]) -> Variables:
    try:
        folder = compilation_cache.default_folder(environment)
        variables = compilation_cache.prepared(folder)
    except OSError as error:
        # No home, or one that cannot be written to: every run compiles.
        return {}, f"not applied: {error}"
    return variables, f"in {variables[compilation_cache.FOLDER]}"


def _glibc() -> tuple[int, ...]:
    """Return the version of the C library if it is glibc, else an empty tuple."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, ValueError, OSError):
        return ()
    return tuple(int(n) for n in version.split(".")) if name == "glibc" else ()


def applied() -> dict[str, str]:
    """Return the settings applied to this process before its program began.

    Returns:
      Each setting with its value, or with the reason why it was not applied. Empty in
      a process that jdist did not start.

    Example:
      >>> applied()
      {}
    """
    return json.loads(os.environ.get(SETTINGS, "{}"))


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
        remedy = "Start fewer processes or do not pin them."
        raise ValueError(requirement(call, rule, got, remedy))
    return [tuple(cores[i * each : (i + 1) * each]) for i in range(nprocs)]
