"""`make test` leaves out what is slow, and what it cannot tell; CI does not."""

import ast
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import conftest

ROOT = Path(__file__).parents[1]


def commands(target):
    text = (ROOT / "Makefile").read_text()
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    return recipe.group(1).replace(
        "$(LIBRARY)", re.search(r"^LIBRARY = (.*)", text, re.MULTILINE).group(1)
    )


def test_ci_runs_everything():
    """But of the slow cases a third: `make test`, what rests on XLA again, and more."""
    library = "not parity and not compilers and not ray"
    assert f'$(PYTEST) -m "not slow and {library}"' in commands("test")
    assert f'$(PYTEST) -m "slow and not compiled and {library}"' in (
        commands("test-slow")
    )
    marks = f"(optimized or compiled) and {library}"
    assert f'JDIST_THOROUGH=1 $(PYTEST) -m "{marks}"' in commands("test-thorough")
    assert "-m parity tests" in commands("parity")
    assert "-m ray tests/ray" in commands("ray")
    ci = (ROOT / ".ci" / "run").read_text()
    for target in ("test", "test-thorough", "parity"):
        assert f"\nmake {target}\n" in ci
    chosen = 'PART="$((0x$(git rev-parse --short=7 HEAD) % 3 + 1))/3"'
    assert f"\nmake test-slow {chosen}\n" in ci
    beside = "make --jobs=2 --output-sync=target lint targets docs ray package"
    assert f"\n{beside}\n" in ci


def test_flags_that_xla_does_not_know_are_left_out_by_name():
    """Tried in a child: XLA ends the process at one, where pytest shows nothing."""
    known = "--xla_backend_optimization_level=0"
    found = conftest.with_quick_flags([known], (known, "--xla_no_such_thing=1"))
    assert found == ([known], ["--xla_no_such_thing=1"])


def test_given_flags_that_xla_does_not_know_are_refused_in_words():
    message = (
        "XLA_FLAGS='--xla_no_such_thing=1' is refused: "
        "Unknown flag in XLA_FLAGS: --xla_no_such_thing=1"
    )
    with pytest.raises(pytest.UsageError, match=re.escape(message)):
        conftest.with_quick_flags(["--xla_no_such_thing=1"], ())


def test_ci_tries_the_newest_python_there_is():
    """In an environment of its own, or says in a line that there is none."""
    ci = (ROOT / ".ci" / "run").read_text()
    assert 'make VENV=".venv-$newest" PYTHON="$python" test' in ci


class Item:
    def __init__(self, name):
        self.nodeid = name


def test_slow_tests_keep_the_cases_that_there_is_time_for(monkeypatch, tmp_path):
    """Evenly spread, the first among them; a slow test of one case is left out."""
    monkeypatch.setattr(conftest, "SLOW", tmp_path / "slow.txt")
    conftest.SLOW.write_text("1.6 a.py::many\n0.8 a.py::one\n")
    many = [Item(f"a.py::many[{k}]") for k in range(8)]
    others = [Item("a.py::one"), Item("a.py::quick[0]")]
    slow = set(conftest._slow([*many, *others]))
    assert slow == {*many, others[0]} - {many[0], many[4]}


def test_each_slow_case_is_in_one_part():
    """A part has some cases of a test with many, and every case is in one."""
    names = [f"a.py::many[{k}]" for k in range(100)]
    parts = [
        {name for name in names if conftest._in_part(name, f"{k}/3")} for k in (1, 2, 3)
    ]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 100
    assert min(map(len, parts)) > 20
    assert all(conftest._in_part(name, "1/1") for name in names)


@pytest.mark.skipif(conftest.new_context is None, reason="JAX makes them elsewhere")
def test_a_shared_context_lowers_the_same_program(monkeypatch):
    """The text is that of a context of its own, also after other programs."""

    def lowered():
        def loss(w, x):
            return jax.lax.scan(lambda c, row: (jnp.sin(c @ w) + row, None), x[0], x)[0]

        gradient = jax.grad(lambda w, x: loss(w, x).sum())
        return jax.jit(gradient).lower(jnp.eye(3), jnp.ones((4, 3))).as_text()

    monkeypatch.setattr(conftest.mlir, "make_ir_context", conftest.new_context)
    alone = lowered()
    monkeypatch.setattr(conftest.mlir, "make_ir_context", conftest.shared_context)
    for _ in range(2 * conftest.PROGRAMS + 1):
        conftest.shared_context()
    assert [lowered(), lowered()] == [alone, alone]
    assert conftest.shared_context() is conftest.shared_context()


def test_slow_tests_exist():
    """A test that is gone, or was renamed, goes from the list too."""
    lines = conftest.SLOW.read_text().splitlines()
    assert lines == sorted(set(lines), key=lambda line: line.split()[1])
    for line in lines:
        seconds, name = line.split()
        assert float(seconds) >= conftest.QUICK
        path, *_, function = name.split("::")
        # The names of doctests are modules.
        assert function in functions(path) or path.startswith("jdist/"), name


@functools.cache
def functions(path):
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
