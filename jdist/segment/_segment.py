"""Segments: a function compiled into halves, and the public calls of both.

All decisions are taken while JAX traces. The forward function makes the plan and
returns it in the tree structure of its residuals, where the backward function finds it
without a lookup. A call therefore costs as much as a call of a jitted function.

The first call traces the function. If its program is one that other halves have
compiled, the call is forwarded to those halves; forwarded calls are looked up by their
shapes.
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jdist._compat import Ahead
from jdist._errors import (
    check_function,
    check_type,
    quoted,
    requirement,
)
from jdist._tree import PyTree, is_inexact, owned, shapes_of
from jdist.segment._lookup.cache import (
    PATIENCE,
    PATIENCE_WITH_MODELS,
    VERSIONS,
    FunctionCache,
)
from jdist.segment._lookup.contents import Contents
from jdist.segment._lookup.program_key import identity_of
from jdist.segment._lookup.traced import (
    Traced,
    TracedProgram,
    refuse_hidden,
    signature_of,
)
from jdist.segment._programs.backward import Layout, gradient
from jdist.segment._programs.plan import ArrayLocations, ForwardPlan, plan
from jdist.segment._programs.recompute import POLICIES, Policy, is_policy
from jdist.segment._programs.split import split
from jdist.segment._residuals import (
    Residuals,
    Rest,
    check_version,
    explain,
    layout_of,
    refuse_origin,
    version_of,
)

FoldFunction = Callable[[Any, Any, Any], Any]
Invoke = Callable[..., Any]
"""`invoke(function, *arguments)`: `operator.call` or a replacement; see `through`."""


class Fold(NamedTuple):
    """A left fold over the gradients of calls, compiled into their backward passes.

    Each gradient is read while it is in the cache: accumulating the gradients of
    successive calls this way costs a fraction of a separate addition.

    Attributes:
      fn: `fn(carry, d_params, given)`, pure, returns the next carry. Compared by
        identity: each new function object compiles anew.
      carry: Pytree of arrays; donated.
      given: Pytree of arrays; not donated.
    """

    fn: FoldFunction
    carry: Any
    given: Any = None


class Halves:
    """Jitted forward and backward functions of one user function.

    JAX compiles each of them for every new set of shapes.

    Args:
      fn: The user function.
      policy: Recomputation policy, one of `POLICIES`.
      user: Name of the public function that compiles, for error messages.
      label: Further part of the cache key; halves of different labels share nothing.
      patience: Number of versions of the function's code that cause a warning.

    Attributes:
      traced: The function as its traced programs.
      owner: Identity token shared by the residuals of these halves and no others.
      forward: `(params, inputs) -> (outputs, residuals)`; the residuals lack
        the arrays that are inputs or outputs.
      outputs: `(params, inputs) -> outputs`, by the same traced program.
      backward: `(fold, carry, given, params, residuals, d_outputs, layout) ->
        (fold(carry, d_params, given), d_inputs)`, `d_params` itself if there is no
        fold. Here and below `fold` is static, and its carry is donated.
      first: `(params, residuals, d_outputs, layout) -> (d_inputs, rest)`; the rest
        lacks the arrays that are arguments or in `d_inputs`.
      second: `(fold, carry, given, rest, layout) -> fold(carry, d_params, given)`;
        without a fold only the gradients that are not in the rest.
      folding_backward, folding_second: The same with a fold.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        policy: Policy,
        user: str,
        label: Hashable = None,
        patience: int = PATIENCE,
    ) -> None:
        # Compared by identity: residuals carry it in their tree structure, which JAX
        # compares.
        self.owner = object()
        self.traced = Traced(fn, user)
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._user, self._policy = user, policy
        self._label, self._patience = label, patience
        # By signature: the halves in which the program of these shapes is compiled.
        self._homes: dict[Any, Halves] = {}
        self._is_home = False

    # Made when first used: other halves may have compiled all programs of this
    # function. The fold and the layout select the program; the carry is not read again.
    # Without a fold nothing is donated: JAX keeps the tree structure of arguments that
    # may be donated, and with it the plan, alive longer than the function.
    forward = cached_property(lambda x: x._jitted(x._run_forward))
    outputs = cached_property(lambda x: x._jitted(x._run_outputs))
    backward = cached_property(lambda x: x._jitted(_backward, 0, 6))
    first = cached_property(lambda x: x._jitted(_first, 3))
    second = cached_property(lambda x: x._jitted(_second, 0, 4))
    folding_backward = cached_property(
        lambda x: x._jitted(_backward, 0, 6, donate_argnums=1)
    )
    folding_second = cached_property(
        lambda x: x._jitted(_second, 0, 4, donate_argnums=1)
    )

    def _jitted(
        self, half: Callable[..., Any], *static: int, **options: PyTree
    ) -> Callable[..., Any]:
        """Jits a half under the user function's name, which profiles show."""

        def run(*arguments: PyTree) -> PyTree:
            return half(*arguments)

        # JAX names the compiled program by the function.
        suffix = half.__name__.removeprefix("_run_").lstrip("_")
        run.__name__ = f"{self._name}_{suffix}"
        return jax.jit(run, static_argnums=static, **options)

    @property
    def contents(self) -> Contents:
        """What the function read when it was traced last; see `Traced`."""
        return self.traced.contents

    def home_of(self, owner: object) -> "Halves | None":
        """The halves with this `owner` among these and related ones; else None."""
        if owner is self.owner:
            return self
        # Residuals may come from the halves to which calls are forwarded.
        homes = self._homes.values()
        return next((home for home in homes if home.owner is owner), None)

    def call(self, invoke: Invoke, half: str, params: PyTree, inputs: PyTree) -> PyTree:
        """Calls `forward` or `outputs` of the halves that compile the program."""
        home = self
        # Where the first program was compiled here, the others are too, and JAX finds
        # them: a signature costs more than a small call.
        if not self._is_home:
            home = self._home((params, *inputs))
            self._is_home = home is self
        return invoke(getattr(home, half), params, inputs)

    def _home(self, arguments: tuple[Any, ...]) -> "Halves":
        """The halves that have compiled the program for these shapes; else these."""
        signature = signature_of(arguments)
        home = self._homes.get(signature)
        if home is None:
            program = self.traced.program(arguments)
            case = (self._policy, self._label, signature)
            key = program.outputs, identity_of(program.closed)
            home = self._homes[signature] = VERSIONS.get(
                self._user, self.contents, case, key, self, self._patience
            )
        return home

    def _program(self, params: PyTree, inputs: PyTree) -> TracedProgram:
        """The traced program, about to be compiled."""
        arguments = (params, *inputs)
        self._home(arguments)
        # Here, and not in `call`: JAX traces once for each set of shapes.
        kinds = [jax.typeof(x) for x in jax.tree.leaves(arguments)]
        VERSIONS.note_sizes(self._user, self.contents, self._label, kinds)
        return self.traced.program(arguments)

    def _run_forward(self, params: PyTree, inputs: PyTree) -> PyTree:
        program = self._program(params, inputs)
        planned = plan(program.run, params, inputs, self._policy, self.owner)
        # Derivative rules have run since the first check, and may close over tracers.
        refuse_hidden(self._user, planned.program)
        outputs, computed = _differentiable(planned, program.run, params, inputs)
        return outputs, Residuals(planned, computed)

    def _run_outputs(self, params: PyTree, inputs: PyTree) -> PyTree:
        return self._program(params, inputs).run(params, *inputs)


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
        return finished  # The others are in the rest; returning them would copy them.
    return fold(carry, rest.split.gradients(rest.arrays, finished), given)


