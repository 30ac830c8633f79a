"""Problems: found by name, guarded, and judged with what they hold."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify
from jdist._own_code import OwnCodeRaised, own_code
from jdist.verify.problem import Problem, load, standard

MODULE = """
import jax, jax.numpy as jnp
from jdist.verify import Problem

w, x = jnp.array([0.3, 0.4]), jnp.array([[1.0, 2.0], [3.0, 4.0]])
losses = lambda w, x: (x @ w) ** 2
right = jax.value_and_grad(lambda w, x: losses(w, x).mean())
problem = Problem(losses, w, x, {"right": right})
def as_function():
    return problem
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in a package in the current folder, which no path names."""
    package = tmp_path / "their_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "problems.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    return "their_package.problems"


@pytest.mark.parametrize("name", ["problem", "as_function"])
def test_a_problem_is_found_in_each_form(module, name):
    """A `Problem`, and a function that returns one."""
    found = load(f"{module}:{name}")
    assert isinstance(found, Problem)
    assert found.params.tolist() == pytest.approx([0.3, 0.4])
    assert (found.reduction, found.weights) == ("mean", None)
    assert found.finite_differences
    assert found.judge().ok


def test_a_problem_is_judged_with_all_that_it_holds(rng):
    """Weights, reduction and options reach the judge."""
    w = jnp.asarray(rng.normal(size=3), jnp.float32)
    x = jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)
    weights = np.float32([1, 0, 2, 0.5, 3])
    losses = lambda w, x: jnp.sin(x @ w)  # noqa: E731
    right = jax.value_and_grad(lambda w, x: jnp.sum(losses(w, x) * weights))
    problem = Problem(
        losses, w, x, {"right": right}, weights, "sum", finite_differences=False
    )
    report = problem.judge()
    assert report.ok, str(report)
    assert report.oracle is None
    unweighted = Problem(
        losses, w, x, {"right": right}, None, "sum", finite_differences=False
    )
    assert not unweighted.judge().ok
    mean = Problem(
        losses, w, x, {"right": right}, weights, "mean", finite_differences=False
    )
    assert not mean.judge().ok


def test_what_a_problem_raises_is_its_own():
    """Of the loss, and of a candidate by its name; what it returns is left alone."""

    def broken(w, x):
        raise ZeroDivisionError("by hand")

    losses = lambda w, x: x * w  # noqa: E731
    one = jnp.ones(2)
    in_candidate = Problem(losses, one[0], one, {"mine": broken}).guarded()
    with pytest.raises(OwnCodeRaised, match=r"candidate 'mine' raised Zero.*by hand"):
        in_candidate.judge()
    in_loss = Problem(broken, one[0], one, {"mine": losses}).guarded()
    with pytest.raises(OwnCodeRaised, match="loss_fn raised ZeroDiv") as caught:
        in_loss.judge()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    fine = Problem(losses, one[0], one, {"mine": losses}).guarded()
    assert fine.loss_fn(2, 3) == 6
    assert fine.candidates["mine"](2, 3) == 6


def test_own_code_is_told_once():
    """The innermost name stays; an interrupt is no mistake and passes."""
    inner = pytest.raises(OwnCodeRaised, match=r"^inner raised KeyError")
    with inner, own_code("outer"), own_code("inner"):
        raise KeyError("x")
    left = pytest.raises(OwnCodeRaised, match="outer raised SystemExit")
    with left, own_code("outer"):
        raise SystemExit(3)
    with pytest.raises(KeyboardInterrupt, match="by hand"), own_code("outer"):
        raise KeyboardInterrupt("by hand")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_standard_problem_in_each_dtype(dtype):
    """The same numbers, rounded; a row of zeros in it would be NaN."""
    problem, wide = standard(jnp.dtype(dtype)), standard(jnp.dtype("float64"))
    leaves = jax.tree.leaves((problem.params, problem.batch["x"]))
    assert {str(leaf.dtype) for leaf in leaves} == {dtype}
    for ours, theirs in zip(
        jax.tree.leaves(problem.params), jax.tree.leaves(wide.params), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), theirs, rtol=float(jnp.finfo(dtype).eps)
        )
    losses = problem.loss_fn(problem.params, problem.batch)
    assert losses.shape == problem.weights.shape
    assert bool(jnp.isfinite(losses).all())
    zeroed = {**problem.batch, "x": problem.batch["x"].at[0].set(0)}
    assert not bool(jnp.isfinite(problem.loss_fn(problem.params, zeroed)).all())


def test_the_standard_problem_tells_a_detached_use_of_the_shared_matrix():
    """It is used twice, and both uses have a gradient of size."""
    problem = standard(jnp.float64)
    used = jax.grad(lambda p: problem.loss_fn(p, problem.batch).sum())(problem.params)
    assert float(jnp.abs(used["shared"]).max()) > 1e-2
    assert float(jnp.abs(used["unused"]).max()) == 0
    assert verify.Problem is Problem
