"""The compiled functions behind a segment.

Everything is decided while JAX traces: the forward function makes the plan and returns
it in the structure of its residuals, so that the backward function finds it without any
look-up of our own. A call therefore costs what a call of a jitted function costs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jdist.segment._backward import Layout, cotangents_of, gradient
from jdist.segment._deferred import Deferral, defer
from jdist.segment._plan import Plan, plan
from jdist.segment._repeat import Policy
from jdist.segment._residuals import Deferred, Residuals, Rest
from jdist.segment._split import split

Static = tuple[tuple[int, type, Any], ...]

Then = Callable[[Any, Any, Any], Any]
"""`then(carry, d_params, given)`: what is made of gradients as they are computed."""


@dataclass(frozen=True, slots=True)
class Halves:
    """The compiled functions of one function; JAX compiles each for new shapes.

    Attributes:
      owner: What tells the residuals of these halves from those of others.
      forward: `(params, inputs, static) -> (outputs, residuals)`; of these only what
        nobody else holds.
      backward: `(params, residuals, d_outputs, layout) -> (d_params, d_inputs)`.
      first: `(params, residuals, d_outputs, layout) -> (d_inputs, rest)`; of the rest
        only what nobody else holds.
      second: `(rest, layout) -> gradients`, those that are not in the rest.
      backward_then: `(then, carry, given, params, residuals, d_outputs, layout) ->
        (then(carry, d_params, given), d_inputs)`; the carry is donated.
      second_then: `(then, carry, given, rest, layout) -> then(carry, d_params, given)`;
        the carry is donated.
      deferring_then: As `backward_then`, with a third result: of what is kept for
        `joined_then` only what nobody else holds.
      joined_then: `(then, carry, given, deferred, layout) -> then(carry, d_params,
        given)`; the carry is donated.
    """

    owner: object
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    first: Callable[..., Any]
    second: Callable[..., Any]
    backward_then: Callable[..., Any]
    second_then: Callable[..., Any]
    deferring_then: Callable[..., Any]
    joined_then: Callable[..., Any]


def halves(fn: Callable[..., Any], policy: Policy) -> Halves:
    """Wraps a function's halves for compilation; they are traced when first called."""
    owner = object()

    def forward(params: Any, inputs: Any, static: Static) -> Any:
        def called(params: Any, *inputs: Any) -> Any:
            arguments = list(inputs)
            for place, _, value in static:
                arguments[place] = value
            return fn(params, *arguments)

        planned = plan(called, params, inputs, policy, owner)
        outputs, computed = _differentiable(planned, called, params, inputs)
        return outputs, Residuals(planned, computed)

    def backward(
        params: Any, residuals: Residuals, d_outputs: Any, layout: Layout
    ) -> Any:
        kept = residuals.arrays
        whole = gradient(residuals.plan, kept, params, d_outputs)
        leaves = jax.tree.leaves((params, kept, d_outputs))
        return whole.run(leaves, layout)

    def first(params: Any, residuals: Residuals, d_outputs: Any, layout: Layout) -> Any:
        kept = residuals.arrays
        parts = split(gradient(residuals.plan, kept, params, d_outputs))
        leaves = jax.tree.leaves((params, kept, d_outputs))
        d_inputs, computed = parts.first(leaves, layout)
        return d_inputs, Rest(parts, computed)

    def second(rest: Rest, layout: Layout) -> list[Any]:
        return rest.split.finish(rest.arrays, layout)

    name = getattr(fn, "__name__", type(fn).__name__)
    backward_then, second_then = _continued(backward)
    deferring_then, joined_then = _joining()
    continued = (backward_then, second_then, deferring_then, joined_then)
    for half in (forward, backward, first, second, *continued):
        half.__name__ = f"{name}_{half.__name__}"
    return Halves(
        owner,
        jax.jit(forward, static_argnums=2),
        jax.jit(backward, static_argnums=3),
        jax.jit(first, static_argnums=3),
        jax.jit(second, static_argnums=1),
        jax.jit(backward_then, static_argnums=(0, 6), donate_argnums=1),
        jax.jit(second_then, static_argnums=(0, 4), donate_argnums=1),
        jax.jit(deferring_then, static_argnums=(0, 6), donate_argnums=1),
        jax.jit(joined_then, static_argnums=(0, 4), donate_argnums=1),
    )


def _continued(backward: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """The whole backward pass, and the second half, with what is made of gradients."""

    def backward_then(
        then: Then,
        carry: Any,
        given: Any,
        params: Any,
        residuals: Residuals,
        d_outputs: Any,
        layout: Layout,
    ) -> Any:
        d_params, d_inputs = backward(params, residuals, d_outputs, layout)
        return then(carry, d_params, given), d_inputs

    def second_then(
        then: Then, carry: Any, given: Any, rest: Rest, layout: Layout
    ) -> Any:
        finished = rest.split.finish(rest.arrays, layout)
        return then(carry, rest.split.gradients(rest.arrays, finished), given)

    return backward_then, second_then


def _joining() -> tuple[Callable[..., Any], ...]:
    """The backward pass without its last products, and these for many calls."""
    # One object for all traces: calls are joined where theirs is the same.
    known: dict[tuple[Plan, tuple[bool, ...]], Deferral] = {}

    def deferring_then(
        then: Then,
        carry: Any,
        given: Any,
        params: Any,
        residuals: Residuals,
        d_outputs: Any,
        layout: Layout,
    ) -> Any:
        planned, kept = residuals.plan, residuals.arrays
        case = planned, tuple(cotangents_of(d_outputs, planned.outputs)[1])
        if case not in known:
            known[case] = defer(gradient(planned, kept, params, d_outputs))
        leaves = jax.tree.leaves((params, kept, d_outputs))
        d_params, d_inputs, computed = known[case].first(leaves, layout)
        return then(carry, d_params, given), d_inputs, Deferred(known[case], computed)

    def joined_then(
        then: Then, carry: Any, given: Any, deferred: list[Deferred], layout: Layout
    ) -> Any:
        calls = [each.arrays for each in deferred]
        return then(carry, deferred[0].split.joined(calls, layout), given)

    return deferring_then, joined_then


def _differentiable(
    planned: Plan, fn: Callable[..., Any], params: Any, inputs: Any
) -> tuple[Any, tuple[Any, ...]]:
    """Runs the forward program so that its outputs differentiate as `fn` does.

    The program is made of what the derivative rules of `fn` compute, a rounding, say,
    whose own derivative is zero where `fn` has a rule for it. Under `jax.grad` the
    outputs must follow the rules again. (JAX allows no effects in such a function.)
    """
    leaves, structure = jax.tree.flatten((params, inputs))
    if planned.program.jaxpr.effects:
        return planned.forward(leaves)

    @jax.custom_jvp
    def run(leaves: list[Any]) -> Any:
        return planned.forward(leaves)

    def outputs_of(leaves: list[Any]) -> Any:
        params, inputs = jax.tree.unflatten(structure, leaves)
        return jax.tree.map(jnp.asarray, fn(params, *inputs))

    @run.defjvp
    def _rule(primals: Any, tangents: Any) -> Any:
        outputs, d_outputs = jax.jvp(outputs_of, primals, tangents)
        computed, d_computed = jax.jvp(
            lambda leaves: planned.forward(leaves)[1], primals, tangents
        )
        return (outputs, computed), (d_outputs, d_computed)

    return run(leaves)
