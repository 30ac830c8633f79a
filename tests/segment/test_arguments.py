"""Arguments and results: absent cotangents, every dtype, every structure."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.segment import Fold, segment
from tests.segment.cases import assert_close, assert_same_bits, normal
from tests.segment.test_halves import products

# --- absent cotangents ---


def _two_heads(p, x, y):
    hidden = jnp.tanh(x @ p["w"])
    return {"a": hidden @ p["a"], "b": (jnp.sin(y @ p["b"]), hidden)}


@pytest.fixture
def heads(rng):
    params = {"w": normal(rng, 5, 7), "a": normal(rng, 7, 3), "b": normal(rng, 4, 2)}
    inputs = (normal(rng, 6, 5), normal(rng, 6, 4))
    outputs = _two_heads(params, *inputs)
    d_outputs = jax.tree.map(lambda x: normal(rng, *x.shape), outputs)
    return params, inputs, d_outputs


PATTERNS = [
    {"a": True, "b": (True, True)},
    {"a": True, "b": (False, False)},
    {"a": False, "b": (True, False)},
    {"a": False, "b": (False, True)},
    {"a": False, "b": (False, False)},
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_none_is_a_zero_cotangent(heads, pattern):
    """None gives the gradients of zeros; where nothing flows, the cotangent is None."""
    params, inputs, d_outputs = heads
    seg = segment(_two_heads)
    _, residuals = seg.forward(params, *inputs)
    absent = jax.tree.map(lambda d, live: d if live else None, d_outputs, pattern)
    zeros = jax.tree.map(lambda d, live: d if live else 0 * d, d_outputs, pattern)
    _, pull_back = jax.vjp(_two_heads, params, *inputs)
    d_params, *d_inputs = pull_back(zeros)
    found = seg.backward(params, residuals, absent)
    assert_close(found, (d_params, tuple(d_inputs)))
    a, (b, hidden) = pattern["a"], pattern["b"]
    assert [x is not None for x in found[1]] == [a or hidden, b]
    # Gradients of parameters are zeros, not None: an optimizer skips None.
    assert all(
        x is not None for x in jax.tree.leaves(found[0], is_leaf=lambda x: x is None)
    )
    assert np.any(found[0]["w"]) == (a or hidden)
    d_inputs, rest = seg.backward_inputs(params, residuals, absent)
    assert_close((seg.backward_params(rest), d_inputs), found)


NO_FOLD = (None, None, None)


def test_absent_cotangents_save_work(heads):
    """The products that only an absent cotangent needs are not in the program."""
    with jax.default_device(jax.devices("cpu")[0]):
        params, inputs, d_outputs = jax.tree.map(np.asarray, heads)
        seg = segment(_two_heads)
        _, residuals = seg.forward(params, *inputs)
        counts = []
        for pattern in PATTERNS:
            absent = jax.tree.map(
                lambda d, live: d if live else None, d_outputs, pattern
            )
            half = seg._halves.backward
            counts.append(
                products(half, None, None, None, params, residuals, absent, None)
            )
    # Two products for each of w, a and b that takes part.
    assert counts == [6, 4, 2, 2, 0]


def test_none_for_a_whole_subtree(heads):
    """None may stand for a subtree, and a pattern compiles once however it is given."""
    params, inputs, d_outputs = heads
    seg = segment(_two_heads)
    _, residuals = seg.forward(params, *inputs)
    short = seg.backward(params, residuals, {"a": d_outputs["a"], "b": None})
    long = seg.backward(params, residuals, {"a": d_outputs["a"], "b": (None, None)})
    assert_same_bits(short, long)


def test_each_pattern_compiles_once(heads):
    """Repeated patterns find their program."""
    params, inputs, d_outputs = heads
    seg = segment(lambda p, x, y: _two_heads(p, x, y))
    _, residuals = seg.forward(params, *inputs)
    for _ in range(2):
        for pattern in PATTERNS:
            absent = jax.tree.map(
                lambda d, live: d if live else None, d_outputs, pattern
            )
            seg.backward(params, residuals, absent)
    assert seg._halves.backward._cache_size() == len(PATTERNS)
    assert seg._halves.forward._cache_size() == 1


# --- kinds of leaves ---


def test_integers_booleans_and_keys(rng):
    """They pass through, in and out of params too; their cotangent is None."""

    def fn(p, x, tokens, mask, key):
        noise = jax.random.normal(key, x.shape, x.dtype)
        rows = p["table"][tokens] * p["repeat"].astype(x.dtype)
        kept = jnp.where(mask, rows + x * noise, 0)
        return kept, tokens + 1, ~mask, jax.random.split(key)[0]

    params = {"table": normal(rng, 9, 4), "repeat": jnp.asarray(3)}
    x, key = normal(rng, 6, 4), jax.random.key(5)
    tokens = jnp.asarray(rng.integers(0, 9, 6))
    mask = jnp.asarray(rng.random((6, 4)) < 0.5)
    seg = segment(fn)
    outputs, residuals = seg.forward(params, x, tokens, mask, key)
    assert np.array_equal(outputs[1], tokens + 1)
    assert np.array_equal(outputs[2], ~mask)
    assert outputs[3] == jax.random.split(key)[0]
    d_outputs = (normal(rng, 6, 4), None, None, None)
    d_params, d_inputs = seg.backward(params, residuals, d_outputs)
    assert d_params["repeat"] is None
    assert d_inputs[1:] == (None, None, None)
    _, pull_back = jax.vjp(
        lambda table, x: fn({**params, "table": table}, x, tokens, mask, key)[0],
        params["table"],
        x,
    )
    assert_close((d_params["table"], d_inputs[0]), pull_back(d_outputs[0]))


UNIT = {
    jnp.float64: 2.0**-53, jnp.float32: 2.0**-24, jnp.float16: 2.0**-11,
    jnp.bfloat16: 2.0**-8, jnp.complex64: 2.0**-24, jnp.complex128: 2.0**-53,
}  # fmt: skip


@pytest.mark.parametrize("dtype", UNIT, ids=lambda dtype: dtype.__name__)
def test_every_floating_dtype(dtype, rng):
    """Gradients have the dtype of what they belong to, and its precision."""

    def draw(*shape):
        values = rng.standard_normal(shape)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            values = values + 1j * rng.standard_normal(shape)
        return jnp.asarray(values, dtype)

    def fn(p, x):
        return jnp.tanh(x @ p["w"]) * p["s"]

    params, x, d_outputs = {"w": draw(5, 3), "s": draw(1, 3)}, draw(4, 5), draw(4, 3)
    seg = segment(fn)
    _, residuals = seg.forward(params, x)
    found = seg.backward(params, residuals, d_outputs)
    _, pull_back = jax.vjp(fn, params, x)
    d_params, d_x = pull_back(d_outputs)
    # At most 5 + 5 terms are added, and some ten functions applied, on any path; in 16
    # bits `jax.vjp` and the segment may each round in another place.
    assert_close(found, (d_params, (d_x,)), roundings=40, unit=UNIT[dtype])


def test_mixed_dtypes_and_weak_types(rng):
    """Python numbers may be inputs and cotangents; gradients keep their dtypes."""
    params = {"a": normal(rng, 3, dtype=jnp.bfloat16), "b": normal(rng, 3, dtype=float)}

    def fn(p, scale):
        return (p["a"].astype(float) * p["b"] * scale).sum()

    seg = segment(fn)
    outputs, residuals = seg.forward(params, 2.5)
    d_params, (d_scale,) = seg.backward(params, residuals, 1.0)
    assert [d_params["a"].dtype, d_params["b"].dtype] == [jnp.bfloat16, jnp.float64]
    # One product and three terms; b's gradient is exact products of bf16 and 2.5.
    assert_close(
        d_params["b"], params["a"].astype(float) * 2.5, roundings=2, unit=2**-53
    )
    assert_close(d_scale, outputs / 2.5, roundings=8, unit=2**-53)


@pytest.mark.parametrize("params", [(), {}, None], ids=repr)
def test_no_parameters(params, rng):
    """A segment without parameters is a function of its inputs."""
    x = normal(rng, 4)
    seg = segment(lambda _, x: jnp.sin(x))
    outputs, residuals = seg.forward(params, x)
    d_params, (d_x,) = seg.backward(params, residuals, x)
    assert d_params == params
    assert_close(d_x, x * jnp.cos(x))
    d_inputs, rest = seg.backward_inputs(params, residuals, x)
    assert seg.backward_params(rest) == params
    assert_close(d_inputs, (d_x,))
    assert outputs.shape == (4,)


def test_no_inputs_no_outputs(rng):
    """No inputs, empty inputs, no outputs: empty trees all the way."""
    p = normal(rng, 4)
    seg = segment(lambda p, *_: jnp.sin(p))
    for inputs in ((), ((), {}, None)):
        _, residuals = seg.forward(p, *inputs)
        d_p, d_inputs = seg.backward(p, residuals, p)
        assert d_inputs == inputs
        assert_close(d_p, p * jnp.cos(p))
    nothing = segment(lambda p, x: {})
    outputs, residuals = nothing.forward(p, p)
    assert outputs == {}
    d_p, d_inputs = nothing.backward(p, residuals, {})
    assert d_inputs == (None,)
    assert_same_bits(d_p, jnp.zeros_like(p))
    _, rest = nothing.backward_inputs(p, residuals, {})
    assert_same_bits(nothing.backward_params(rest), jnp.zeros_like(p))


def test_outputs_that_are_arguments(rng):
    """A segment that hands its input, or a parameter, through."""
    p, x = normal(rng, 4), normal(rng, 4)
    seg = segment(lambda p, x: (x, p, x * p))
    outputs, residuals = seg.forward(p, x)
    assert_same_bits(outputs[:2], (x, p))
    a, b, c = normal(rng, 4), normal(rng, 4), normal(rng, 4)
    expected = (b + c * x, (a + c * p,))
    assert_close(seg.backward(p, residuals, (a, b, c)), expected)
    d_inputs, rest = seg.backward_inputs(p, residuals, (a, b, c))
    assert_close((seg.backward_params(rest), d_inputs), expected)


def test_bound_arguments(rng):
    """Python values that `partial` binds choose the program; each compiles once."""

    def fn(p, x, y, power, name):
        return x**power * p + (y if name == "add" else -y)

    p, x, y = normal(rng, 4), normal(rng, 4), normal(rng, 4)
    halves = set()
    for _ in range(2):
        for power, name in ((2, "add"), (3, "add"), (3, "subtract")):
            seg = segment(
                functools.partial(fn, power=power, name=name), label=(power, name)
            )
            _, residuals = seg.forward(p, x, y)
            d_p, d_inputs = seg.backward(p, residuals, y)
            assert_close(d_p, y * x**power)
            assert_close(d_inputs[0], y * p * power * x ** (power - 1))
            assert_close(d_inputs[1], y if name == "add" else -y)
            halves.add(seg._halves)
    assert sum(each.forward._cache_size() for each in halves) == 3


def test_numpy_inputs_may_be_overwritten(rng):
    """A copy of a NumPy array is kept: the caller may reuse the buffer."""
    p, x = normal(rng, 5, 3), rng.standard_normal((4, 5)).astype(np.float32)
    seg = segment(lambda p, x: x @ p)
    outputs, residuals = seg.forward(p, x)
    expected = seg.backward(p, residuals, outputs)
    x[:] = 0
    assert_same_bits(seg.backward(p, residuals, outputs), expected)
    assert np.any(expected[0])


def test_printing_runs_once(rng, capfd):
    """An effect happens once per forward pass, and not again in the backward pass."""

    def fn(p, x):
        jax.debug.print("forward {}", x.shape[0], ordered=False)
        return jnp.sin(p * x)

    x = normal(rng, 4)
    for recompute in (False, True):
        seg = segment(fn, recompute=recompute)
        outputs, residuals = seg.forward(x, x)
        _, rest = seg.backward_inputs(x, residuals, outputs)
        seg.backward_params(rest)
        jax.effects_barrier()
        assert capfd.readouterr().out == "forward 4\n"


def test_printing_in_a_backward_rule_runs_once(rng, capfd):
    """An effect of a custom rule happens in the backward pass, in its first half."""

    @jax.custom_vjp
    def watched(x):
        return jnp.sin(x)

    def pull(x, d):
        jax.debug.print("backward {}", x.shape[0])
        return (d * jnp.cos(x),)

    watched.defvjp(lambda x: (jnp.sin(x), x), pull)
    x = normal(rng, 4)
    seg = segment(lambda p, x: watched(p * x))
    outputs, residuals = seg.forward(x, x)
    seg.backward(x, residuals, outputs)
    jax.effects_barrier()
    assert capfd.readouterr().out == "backward 4\n"
    _, rest = seg.backward_inputs(x, residuals, outputs)
    jax.effects_barrier()
    assert capfd.readouterr().out == "backward 4\n"
    seg.backward_params(rest)
    jax.effects_barrier()
    assert capfd.readouterr().out == ""


# --- refusals ---


@pytest.mark.parametrize(
    ("d_outputs", "message"),
    [
        (
            "a",
            r"must be like its output, float32 of shape \(6, 3\). Got float32 of ",
        ),
        (
            "b",
            r"must be like its output, float32 of shape \(6, 3\). Got float64 of ",
        ),
        (
            "c",
            r"must have the structure of the outputs. Got no leaf there at b/0\. None",
        ),
        (
            "d",
            r"must have the structure of the outputs. Got a leaf of no output at c\. ",
        ),
        (
            "e",
            r"must have the structure of the outputs. Got no leaf there at b/0\. None",
        ),
    ],
)
def test_cotangents_that_do_not_fit(heads, d_outputs, message):
    """Wrong shape, wrong dtype, missing, additional, or one for a whole subtree."""
    params, inputs, right = heads
    wrong = {
        "a": {**right, "a": right["a"][:, :2]},
        "b": {**right, "a": right["a"].astype(float)},
        "c": {"a": right["a"]},
        "d": {**right, "c": right["a"]},
        "e": {**right, "b": right["a"]},
    }[d_outputs]
    seg = segment(_two_heads)
    _, residuals = seg.forward(params, *inputs)
    with pytest.raises(
        ValueError, match=r"`Segment.backward\(d_outputs=...\)` " + message
    ):
        seg.backward(params, residuals, wrong)


def test_imaginary_cotangent_of_a_real_output_is_refused(rng):
    """A Python number takes the output's dtype, unless it would lose a part."""
    p = normal(rng, 4)
    seg = segment(lambda p: p.sum())
    _, residuals = seg.forward(p)
    assert_same_bits(seg.backward(p, residuals, 2)[0], jnp.full(4, 2, np.float32))
    with pytest.raises(
        ValueError, match=r"float32 of shape \(\). Got complex128 of sha"
    ):
        seg.backward(p, residuals, 2j)


