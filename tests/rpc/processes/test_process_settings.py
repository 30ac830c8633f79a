"""What is set up in started processes, as the system itself tells it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jdist import _scheduling
from jdist.rpc.processes import process_settings, trampoline
from jdist.rpc.processes.process_settings import (
    ProcessSettings,
    available_cores,
    resolved,
    settings_of_each,
)
from jdist.rpc.processes.spawn import spawn
from tests.rpc import spawn_cases as cases

GLIBC = (*process_settings._ALLOCATOR, *process_settings._LARGE_PAGES)
VARIABLES = (
    *GLIBC, "XLA_FLAGS", "PJRT_NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "JAX_NUM_CPU_DEVICES",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """What the machine's own environment has would win."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_settings_are_in_force_before_the_program_begins():
    before = os.sched_getscheduler(0), os.sched_getaffinity(0), dict(os.environ)
    cores = available_cores()[:2]
    found = spawn(cases.settings, nprocs=len(cores), pin=1)
    for core, seen in zip(cores, found, strict=True):
        assert seen["class"] == os.SCHED_BATCH
        assert seen["cores"] == {core}
        assert seen["mapped apart"] is False
        assert seen["variables"] == {
            "PJRT_NPROC": "8",
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "1",
        }
        assert seen["begun in batches"]
        assert seen["jax first"] is False
    after = os.sched_getscheduler(0), os.sched_getaffinity(0), dict(os.environ)
    assert after == before


@pytest.fixture(autouse=True)
def users_folder(tmp_path, monkeypatch):
    """Where compiled programs go; the suite's own tells children another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    (tmp_path / "given").mkdir()
    return tmp_path / "given" / "jdist"


def homes(users_folder):
    """An environment other than this process's own: it alone is to be asked."""
    return {"XDG_CACHE_HOME": str(users_folder.parent)}


def test_compiled_programs_are_kept_where_the_user_has_no_folder(users_folder):
    made = resolved(ProcessSettings(), nprocs=2, environment=homes(users_folder))
    folder = made.variables["JAX_COMPILATION_CACHE_DIR"]
    assert Path(folder).parent == users_folder
    assert Path(folder).is_dir()
    own = {"JAX_COMPILATION_CACHE_DIR": "gs://bucket"}
    for settings, environment in ((ProcessSettings(), own), (None, {})):
        left = resolved(settings, nprocs=2, environment=environment)
        assert not [name for name in left.variables if name.startswith("JAX_")]


def test_a_limit_of_the_users_own_holds_in_our_folder(users_folder):
    """Of a setting's variables one is the user's."""
    limit = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "2"}
    environment = homes(users_folder) | limit
    made = resolved(ProcessSettings(), nprocs=2, environment=environment)
    assert "JAX_COMPILATION_CACHE_DIR" in made.variables
    assert not limit.keys() & made.variables.keys()


def test_a_home_that_cannot_be_written_keeps_nothing(users_folder):
    users_folder.write_text("a file where the folder should be")
    made = resolved(ProcessSettings(), nprocs=2, environment=homes(users_folder))
    assert not [name for name in made.variables if name.startswith("JAX_")]


def test_without_settings_a_process_is_as_its_parent():
    (seen,) = spawn(cases.settings, nprocs=1, settings=None)
    assert seen["class"] == os.sched_getscheduler(0)
    assert seen["cores"] == os.sched_getaffinity(0)
    assert seen["mapped apart"] is True
    assert set(seen["variables"].values()) == {None}
    assert not seen["begun in batches"]


def test_each_setting_has_a_switch():
    switched = ProcessSettings(batch_scheduling=False, callback_threads=300)
    (seen,) = spawn(cases.settings, nprocs=1, settings=switched)
    assert seen["class"] == os.sched_getscheduler(0)
    assert seen["variables"]["PJRT_NPROC"] == "300"
    assert not seen["begun in batches"]


def test_what_the_user_set_stays(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "3")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "5")
    (seen,) = spawn(cases.settings, nprocs=1)
    assert seen["variables"]["PJRT_NPROC"] == "3"
    assert seen["variables"]["MALLOC_ARENA_MAX"] == "5"


def test_a_large_callback_on_one_core_ends():
    """In XLA's own pool, of one thread on one core, it waits for itself for ever."""
    ((found, expected),) = spawn(
        cases.callback_with_large_argument, nprocs=1, pin=1, timeout=240
    )
    assert found == expected > 0


def test_the_pool_is_never_made_smaller_than_xla_would():
    cores = len(available_cores())
    few = resolved(ProcessSettings(callback_threads=1), nprocs=1, environment={})
    assert few.variables["PJRT_NPROC"] == str(cores)
    pinned = resolved(ProcessSettings(callback_threads=1), 1, (4, 5, 6), environment={})
    assert pinned.variables["PJRT_NPROC"] == "3"
    assert pinned.variables["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    "environment",
    [
        {"JAX_NUM_CPU_DEVICES": "11"},
        {"XLA_FLAGS": "--a=b --xla_force_host_platform_device_count=11 --c=d"},
    ],
)
def test_the_pool_has_two_threads_for_each_device(environment):
    """One for a program that runs, and one for the next that is launched."""
    made = resolved(ProcessSettings(), nprocs=1, environment=environment)
    assert made.variables["PJRT_NPROC"] == "22"