def _differentiable(
    planned: ForwardPlan, fn: Callable[..., Any], params: PyTree, inputs: PyTree
) -> tuple[Any, tuple[Any, ...]]:
    """Runs the forward program so that its outputs differentiate as `fn` does."""
    leaves, structure = jax.tree.flatten((params, inputs))
    if planned.program.jaxpr.effects:
        return planned.forward(leaves)

    # The traced program has the derivative rules of `fn` inlined: differentiated as it
    # is, a rounding with a straight-through rule would yield zero. The custom JVP makes
    # `jax.grad` follow the rules of `fn` again. JAX allows no effects in such a
    # function, hence the return above.
    @jax.custom_jvp
    def run(leaves: list[Any]) -> PyTree:
        return planned.forward(leaves)

    def outputs_of(leaves: list[Any]) -> PyTree:
        params, inputs = jax.tree.unflatten(structure, leaves)
        return jax.tree.map(jnp.asarray, fn(params, *inputs))

    @run.defjvp
    def _rule(primals: PyTree, tangents: PyTree) -> PyTree:
        # Outputs follow the function's own rules; kept values follow the program's,
        # since no rule of the function yields them.
        outputs, d_outputs = jax.jvp(outputs_of, primals, tangents)
        computed, d_computed = jax.jvp(
            lambda leaves: planned.forward(leaves)[1], primals, tangents
        )
        return (outputs, computed), (d_outputs, d_computed)

    return run(leaves)


