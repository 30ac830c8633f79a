"""The pytest plugin: a test fails on a wrong gradient, and its failure says why."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import VerificationError, pytest_plugin
from jdist.pytest_plugin import GradientJudge
from tests.test_docs import CODE

ROOT = Path(__file__).parents[1]
NAME = "jdist.pytest_plugin"

# pytest imports it in every session of everybody who has jdist.
IMPORT = f"""
import sys
import {NAME}

heavy = {{"jax", "jaxlib", "numpy", "rich", "jdist.verify"}} & sys.modules.keys()
assert not heavy, heavy
"""

TESTS = """
import jax, pytest
from test_trainer import losses, problem, trainer, update


def test_wrong(judge):
    def seven_times(params, batch):
        assert params["in"].dtype == judge.dtype
        return jax.tree.map(lambda x: 7 * x, trainer(params, batch))

    params, batch = problem()
    judge.gradients(losses, params, batch, seven_times)
    raise AssertionError("the fixture has passed a wrong gradient")


def test_truth():
    from jdist import verify

    params, batch = problem()
    wrong = lambda *given: jax.tree.map(lambda x: 7 * x, trainer(*given))
    assert verify.gradients(losses, params, batch, {"mine": wrong})


@pytest.mark.jdist(dtype="float64")
class TestMarks:
    def test_of_the_class(self, judge):
        assert judge.dtype == "float64"

    @pytest.mark.jdist(dtype="float16")
    def test_over_the_class(self, judge):
        assert judge.dtype == "float16"

    @pytest.mark.jdist(dtype=None)
    def test_over_the_option(self, judge):
        assert judge.dtype is None


def test_of_the_option(judge):
    assert judge.dtype == "bfloat16"


@pytest.mark.jdist(dtype="float8")
def test_unknown_dtype(judge): ...


@pytest.mark.jdist("float32")
def test_no_keyword(judge): ...


@pytest.mark.jdist(dtypes="float32")
def test_another_keyword(judge): ...
"""

REFUSED = {
    "test_unknown_dtype": "`pytest.mark.jdist(dtype=...)` must be one of None, "
    "'bfloat16', 'float16', 'float32', 'float64'. Got 'float8'.",
    "test_no_keyword": "`pytest.mark.jdist` takes dtype= and nothing else. Got "
    "['float32'].",
    "test_another_keyword": "`pytest.mark.jdist` takes dtype= and nothing else. Got "
    "['dtypes'].",
}


def session(tests, *options):
    """Runs pytest on tests as a user does; returns its exit status and its text."""
    command = [sys.executable, "-m", "pytest", "-p", NAME, "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, "-rA", "--strict-markers", *options, str(tests)],
        capture_output=True,
        text=True,
        cwd=tests if tests.is_dir() else tests.parent,
        timeout=300,
    )
    return ran.returncode, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A folder with the test file that docs/pytest.md shows."""
    folder = tmp_path_factory.mktemp("users")
    code, _ = CODE.findall((ROOT / "docs" / "pytest.md").read_text())
    (folder / "test_trainer.py").write_text(code)
    return folder


def test_pytest_finds_it_by_its_entry_point():
    """Under the module's own name: with `-p` as well it is loaded once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {NAME: NAME}
    assert pytest_plugin.__name__ == NAME
    assert not any("pytest" in each for each in project["dependencies"])


def test_a_test_is_named_by_its_layout(tmp_path):
    """The two blocks of the pages, whose trainer is wrong with a mask and in parts."""
    text = (ROOT / "docs" / "verify.md").read_text()
    layouts = CODE.findall(text.partition("## Right in every layout")[2])[0]
    _, code = CODE.findall((ROOT / "docs" / "pytest.md").read_text())
    (tmp_path / "layouts.py").write_text(layouts)
    (tmp_path / "test_layouts.py").write_text(code)
    status, shown = session(tmp_path)
    assert status == 1
    told = re.findall(r"^(PASSED|FAILED) \S+::test_layout\[(\S+)\]", shown, re.M)
    assert ("PASSED", "dp=1,micro=1,remat=False,mask=False") in told
    for outcome, layout in told:
        assert (outcome == "FAILED") == ("micro=3" in layout and "mask=True" in layout)
    assert {outcome for outcome, _ in told} == {"PASSED", "FAILED"}


def test_other_parameters_keep_their_names():
    name = pytest_plugin.pytest_make_parametrize_id
    assert name({"dp": 2, "mask": True}, "layout") == "dp=2,mask=True"
    assert name({"dp": 2}, "options") is None
    assert name((1, 2), "layout") is None


def test_to_import_it_imports_neither_jax_nor_the_judge():
    subprocess.run([sys.executable, "-c", IMPORT], check=True, timeout=300)


def test_the_file_on_the_page_passes_as_it_stands(page):
    """And each of its tests judged something: with a wrong trainer all fail."""
    status, text = session(page)
    assert status == 0, text
    assert "3 passed" in text
    wrong = page / "wrong"
    wrong.mkdir()
    code = (page / "test_trainer.py").read_text().replace("(a + b) / 7", "(a + b)")
    (wrong / "test_trainer.py").write_text(code)
    status, text = session(wrong)
    assert status == 1
    assert "3 failed" in text
    assert len(re.findall("it is 7 times the", text)) >= 3


def test_what_a_session_shows(page):
    """The failure is at the test's line, and has the report and how to repeat it."""
    own = page / "own"
    own.mkdir()
    (own / "test_own.py").write_text(TESTS)
    (own / "test_trainer.py").write_text((page / "test_trainer.py").read_text())
    status, text = session(own / "test_own.py", "--jdist-dtype=bfloat16")
    assert status == 1
    outcomes = dict(
        reversed(found)
        for found in re.findall(
            r"^(PASSED|FAILED|ERROR) \S+::(\w+)", text, re.MULTILINE
        )
    )
    passed = {
        "test_of_the_option", "test_of_the_class",
        "test_over_the_option", "test_over_the_class",
    }  # fmt: skip
    assert outcomes == {
        **dict.fromkeys(passed, "PASSED"),
        **dict.fromkeys(("test_wrong", "test_truth"), "FAILED"),
        **dict.fromkeys(REFUSED, "ERROR"),
    }
    for name, words in REFUSED.items():
        assert words in text, name
    shown = text.partition("_ test_wrong _")[2].partition("\n____")[0]
    assert ">       judge.gradients(losses, params, batch, seven_times)" in shown
    assert "def gradients(" not in shown, "the plugin's own lines are hidden"
    assert "VerificationError: the trainer is not proved right" in shown
    assert re.search(r"E +trainer +out +bfloat16 .* FAILS", shown)
    assert "E       judged with --jdist-dtype=bfloat16" in shown
    assert "has passed a wrong gradient" not in shown.partition("\nE ")[2]


