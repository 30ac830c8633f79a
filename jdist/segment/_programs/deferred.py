"""Weight gradients deferred, and computed for many calls at once.

The gradient of a weight is a sum over examples, and nearly always a product that
contracts them. For the calls i = 1..k of one segment, micro-batches of a pipeline, say,

    dW = S_i a_i^T b_i = [a_1; ..; a_k]^T [b_1; ..; b_k]

so that one product of long factors replaces k of short ones, which are slower on their
own and need k additions of an array of the size of W. Operations after the product are
linear (a transposition, a sum of two uses of W) and are applied once, to the sum.

The first half of the backward program does everything but these products: it yields the
cotangents of the inputs, the gradients that end in no such product, and the factors.
The price is memory: the factors are kept until all calls have run their first halves.

    params, kept, d_outputs --> first half ---+--> d_inputs, gradients that are ready
                                              | factors
                                    of all calls --> the other gradients
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jdist._compat import evaluate, part_of
from jdist._tree import PyTree
from jdist.segment._programs.backward import BackwardProgram, Layout
from jdist.segment._programs.plan import ArrayLocations
from jdist.segment._programs.recompute import depending_on

LINEAR = ("transpose", "reshape", "squeeze", "reduce_sum", "neg")
SUMS = ("add", "add_any")


class Term(NamedTuple):
    """A summand of gradients that is summed over the calls.

    Attributes:
      value: The summand, a variable of the backward program.
      product: The program that computes it from two factors; None if the value itself
        is kept.
      places: Positions of the factors, or of the value, among the kept arrays.
      axes: For each factor, an axis that the product contracts; empty without product.
    """

    value: Var
    product: ClosedJaxpr | None
    places: tuple[int, ...]
    axes: tuple[int, ...]

    def total(self, calls: Sequence[Sequence[Any]]) -> jax.Array:
        """The sum over all calls, given what each of them has kept."""
        if self.product is None:
            values = [kept[self.places[0]] for kept in calls]
            return functools.reduce(jnp.add, values)
        factors = [
            # Along the contracted axis: the product then adds over the calls by itself.
            jnp.concatenate([kept[place] for kept in calls], axis)
            for place, axis in zip(self.places, self.axes, strict=True)
        ]
        (found,) = evaluate(self.product, factors)
        return found


@dataclass(frozen=True, eq=False)
class Deferral:
    """A backward program with some gradients of parameters deferred.

    Attributes:
      gradient: The whole backward program.
      locations: Locations of the arrays to keep among (params, kept, cotangents,
        cotangents of the inputs, computed).
      terms: The summands over the calls.
      tail: The program from the sums to the deferred gradients.
      put_off: For each gradient of a parameter, whether it is deferred.
    """

    gradient: BackwardProgram
    locations: ArrayLocations
    terms: tuple[Term, ...]
    tail: ClosedJaxpr
    put_off: tuple[bool, ...]

    def first(
        self, arguments: Sequence[Any], layout: Layout
    ) -> tuple[PyTree, PyTree, tuple[PyTree, ...]]:
        """Runs the first half for one call: `(d_params, d_inputs, computed)`.

        Deferred gradients are None; `computed` are the arrays to keep that are neither
        arguments nor in `d_inputs`.
        """
        whole = self.gradient
        ready = self._gradients(put_off=False)
        results = [*ready, *whole.d_inputs, *self.locations.computed]
        inputs = whole.program.jaxpr.invars
        # All effects run here, and none in the products, so that each happens once.
        program = part_of(whole.program, inputs, results, effects=True)
        found = iter(evaluate(program, arguments))
        d_params = self._tree([next(found) for _ in ready], layout, put_off=False)
        d_inputs = [next(found) for _ in whole.d_inputs]
        return d_params, whole.inputs_tree(d_inputs, layout), tuple(found)

    def joined(self, calls: Sequence[Sequence[Any]], layout: Layout) -> PyTree:
        """The deferred gradients, summed over all calls; None for the others.

        Args:
          calls: The kept arrays of each call.
          layout: Shardings of the leaves of (params, inputs); None on one device.
        """
        found = evaluate(self.tail, [term.total(calls) for term in self.terms])
        return self._tree(found, layout, put_off=True)

    def _gradients(self, *, put_off: bool) -> list[Any]:
        pairs = zip(self.gradient.d_params, self.put_off, strict=True)
        return [atom for atom, is_off in pairs if is_off == put_off]

    def _tree(self, values: Sequence[Any], layout: Layout, *, put_off: bool) -> PyTree:
        atoms = self._gradients(put_off=put_off)
        placed = iter(self.gradient.placed(atoms, values, layout))
        return self.gradient.params_tree(
            [next(placed) if is_off == put_off else None for is_off in self.put_off]
        )


def defer(gradient: BackwardProgram) -> Deferral:
    """Finds the final products of gradients of parameters, and defers them."""
    program, (params, kept, cotangents) = gradient.program, gradient.groups
    makers = {x: e for e in program.jaxpr.eqns for x in e.outvars}
    varying = depending_on(program, [*kept, *cotangents])

    def parts(value: Var) -> list[Var]:
        """Values of which `value` is a linear function; products where possible."""
        equation = makers.get(value)
        if equation is None or contracted(equation, varying):
            return [value]
        given = [x for x in equation.invars if isinstance(x, Var)]
        name = equation.primitive.name
        # Linear functions of the product can be applied once, to the sum over all
        # calls.
        linear = name in LINEAR and len(equation.invars) == 1
        if given and (linear or (name in SUMS and len(given) == 2)):
            return [part for x in given for part in parts(x)]
        return [value]

    def is_product(value: Var) -> bool:
        return value in makers and bool(contracted(makers[value], varying))

    ends = [parts(x) if isinstance(x, Var) else [] for x in gradient.d_params]
    put_off = tuple([any(map(is_product, own)) for own in ends])
    pairs = zip(ends, put_off, strict=True)
    summed = dict.fromkeys(x for own, is_off in pairs if is_off for x in own)
    factors = {x: makers[x].invars if is_product(x) else [x] for x in summed}
    # A factor of two products, such as a shared input, is kept once.
    held = list(dict.fromkeys(x for own in factors.values() for x in own))
    terms = [
        Term(
            value,
            part_of(program, own, [value], effects=False) if len(own) == 2 else None,
            tuple([held.index(x) for x in own]),
            contracted(makers[value], varying) if len(own) == 2 else (),
        )
        for value, own in factors.items()
    ]
    last = [x for x, is_off in zip(gradient.d_params, put_off, strict=True) if is_off]
    return Deferral(
        gradient,
        ArrayLocations.of(held, params, kept, cotangents, gradient.d_inputs),
        tuple(terms),
        part_of(program, list(factors), last, effects=False),
        put_off,
    )


def contracted(equation: JaxprEqn, varying: set[Var]) -> tuple[int, ...]:
    """An axis of each factor that a product contracts; empty if it is no product."""
    # With a weight or a constant as one of the factors nothing is gained.
    factors = {x for x in equation.invars if isinstance(x, Var) and x in varying}
    if len(equation.invars) != 2 or len(factors) != 2:
        return ()
    details, name = equation.params, equation.primitive.name
    if name == "dot_general":
        (first, second), _ = details["dimension_numbers"]
        return (first[0], second[0]) if first else ()
    # Grouped convolutions sum within their groups only, and are left alone.
    grouped = ("feature_group_count", "batch_group_count")
    if name == "conv_general_dilated" and all(details[n] == 1 for n in grouped):
        axes = details["dimension_numbers"]
        return axes.lhs_spec[1], axes.rhs_spec[1]
    return ()
