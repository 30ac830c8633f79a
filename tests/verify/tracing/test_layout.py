"""The axis of examples: found by tracing more examples, and used to cut rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify
from jdist.verify.tracing.layout import Layout, finite_part, infinities, layouts

EXAMPLES = 6


def found(loss):
    """The layouts of a loss of `(examples, 4)` arrays, by name."""
    batch = {"x": jnp.ones((EXAMPLES, 4)), "ids": jnp.arange(EXAMPLES)}
    with verify.TapRecording():
        made = layouts(loss, jnp.ones((4, 3)), batch, EXAMPLES)
    return {name: layout for (name, _), layout in made.items()}


def taps(**values):
    """A loss that taps the values of functions of the parameters and the batch."""

    def loss(w, batch):
        tapped = [verify.tap(fn(w, batch["x"]), name) for name, fn in values.items()]
        return sum(jnp.sum(x) for x in tapped)

    return loss


CASES = {
    "rows": (lambda w, x: x @ w, Layout((6, 3), 0, 1)),
    "columns": (lambda w, x: (x @ w).T, Layout((3, 6), 1, 1)),
    "folded, as (examples * heads)": (
        lambda w, x: jnp.repeat(x, 2, axis=0),
        Layout((12, 4), 0, 2),
    ),
    "a parameter": (lambda w, x: w, Layout((4, 3), None, 1)),
    "a sum over the batch": (lambda w, x: x.sum(axis=0), Layout((4,), None, 1)),
    "pairs of examples": (lambda w, x: x @ x.T, Layout((6, 6), None, 1)),
    "a constant beside them": (
        lambda w, x: jnp.concatenate([jnp.ones((1, 4)), x]),
        Layout((7, 4), None, 1),
    ),
    "all in one axis": (lambda w, x: x.reshape(-1), Layout((24,), 0, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_axis_is_the_one_that_grows(name):
    """By a whole number of entries for each example; otherwise there is none."""
    fn, layout = CASES[name]
    assert found(taps(value=fn)) == {"value": layout}


def test_taps_inside_loops_and_calls_are_seen():
    """In the body of a scan, a jitted function and a branch."""

    def loss(w, batch):
        def step(x, row):
            return verify.tap(jnp.tanh(x + row.sum()), "carried"), x.sum()

        x, _ = jax.lax.scan(step, batch["x"], w)
        x = jax.jit(lambda x: verify.tap(x * 2, "called"))(x)
        return jax.lax.cond(
            w.sum() > 0, lambda x: verify.tap(x, "branch"), lambda x: x, x
        ).sum()

    layout = Layout((6, 4), 0, 1)
    assert found(loss) == dict.fromkeys(("carried", "called", "branch"), layout)


def test_a_loss_for_equal_parts_is_traced_with_twice_as_many():
    """One example more does not divide into its parts."""

    def loss(w, batch):
        parts = batch["x"].reshape(3, -1, 4)
        return verify.tap(parts @ w, "parts").sum()

    assert found(loss) == {"parts": Layout((3, 2, 3), None, 1)}


def test_nothing_is_learned_of_a_loss_for_one_size():
    """It refuses any other number of examples."""

    def loss(w, batch):
        return verify.tap(batch["x"].reshape(EXAMPLES, 4) @ w, "rows").sum()

    assert found(loss) == {}


ROWS = np.arange(24.0).reshape(6, 4)


@pytest.mark.parametrize(
    ("layout", "array", "axes", "rows"),
    [
        (Layout((6, 4), 0, 1), ROWS, 0, ROWS),
        (Layout((6, 4), 0, 1), ROWS[:2], 0, ROWS[:2]),
        (Layout((4, 6), 1, 1), ROWS.T, 0, ROWS),
        (Layout((6, 4), 0, 2), ROWS, 0, ROWS.reshape(3, 8)),
        (Layout((6, 4), 0, 1), ROWS.reshape(3, 2, 4), 1, ROWS),
        (Layout((6, 4), 0, 1), ROWS.reshape(6, 4), 1, ROWS),
        (Layout((4, 6), 1, 1), ROWS.reshape(3, 2, 4).swapaxes(1, 2), 1, ROWS),
        (Layout((6, 4), None, 1), ROWS, 0, ROWS.reshape(1, 24)),
        (Layout((4,), None, 1), ROWS, 1, ROWS),
        # Of a reference that `vmap` gave one example at a time, as a batch of one.
        (Layout((6, 1, 4), 0, 1), ROWS, 0, ROWS),
        (Layout((6, 1, 4), 0, 1), ROWS[:2], 0, ROWS[:2]),
        (Layout((6, 1, 4), 0, 1), ROWS[:, None], 1, ROWS),
        (Layout((6, 1, 4), 0, 1), ROWS, 1, ROWS),
        (Layout((6, 4), 0, 1), ROWS[:, None], 1, ROWS),
    ],
)
def test_rows_of_an_array(layout, array, axes, rows):
    """Of any number of examples, below the axes of `vmap`."""
    np.testing.assert_array_equal(layout.rows(array, axes), rows)


@pytest.mark.parametrize(
    ("layout", "shape", "axes"),
    [
        (Layout((6, 4), 0, 1), (6, 5), 0),
        (Layout((6, 4), 0, 1), (6, 4, 1), 0),
        (Layout((6, 4), 0, 4), (6, 4), 0),
        (Layout((6, 4), None, 1), (5, 4), 0),
        (Layout((3, 6, 2), 1, 2), (4, 6, 2), 0),
    ],
)
def test_arrays_of_other_shapes_have_no_rows(layout, shape, axes):
    assert layout.rows(np.zeros(shape), axes) is None


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout((6, 4), 0, 1), (4,)),
        (Layout((12, 4), 0, 2), (2, 4)),
        (Layout((4, 6), 1, 1), (4,)),
        (Layout((6, 4), None, 1), (6, 4)),
        (Layout((6,), 0, 1), ()),
    ],
)
def test_the_shape_of_one_examples_part(layout, shape):
    assert layout.row_shape() == shape


def test_infinities_stand_apart():
    """0 in the array that is compared by numbers, a sign in the other."""
    array = np.array([1.0, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(finite_part(array), [1.0, 0, 0, np.nan])
    np.testing.assert_array_equal(infinities(array), [0, 1, -1, 0])
