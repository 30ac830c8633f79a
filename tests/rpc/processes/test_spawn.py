"""`spawn`: results, failures, endings, and that nothing stays behind."""

import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from jdist import rpc
from jdist._errors import Unavailable
from jdist.rpc.base.errors import ProcessFailed, RpcError, RpcTimeout
from jdist.rpc.group.rendezvous import ReservedPort
from jdist.rpc.processes.spawn import spawn
from tests.plugin_notices import without_notices
from tests.rpc import spawn_cases as cases
from tests.rpc.process_watch import ProcessWatch, await_gone, leftovers


@pytest.fixture(autouse=True)
def _nothing_left():
    before = leftovers()
    yield
    assert leftovers() == before


@pytest.fixture
def watch():
    with ProcessWatch() as found:
        yield found


@pytest.fixture
def gate(tmp_path):
    """A named pipe: who reads it waits until somebody writes."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def test_results_come_by_rank(rng):
    value = {"x": rng.normal(size=(300, 401)), "label": "é"}
    results = spawn(cases.echo, args=(value,), nprocs=3)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    for _, echoed, stdin in results:
        assert echoed["label"] == "é"
        assert np.array_equal(echoed["x"], value["x"])
        assert stdin == ""


def test_each_process_is_told_where_it_stands():
    before = dict(os.environ)
    common = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JDIST_CLUSTER_KEY")
    own = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    bind = ("JDIST_COORDINATOR_BIND_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS")
    jax = ("JAX_COORDINATOR_ADDRESS", *bind)
    results = spawn(cases.environment, args=(*common, *own, *jax), nprocs=2)
    told = [variables for _, variables in results]
    for rank, variables in enumerate(told):
        assert [variables[name] for name in own] == [str(rank), str(rank), "2", "0"]
        assert variables["WORLD_SIZE"] == "2"
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        host, port = variables["JAX_COORDINATOR_ADDRESS"].split(":")
        assert host == "127.0.0.1"
        assert port != variables["MASTER_PORT"]
        assert variables["JDIST_COORDINATOR_BIND_ADDRESS"] == f"{host}:{port}"
        # It would move the coordinator of a program that gives an address of its own.
        assert variables["JAX_COORDINATOR_BIND_ADDRESS"] is None
    assert all(told[0][name] == told[1][name] for name in common)
    assert len(told[0]["JDIST_CLUSTER_KEY"]) == 64
    again = spawn(cases.environment, args=("JDIST_CLUSTER_KEY",), nprocs=1)
    assert again[0][1]["JDIST_CLUSTER_KEY"] != told[0]["JDIST_CLUSTER_KEY"]
    assert dict(os.environ) == before


def test_a_program_may_join_jax_at_an_address_of_its_own():
    """Nothing that a spawned process is told moves its own coordinator."""
    with ReservedPort() as own:
        assert spawn(cases.join_jax, args=(own.port,), nprocs=2, timeout=120) == [2, 2]


def test_a_failure_names_rank_and_line_and_ends_the_rest(watch, gate):
    args = (watch.port, gate)
    with spawn(cases.raise_beside, args, nprocs=2, join=False) as processes:
        pids = watch.expect(4)
        assert processes.pids == (pids["rank0"], pids["rank1"])
        gate.write_text("go")
        with pytest.raises(ProcessFailed, match="rank 1 found nothing") as caught:
            processes.join()
        await_gone(pids.values())
    failure = caught.value
    assert failure.rank == 1
    assert failure.pid == pids["rank1"]
    assert failure.what == "failed"
    first, place = failure.traceback.splitlines()[:2]
    assert first == "Traceback (most recent call last):"
    assert "spawn_cases.py" in place
    assert "_deeper" in failure.traceback
    assert str(failure).startswith(f"Rank 1 (pid {failure.pid}) failed.\n\nTraceback")
    with pytest.raises(ProcessFailed, match="rank 1 found nothing"):
        processes.join()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_death_by_a_signal_is_named(name, watch, gate):
    args = (watch.port, gate, signal.Signals[name])
    with spawn(cases.die_by, args, nprocs=2, join=False) as processes:
        pids = watch.expect(4)
        gate.write_text("go")
        what = f"Rank 1 .* was killed by {name} before its function returned"
        with pytest.raises(ProcessFailed, match=what) as caught:
            processes.join()
    await_gone(pids.values())
    assert caught.value.traceback == ""


def test_the_cause_is_told_not_the_complaint_that_came_first(gate):
    with pytest.raises(ProcessFailed, match=r"LookupError: the cause") as caught:
        spawn(cases.complain_after, args=(gate,), nprocs=2)
    assert caught.value.rank == 0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", "ended with exit code 3 before its function returned"),
        ("vanish", "ended with exit code 0 before its function returned"),
        ("late", "ended with exit code 7 after its function had returned"),
        ("unpicklable", "spawn.*must return what pickle can carry.*lambda"),
    ],
)
def test_endings_without_a_result(how, message):
    with pytest.raises(ProcessFailed, match=f"(?s){message}"):
        spawn(cases.leave, args=(how,), nprocs=1)


def test_who_does_not_end_when_asked_is_killed(watch, gate):
    args = (watch.port, gate)
    processes = spawn(cases.refuse_to_end, args, nprocs=2, grace=0.1, join=False)
    pids = watch.expect(4)
    gate.write_text("go")
    with pytest.raises(ProcessFailed, match="rank 1 found nothing"):
        processes.join()
    await_gone(pids.values())


def test_the_grace_period_is_for_tidying_up(watch, gate, tmp_path):
    note = tmp_path / "note"
    args = (watch.port, gate, note)
    processes = spawn(cases.tidy_up, args, nprocs=2, grace=60, join=False)
    pids = watch.expect(4)
    gate.write_text("go")
    with pytest.raises(ProcessFailed, match="rank 1 found nothing"):
        processes.join()
    await_gone(pids.values())
    assert note.read_text() == "tidy"


def test_what_a_process_started_ends_with_it(watch):
    processes = spawn(cases.leave_a_child, (watch.port,), nprocs=2, join=False)
    pids = watch.expect(4)
    assert processes.join() == [0, 1]
    await_gone(pids.values())


def test_a_timeout_names_the_late_and_ends_all(watch):
    what = r"ran for more than set timeout of 0.5 s: rank 0, 1 had not ended"
    with pytest.raises(RpcTimeout, match=what):
        spawn(cases.wait_for_ever, args=(watch.port,), nprocs=2, timeout=0.5)


@pytest.mark.parametrize("seconds", [1e10, sys.float_info.max])
def test_a_timeout_of_centuries(seconds):
    """Longer than Python's locks can wait."""
    assert spawn(math.pow, args=(2,), nprocs=1, timeout=seconds, grace=seconds) == [0.0]


