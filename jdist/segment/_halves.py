"""The compiled functions behind a segment.

Everything is decided while JAX traces: the forward function makes the plan and returns
it in the structure of its residuals, so that the backward function finds it without any
look-up of our own. A call therefore costs what a call of a jitted function costs.

Only where the function turns out to be a program that other halves have compiled, the
call goes to these, and such calls are looked up by their shapes.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._tree import PyTree
from jdist.segment._lookup.cache import PATIENCE, VERSIONS
from jdist.segment._lookup.contents import Contents
from jdist.segment._lookup.program_key import identity_of
from jdist.segment._lookup.traced import (
    Static,
    Traced,
    TracedProgram,
    refuse_hidden,
    signature_of,
)
from jdist.segment._programs.backward import Layout, cotangents_of, gradient
from jdist.segment._programs.deferred import Deferral, defer
from jdist.segment._programs.plan import ForwardPlan, plan
from jdist.segment._programs.recompute import Policy
from jdist.segment._programs.split import split
from jdist.segment._residuals import Deferred, Residuals, Rest

FoldFunction = Callable[[Any, Any, Any], Any]
Invoke = Callable[..., Any]
"""`invoke(function, *arguments)`: `operator.call`, or what stands in for it."""


class Fold(NamedTuple):
    """A left fold over the gradients of calls, compiled into their backward passes.

    Each gradient is read while it is in the cache: adding those of one call after
    another to a sum costs a fraction of what it costs on its own.

    Attributes:
      fn: `fn(carry, d_params, given)`, pure, returns the next carry. It is known by its
        identity: a new function each time compiles each time.
      carry: Pytree of arrays, which are donated.
      given: Pytree of arrays, which are not.
    """

    fn: FoldFunction
    carry: Any
    given: Any = None


class Elsewhere(Exception):
    """The program that is being traced is compiled already, by other halves.

    Attributes:
      home: These halves.
    """

    def __init__(self, home: "Halves") -> None:
        super().__init__(home)
        self.home = home


class Halves:
    """The compiled functions of one function; JAX compiles each for new shapes.

    Args:
      fn: The function.
      policy: What may be run again.
      user: Name of the public function that compiles, for errors.
      contents: What `fn` is made of.
      label: What else tells it from others; halves of different labels share nothing.
      patience: Number of versions of the function's code that cause a warning.
      before: The halves of which these are set aside, for one of their functions.
      alone: See `Traced`.

    Attributes:
      owner: An object that only residuals of these halves share.
      forward: `(params, inputs, static) -> (outputs, residuals)`; of these only what
        nothing else holds.
      outputs: `(params, inputs, static) -> outputs`, of the same program.
      backward: `(fold, carry, given, params, residuals, d_outputs, layout) ->
        (fold(carry, d_params, given), d_inputs)`, `d_params` itself if there is no
        fold. Here and below `fold` is static, and its carry is donated.
      first: `(params, residuals, d_outputs, layout) -> (d_inputs, rest)`; of the rest
        only what nothing else holds.
      second: `(fold, carry, given, rest, layout) -> fold(carry, d_params, given)`;
        without a fold those gradients that are not in the rest.
      folding_backward, folding_second: The same with a fold.
      deferring: As `folding_backward`, with a third result: of what is kept for
        `joined` only what nothing else holds.
      joined: `(fold, carry, given, deferred, layout) -> fold(carry, d_params, given)`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        policy: Policy,
        user: str,
        contents: Contents,
        label: Hashable = None,
        patience: int = PATIENCE,
        before: "Halves | None" = None,
        alone: bool = False,
    ) -> None:
        # Compared by identity: residuals carry it in their tree structure, which JAX
        # compares.
        self.owner = object()
        self._user = user
        self._policy = policy
        self._contents = contents
        self._label = label
        self._patience = patience
        self._before = before
        self._traced: Traced = (
            before._traced.aside(fn) if before else Traced(fn, user, contents, alone)
        )
        # By signature: halves in which the program of these shapes was compiled first.
        self._elsewhere: dict[Any, Halves] = {}
        name = getattr(fn, "__name__", type(fn).__name__)
        compiled = functools.partial(_compiled, name)
        self.forward = compiled(self._run_forward, static_argnums=2)
        self.outputs = compiled(self._run_outputs, static_argnums=2)
        # The fold and the layout decide the program; the carry is not read again.
        folding = {"static_argnums": (0, 6), "donate_argnums": 1}
        ending = {"static_argnums": (0, 4), "donate_argnums": 1}
        deferring, joined = _deferring_and_joined()
        # Without a fold nothing is donated: JAX keeps the structure of arguments that
        # may be, and with it the plan, for longer than the function.
        self.backward = compiled(_backward, static_argnums=(0, 6))
        self.second = compiled(_second, static_argnums=(0, 4))
        self.folding_backward = compiled(_backward, **folding)
        self.folding_second = compiled(_second, **ending)
        self.first = compiled(_first, static_argnums=3)
        self.deferring = compiled(deferring, **folding)
        self.joined = compiled(joined, **ending)

    def aside(self, fn: Callable[..., Any]) -> "Halves":
        """For one of the functions that share these halves, when another has changed.

        What is compiled here serves it on; what is new it traces itself.
        """
        made_of = self._policy, self._user, self._contents, self._label
        return Halves(fn, *made_of, self._patience, before=self)

    def home_of(self, owner: object) -> "Halves | None":
        """The halves that made residuals for a call of these; None if none did."""
        if owner is self.owner:
            return self
        # Residuals may come from halves that were set aside since, or that had the
        # program.
        others = [*self._elsewhere.values(), *([self._before] if self._before else [])]
        for other in others:
            home = other.home_of(owner)
            if home is not None:
                return home
        return None

    def call(
        self, invoke: Invoke, half: str, params: PyTree, inputs: PyTree, static: Static
    ) -> PyTree:
        """Calls `forward` or `outputs`, here or where the program is compiled."""
        # Found only where some program is elsewhere: it costs more than a small call.
        signature = None
        if self._elsewhere:
            signature = signature_of((params, *inputs), static)
            home = self._elsewhere.get(signature)
            if home is not None:
                return home.call(invoke, half, params, inputs, static)
        try:
            return invoke(getattr(self, half), params, inputs, static)
        except Elsewhere as found:
            home = found.home
        signature = signature or signature_of((params, *inputs), static)
        self._elsewhere[signature] = home
        return home.call(invoke, half, params, inputs, static)

    def _program(self, params: PyTree, inputs: PyTree, static: Static) -> TracedProgram:
        """The function's program, if these are the halves where it is compiled.

        Raises:
          Elsewhere: It is compiled elsewhere.
        """
        arguments = (params, *inputs)
        program = self._traced.program(arguments, static)
        case = (self._policy, self._label, signature_of(arguments, static))
        key = program.outputs, identity_of(program.closed)
        home: Halves = VERSIONS.get(
            self._user, self._contents, case, key, self, self._patience
        )
        if home is not self:
            # Through JAX's trace, which is given up by that: nothing is compiled a
            # second time.
            raise Elsewhere(home)
        # Here, and not in `call`: JAX traces once for each set of shapes.
        kinds = [jax.typeof(x) for x in jax.tree.leaves(arguments)]
        VERSIONS.note_sizes(self._user, self._contents, self._label, kinds)
        return program

    def _run_forward(self, params: PyTree, inputs: PyTree, static: Static) -> PyTree:
        program = self._program(params, inputs, static)
        planned = plan(program.run, params, inputs, self._policy, self.owner)
        # The derivative rules have run, and may have brought something in.
        refuse_hidden(self._user, planned.program)
        outputs, computed = _differentiable(planned, program.run, params, inputs)
        return outputs, Residuals(planned, computed)

    def _run_outputs(self, params: PyTree, inputs: PyTree, static: Static) -> PyTree:
        return self._program(params, inputs, static).run(params, *inputs)


