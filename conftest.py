"""Flags for every test, set before JAX starts; and what the suite's time went into.

Flags go by environment, so that child processes have them too. Sixteen-bit and
float64 arrays are both wanted, hence x64; mixed dtypes and ranks must be meant, hence
the strict promotions. What is compiled is kept in files for other processes and runs.
"""

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

from jdist import _compilation_cache

ROOT = Path(__file__).parent
THOROUGH = os.environ.get("JDIST_THOROUGH", "") not in ("", "0")
# The tests' programs are small and run once or twice: their time goes into being
# compiled. With these flags that takes a fifth. `make test-thorough` has none, and runs
# what rests on XLA again with the code that users get.
QUICK_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
FLAGS_TRIED = "JDIST_TEST_FLAGS"
"""The variable with the flags that were left out, for the processes of a run."""


def flags_refused(flags):
    """What XLA says of flags that this jaxlib does not know; None if it takes them.

    In a child: XLA ends the process at an unknown flag, behind pytest's capture.
    """
    tried = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if tried.returncode == 0:
        return None
    lines = tried.stderr.splitlines() or [f"exit status {tried.returncode}"]
    told = next((line for line in lines if "nknown flag" in line), lines[-1])
    return told.rsplit("] ", 1)[-1]


def with_quick_flags(given, quick=QUICK_FLAGS):
    """The given flags with those of `quick` that XLA knows; and those it does not.

    Raises:
      UsageError: XLA does not know the given ones.
    """
    more = [flag for flag in quick if flag not in given]
    if not [*given, *more] or flags_refused([*given, *more]) is None:
        return [*given, *more], []
    if told := flags_refused(given):
        raise pytest.UsageError(f"XLA_FLAGS={' '.join(given)!r} is refused: {told}")
    left = [flag for flag in more if flags_refused([flag]) is not None]
    return [*given, *(flag for flag in more if flag not in left)], left


# What xdist starts has them already, and must find the same programs.
if FLAGS_TRIED not in os.environ:
    own = os.environ.get("XLA_FLAGS", "").split()
    flags, unknown = with_quick_flags(own, () if THOROUGH else QUICK_FLAGS)
    if flags:
        os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ[FLAGS_TRIED] = " ".join(unknown)