def test_join_has_a_timeout_of_its_own(watch):
    args = (watch.port,)
    processes = spawn(cases.wait_for_ever, args, nprocs=1, timeout=60, join=False)
    pids = watch.expect(2)
    with pytest.raises(RpcTimeout, match=r"set timeout of 0.01 s: rank 0 had"):
        processes.join(timeout=0.01)
    await_gone(pids.values())


def test_processes_can_be_joined_twice_or_ended_early(watch):
    processes = spawn(math.pow, args=(2,), nprocs=2, join=False)
    assert processes.join() == [0.0, 1.0]
    assert processes.join() == [0.0, 1.0]
    with spawn(cases.wait_for_ever, (watch.port,), nprocs=2, join=False) as ended:
        pids = watch.expect(4)
    await_gone(pids.values())
    with pytest.raises(RpcError, match="were ended before they had results"):
        ended.join()


def test_works_from_any_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(spawn(math.pow, (2,))))
    thread.start()
    thread.join()
    assert found == [0.0, 1.0]


PROGRAM = """
import os, sys
from jdist.rpc.processes.spawn import spawn

def place(rank, value):
    return rank * value, __name__, sys.argv[1:], sys.warnoptions

{guard}
    print(spawn(place, args=(21,), nprocs=2))
"""
ROOT = str(Path(__file__).parents[3])
GUARDED = PROGRAM.format(guard='if __name__ == "__main__":')