def _compiled(
    name: str, half: Callable[..., Any], **options: PyTree
) -> Callable[..., Any]:
    """A half, compiled under the function's name, which shows in profiles."""

    def run(*arguments: PyTree) -> PyTree:
        return half(*arguments)

    # JAX names the compiled program by the function.
    run.__name__ = f"{name}_{half.__name__.removeprefix('_run_').lstrip('_')}"
    return jax.jit(run, **options)


def _backward(
    fold: FoldFunction | None,
    carry: PyTree,
    given: PyTree,
    params: PyTree,
    residuals: Residuals,
    d_outputs: PyTree,
    layout: Layout,
) -> PyTree:
    kept = residuals.arrays
    whole = gradient(residuals.plan, kept, params, d_outputs)
    leaves = jax.tree.leaves((params, kept, d_outputs))
    d_params, d_inputs = whole.run(leaves, layout)
    if fold is not None:
        d_params = fold(carry, d_params, given)
    return d_params, d_inputs


def _first(
    params: PyTree, residuals: Residuals, d_outputs: PyTree, layout: Layout
) -> PyTree:
    kept = residuals.arrays
    parts = split(gradient(residuals.plan, kept, params, d_outputs))
    leaves = jax.tree.leaves((params, kept, d_outputs))
    d_inputs, computed = parts.first(leaves, layout)
    return d_inputs, Rest(parts, computed)


