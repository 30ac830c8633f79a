"""The equations that each policy may run again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import _compat
from jdist.segment._programs.recompute import may_repeat

X = np.arange(1.0, 7.0).reshape(2, 3)
N = np.arange(1, 7)
EVERYWHERE, WITH_DOTS, NOWHERE = (True, True), (False, True), (False, False)


def _key(x):
    return jax.random.bits(jax.random.key(0), x.shape)


@jax.custom_jvp
def _ramp(x):
    return jnp.maximum(x, 0.0)


@jax.custom_jvp
def _gate(x):
    return jnp.where(x > 0, x, 0.0)


_ramp.defjvps(lambda dx, _, x: dx)
_gate.defjvps(lambda dx, _, x: dx)


CASES = {
    "element-wise": (lambda x: x * jnp.tanh(x), EVERYWHERE),
    "shapes": (lambda x: jnp.broadcast_to(x.T[None], (4, 3, 2))[1:, ::-1], EVERYWHERE),
    "cast": (lambda x: x.astype(jnp.bfloat16), EVERYWHERE),
    "integers": (lambda _, n: (n + 1 > 3) & (n < 5), EVERYWHERE),
    "own derivative": (_ramp, EVERYWHERE),
    "map": (lambda x: jax.lax.map(jnp.sin, x), EVERYWHERE),
    "reduction": (lambda x: x.sum(), WITH_DOTS),
    "look-up": (lambda x: x[np.array([1, 0, 1])], WITH_DOTS),
    "random bits": (_key, WITH_DOTS),
    "loop": (lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[0], x)[1], WITH_DOTS),
    "product": (lambda x: x @ x.T, NOWHERE),
    "product in a loop": (lambda x: jax.lax.map(lambda y: y @ y, x), NOWHERE),
    "comparison": (lambda x: x > 2, NOWHERE),
    "argmax": (lambda x: jnp.argmax(x, 1), NOWHERE),
    "floor": (jnp.floor, NOWHERE),
    "to integers": (lambda x: x.astype(int), NOWHERE),
    "decision in its own derivative": (_gate, NOWHERE),
    "effect": (lambda x: jax.debug.print("{}", x), NOWHERE),
}


@pytest.mark.parametrize("name", CASES)
def test_policies(name):
    """All equations of the function must be allowed; True allows all but effects."""
    fn, expected = CASES[name]
    program, _ = _compat.trace(fn, X, *([N] if name == "integers" else []))
    allowed = [
        all(may_repeat(equation, policy) for equation in program.jaxpr.eqns)
        for policy in (False, "dots")
    ]
    assert tuple(allowed) == expected
    assert all(may_repeat(e, True) for e in program.jaxpr.eqns) == (name != "effect")
