"""Devices that round the operands of float32 products, as to TF32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jdist.verify.evaluation import products
from jdist.verify.evaluation.products import kept_bits, rounding_note
from tests.verify import narrow_products as runs


def product(dtype, precision=None):
    x = jnp.ones((5, 7), dtype)
    return jax.make_jaxpr(lambda x: jnp.dot(x, x.T, precision=precision))(x)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
@pytest.mark.parametrize("precision", [None, "high", "highest"])
def test_a_cpu_keeps_all_bits(dtype, precision):
    program = product(dtype, precision)
    (equation,) = [x for x in program.eqns if x.primitive.name == "dot_general"]
    assert kept_bits(equation) is None
    assert rounding_note(program) == ()


@pytest.mark.parametrize(("bits", "fewest"), [(10, 1), (7, 3)])
def test_right_programs_pass_and_wrong_ones_fail(bits, fewest, fresh_hosts):
    (found,) = fresh_hosts(1).everywhere(runs.verdicts, bits, fewest)
    (by_name, oracle, notes), (sharp, sharp_oracle, sharp_notes) = found
    assert oracle
    assert {name for name in runs.RIGHT if not by_name[name]} == set()
    assert not by_name["5 %"]
    assert by_name["0.1 %"]  # What it costs.
    if bits == 10:
        assert not by_name["1 %"]
    (note,) = [note for note in notes if "operands" in note]
    kind = {10: "11 bits (TF32)", 7: "8 bits (bfloat16)"}[bits]
    assert f"rounds float32 operands of products to {kind}" in note
    assert 'jax.default_matmul_precision("highest")' in note
    assert sharp_oracle
    assert sharp == {"in parts": True, "0.1 %": False, "1 %": False, "5 %": False}
    assert not any("operands" in note for note in sharp_notes)


def test_steps_and_traces_allow_for_it_too(fresh_hosts):
    (found,) = fresh_hosts(1).everywhere(runs.steps_and_traces, 10)
    failed, notes, traces, trace_notes = found
    assert failed == {"wrong"}
    assert traces == [True, False]
    for each in (notes, trace_notes):
        assert sum("11 bits (TF32)" in note for note in each) == 1


def test_the_device_is_asked_within_a_trace_and_on_a_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    (equation,) = [
        x for x in product("float32").eqns if x.primitive.name == "dot_general"
    ]

    def asking(x):
        return x + int(kept_bits(equation) is None)

    products._kept.cache_clear()
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(asking)(np.arange(3)), [1, 2, 3])


def test_each_device_is_asked():
    """`jax.default_device` may name a CPU beside a GPU."""
    (equation,) = [
        x for x in product("float32").eqns if x.primitive.name == "dot_general"
    ]
    products._kept.cache_clear()
    for device in (None, jax.devices()[1], None):
        with jax.default_device(device):
            assert kept_bits(equation) is None
    assert products._kept.cache_info().misses == 2