def _second(
    fold: FoldFunction | None, carry: PyTree, given: PyTree, rest: Rest, layout: Layout
) -> PyTree:
    finished = rest.split.finish(rest.arrays, layout)
    if fold is None:
        return finished  # The others are in the rest: to return them would copy them.
    return fold(carry, rest.split.gradients(rest.arrays, finished), given)


def _deferring_and_joined() -> tuple[Callable[..., Any], ...]:
    """The backward pass without its last products, and these for many calls."""
    # One object for all traces: calls are joined where theirs is the same.
    known: dict[tuple[ForwardPlan, tuple[bool, ...]], Deferral] = {}

    def deferring(
        fold: FoldFunction,
        carry: PyTree,
        given: PyTree,
        params: PyTree,
        residuals: Residuals,
        d_outputs: PyTree,
        layout: Layout,
    ) -> PyTree:
        planned, kept = residuals.plan, residuals.arrays
        # Another pattern of absent cotangents is another program, whose factors do not
        # join.
        case = planned, tuple(cotangents_of(d_outputs, planned.outputs)[1])
        if case not in known:
            known[case] = defer(gradient(planned, kept, params, d_outputs))
        leaves = jax.tree.leaves((params, kept, d_outputs))
        d_params, d_inputs, computed = known[case].first(leaves, layout)
        return fold(carry, d_params, given), d_inputs, Deferred(known[case], computed)

    def joined(
        fold: FoldFunction,
        carry: PyTree,
        given: PyTree,
        deferred: list[Deferred],
        layout: Layout,
    ) -> PyTree:
        calls = [each.arrays for each in deferred]
        return fold(carry, deferred[0].split.joined(calls, layout), given)

    return deferring, joined


def _differentiable(
    planned: ForwardPlan, fn: Callable[..., Any], params: PyTree, inputs: PyTree
) -> tuple[Any, tuple[Any, ...]]:
    """Runs the forward program so that its outputs differentiate as `fn` does."""
    leaves, structure = jax.tree.flatten((params, inputs))
    if planned.program.jaxpr.effects:
        return planned.forward(leaves)

    # The program computes what the derivative rules of `fn` do, such as a rounding,
    # whose own derivative is zero where `fn` has a rule for it. Under `jax.grad` the
    # outputs follow the rules again. JAX allows no effects in such a function.
    @jax.custom_jvp
    def run(leaves: list[Any]) -> PyTree:
        return planned.forward(leaves)

    def outputs_of(leaves: list[Any]) -> PyTree:
        params, inputs = jax.tree.unflatten(structure, leaves)
        return jax.tree.map(jnp.asarray, fn(params, *inputs))

    @run.defjvp
    def _rule(primals: PyTree, tangents: PyTree) -> PyTree:
        # Outputs by the function's own rules; what is kept by the program's, since no
        # rule of the function yields it.
        outputs, d_outputs = jax.jvp(outputs_of, primals, tangents)
        computed, d_computed = jax.jvp(
            lambda leaves: planned.forward(leaves)[1], primals, tangents
        )
        return (outputs, computed), (d_outputs, d_computed)

    return run(leaves)
