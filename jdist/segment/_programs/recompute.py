"""Which equations a backward pass may run again, and which values depend on which.

Three policies, named as in `segment(recompute=...)`:

- `False`: operations that XLA fuses into their readers, element-wise arithmetic and
  changes of shape. Running them again costs less than reading their results from
  memory.
- `"dots"`: all but matrix products, convolutions and whatever contains or hides them.
- `True`: everything.

Under the first two a *decision* is not recomputed: the outcome of a comparison, a
rounding to integers or an argmax of floating values is kept, at about a byte per
element. Its operands, recomputed by another program, may be rounded differently, and
the backward pass would then take another branch than the forward pass; the gradient of
a maximum might even find no element equal to it. An equation with an effect, such as
printing, is never run again.
"""

from collections.abc import Callable, Container, Iterable

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jdist._compat import inner_programs, loop_counts, reads

Policy = bool | str
POLICIES: tuple[Policy, ...] = (False, "dots", True)


def is_policy(given: object) -> bool:
    """Whether a value is one of `POLICIES`."""
    # 1 is equal to True, and an array compared with a text has no truth.
    return isinstance(given, bool | str) and given in POLICIES


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ARITHMETIC = _names(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt clamp complex "
    "conj convert_element_type cos cosh div eq erf erf_inv erfc exp exp2 expm1 ge gt "
    "imag integer_pow is_finite le log log1p logistic lt max min mul ne neg not "
    "one_minus_square or population_count pow real reduce_precision rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sin sinh sqrt square sub "
    "tan tanh xor"
)
SHAPES = _names(
    "bitcast_convert_type broadcast_in_dim copy expand_dims reshape rev slice split "
    "squeeze transpose"
)
CALLS = _names("custom_jvp_call jit pjit")
# Discontinuous with a floating result: decisions, like a comparison.
STEPS = _names("ceil floor nextafter rem round sign")
# Matrix products and convolutions, and what may hide them or talk to other devices.
COSTLY = _names(
    "all_gather all_to_all cholesky conv_general_dilated cumsum custom_call "
    "dot_general eig eigh ffi_call fft householder_product lu optimization_barrier "
    "pallas_call ppermute psum psum_invariant qr ragged_dot ragged_dot_general "
    "reduce_scatter svd triangular_solve"
)


def may_repeat(equation: JaxprEqn, policy: Policy) -> bool:
    """Whether the backward pass may run an equation of the forward pass again."""
    if equation.effects:
        return False
    if policy is True:
        return True
    name = equation.primitive.name
    if name in STEPS or _decides(equation):
        return False
    inner = [e for program in inner_programs(equation) for e in program.eqns]
    if not all(may_repeat(e, policy) for e in inner):
        return False
    if policy == "dots":
        return name not in COSTLY
    # A loop without a carry is element-wise over its iterations, as its body is.
    counts = loop_counts(equation)
    is_map = counts is not None and counts[1] == 0
    return name in ARITHMETIC or name in SHAPES or name in CALLS or is_map


def _decides(equation: JaxprEqn) -> bool:
    """Whether a floating argument turns into a result that is not floating."""
    return any(_is_floating(x) for x in equation.invars) and not all(
        _is_floating(x) for x in equation.outvars
    )


def _is_floating(atom: object) -> bool:
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))  # type: ignore[attr-defined]


def recipes(
    program: ClosedJaxpr,
    sources: Iterable[Var],
    repeats: Callable[[JaxprEqn], bool],
    free: Container[Var] = (),
) -> Callable[[Var], list[Var] | None]:
    """What each value of a program can be recomputed from, for `cheapest_cut`.

    Args:
      program: The program.
      sources: Values that do not depend on these are recomputed from nothing.
      repeats: Whether an equation may run again.
      free: Further values that cost nothing.
    """
    dependent = depending_on(program, sources)
    makers = {x: equation for equation in program.jaxpr.eqns for x in equation.outvars}

    def made_from(value: Var) -> list[Var] | None:
        if value not in dependent or value in free:
            return []
        maker = makers.get(value)
        if maker is None or not repeats(maker):
            return None
        read = dict.fromkeys(x for x in maker.invars if isinstance(x, Var))
        return [x for x in read if x in dependent]

    return made_from


def depending_on(program: ClosedJaxpr, sources: Iterable[Var]) -> set[Var]:
    """All values of a program that depend on the given sources, or on an effect."""
    found = set(sources)
    for equation in program.jaxpr.eqns:
        read = {x for x in equation.invars if isinstance(x, Var)}
        # An effect may bring in anything, such as the time.
        if equation.effects or (read and read <= found):
            found.update(equation.outvars)
        elif read & found:
            for result, arguments in reads(equation, program).items():
                if found.intersection(arguments):
                    found.add(result)
    return found