def _python(*arguments, folder, stdin=None):
    """Runs a program of the user's, with no way to jdist but the module path."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ROOT},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize("way", [["program.py"], ["-m", "program"]])
def test_functions_of_the_main_program(way, tmp_path):
    (tmp_path / "program.py").write_text(GUARDED)
    done = _python("-W", "error::UserWarning", *way, "--size", "2", folder=tmp_path)
    expected = [
        (rank * 21, "__mp_main__", ["--size", "2"], ["error::UserWarning"])
        for rank in range(2)
    ]
    assert without_notices(done.stderr) == ""
    assert done.stdout == f"{expected}\n"


def test_the_guides_program_does_what_it_says(tmp_path):
    guide = (Path(ROOT) / "docs" / "launch.md").read_text()
    program = guide.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "program.py").write_text(program)
    done = _python("program.py", folder=tmp_path)
    assert without_notices(done.stderr) == ""
    assert done.stdout.strip() == program.rpartition("prints ")[2].strip()


def test_an_unguarded_main_program_is_refused(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.format(guard="if True:"))
    done = _python("program.py", folder=tmp_path)
    assert done.returncode == 1
    assert "RuntimeError: `spawn` was called while a spawned process" in done.stderr
    assert 'Guard the start of the program by `if __name__ == "__main__":`' in (
        done.stderr
    )


def test_functions_of_an_interactive_session_are_refused(tmp_path):
    done = _python("-", folder=tmp_path, stdin=GUARDED)
    assert "not in an interactive session" in done.stderr


def test_a_program_that_ignores_its_children_gets_results_too(tmp_path):
    ignore = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    (tmp_path / "program.py").write_text(ignore + GUARDED)
    done = _python("program.py", folder=tmp_path)
    assert without_notices(done.stderr) == ""
    assert done.stdout.startswith("[(0, '__mp_main__'")


WAITING = """
import sys
from jdist.rpc.processes.spawn import spawn
from tests.rpc.spawn_cases import wait_for_ever

if __name__ == "__main__":
    spawn(wait_for_ever, args=(int(sys.argv[1]),), nprocs=2)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_orphan_survives_the_parent(name, watch, tmp_path):
    """Neither Ctrl-C nor a parent that cannot do anything any more."""
    (tmp_path / "program.py").write_text(WAITING)
    parent = subprocess.Popen(
        [sys.executable, "program.py", str(watch.port)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
        stderr=subprocess.PIPE,
        text=True,
    )
    with parent:
        pids = watch.expect(4)
        parent.send_signal(signal.Signals[name])
        _, errors = parent.communicate(timeout=280)
    await_gone(pids.values())
    assert parent.returncode == -signal.Signals[name]
    assert ("KeyboardInterrupt" in errors) == (name == "SIGINT")
    assert "supervisor.py" not in errors


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"nprocs": 0}, ValueError, r"nprocs=...\)` must be in 1..65536. Got 0"),
        ({"nprocs": 2**16 + 1}, ValueError, "must be in 1..65536. Got 65537"),
        (
            {"nprocs": True},
            TypeError,
            "nprocs.* must be in 1..65536, an integer. Got True",
        ),
        (
            {"nprocs": "2"},
            TypeError,
            "nprocs.* must be in 1..65536, an integer. Got '2'",
        ),
        ({"fn": "main"}, TypeError, "fn.* must be a function. Got 'main'"),
        ({"fn": lambda rank: rank}, ValueError, "fn.*pickle can name.*Define it in a"),
        ({"args": (threading.Lock(),)}, ValueError, "args.*pickle can carry.*lock"),
        ({"pin": -1}, ValueError, "pin.* must be a number of cores per process"),
        ({"pin": 10**6}, ValueError, "must leave 2 processes cores of their own"),
        ({"timeout": -1}, ValueError, "timeout.* at least 0. Got -1"),
        ({"timeout": "1"}, TypeError, "timeout.* must be seconds"),
        ({"timeout": math.nan}, ValueError, "timeout.* must be seconds, finite"),
        ({"grace": -1}, ValueError, "grace.* at least 0. Got -1"),
        ({"grace": math.inf}, ValueError, "grace.* must be seconds, finite"),
        ({"grace": True}, TypeError, "grace.* must be seconds"),
    ],
)
def test_refusals(changes, error, message):
    with pytest.raises(error, match=message):
        spawn(**{"fn": cases.leave, "args": ("late",), "nprocs": 2} | changes)


def test_other_systems_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(Unavailable, match="`spawn` needs Linux, macOS or another"):
        spawn(math.pow, args=(2,))


def test_the_parent_joins_the_group_of_its_children():
    """As a notebook does that drives them."""
    with spawn(cases.serve_the_parent, nprocs=2, join=False) as children:
        rpc.init_rpc(
            "parent",
            rank=2,
            world_size=3,
            coordinator=children.coordinator,
            options=rpc.RpcOptions(key=children.key),
        )
        assert children.running
        assert rpc.rpc_sync("worker1", max, args=(3, 5)) == 5
        rpc.shutdown()
        assert children.join() == [0, 1]
        assert not children.running