# --- the calls of both halves ---

CACHE: FunctionCache[Halves] = FunctionCache("segment", size=256)
_NO_FOLD = (None, None, None)


class LoweredHalves(NamedTuple):
    """The lowered programs of a segment for given shapes; see `Segment.lower`.

    Attributes:
      forward: The program that `Segment.forward` runs.
      backward: The program that `Segment.backward` runs if every floating output has a
        cotangent.
      kept: Shapes and dtypes of the arrays kept for the backward pass.
      computed: Those of them that the forward pass allocates: the memory of a call in
        flight. The others are inputs and outputs, kept by reference.
    """

    forward: jax.stages.Lowered
    backward: jax.stages.Lowered
    kept: tuple[jax.ShapeDtypeStruct, ...]
    computed: tuple[jax.ShapeDtypeStruct, ...]


class Segment:
    """A pure function compiled into a forward and a backward half; made by `segment`.

    The halves are compiled when first called, once per set of shapes and per pattern
    of absent cotangents, and are shared by all segments of the same program.
    A segment may be used by several threads at a time, and inside JAX's
    transformations: under `jax.grad` its outputs differentiate as `fn` does.

    Attributes:
      fn: The function.
    """

    __slots__ = ("_guarded", "_halves", "_invoke", "fn")

    def __init__(
        self,
        fn: Callable[..., Any],
        halves: Halves,
        invoke: Invoke = operator.call,
        guarded: bool = False,
    ) -> None:
        self.fn = fn
        self._halves = halves
        self._invoke = invoke
        # Whether each call checks what `fn` reads; else the caller does, once for many.
        self._guarded = guarded

    def __repr__(self) -> str:
        return f"segment({getattr(self.fn, '__qualname__', self.fn)})"

    def through(self, invoke: Invoke) -> "Segment":
        """The same segment, with its compiled functions called through `invoke`.

        Args:
          invoke: `invoke(function, *arguments)` replaces `function(*arguments)`; it may
            compile ahead of time, and return shapes for shapes.
        """
        return Segment(self.fn, self._halves, invoke, self._guarded)

    def forward(self, params: PyTree, *inputs: PyTree) -> tuple[PyTree, Residuals]:
        """Runs the function and keeps what its backward pass needs.

        Args:
          params: Pytree of arrays. Not kept: the backward pass must be given the same.
          *inputs: Pytrees of arrays, as `fn` takes them; integers, booleans and PRNG
            keys too. Inputs and outputs are kept by reference, where the backward pass
            needs them: they must not be donated before it.

        Returns:
          The outputs of `fn`, and the residuals. These hold arrays that depend on the
          inputs, of the fewest bytes that suffice.

        Raises:
          TypeError: `fn` reads a value that is being traced.
          ValueError: What `fn` reads has changed since it was first compiled, and its
            program with it.
        """
        # The compiled function returns only arrays that are neither inputs nor outputs;
        # those are added here, by reference.
        outputs, saved = self._call("forward", params, inputs)
        plan = saved.plan
        leaves = jax.tree.leaves((params, inputs, outputs))
        given, arguments = plan.param_count, len(plan.trained)
        kept = _gathered(
            plan.locations, leaves[given:arguments], leaves[arguments:], saved.arrays
        )
        # The caller may write to a NumPy array before the backward pass reads it.
        kept = tuple(
            [jax.device_put(owned(x)) if type(x) is np.ndarray else x for x in kept]
        )
        version, layout = version_of(leaves[:given]), layout_of(leaves[:arguments])
        return outputs, Residuals(plan, kept, version, layout)

    def outputs(self, params: PyTree, *inputs: PyTree) -> PyTree:
        """Computes the outputs of `forward` alone, if no backward pass follows.

        Args and errors are those of `forward`. It runs the program that `forward`
        differentiates: for the same shapes `fn` is traced once for both.
        """
        return self._call("outputs", params, inputs)

    def check(self) -> None:
        """Checks that the function reads what it read when it was first compiled.

        Raises:
          ValueError: It would now be compiled to another program.
        """
        self._halves.traced.check()

    def backward(
        self,
        params: PyTree,
        residuals: Residuals,
        d_outputs: PyTree,
        *,
        fold: Fold | None = None,
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        """Pulls the cotangents of the outputs back to parameters and inputs.

        Args:
          params: The very arrays that `forward` was given.
          residuals: What that call of `forward` returned. They can be used again.
          d_outputs: Tree like the outputs: the cotangents, of the outputs' shapes and
            dtypes. None in place of a leaf or of a whole subtree: no cotangent flows
            there, and work needed only for it is left out. Outputs that are not
            floating have None.
          fold: Applied to the gradients in the same program, such as a sum over calls.

        Returns:
          `(d_params, d_inputs)`. `d_params` is a tree like the parameters, with zeros
          where nothing flows, and None for a parameter that is not floating. `d_inputs`
          is a tuple like the inputs, with None where no cotangent flows: inputs that
          are not floating, and those that no output with a cotangent depends on. Each
          has the dtype and the sharding of its parameter or input. With a
          fold, the fold's result replaces `d_params`.

        Raises:
          ValueError: The parameters are not those of the forward pass; an array that is
            needed was donated or deleted; the residuals are of another segment; or
            `d_outputs` does not fit the outputs.
          TypeError: `residuals` is not what `forward` returned, `fold` is no `Fold`, or
            a leaf is no array.
        """
        arguments = (params, residuals, d_outputs)
        _check_fold("Segment.backward", fold)
        half = "backward" if fold is None else "folding_backward"
        return self._pull_back("Segment.backward", half, arguments, fold or _NO_FOLD)

    def backward_inputs(
        self, params: PyTree, residuals: Residuals, d_outputs: PyTree
    ) -> tuple[tuple[PyTree, ...], Rest]:
        """The first half of `backward`: the cotangents of the inputs.

        Args and errors are those of `backward`.

        Returns:
          `(d_inputs, rest)`: what `backward` returns for the inputs, and what
          `backward_params` needs for the second half, without any work done twice.
          The rest refers to parameters, residuals and cotangents (those passed in and
          those returned) that it needs: these must not be donated before
          `backward_params`.
        """
        arguments = (params, residuals, d_outputs)
        call = "Segment.backward_inputs"
        d_inputs, found = self._pull_back(call, "first", arguments)
        arrays = _held(found, arguments, d_inputs)
        return d_inputs, Rest(found.split, arrays, residuals.layout)

    def backward_params(self, rest: Rest, *, fold: Fold | None = None) -> PyTree:
        """The second half of `backward`: the gradients of the parameters.

        Args:
          rest: What `backward_inputs` returned.
          fold: As for `backward`.

        Returns:
          `d_params`, as `backward` returns it, equal to rounding. Arrays may be shared
          with the rest. With a fold, the fold's result.

        Raises:
          ValueError: An array that is needed was donated or deleted; or the rest is of
            another segment.
          TypeError: `rest` is not what `backward_inputs` returned, or `fold` is no
            `Fold`.
        """
        call = "Segment.backward_params"
        home = self._home(call, rest, Rest)
        _check_fold(call, fold)
        second = home.second if fold is None else home.folding_second
        finished: Any = []
        # Without a fold, all gradients may be in the rest already: the call is saved.
        if fold is not None or None in rest.split.ready:
            try:
                finished = self._invoke(second, *(fold or _NO_FOLD), rest, rest.layout)
            except (RuntimeError, ValueError) as error:
                explain(call, error, {"rest": rest})
                raise
        if fold is not None:
            return finished
        return rest.split.gradients(rest.arrays, finished)

    def lower(self, params: PyTree, *inputs: PyTree) -> LoweredHalves:
        """Lowers the programs of both halves, without compiling or running them.

        Args:
          params: As for `forward`; each array may be a shape (`jax.ShapeDtypeStruct`),
            with the sharding that the array will have, also over absent devices.
          *inputs: Likewise.

        Raises: what `forward` raises.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> seg = segment(lambda w, x: jnp.tanh(x @ w).sum())
          >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
          >>> found = seg.lower(shape(3, 4), shape(5, 3))
          >>> [x.shape for x in found.kept], [x.shape for x in found.computed]
          ([(5, 4), (5, 3)], [(5, 4)])
        """
        params, given = shapes_of((params, inputs))
        ahead = Ahead(places=True)
        through = self.through(ahead)
        outputs, residuals = through.forward(params, *given)
        d_outputs = jax.tree.map(lambda y: y if is_inexact(y) else None, outputs)
        through.backward(params, residuals, d_outputs)
        forward, backward = [traced.lower() for traced in ahead.traced]
        pairs = zip(residuals.arrays, residuals.plan.locations.places, strict=True)
        # The groups are inputs, outputs, and what is computed.
        computed = tuple([x for x, (group, _) in pairs if group == 2])
        return LoweredHalves(forward, backward, residuals.arrays, computed)

    def _call(self, half: str, params: PyTree, inputs: PyTree) -> PyTree:
        # Written out for the common case.
        if self._guarded and not self._halves.traced.contents.hold():
            self.check()
        try:
            return self._halves.call(self._invoke, half, params, inputs)
        except TypeError as error:
            explain(f"Segment.{half}", error, {"params": params, "inputs": inputs})
            raise

    def _pull_back(
        self,
        call: str,
        half: str,
        arguments: tuple[Any, Residuals, Any],
        fold: tuple[Any, ...] = (),
    ) -> PyTree:
        params, residuals, _ = arguments
        home = self._home(call, residuals, Residuals)
        check_version(call, params, residuals.version)
        compiled = getattr(home, half)
        try:
            return self._invoke(compiled, *fold, *arguments, residuals.layout)
        except (RuntimeError, TypeError, ValueError) as error:
            # JAX's own error names neither the argument nor the leaf.
            names = ("params", "residuals", "d_outputs")
            explain(call, error, dict(zip(names, arguments, strict=True)))
            raise

    def _home(self, call: str, value: PyTree, kind: PyTree) -> Halves:
        """The halves that made `value`; raises if that was another segment's call."""
        if type(value) is kind:
            owner, own = value.owner, self._halves
            # Nearly always these halves; the search costs as much as all of this check.
            home = own if owner is own.owner else own.home_of(owner)
            if home is not None:
                return home
        refuse_origin(call, value, kind)


def forward_arrays(
    segment: Segment, arrays: tuple[ArrayLike, ...]
) -> tuple[PyTree, Residuals]:
    """`segment.forward((), *arrays)` with half the Python overhead.

    Args:
      segment: Made by `pure_segment`.
      arrays: The inputs. NumPy arrays are kept without a copy: they must not be written
        to afterwards.
    """
    outputs, saved = segment._halves.call(segment._invoke, "forward", (), arrays)
    plan = saved.plan
    kept: tuple[Any, ...] = ()
    if plan.kept:
        leaves = jax.tree.leaves(outputs)
        kept = _gathered(plan.locations, arrays, leaves, saved.arrays)
    return outputs, Residuals(plan, kept, None, layout_of(arrays))


def backward_arrays(
    segment: Segment, residuals: Residuals, d_outputs: PyTree
) -> tuple[PyTree, ...]:
    """`segment.backward((), residuals, d_outputs)[1]` with half the Python overhead."""
    arguments = ((), residuals, d_outputs)
    halves = segment._halves
    if residuals.plan.owner is not halves.owner:  # Made by halves of the same program.
        return segment.backward(*arguments)[1]
    try:
        _, d_inputs = halves.backward(*_NO_FOLD, *arguments, residuals.layout)
    except (RuntimeError, ValueError) as error:
        names = {"residuals": residuals, "d_outputs": d_outputs}
        explain("Segment.backward", error, names)
        raise
    return tuple(d_inputs)


def _check_fold(call: str, fold: object) -> None:
    if fold is not None and not (isinstance(fold, Fold) and callable(fold.fn)):
        rule = "must be a Fold of a function, or None"
        raise TypeError(requirement(f"{call}(fold=...)", rule, quoted(fold)))


def _gathered(locations: ArrayLocations, *groups: Sequence[Any]) -> tuple[Any, ...]:
    """The arrays at these locations, taken from the groups."""
    return tuple([groups[number][place] for number, place in locations.places])


def _held(
    found: Rest, arguments: tuple[Any, Residuals, Any], d_inputs: PyTree
) -> tuple[Any, ...]:
    """All arrays to keep: arguments and `d_inputs` by reference, and computed ones."""
    params, residuals, d_outputs = arguments
    return _gathered(
        found.split.locations,
        jax.tree.leaves(params),
        residuals.arrays,
        jax.tree.leaves(d_outputs),
        jax.tree.leaves(d_inputs),
        found.arrays,
    )


def segment(
    fn: Callable[..., Any],
    *,
    recompute: Policy = False,
    label: Hashable = None,
) -> Segment:
    """Compiles a pure function into a forward and a backward half.

        outputs, residuals = seg.forward(params, *inputs)
        d_params, d_inputs = seg.backward(params, residuals, d_outputs)

    The residuals depend on the inputs: neither a parameter nor anything computed from
    parameters only is among them, so that k calls in flight cost k times the
    activations and never k times the weights.

    Args:
      fn: `fn(params, *inputs) -> outputs`, pure; all are pytrees of arrays. Other
        values that it reads (closure, globals, defaults, attributes) count as they are
        when it is first traced; a call after a change that matters is refused. Segments
        of one code object share compiled programs where these are equal: a mode or a
        size is closed over, or given by `functools.partial`.
      recompute: What the backward pass may recompute instead of reading it from the
        residuals. False: element-wise arithmetic, which costs next to nothing. "dots":
        all but matrix products, convolutions and the like. True: everything; only
        inputs are kept.
      label: Marks versions of one code object as intended, such as the stages of a
        pipeline made by one factory, rather than made by a closure by accident.
        Segments of different labels share nothing. With a label, the sixteenth version
        causes a warning instead of the third.

    Returns:
      A `Segment`.

    Raises:
      TypeError: `fn` is no function, or refers to a value that is being traced (also
        when it is first called).
      ValueError: `recompute` is none of the above.

    Example:
      >>> import jax.numpy as jnp
      >>> seg = segment(lambda w, x: jnp.tanh(x @ w))
      >>> w, x = jnp.array([[1.0], [2.0]]), jnp.array([[0.3, -0.1]])
      >>> y, residuals = seg.forward(w, x)
      >>> d_w, (d_x,) = seg.backward(w, residuals, jnp.ones_like(y))
      >>> [round(float(d), 3) for d in d_x[0]]
      [0.99, 1.98]

    References:
      Narayanan et al., PipeDream, SOSP 2019, section 3.3 (weights and activations of
      micro-batches in flight); Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024
      (the split backward).
    """
    check_function("segment(fn)", fn)
    check_type("segment(label=...)", label, Hashable, "must be hashable")
    if not is_policy(recompute):
        rule = f"must be one of {', '.join(map(repr, POLICIES))}"
        raise ValueError(requirement("segment(recompute=...)", rule, recompute))
    patience = PATIENCE if label is None else PATIENCE_WITH_MODELS
    halves = CACHE.get(
        fn,
        (recompute, label),
        lambda _: Halves(fn, recompute, "segment", label, patience),
    )
    return Segment(fn, halves, guarded=True)


def unguarded(segment: Segment) -> Segment:
    """The same segment for a caller who checks by itself, once for many calls."""
    return Segment(segment.fn, segment._halves)
