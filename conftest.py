"""Flags for every test, set before JAX starts; and what the suite's time went into.

Flags go by environment, so that child processes have them too. Sixteen-bit and
float64 arrays are both wanted, hence x64; mixed dtypes and ranks must be meant, hence
the strict promotions. What is compiled is kept in files for other processes and runs.
"""

import gc
import itertools
import os
import signal
from collections import defaultdict
from pathlib import Path

from jdist import _compilation_cache

ROOT = Path(__file__).parent
THOROUGH = os.environ.get("JDIST_THOROUGH", "") not in ("", "0")
if not THOROUGH:
    # The tests' programs are small and run once or twice: their time goes into being
    # compiled. With these flags that takes a fifth. `make test-thorough` has none, and
    # runs what rests on XLA again with the code that users get.
    given = os.environ.get("XLA_FLAGS", "").split()
    quick = (
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    )
    # What xdist starts has them already, and must find the same programs.
    os.environ["XLA_FLAGS"] = " ".join([*given, *(x for x in quick if x not in given)])
if _compilation_cache.FOLDER not in os.environ:
    os.environ.update(_compilation_cache.prepared(ROOT / "build" / "programs"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_ENABLE_X64"] = "1"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

# A suite started by `nohup` or `&` ignores them, and so would all that it starts.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# Seconds that each part of the suite may grow to, of both processes that run it on 2
# cores. Half of their sum keeps `.ci/run` under 30 minutes, set-up included; the
# summary shows what was used.
BUDGET = {
    "reduction and data_parallel": 300,
    "verify": 130,
    "optim": 110,
    "segment": 120,
    "rpc": 340,
    "autograd": 340,
    "pipeline": 360,
    "experiments": 320,
    "examples": 60,
    "targets": 120,
    "ground": 90,
}
# Tracing makes objects by the hundred thousand, none of them garbage: to look for some
# after every 700, which is Python's default, took a quarter of it.
gc.set_threshold(50_000, 20, 20)

_modules = itertools.count()
PARTS = {"data_parallel": "reduction and data_parallel", "matrix": "verify"} | {
    part: part for part in BUDGET
}


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


def _part(nodeid):
    folders = Path(nodeid.split("::")[0]).parts[1:]
    known = (
        part
        for name in folders
        for key, part in PARTS.items()
        if name.removeprefix("test_").startswith(key.split()[0])
    )
    return next(known, "ground")


def pytest_collection_modifyitems(items):
    """Skips what `make test` cannot tell; refuses names that vary between processes.

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


def pytest_terminal_summary(terminalreporter):
    """Shows where the time went, beside the budget of each part."""
    seconds = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds[_part(report.nodeid)] += report.duration
    terminalreporter.section("time by part")
    for part, used in sorted(seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{used:7.1f} s of {BUDGET[part]:4d}  {part}")