def test_cotangent_of_an_integer_is_refused(rng):
    """An output that is not floating has no cotangent."""
    x = normal(rng, 4)
    seg = segment(lambda p, x: (x * p, jnp.argmax(x)))
    _, residuals = seg.forward(x, x)
    message = (
        r"must be None for an output of int64, which has no cotangent. Got .* at 1"
    )
    with pytest.raises(ValueError, match=message):
        seg.backward(x, residuals, (x, jnp.asarray(1)))


@pytest.mark.parametrize("recompute", [1, 0, None, "all", np.zeros(2)])
def test_unknown_policy(recompute):
    """1 is not True here: a policy must be said."""
    message = r"`segment\(recompute=...\)` must be one of False, 'dots', True. Got "
    with pytest.raises(ValueError, match=message):
        segment(jnp.sin, recompute=recompute)


def test_not_a_function():
    """Only what can be called becomes a segment."""
    with pytest.raises(TypeError, match=r"`segment\(fn\)` must be a function. Got 3\."):
        segment(3)


def test_residuals_of_another_kind(heads):
    """Residuals and rest are taken for nothing else."""
    params, inputs, d_outputs = heads
    seg = segment(_two_heads)
    _, residuals = seg.forward(params, *inputs)
    _, rest = seg.backward_inputs(params, residuals, d_outputs)
    message = (
        r"`Segment.backward\(residuals=...\)` must be what `forward` of this very "
        r"segment returned\. Got 3"
    )
    with pytest.raises(TypeError, match=message):
        seg.backward(params, 3, d_outputs)
    message = (
        r"`Segment.backward_params\(rest=...\)` must be what `backward_inputs` of this "
    )
    with pytest.raises(TypeError, match=message):
        seg.backward_params(residuals)
    other = segment(_two_heads, recompute=True)
    message = r"of this very segment returned. Got that of another segment\."
    with pytest.raises(ValueError, match=message):
        other.backward_inputs(params, residuals, d_outputs)
    with pytest.raises(ValueError, match=message):
        other.backward_params(rest)


