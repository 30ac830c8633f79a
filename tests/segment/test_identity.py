"""Programs as keys: equal only where they compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist._compat import trace_whole
from jdist.segment._lookup.program_key import identity_of, likeness_of

X = jnp.linspace(-1, 2, 6, dtype=jnp.float32).reshape(2, 3)


def keys(fn, x=X):
    program, _ = trace_whole(fn, x)
    return identity_of(program), likeness_of(program)


def scanned(x, scale=1.5):
    scale = jnp.float32(scale)
    return jax.lax.scan(lambda s, row: (s * scale + row, s.sum()), x[0], x)


def chosen(x):
    return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)


SAME = {
    "arithmetic": lambda: lambda x: jnp.tanh(x * 2) @ x.T,
    "relu, which has a rule of JAX's": lambda: lambda x: jax.nn.relu(x).sum(),
    "softmax": lambda: lambda x: jax.nn.softmax(x),
    "loop": lambda: lambda x: scanned(x),
    "branch": lambda: lambda x: chosen(x),
    "NumPy constant": lambda: lambda x: x * np.ones((1, 3), np.float32),
    "checkpoint": lambda: lambda x: jax.checkpoint(jnp.sin)(x),
    "random": lambda: (
        lambda x: x * jax.random.normal(jax.random.key(3), x.shape, x.dtype)
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_programs_traced_twice_are_equal(name):
    make = SAME[name]
    (first, like), (second, alike) = keys(make()), keys(make())
    assert first == second
    assert hash(first) == hash(second)
    assert like == alike


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (lambda x: x + 1, lambda x: x - 1),
        (lambda x: (x, x + 1), lambda x: (x + 1, x)),
        (lambda x: jnp.sum(x, 0), lambda x: jnp.sum(x, 1)),
        (lambda x: x.astype(jnp.float16), lambda x: x.astype(jnp.bfloat16)),
        (lambda x: scanned(x), lambda x: scanned(x, 1.25)),
        (lambda x: x * np.float32([[1, 2, 3]]), lambda x: x * np.float32([[1, 2, 4]])),
        (lambda x: x[:, :2] @ x[:, 1:].T, lambda x: x[:, 1:] @ x[:, :2].T),
        (lambda x: jax.random.key(1), lambda x: jax.random.key(2)),
    ],
)
def test_other_programs_differ(first, second):
    """In the key by which compiled code is found, and in that by which it is judged."""
    one, other = keys(first), keys(second)
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_arrays_of_jax_count_by_identity():
    """To compare them would wait for them; to judge a change, they are compared."""
    first, second, third = [jnp.full((1, 3), x, X.dtype) for x in (1.0, 1.0, 2.0)]
    programs = [keys(lambda x, c=c: x * c) for c in (first, second, third, first)]
    identities, likenesses = zip(*programs, strict=True)
    assert identities[0] == identities[3]
    assert identities[0] != identities[1]
    assert likenesses[0] == likenesses[1]
    assert likenesses[0] != likenesses[2]


def test_large_numpy_constants_equal_nothing():
    """Each look-up would read them: the program is one of its kind."""
    table = np.zeros(2_000_000, np.float32)
    (first, like), (second, alike) = [keys(lambda x: x[0, 0] + table) for _ in "ab"]
    assert first != second
    assert like == alike


def test_callbacks_count_by_the_objects_they_refer_to():
    """Equal lists are not the same to write to; a change is not refused for them."""
    log, other = [], []

    def telling(log):
        return lambda x: jax.debug.callback(lambda y: log.append(y), x)

    (first, like), (again, _), (second, alike) = map(
        keys, (telling(log), telling(log), telling(other))
    )
    assert first == again
    assert first != second
    assert like == alike


def test_printing_is_the_library_s_own():
    """It calls no function of the user's."""
    made = [keys(lambda x: jax.debug.print("{}", x))[0] for _ in range(2)]
    assert made[0] == made[1]


def test_settings_count():
    """The precision of products is part of the program."""
    with jax.default_matmul_precision("highest"):
        precise = keys(lambda x: x @ x.T)
    with jax.default_matmul_precision("bfloat16"):
        coarse = keys(lambda x: x @ x.T)
    assert precise[0] != coarse[0]
