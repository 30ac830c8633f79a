"""A stage's function made of modules: shared parameters, states, keys, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist.pipeline.stages.stage import outputs_by_name
from jdist.pipeline.stages.stage_program import (
    ModuleCall,
    SharedParameter,
    StageProgram,
    leaves_below,
    with_shared,
    without_shared,
)

NAMES = ("a", "b", "ab")


@st.composite
def trees(draw):
    """Of two levels; names that begin alike, so that paths are not mere prefixes."""
    return {
        name: {other: float(draw(st.integers(0, 9))) for other in NAMES}
        for name in NAMES
    }


@settings(deadline=None)
@given(first=trees(), second=trees(), path=st.sampled_from(["a", "ab", "b/a", "ab/b"]))
def test_shared_parameters_are_kept_once(first, second, path):
    """Blank where they are taken from another module, and there again in a call."""
    source = "a" if "/" not in path else "a/ab"
    shared = [SharedParameter("second", path, "first", source)]
    kept = without_shared({"first": first, "second": second}, shared)
    assert kept["first"] == first
    inside = set(leaves_below(second, path))
    blank = {p for p, x in leaves_below(kept["second"], path).items() if x is None}
    assert blank == inside
    whole = with_shared(kept, shared)
    assert leaves_below(whole["second"], path) == leaves_below(first, source)
    rest = {name for name in NAMES if name != path.partition("/")[0]}
    assert all(whole["second"][name] == second[name] for name in rest)


def program(**changes):
    """y = a(x) with a state, z = b(y, x) with a key."""
    calls = (
        ModuleCall("a", _counting, ("x",), ("y",), stateful=True),
        ModuleCall("b", _noisy, ("y", "x"), ("z",), keyed=True),
    )
    return StageProgram(calls, ("x",), ("y", "z"), **changes)


def _counting(w, state, x):
    return w * x, state + 1


def _noisy(w, y, x, key):
    return w * y + x + jax.random.normal(key, (), jnp.float32)


def test_states_and_keys_go_to_their_modules():
    params, key = {"a": jnp.float32(2), "b": jnp.float32(3)}, jax.random.key(5)
    outputs, after = program()(params, {"a": jnp.int32(4)}, jnp.float32(7), key)
    noise = jax.random.normal(jax.random.fold_in(key, 1), (), jnp.float32)
    np.testing.assert_allclose(outputs, (14, 49 + noise), rtol=1e-6)
    assert after == {"a": 5}
    alone = program(evaluation=True)(params, {"a": jnp.int32(4)}, jnp.float32(7), key)
    np.testing.assert_allclose(alone, outputs)


def test_programs_of_equal_calls_are_equal():
    """So that what is compiled for one serves the other."""
    assert program() == program()
    assert hash(program()) == hash(program())
    assert program() != program(evaluation=True)


def test_an_error_names_its_module():
    broken = StageProgram((ModuleCall("c", jnp.dot, ("x",), ("y",)),), ("x",), ("y",))
    with pytest.raises(TypeError, match="contract") as caught:
        broken({"c": jnp.ones((2, 3))}, jnp.ones((2, 3)))
    assert "It was raised by the module 'c'." in caught.value.__notes__


@pytest.mark.parametrize("returned", [(1,), [1, 2, 3], 4.0])
def test_outputs_of_another_number(returned):
    rule = r"`fn` must return the 2 outputs \('a', 'b'\). Got a (tuple of 1|list of 3"
    with pytest.raises(ValueError, match=rf"{rule}|float)"):
        outputs_by_name("fn", ("a", "b"), returned)
    assert outputs_by_name("fn", ("a",), returned) == {"a": returned}