@pytest.mark.parametrize("fold", [0, (), lambda *given: given, Fold("sum", None)])
def test_a_fold_of_another_kind(heads, fold):
    """Also where no fold would be left of it: nothing is compiled."""
    params, inputs, d_outputs = heads
    seg = segment(_two_heads)
    _, residuals = seg.forward(params, *inputs)
    _, rest = seg.backward_inputs(params, residuals, d_outputs)
    rule = r"\(fold=...\)` must be a Fold of a function, or None\. Got "
    with pytest.raises(TypeError, match=rf"^`Segment.backward{rule}"):
        seg.backward(params, residuals, d_outputs, fold=fold)
    with pytest.raises(TypeError, match=rf"^`Segment.backward_params{rule}"):
        seg.backward_params(rest, fold=fold)


@pytest.mark.parametrize("wrong", ["text", np.array(["text"]), object()])
def test_leaves_that_are_no_arrays(heads, wrong):
    """Named by argument and path, by both ways to the cotangents of the inputs."""
    params, inputs, d_outputs = heads
    seg = segment(_two_heads)
    _, residuals = seg.forward(params, *inputs)
    moved = jax.tree.unflatten(*jax.tree.flatten(residuals)[::-1])
    rule = r"=...\)` must be a tree of arrays\. Got .* at "
    for forward in (seg.forward, seg.outputs):
        name = forward.__name__
        with pytest.raises(TypeError, match=rf"^`Segment.{name}\(params{rule}a"):
            forward({**params, "a": wrong}, *inputs)
        with pytest.raises(TypeError, match=rf"^`Segment.{name}\(inputs{rule}0"):
            forward(params, wrong, *inputs[1:])
    for half in (seg.backward, seg.backward_inputs):
        with pytest.raises(TypeError, match=rf"\(d_outputs{rule}b/0"):
            half(params, residuals, {**d_outputs, "b": (wrong, None)})
        # Residuals that were taken apart know no version of the parameters.
        with pytest.raises(TypeError, match=rf"\(params{rule}a"):
            half({**params, "a": wrong}, moved, d_outputs)