def test_a_wrong_option_is_refused(tmp_path):
    """In words, before anything is collected."""
    status, text = session(tmp_path, "--jdist-dtype=float8")
    assert status == 4
    assert "invalid choice" in text


def losses(w, x):
    return jnp.tanh(x @ w) ** 2


def scaled(factor, seen=None):
    """A trainer whose gradient is so many times too large."""

    def trainer(w, x):
        if seen is not None:
            seen.append((w.dtype, x.dtype))
        loss, gradient = jax.value_and_grad(lambda w: losses(w, x).mean())(w)
        return loss, factor * gradient

    return trainer


@pytest.mark.parametrize("dtype", [None, "float16", "float64"])
def test_the_dtype_is_that_of_all_floating_arrays(rng, dtype):
    """NumPy's as well; others stay; 64-bit types are on while it judges only."""
    w, x = np.float32(rng.normal(size=5)), jnp.float32(rng.normal(size=(7, 5)))
    kept = np.arange(7, dtype=np.int16), jax.random.key(0)
    seen = []
    judge = GradientJudge(dtype)
    with jax.enable_x64(False):
        report = judge.gradients(losses, w, x, scaled(1, seen))
        assert jnp.ones(1).dtype == jnp.float32
    assert set(seen) == {(jnp.dtype(dtype or "float32"),) * 2}
    assert report.ok
    assert report.leaves[0].candidate == "trainer"
    cast = judge._cast(kept)
    assert all(a is b for a, b in zip(cast, kept, strict=True))


def test_a_wrong_trainer_is_an_assertion_that_fails(rng):
    """With the report, also of several; options go on to the judge."""
    w, x = jnp.float64(rng.normal(size=5)), jnp.float64(rng.normal(size=(7, 5)))
    weights = rng.uniform(1, 2, size=7)
    several = {"right": scaled(1), "wrong": scaled(2)}
    with pytest.raises(VerificationError, match=r"it is 2 times the\s") as told:
        GradientJudge().gradients(losses, w, x, several)
    assert isinstance(told.value, AssertionError)
    assert "oracle pinned" in str(told.value)
    with pytest.raises(VerificationError, match=r"FAILS") as told:
        GradientJudge().gradients(
            losses, w, x, scaled(1), weights=weights, finite_differences=False
        )
    assert "oracle" not in str(told.value)


def test_steps_are_judged_in_both_forms(rng):
    """By a loss and an update, and by a reference step."""
    w, x = jnp.float32(rng.normal(size=5)), jnp.float32(rng.normal(size=(7, 5)))

    def update(w, gradient, state):
        return w - 0.1 * gradient, state

    def trainer(factor):
        def step(w, state, x):
            assert w.dtype == x.dtype == jnp.float64
            return update(w, scaled(factor)(w, x)[1], state)

        return step

    def whole(factor):
        return lambda state, x: {
            "params": state["params"] - 0.1 * scaled(factor)(state["params"], x)[1]
        }

    judge = GradientJudge("float64")
    right, wrong = trainer(1), trainer(3)
    assert judge.step(losses, update, (w, ()), [x, 2 * x], right).worst < 1
    with pytest.raises(VerificationError, match=r"it is 3 times the\s"):
        judge.step(losses, update, (w, ()), [x], {"mine": wrong})
    assert judge.step(whole(1), whole(1), {"params": w}, [x]).ok
    with pytest.raises(VerificationError, match=r"it is 3 times the\s"):
        judge.step(whole(3), whole(1), {"params": w}, [x])
