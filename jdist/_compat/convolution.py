"""Convolutions in loops, which XLA's CPU compiler computes slowly as they are.

A convolution says for each axis of its operands what it is. Its fast kernels on a CPU
know one order of axes only, and the gradient of a kernel, where rows and channels have
changed places, is in another one. XLA reorders such operands itself, but not in loops
and branches, where a convolution in another order takes 20 to 70 times as long. So it
is done here. The sums are the same.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jdist._compat.programs import (
    equations_in,
    evaluate,
    with_equations,
    with_inner_programs,
)


def fast_in_loops(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function to be traced in place of `fn`, whose convolutions a CPU computes fast
    in loops too."""

    def reordered(*arguments: Any) -> Any:
        program, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
        if jax.default_backend() == "cpu":
            program = _channels_last(program)
        results = evaluate(program, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return reordered


def _convolves(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "conv_general_dilated"


def _channels_last(program: Any) -> Any:
    """A program whose convolutions, and those of the programs in it, are reordered."""
    if not any(map(_convolves, equations_in(program))):
        # The same object: what is called many times is compiled once.
        return program
    return with_equations(program, _with_channels_last)


def _with_channels_last(equation: JaxprEqn) -> list[JaxprEqn]:
    if _convolves(equation):
        return [_reordered(equation)]
    return [with_inner_programs(equation, _channels_last)]


def _reordered(equation: JaxprEqn) -> JaxprEqn:
    """A call of a convolution between transposed operands and result.

    The order is rows, window, channels for the image and the result, and window, input
    channels, output channels for the kernel.
    """
    image, kernel, result = equation.params["dimension_numbers"]
    last = len(image) - 1
    own = (0, last, *range(1, last))
    numbers = jax.lax.ConvDimensionNumbers(own, (last, last - 1, *range(last - 1)), own)

    def convolve(x: jax.Array, window: jax.Array) -> jax.Array:
        x = x.transpose(image[0], *image[2:], image[1])
        window = window.transpose(*kernel[2:], kernel[1], kernel[0])
        params = {**equation.params, "dimension_numbers": numbers}
        found = equation.primitive.bind(x, window, **params)
        return found.transpose(np.argsort((result[0], *result[2:], result[1])))

    with equation.ctx.manager:
        made = jax.make_jaxpr(jax.jit(convolve))(*[x.aval for x in equation.invars])
    (call,) = made.jaxpr.eqns
    return call.replace(
        invars=equation.invars,
        outvars=equation.outvars,
        source_info=equation.source_info,
    )
