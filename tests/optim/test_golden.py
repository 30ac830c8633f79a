"""Every algorithm goes through torch's own numbers, recorded in golden files."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.optim import bounds, runs
from tests.optim.cases import ALGORITHMS, BY_NAME, STEPS, Problem

pytestmark = pytest.mark.compiled

GOLDEN = Path(__file__).parent / "golden"
RECORDED = [(a.name, case) for a in ALGORITHMS for case in a.golden]


def load(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


@cache
def recorded_problem(name):
    data = load(name)
    return Problem(
        [np.array(p) for p in data["params"]],
        [[None if g is None else np.array(g) for g in row] for row in data["grads"]],
    )


def tuples(options):
    """JSON knows lists only."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("name", "case"), RECORDED)
def test_fifty_steps_are_torchs(name, case, dtype):
    """Parameters and state equal torch's at the recorded steps of a run with None."""
    recorded, problem = load(name)[case], recorded_problem(BY_NAME[name].inputs)
    assert tuples(recorded["options"]) == BY_NAME[name].golden[case]
    seen = runs.run(BY_NAME[name](**tuples(recorded["options"])), problem, dtype)
    assert len(seen.params) == STEPS
    for t, expected in recorded[dtype].items():
        for leaf, start in enumerate(problem.params):
            np.testing.assert_allclose(
                seen.params[int(t)][leaf],
                expected["params"][leaf],
                rtol=0,
                atol=bounds.of_param(seen, leaf, dtype, start),
            )
            compare_states(seen, int(t), leaf, expected["state"][leaf], dtype)


def compare_states(seen, t, leaf, expected, dtype):
    """torch makes a state at the first gradient; until then ours is as it began."""
    found = seen.states[t][leaf]
    if "step" not in found:
        # torch counts in RMSprop, Adadelta and Adagrad what nothing reads; for which of
        # ours that holds `test_step` says, and that a schedule's count is the same.
        expected = {name: x for name, x in expected.items() if name != "step"}
    assert set(expected) <= set(found)
    if not expected and "step" in found:
        assert found["step"] == 0 or set(found) == {"step"}, "plain SGD has no state"
    elif not expected:
        assert not any(map(np.any, found.values())), "a buffer moved without a gradient"
    for name, values in expected.items():
        if name == "step":
            assert found[name] == values
            continue
        bound = bounds.of_state(seen, leaf, name, dtype)
        if np.isfinite(bound):
            np.testing.assert_allclose(found[name], values, rtol=0, atol=bound)


# torch 2.13 in float32: the parameters after three steps, the second of which has a
# NaN, both infinities and a number whose square overflows.
RARE = {
    "rprop": [0.98, 1.9636, 3.022, 3.9636, 4.9635997],
    "radam": [np.nan, np.nan, np.nan, -8.5841914e16, 4.9984994],
    "adam": [np.nan, np.nan, np.nan, 3.9976807, 4.997],
    "rmsprop": [np.nan, np.nan, np.nan, 3.8000002, 4.771087],
}


@pytest.mark.parametrize("name", RARE)
def test_after_a_gradient_that_is_not_ordinary(name):
    grads = [0.1, 0.2, -0.3, 0.4, 0.5], [np.nan, np.inf, -np.inf, 1e20, 0.5]
    grads = [*grads, [0.1, 0.2, 0.3, 0.4, 0.5]]
    problem = Problem([np.arange(1.0, 6.0)], [[np.array(row)] for row in grads])
    seen = runs.run(BY_NAME[name](), problem, "float32").params[-1][0]
    # A few roundings of parameters that moved by up to 2e16.
    np.testing.assert_allclose(seen, RARE[name], rtol=20 * bounds.UNIT["float32"])


@pytest.mark.parametrize("name", ["inputs", "matrices"])
def test_the_recorded_problem_can_tell(name):
    """It has None in several patterns, distinct shapes, and several magnitudes."""
    problem = recorded_problem(name)
    missing = [tuple(g is None for g in row) for row in problem.grads]
    assert len(set(missing)) == 4
    assert [row[1] for row in missing[:4]].count(True) >= 3
    assert len({p.shape for p in problem.params}) == len(problem.params)
    sizes = [
        runs.largest([g for row in problem.grads if (g := row[leaf]) is not None])
        for leaf in range(3)
    ]
    assert max(sizes) > 1e4 * min(sizes)


def test_every_algorithm_is_recorded():
    files = {path.stem for path in GOLDEN.glob("*.json")}
    assert files == {*BY_NAME, "inputs", "matrices"}
