"""The order in which gradients become final, read from the backward pass's program.

A parameter's gradient can be sent once nothing more will be added to it. Names and the
order of leaves do not show when that is (`layer10` sorts before `layer2`). The program
does: JAX writes the equations of a backward pass in the order of computation.

    program of the loss and its pull-back          (equation)   final after it
    h = x @ w1;  y = tanh(h);  z = y @ w2            0, 1, 2
    ..                                               3
    d_w2 = y^T d_z                                   4          w2
    d_y = d_z w2^T;  d_h = d_y (1 - y^2)             5, 6
    d_w1 = x^T d_h                                   7          w1

What counts is the last *costly* equation that a gradient depends on: a cast of all
gradients at the end of the program does not make them all ready last.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jdist._compat import called_program, evaluate, inner_programs
from jdist._tree import PyTree

NEVER = -1
"""The position of a value that no costly equation leads to: it is ready at the
start."""

NAMES = (
    "argmax argmin conv_general_dilated cumlogsumexp cumprod cumsum dot_general "
    "gather ragged_dot reduce_and reduce_max reduce_min reduce_or reduce_prod "
    "reduce_sum reduce_window_sum scatter scatter-add select_and_scatter_add sort "
    "top_k triangular_solve"
)
COSTLY = frozenset(NAMES.split())
"""Equations that read more than they write, or many times; the others are fused into
whatever reads their result."""


def with_gradient_order(
    fn: Callable[..., PyTree], *arguments: PyTree
) -> tuple[PyTree, PyTree]:
    """Runs a function and finds when each leaf of its result becomes final.

    The function is traced once; it may use collectives over an axis that is bound here.

    Args:
      fn: A pure function of pytrees of arrays.
      *arguments: Its arguments.

    Returns:
      `(result, ready)`: `ready` is a tree like the result, of integers: the number of
      the last costly equation that the leaf depends on, -1 where there is none.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loss = lambda p, x: jnp.sum((jnp.tanh(x @ p["first"]) @ p["last"]) ** 2)
      >>> p = {"first": jnp.ones((3, 4)), "last": jnp.ones(4)}
      >>> _, ready = with_gradient_order(jax.grad(loss), p, jnp.ones((2, 3)))
      >>> ready["last"] < ready["first"]
      True
    """
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    structure = jax.tree.structure(shapes)
    results = evaluate(program, jax.tree.leaves(arguments))
    # Read from the program that was evaluated: a second trace might order its equations
    # differently.
    ready = gradient_order(program.jaxpr)
    return (
        jax.tree.unflatten(structure, results),
        jax.tree.unflatten(structure, ready),
    )


def gradient_order(program: Jaxpr) -> list[int]:
    """For each result, the number of the last costly equation that it depends on."""
    arguments = [NEVER] * (len(program.constvars) + len(program.invars))
    # A list, so that called programs continue the same count.
    return _walk(program, arguments, counter=[0])


def _walk(program: Jaxpr, arguments: list[int], counter: list[int]) -> list[int]:
    inputs = [*program.constvars, *program.invars]
    final = dict(zip(inputs, arguments, strict=True))

    def read(atom: Any) -> int:
        return NEVER if isinstance(atom, Literal) else final[atom]

    for equation in program.eqns:
        given = [read(x) for x in equation.invars]
        inner = called_program(equation)
        if inner is not None:
            # Constants of a called program come first, and depend on nothing.
            padding = [NEVER] * len(inner.constvars)
            results = _walk(inner, [*padding, *given], counter)
        else:
            counter[0] += 1
            last = counter[0] if _is_costly(equation) else max(given, default=NEVER)
            results = [last] * len(equation.outvars)
        final.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in program.outvars]


def _is_costly(equation: JaxprEqn) -> bool:
    """Whether an equation is in `COSTLY`, is a collective, or contains programs."""
    name = equation.primitive.name
    # Collectives of the loss are costly: they wait for the other replicas.
    waits = any(key in equation.params for key in ("axis_index_groups", "axis_name"))
    return name in COSTLY or waits or bool(inner_programs(equation))