def test_another_c_library_is_left_alone(monkeypatch):
    def refuse(name):
        raise ValueError(name)

    monkeypatch.setattr(os, "confstr", refuse)
    made = resolved(ProcessSettings(), nprocs=1, environment={})
    assert not set(made.variables) & set(GLIBC)


@pytest.mark.parametrize(
    ("library", "kernel", "given"),
    [
        ("glibc 2.35", "always [madvise] never", True),
        ("glibc 2.34", "always [madvise] never", False),
        ("glibc 2.41", "always madvise [never]", False),
        ("glibc 2.41", None, False),
    ],
)
def test_large_pages_where_library_and_kernel_have_them(
    monkeypatch, tmp_path, library, kernel, given
):
    offered = tmp_path / "enabled"
    if kernel is not None:
        offered.write_text(kernel)
    monkeypatch.setattr(os, "confstr", lambda name: library)
    monkeypatch.setattr(process_settings, "_KERNEL_PAGES", offered)
    made = resolved(ProcessSettings(), nprocs=1, environment={})
    assert ("GLIBC_TUNABLES" in made.variables) is given
    own = {"GLIBC_TUNABLES": "", "OMP_NUM_THREADS": "1"}
    without = resolved(ProcessSettings(), nprocs=1, environment=own)
    assert not without.variables.keys() & own.keys()


def test_programs_are_ordered_for_little_memory_on_one_core():
    """Eight products, each added to a sum: one of them lies in memory, or all."""
    (lean,) = spawn(cases.bytes_of_products, nprocs=1, pin=1)
    (plain,) = spawn(cases.bytes_of_products, nprocs=1, pin=1, settings=None)
    assert lean == 2**16 * 4
    assert plain == 8 * lean


@pytest.mark.parametrize(
    ("release", "given"), [("0.10.2", True), ("0.12.0.1", True), ("0.13.0", False)]
)
def test_a_flag_only_for_releases_that_know_it(monkeypatch, release, given):
    monkeypatch.setattr(process_settings.metadata, "version", lambda name: release)
    made = resolved(ProcessSettings(), 1, (3,), environment={})
    assert ("XLA_FLAGS" in made.variables) is given
    for cores, own in (((3, 4), {}), ((3,), {"XLA_FLAGS": ""})):
        made = resolved(ProcessSettings(), 1, cores, environment=own)
        assert "XLA_FLAGS" not in made.variables


def test_memory_of_started_processes_asks_for_large_pages():
    """Where the kernel gives them to nobody unasked."""
    made = resolved(ProcessSettings(), nprocs=1, environment={})
    offered = process_settings._KERNEL_PAGES
    wanted = "GLIBC_TUNABLES" in made.variables and "[madvise]" in offered.read_text()
    assert spawn(cases.asks_for_large_pages, nprocs=1) == [wanted]
    assert spawn(cases.asks_for_large_pages, nprocs=1, settings=None) == [False]


def test_without_a_batch_class_a_process_begins_without(monkeypatch):
    monkeypatch.delenv(_scheduling.BATCH, raising=False)
    monkeypatch.delattr(os, "SCHED_BATCH")
    trampoline.schedule_in_batches()
    assert _scheduling.BATCH not in os.environ


def test_a_class_chosen_by_somebody_else_stays(monkeypatch):
    monkeypatch.delenv(_scheduling.BATCH, raising=False)
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_IDLE)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *args: pytest.fail("entered"))
    trampoline.schedule_in_batches()
    assert _scheduling.BATCH not in os.environ


def test_where_the_class_is_forbidden_a_process_begins_without(monkeypatch):
    def refuse(pid, policy, param):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.delenv(_scheduling.BATCH, raising=False)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    trampoline.schedule_in_batches()
    assert _scheduling.BATCH not in os.environ


@pytest.mark.parametrize("first", ["jax", "rpc"])
def test_a_worker_leaves_the_batch_class_and_jax_does_not(first):
    """A woken thread of the batch class would wait for a neighbour's time slice."""
    batch, ordinary = {os.SCHED_BATCH}, {os.SCHED_OTHER}
    (seen,) = spawn(cases.classes_of_a_worker, args=(first,), nprocs=1)
    assert seen == {
        "begun": batch,
        "jax": batch,
        "rpc": ordinary,
        "main": ordinary,
        "pipeline": batch,
    }


def test_without_the_batch_class_all_are_in_the_ordinary_one():
    chosen = ProcessSettings(batch_scheduling=False)
    (seen,) = spawn(cases.classes_of_a_worker, ("rpc",), nprocs=1, settings=chosen)
    assert set.union(*seen.values()) == {os.SCHED_OTHER}