if _compilation_cache.FOLDER not in os.environ:
    os.environ.update(_compilation_cache.prepared(ROOT / "build" / "programs"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# OpenBLAS's threads spin while they wait for each other: beside busy programs a QR
# decomposition of 300 x 120 took 3.4 s with two of them, and 0.05 s with one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["JAX_ENABLE_X64"] = "1"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import jax
import numpy as np
from jax.sharding import AxisType

try:
    from jax._src.interpreters import mlir
except ImportError:  # The suite is slower then, and the same.
    mlir = None

# A suite started by `nohup` or `&` ignores them, and so would all that it starts.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# The tests that take longer than `QUICK` seconds, all cases together. `make test` runs
# as many cases of each as fit into these, `make test-slow` the others.
SLOW = ROOT / "tests" / "slow.txt"
QUICK = 0.4
RECORD = os.environ.get("JDIST_RECORD_SLOW", "") not in ("", "0")
# "2/3": of the slow cases the second third only, by the hash of their names, so that a
# test with many cases has some in each part.
PART = os.environ.get("JDIST_SLOW_PART", "1/1")
# Tracing makes objects by the hundred thousand, none of them garbage: to look for some
# after every 700, which is Python's default, took a quarter of it.
gc.set_threshold(50_000, 20, 20)

# JAX makes an MLIR context for each program that it lowers. That takes 4 ms, most of
# what a small program takes to lower, and the tests lower tens of thousands. What is
# lowered does not depend on it (`tests/test_suite.py`).
new_context = getattr(mlir, "make_ir_context", None)
PROGRAMS = 100  # A context keeps all constants and types that it ever had.
_of_thread = threading.local()


def shared_context():
    """The thread's context, and another one after so many programs."""
    context, used = getattr(_of_thread, "context", (None, PROGRAMS))
    if used == PROGRAMS:
        context, used = new_context(), 0
    _of_thread.context = context, used + 1
    return context


if not THOROUGH and new_context is not None:
    mlir.make_ir_context = shared_context

_modules = itertools.count()
PARTS = (
    "reduction", "data_parallel", "verify", "matrix", "optim", "segment", "rpc",
    "autograd", "pipeline", "experiments", "examples", "targets",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _as_a_user_sees_it(request):
    """Examples in docstrings run with JAX's own defaults, not with the flags above."""
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module", autouse=True)
def _what_was_before():
    """Compiled programs are dropped now and then: all of them take several GiB.

    What stays is not collected: to look at the objects of thousands of tests would take
    seconds each time.
    """
    if next(_modules) % 25 == 24:
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
    gc.freeze()


@pytest.fixture
def rng():
    """A generator of its own for each test, so that order does not matter."""
    return np.random.default_rng(20261121)


@pytest.fixture
def mesh():
    """`mesh(k)`: k CPU devices along the axis "data"."""

    def make(count, types=AxisType.Auto):
        devices = np.array(jax.devices("cpu")[:count])
        return jax.sharding.Mesh(devices, ("data",), axis_types=(types,))

    return make


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks what is slow; skips what `make test` cannot tell; refuses names that vary.

    Processes could not share tests with such names.

    Raises:
      UsageError: A name holds an object's address.
    """
    reason = "compiled without optimization: make test-thorough"
    unoptimized = pytest.mark.skip(reason=reason)
    for item in items:
        if not THOROUGH and item.get_closest_marker("optimized"):
            item.add_marker(unoptimized)
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(
                f"{item.nodeid} needs `ids` that are always the same"
            )
    if not RECORD:
        slow = list(_slow(items))
        for item in slow:
            item.add_marker("slow")
        if left := {item for item in slow if not _in_part(item.nodeid)}:
            items[:] = [item for item in items if item not in left]
            config.hook.pytest_deselected(items=list(left))
    # The experiments take longest: begun last, they would run on one core.
    items.sort(key=lambda item: "experiments" not in Path(item.nodeid).parts)


def _slow(items):
    """The cases of a test for which `make test` has no time."""
    lines = SLOW.read_text().splitlines()
    seconds = {name: float(used) for used, name in map(str.split, lines)}
    cases = defaultdict(list)
    for item in items:
        cases[_function(item.nodeid)].append(item)
    for name in cases.keys() & seconds.keys():
        every = cases[name]
        kept = int(len(every) * QUICK / seconds[name])
        # So many are kept, evenly spread, the first among them.
        yield from (
            item
            for number, item in enumerate(every)
            if number * kept % len(every) >= kept
        )


def _in_part(nodeid, part=PART):
    number, parts = map(int, part.split("/"))
    return zlib.crc32(nodeid.encode()) % parts == number - 1


def pytest_report_header():
    """Names the flags without which this run compiles."""
    unknown = os.environ.get(FLAGS_TRIED)
    return f"flags unknown to this jaxlib, left out: {unknown}" if unknown else None


def _function(nodeid):
    return nodeid.split("[")[0]


def pytest_terminal_summary(terminalreporter):
    """Shows where the time went; writes down the slow tests if it was asked to."""
    parts, functions = defaultdict(float), defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                parts[_part(report.nodeid)] += report.duration
                functions[_function(report.nodeid)] += report.duration
    terminalreporter.section("time by part")
    for part, used in sorted(parts.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{used:7.1f} s  {part}")
    if RECORD:
        SLOW.write_text(
            "".join(
                f"{used:.1f} {name}\n"
                for name, used in sorted(functions.items())
                if used > QUICK
            )
        )


def _part(nodeid):
    folders = Path(nodeid.split("::")[0]).parts[1:]
    known = (
        part
        for name in folders
        for part in PARTS
        if name.removeprefix("test_").startswith(part)
    )
    return next(known, "ground")
