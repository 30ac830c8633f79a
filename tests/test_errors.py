"""Remedies that can be followed, and what `python -m jdist` shows."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import __main__ as command
from jdist import _errors

ROOT = Path(__file__).parents[1]


def test_an_extra_of_a_checkout():
    """The folder, as the index does not have this jdist."""
    expected = f"pip install -e '{ROOT}[tls]'"
    assert _errors.extra("tls") == expected


def test_an_extra_of_an_installed_package(tmp_path, monkeypatch):
    """pip takes the jdist that is there, and installs what the extra needs."""
    monkeypatch.setattr(_errors, "__file__", str(tmp_path / "jdist" / "_errors.py"))
    assert _errors.extra("tls") == "pip install 'jdist[tls]'"


@pytest.mark.parametrize("value", [2, 0.5, np.float32(1), np.array(3), jnp.ones(())])
def test_a_number_may_be_a_scalar_array(value):
    _errors.check_number("f(x=...)", value, "must be above 0", lambda x: x > 0)
    with pytest.raises(ValueError, match=r"^`f\(x=...\)` must be above 9. Got \d"):
        _errors.check_number("f(x=...)", value, "must be above 9", lambda x: x > 9)


@pytest.mark.parametrize("value", [True, np.True_, np.array(True), "2", np.ones(1), 1j])
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match=r"^`f\(x=...\)` must be above 0, a number. G"):
        _errors.check_number("f(x=...)", value, "must be above 0", lambda x: x > 0)


@pytest.mark.parametrize("value", [2.0, np.float32(2), np.inf, "2", True, np.ones(1)])
def test_what_is_no_integer(value):
    for whole in (2, np.int64(2), np.array(2), jnp.int32(2)):
        _errors.check_number(
            "f(n=...)", whole, "must be 2", lambda n: n == 2, whole=True
        )
    with pytest.raises(TypeError, match=r"^`f\(n=...\)` must be 2, an integer\. Got "):
        _errors.check_number(
            "f(n=...)", value, "must be 2", lambda n: n == 2, whole=True
        )


@pytest.mark.parametrize("value", [3, np.int64(4), jnp.int32(3)])
def test_an_integer_has_a_least(value):
    _errors.check_at_least("f(n=...)", value, 3)
    with pytest.raises(
        ValueError, match=r"^`f\(n=...\)` must be at least 5, as said. G"
    ):
        _errors.check_at_least("f(n=...)", value, 5, ", as said")
    with pytest.raises(TypeError, match=r"must be at least 3, an integer\. Got 3\.5"):
        _errors.check_at_least("f(n=...)", 3.5, 3)


@pytest.mark.parametrize("value", [0, -1.5, np.inf, np.nan])
def test_a_time_to_wait_is_positive_and_finite(value):
    _errors.check_positive_seconds("f(timeout=...)", 0.25)
    with pytest.raises(ValueError, match=r"^`f\(timeout=...\)` must be a positive num"):
        _errors.check_positive_seconds("f(timeout=...)", value)


def test_what_there_is():
    """In a checkout all four commands, a line each, and the version."""
    done = subprocess.run(
        [sys.executable, "-m", "jdist"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    version, *lines = done.stdout.splitlines()
    assert version.startswith("jdist 0.1.0, with JAX ")
    for module, what in command.COMMANDS.items():
        (line,) = [line for line in lines if f"python -m {module} " in line]
        assert line.rstrip().endswith(what)
    assert str(ROOT / "docs") in lines[-1]


def test_commands_of_other_projects_are_not_shown(monkeypatch, tmp_path, capsys):
    """Beside an installed jdist, `experiments` may be any package."""
    monkeypatch.setattr(command, "ROOT", tmp_path)
    for module in ("experiments", "benchmarks"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert command.main() == 0
    shown = capsys.readouterr().out
    assert "python -m experiments" not in shown
    assert "docs/" not in shown
    assert "In Python, `help(jdist)` tells of its parts" in shown


def test_a_large_value_is_quoted_in_a_line():
    """A gradient that is given where a function is expected."""
    given = {"w": np.arange(900.0).reshape(300, 3)}
    with pytest.raises(TypeError, match=r"function\. Got \{'w': array\(\[\[") as told:
        _errors.check_function("judge(candidates=...)", given)
    assert "\n" not in str(told.value)
    assert str(told.value).endswith("....")
    assert len(str(told.value)) < 400
    with pytest.raises(TypeError, match="Got 'two  spaces'"):
        _errors.check_function("judge(candidates=...)", "two  spaces")