def test_a_batch_class_of_the_users_own_stays(monkeypatch):
    """Only what the launcher did is undone."""
    monkeypatch.setattr(os, "sched_setscheduler", lambda *args: pytest.fail("entered"))
    monkeypatch.delenv(_scheduling.BATCH, raising=False)
    _scheduling.leave_batch_class()
    with _scheduling.in_batch_class():
        pass


def test_where_a_class_is_forbidden_a_thread_keeps_its_own(monkeypatch):
    def refuse(pid, policy, param):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setenv(_scheduling.BATCH, "1")
    before = os.sched_getscheduler(0)
    _scheduling.leave_batch_class()
    with _scheduling.in_batch_class():
        assert os.sched_getscheduler(0) == before


class _Threads:
    """Threads and their classes; those in `starting` start another when moved."""

    def __init__(self, monkeypatch, classes, starting=()):
        self.classes = dict(classes)
        self.starting = list(starting)
        monkeypatch.setenv(_scheduling.BATCH, "1")
        monkeypatch.setattr(os, "listdir", lambda path: [*map(str, self.classes), "9"])
        monkeypatch.setattr(os, "sched_getscheduler", self.class_of)
        monkeypatch.setattr(os, "sched_setscheduler", self.move)

    def class_of(self, thread):
        if thread == 9:
            raise ProcessLookupError(3, "No such process")
        return self.classes[thread]

    def move(self, thread, policy, param):
        if self.starting:
            self.classes[self.starting.pop()] = self.classes[thread]
        self.classes[thread] = policy


def test_threads_that_others_start_meanwhile_are_moved_too(monkeypatch):
    """By a thread whose turn has not come: the new one was in no list yet."""
    begun = {2: os.SCHED_OTHER, 3: os.SCHED_BATCH, 5: os.SCHED_OTHER, 6: os.SCHED_IDLE}
    threads = _Threads(monkeypatch, begun, starting=[13, 11])
    _scheduling.enter_batch_class()
    assert threads.classes.pop(6) == os.SCHED_IDLE  # the user's own
    assert threads.classes == dict.fromkeys((2, 3, 5, 11, 13), os.SCHED_BATCH)


def test_threads_that_may_not_be_moved_are_left(monkeypatch):
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")

    threads = _Threads(monkeypatch, {2: os.SCHED_OTHER, 5: os.SCHED_OTHER})
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    _scheduling.enter_batch_class()
    assert set(threads.classes.values()) == {os.SCHED_OTHER}


def test_physical_cores_come_before_their_second_threads(monkeypatch, tmp_path):
    for core, siblings in enumerate(["0,2", "1,3", "0,2", "1,3", "4-5", "4-5"]):
        (tmp_path / f"{core}").write_text(f"{siblings}\n")
    monkeypatch.setattr(process_settings, "_SIBLINGS", f"{tmp_path}/{{}}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5, 9})
    assert available_cores() == [0, 1, 4, 9, 2, 3, 5]
    shares = settings_of_each("pin", None, 3, 2)
    assert [each.cores for each in shares] == [(0, 1), (4, 9), (2, 3)]


def test_systems_that_cannot_pin_say_so(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(NotImplementedError, match=r"pin.* cannot pin a process"):
        settings_of_each("spawn(pin=...)", None, 2, 1)
    shares = settings_of_each("spawn(pin=...)", None, 2, 0)
    assert [each.cores for each in shares] == [(), ()]


def test_a_negative_pool_is_refused():
    with pytest.raises(ValueError, match=r"callback_threads.* must be at least 0"):
        ProcessSettings(callback_threads=-1)


@pytest.mark.parametrize("way", ["end_group_by_signal", "end_group_by_guardian"])
def test_the_group_ends_when_the_pipe_closes(way):
    """Both ways, also where the kernel has the better one; and before it is asked."""
    program = (
        "import os, subprocess, sys\n"
        "from jdist.rpc.processes import trampoline\n"
        f"trampoline.{way}(int(sys.argv[1]))\n"
        'child = subprocess.Popen(["sleep", "1000"])\n'
        "os.write(1, b'x')\n"
        "child.wait()\n"
    )
    for closed_before in (False, True):
        far, near = os.pipe()
        if closed_before:
            os.close(near)
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(far)],
            pass_fds=[far],
            stdout=subprocess.PIPE,
            process_group=0,
        )
        os.close(far)
        with process:
            if not closed_before:
                assert process.stdout.read(1) == b"x"
                os.close(near)
            # The pipe closes when the child's child is gone too, and the guardian.
            process.stdout.read()
        assert process.returncode == -9


def test_a_missing_program_is_reported_as_a_shell_does():
    far, near = os.pipe()
    nothing = {"lifeline": far, "batch": False, "cores": []}
    first = [sys.executable, "-I", "-S", trampoline.__file__, json.dumps(nothing)]
    command = [*first, "no-such"]
    done = subprocess.run(command, pass_fds=[far], capture_output=True, text=True)
    os.close(far)
    os.close(near)
    assert done.returncode == 127
    assert re.fullmatch("cannot run no-such: No such file or directory\n", done.stderr)
