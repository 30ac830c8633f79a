"""An abort, a hang and an exit of a layout are findings; the search goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jdist import verify
from jdist.verify.fuzzing.judging_process import JudgingProcess, _own_frame
from jdist.verify.fuzzing.layout_judge import LayoutJudge
from tests.verify.fuzzing import ending_trainer as own

DEADLINE = 20.0


@pytest.fixture(scope="module")
def found():
    """A search through all ways to end."""
    axes = {**own.AXES, "way": ("right", "abort", "hang", "exit")}
    options = {"axes": axes, "deadline": DEADLINE}
    return verify.fuzz(own.problem, own.claim, own.trainer, **options)


def test_each_end_is_a_finding(found):
    told = {each.axes["way"]: each for each in found.findings}
    assert not found.ok
    assert set(told) == {"abort", "hang", "exit"}
    for way, outcome in {"abort": "ended", "hang": "hung", "exit": "ended"}.items():
        assert told[way].verdict.outcome == outcome
        assert told[way].axes == {"way": way, "tp": 2}
        assert told[way].kept == ()
        assert told[way].trace is None
    words = told["abort"].verdict.why
    assert words.startswith("the process was ended by SIGABRT, in candidate (ending_tr")
    assert "Fatal Python error: Aborted" in told["abort"].verdict.details
    words = told["hang"].verdict.why
    assert words.startswith("no answer within 20 s, in hangs (ending_trainer.py:")
    assert told["exit"].verdict.why == "the process ended with status 7"


def test_the_layouts_after_it_are_judged(found):
    assert found.uncovered == ()
    right = [each for each in found.verdicts if each.outcome == "right"]
    assert {each.layout["way"] for each in right} == set(own.AXES["way"][:4])
    assert all(v.outcome == "right" for v in found.verdicts if v.layout["tp"] == 1)
    assert "wrong" not in str(found)
    assert "hung if way=hang and tp=2: no answer within 20 s" in str(found)


def test_the_process_has_this_ones_devices_and_settings():
    count = len(jax.devices())
    with jax.enable_x64(False):
        axes = {"devices": (count,), "x64": (False,)}
        given = own.problem, own.claim, own.devices_of
        verify.fuzz(*given, axes=axes, strength=1).raise_if_failed()


def test_a_process_ends_with_the_search():
    """And is started again if it has ended after an answer."""
    judge = LayoutJudge(own.problem, own.claim, own.trainer, ())
    process = JudgingProcess(judge, own.AXES, DEADLINE)
    assert process.judge({"way": "right", "tp": 1}).outcome == "right"
    process._process.kill()
    process._process.join()
    assert process.judge({"way": "right", "tp": 1}).outcome == "right"
    number, errors = process._process.pid, Path(process._errors.name)
    assert errors.exists()
    process.close()
    process.close()
    with pytest.raises(ProcessLookupError, match="No such process"):
        os.kill(number, 0)
    assert not errors.exists()


KILLED = """
import os
from jdist import verify
from tests.verify.fuzzing import ending_trainer as own

def problem(layout):
    print(os.getpid(), flush=True)
    own.hangs()

if __name__ == "__main__":
    verify.fuzz(problem, own.claim, own.trainer, axes={"tp": (1, 2)}, strength=1)
"""


def test_a_process_in_a_layout_ends_with_the_one_that_asked(tmp_path):
    """Even if that one is killed; both have the pipe, which is open until they end."""
    path = tmp_path / "killed.py"
    path.write_text(KILLED)
    search = subprocess.Popen(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    )
    number = int(search.stdout.readline())
    search.kill()
    try:
        assert search.communicate(timeout=20) == (b"", None)
    except subprocess.TimeoutExpired:
        os.kill(number, signal.SIGKILL)
        raise


def test_a_local_function_is_refused():
    words = "fuzz\\(trainer=...\\)` must go to another process: functions by their mod"
    with pytest.raises(ValueError, match=words) as raised:
        verify.fuzz(own.problem, own.claim, lambda c: None, axes=own.AXES)
    assert "deadline=None judges in this process" in str(raised.value)


def test_a_value_that_cannot_be_sent_is_refused():
    axes = {"way": (len, lambda: 3)}
    with pytest.raises(ValueError, match=r"fuzz\(axes=...\)` must go to another p"):
        verify.fuzz(own.problem, own.claim, own.trainer, axes=axes, strength=1)


SCRIPT = """
import jax, jax.numpy as jnp
from jdist import verify
from tests.verify.fuzzing import ending_trainer as own

def trainer(layout):
    return own.gradient

found = verify.fuzz(own.problem, own.claim, trainer, axes={"tp": (1, 2)}, strength=1)
"""


def test_a_script_without_a_guard_is_refused(tmp_path):
    """Its process would search again; and what is in no file cannot be imported."""
    (tmp_path / "script.py").write_text(SCRIPT)
    ways = [[str(tmp_path / "script.py")], ["-c", SCRIPT]]
    told = "must be functions that a new process can import"
    for way, reason in zip(
        ways, ("bootstrapping phase", "attribute 'trainer'"), strict=True
    ):
        ran = subprocess.run(
            [sys.executable, *way],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 1
        assert told in ran.stderr
        assert reason in ran.stderr
        assert "under `if __name__ == '__main__':`" in ran.stderr


def test_what_another_process_cannot_import_is_refused(monkeypatch):
    """As in a notebook: only this process has the function."""
    here = type(own)("only_here")
    exec("def trainer(layout):\n    return None", vars(here))
    monkeypatch.setitem(__import__("sys").modules, "only_here", here)
    words = "must be functions that a new process can import. Got ModuleNotFoundError"
    with pytest.raises(ValueError, match=words):
        verify.fuzz(own.problem, own.claim, here.trainer, axes=own.AXES)


def test_the_users_call_is_named():
    stack = (
        f'  File "{verify.__file__}", line 3 in ask\n'
        '  File "/home/me/mine.py", line 7 in step\n'
        '  File "/home/me/other.py", line 9 in main\n'
    )
    assert _own_frame(stack) == ", in step (mine.py:7)"
    assert _own_frame("Aborted") == ""
