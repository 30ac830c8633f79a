"""A least-squares estimate of how often a gradient counts each use of a parameter.

A parameter that a program uses in several places has the sum of their gradients, of
which a pipeline with tied parameters, or a psum in a wrong place, may leave some out or
add some twice. Each use is given a copy of the parameter here. With the copies'
gradients g_k, a gradient g that is wrong in this way alone is sum_k c_k g_k, and least
squares finds the counts c_k: a right one has all of them 1. Where the loss is given in
terms, of the calls or devices that compute it, each use has a count for each term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, repeat
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jdist._tree import PyTree, named_leaves
from jdist.verify.evaluation.lockstep import bind, called, interpreted

MOST = 8
"""Maximum number of uses to tell apart: each costs a gradient of the parameter's
size."""

LIKENESS = 1e-4
"""The share of the gradient's norm that may remain unexplained. A gradient that is
wrong in another way is not a sum of some of its parts to this precision."""

# These only move the parameter; the use is the equation behind them.
_PASSED_ON = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze",
    "transpose",
})  # fmt: skip


class _Parameter(NamedTuple):
    """A placeholder for a parameter, with the equations that moved it so far."""

    place: int
    moves: tuple[JaxprEqn, ...] = ()


def uses_counted(
    fn: Callable[[PyTree], jax.Array],
    params: PyTree,
    gradients: Mapping[str, Any],
    terms: Sequence[str] = ("",),
) -> dict[str, str]:
    """How often gradients count each use of their parameters.

    Args:
      fn: The scalar loss, as a function of the parameters; or `(terms,)`, its terms.
      params: Pytree.
      gradients: What was found for some of its floating leaves, by path.
      terms: Names of the terms, such as "examples 0-2".

    Returns:
      By path, words such as "gather once, dot_general 0 times", by the operations that
      use the parameter; of those leaves alone where this explains the gradient.
    """
    leaves, structure = jax.tree.flatten(params)
    paths = [path for path, leaf in named_leaves(params).items() if leaf is not None]
    program = jax.make_jaxpr(lambda *own: fn(jax.tree.unflatten(structure, own)))(
        *leaves
    )
    own = {paths.index(path): np.asarray(x) for path, x in gradients.items()}
    # Traced once for the names of the uses, and so for the number of copies.
    uses: dict[int, list[str]] = {}
    copies: dict[int, Any] = {place: repeat(leaves[place]) for place in own}
    jax.eval_shape(
        lambda all_leaves: _evaluate(program, all_leaves, copies, uses), leaves
    )
    uses = {
        place: _numbered(uses[place])
        for place, gradient in own.items()
        if 2 <= len(uses[place]) <= MOST and not _few(gradient, uses[place], terms)
    }

    @jax.jit
    def parts(copies: dict[int, list[jax.Array]], leaves: list[Any]) -> Any:
        def loss(copies: dict[int, list[jax.Array]]) -> jax.Array:
            given = {place: iter(each) for place, each in copies.items()}
            return _evaluate(program, leaves, given, {})

        return jax.jacrev(loss)(copies)

    each = {place: [leaves[place]] * len(names) for place, names in uses.items()}
    found = parts(each, leaves) if each else {}
    told = {
        paths[place]: _counted(names, found[place], own[place], terms)
        for place, names in uses.items()
    }
    return {path: words for path, words in told.items() if words}


def _few(gradient: np.ndarray, names: Sequence[str], terms: Sequence[str]) -> bool:
    """Whether some counts would explain a gradient whatever it is."""
    return len(terms) > 1 and len(names) * len(terms) > gradient.size // 2


def _counted(
    uses: Sequence[str],
    found: Sequence[jax.Array],
    gradient: np.ndarray,
    terms: Sequence[str],
) -> str:
    """The counts of one leaf in words; empty if they explain nothing."""
    parts = {
        (use, term): own
        for use, part in zip(uses, found, strict=True)
        for term, own in zip(
            terms, np.asarray(part, np.float64).reshape(len(terms), -1), strict=True
        )
        if own.any()  # A comparison, or what stands behind `stop_gradient`, has none.
    }
    counts = _solved(list(parts.values()), gradient) if len(parts) > 1 else None
    if counts is None or np.ptp(counts) < LIKENESS:
        return ""  # One factor for all is said of the leaf itself.
    told: dict[str, dict[str, str]] = {}
    for (use, term), number in zip(parts, counts, strict=True):
        told.setdefault(use, {})[term] = _times(number)
    return ", ".join(f"{use} {_of_terms(own)}" for use, own in told.items())


def _of_terms(counts: Mapping[str, str]) -> str:
    """How often a use counts; by the terms, if they differ in it."""
    if len(set(counts.values())) == 1:
        return next(iter(counts.values()))
    return " and ".join(f"{times} of {term}" for term, times in counts.items())


def _solved(parts: Sequence[np.ndarray], gradient: np.ndarray) -> np.ndarray | None:
    """The counts that explain a gradient, if only one set of them does."""
    found = np.asarray(gradient, np.float64).ravel()
    # Normalized columns: the least singular value then measures how alike they are.
    sizes = np.array([np.linalg.norm(part) for part in parts])
    if not (np.isfinite(found).all() and np.isfinite(sizes).all()):
        return None
    matrix = np.stack(parts, 1) / sizes
    solution, _, rank, singular = np.linalg.lstsq(matrix, found)
    if rank < len(parts) or singular[-1] < math.sqrt(LIKENESS):
        return None
    left = np.linalg.norm(found - matrix @ solution)
    scale = max(np.linalg.norm(found), sizes.max())
    return solution / sizes if left <= LIKENESS * scale else None


def _times(number: float) -> str:
    rounded = round(float(number), 2) + 0.0  # Not -0.
    return "once" if rounded == 1 else f"{rounded:g} times"


def _numbered(names: Sequence[str]) -> list[str]:
    """Appends a number to each name that occurs more than once."""
    numbers = {name: count(1) for name in names}
    return [
        f"{name} ({next(numbers[name])})" if names.count(name) > 1 else name
        for name in names
    ]


def _evaluate(
    program: ClosedJaxpr,
    leaves: Sequence[Any],
    copies: Mapping[int, Iterator[jax.Array]],
    names: dict[int, list[str]],
) -> jax.Array:
    """The result of a program in which uses of some arguments have copies of their own.

    `names` becomes the primitives of the uses, in the order of the copies.
    """
    names.update((place, []) for place in copies)

    def used(parameter: _Parameter, name: str) -> jax.Array:
        names[parameter.place].append(name)
        value = next(copies[parameter.place])
        for move in parameter.moves:
            (value,) = bind(move, [value])
        return value

    def run(inner: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        given = inner.jaxpr, inner.consts, inputs
        return interpreted(*given, call, lambda literal: literal.val)

    def call(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if not any(isinstance(each, _Parameter) for each in operands):
            return bind(equation, operands)
        if name in _PASSED_ON and len(operands) == 1:
            moved: _Parameter = operands[0]
            return [moved._replace(moves=(*moved.moves, equation))]
        # A custom rule may return any derivative, so the call itself is the use.
        inner = None if name.startswith("custom_") else called(equation)
        if inner is not None:
            return run(inner, operands)
        given = [used(x, name) if isinstance(x, _Parameter) else x for x in operands]
        return bind(equation, given)

    arguments = [_Parameter(i) if i in copies else x for i, x in enumerate(leaves)]
    (result,) = run(program, arguments)
    return used(result, "the result") if isinstance(result, _Parameter) else result
