"""One stage during one step: its passes, residuals and gradient.

All executors of schedules use the same object, so that a pipeline over processes and
one within a process run the same compiled functions in the same order.
"""

import copy
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp

from jdist import reduction
from jdist._compat import is_traced
from jdist._tree import PyTree, split_inexact, wide_dtype
from jdist.pipeline.stages.place import bytes_on_device, laid_like, on_mesh
from jdist.pipeline.stages.stage import Stage
from jdist.reduction import Partial
from jdist.segment import Segment
from jdist.segment.internal import Fold, Invoke


class UpdateInBackward(NamedTuple):
    """An update within a backward pass, by the gradient of that pass alone.

    Attributes:
      fn: `fn(opt_state, d_params, (params, share)) -> (params, opt_state)`, with the
        share of `StageRun.backward`; one object for all passes, because it is a part of
        the compiled program.
      opt_state: State of the optimizer; donated.
      params: The parameters that are updated.
    """

    fn: Callable[[PyTree, PyTree, tuple[PyTree, Partial]], PyTree]
    opt_state: PyTree
    params: PyTree


@final
@dataclass(eq=False, repr=False)
class StageRun:
    """The passes of one stage, and the gradient that they accumulate.

    Args:
      stage: The stage.
      compiled: Its segment.
      params: Its parameters, on its device.
      state: Its initial state; None for a stage without one.
      key: A PRNG key of this step and stage, if it takes keys.
      kind: How the gradients of micro-batches are joined. "sum": they are added.
        "mean": each is that of the micro-batch's own mean, and they are averaged by
        their weights. "max", "min": likewise, over those that hold the extreme.
      single: Whether its gradient is that of a single micro-batch.

    Attributes:
      state: The state after the last forward pass.
      update: An update that the next backward pass makes in place of adding its
        gradient to the sum; or None.
      updated: The return value of that update.
    """

    stage: Stage
    compiled: Segment
    params: PyTree
    state: PyTree
    key: jax.Array | None
    kind: str
    single: bool = False

    def __post_init__(self) -> None:
        """Begins without residuals and without a gradient."""
        self.update: UpdateInBackward | None = None
        self.updated: PyTree = None
        self._invoke: Invoke = operator.call
        self._on_mesh = on_mesh(self.state)
        self._residuals: dict[int, PyTree] = {}
        self._returns: Callable[..., Any] = tuple
        self._rests: dict[int, tuple[PyTree, Partial]] = {}
        self._partial: Partial | None = None

    def through(self, invoke: Invoke) -> "StageRun":
        """A copy without residuals that calls compiled functions through another one.

        Args:
          invoke: See `Segment.through`; its return values take the place of arrays.
        """
        made = copy.copy(self)
        made.compiled = self.compiled.through(invoke)
        made._invoke = invoke
        made._residuals, made._rests, made._partial = {}, {}, None
        return made

    @property
    def _kept(self) -> tuple[dict[int, PyTree], ...]:
        """Arrays kept for a part of the backward pass, by micro-batch."""
        return self._residuals, self._rests

    def arrays(self) -> PyTree:
        """All arrays that it holds at the moment, except parameters and keys."""
        return self._kept, self._partial, self.state

    def kept(self, micro: int | None = None) -> dict[int, int]:
        """The bytes of each array kept for a backward pass, by its `id`.

        The bytes are those on one device, if the array is divided over a mesh.

        Args:
          micro: A micro-batch; None: all of them.
        """
        of = self._kept
        kept: Any = of if micro is None else [some.get(micro) for some in of]
        # Pending weight gradients may refer to parameters, which take no memory of
        # their own.
        own = {id(x) for x in jax.tree.leaves(self.params)}
        arrays = [x for x in jax.tree.leaves(kept) if isinstance(x, jax.Array)]
        return {id(x): bytes_on_device(x) for x in arrays if id(x) not in own}

    def forward(self, micro: int, inputs: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Runs the forward pass of a micro-batch; returns its outputs by name."""
        given = self._given(micro, inputs)
        # The state goes from micro-batch to micro-batch, in the schedule's order.
        (returned, state), residuals = self.compiled.forward(*given)
        # On a mesh the compiler chooses the sharding of results; a state with another
        # sharding would make the next pass compile again.
        self.state = laid_like(state, self.state) if self._on_mesh else state
        # Outputs are not kept here, so that their memory is free once their consumers
        # have used them.
        self._residuals[micro] = residuals
        # `jax.vjp` wants cotangents of the structure of the outputs: those of a named
        # tuple have to be one.
        self._returns = getattr(type(returned), "_make", type(returned))
        return self._named(returned)

    def outputs(self, micro: int, inputs: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Runs a forward pass without a backward pass; returns its outputs by name."""
        returned, _ = self.compiled.outputs(*self._given(micro, inputs))
        return self.stage.named(returned)

    def _given(self, micro: int, inputs: Mapping[str, PyTree]) -> tuple[PyTree, ...]:
        """The arguments of the segment."""
        key = None
        if self.key is not None:
            key = self._invoke(fold, self.key, micro)
        values = tuple([inputs[name] for name in self.stage.inputs])
        return self.params, self.state, values, key

    def _named(self, returned: PyTree) -> dict[str, PyTree]:
        names = self.stage.outputs
        # The rehearsal has checked their number.
        return dict(
            zip(names, [returned] if len(names) == 1 else returned, strict=True)
        )

    def backward(
        self,
        micro: int,
        cotangents: Mapping[str, PyTree],
        share: Partial,
        split: bool,
    ) -> dict[str, PyTree]:
        """Runs the backward pass; returns the cotangents of the inputs by name.

        Args:
          micro: Number of the micro-batch.
          cotangents: Cotangents of the outputs by name, None where none flows.
          share: What the micro-batch contributes, without a gradient. For max and min
            its extreme loss and the number of its extremes; else 0 and the sum of its
            weights.
          split: Whether `backward_params` comes later.

        Returns:
          The cotangents by name, None where none flows.
        """
        # Removed first: this frame then holds the last reference, and their memory is
        # free once the pass is done.
        residuals = self._residuals.pop(micro)
        d_outputs = self._cotangent(cotangents)
        passes, given = self.compiled, (self.params, residuals, d_outputs)
        if self.update is not None:
            fn, opt_state, params = self.update
            step = Fold(fn, opt_state, (params, share))
            self.updated, (_, d_inputs, _) = passes.backward(*given, fold=step)
            return self._by_input(d_inputs)
        # Not in the constructor: only the cotangents show on which devices the sum
        # will be.
        if self._partial is None:
            self._partial = self._begun(share, d_outputs)
        add = Fold(_ADD[self.kind], self._partial, share)
        # The previous stage gets its cotangent before the weight gradient is computed.
        if split:
            (_, d_inputs, _), rest = passes.backward_inputs(*given)
            self._rests[micro] = rest, share
        else:
            self._partial, (_, d_inputs, _) = passes.backward(*given, fold=add)
        return self._by_input(d_inputs)

    def _by_input(self, d_inputs: PyTree) -> dict[str, PyTree]:
        if d_inputs is None:
            return dict.fromkeys(self.stage.inputs)
        return dict(zip(self.stage.inputs, d_inputs, strict=True))

    def _begun(self, share: Partial, d_outputs: PyTree) -> Partial | None:
        """The zero that gradients are added to; None for a single micro-batch."""
        # A sum of one term needs no zero, and no pass over memory for it.
        if self.single:
            return None
        structure: Any
        leaves, structure = jax.tree.flatten(split_inexact(self.params)[0])
        # The sum has to be committed as the results of the passes are, or the second
        # backward pass would be another program than the first.
        others = jax.tree.leaves((leaves, share, d_outputs))
        bound = next(filter(_is_committed, others), None)
        summed = [*leaves, share.value, share.weight]
        kinds = tuple([jax.typeof(x) for x in summed])
        places = tuple([_place(x, bound) for x in summed])
        *leaves, value, weight = self._invoke(_nothing(kinds, places, self.kind))
        return Partial(value, structure.unflatten(leaves), weight)

    def backward_params(self, micro: int) -> None:
        """Runs the second half of a split backward pass: the weight gradient."""
        rest, share = self._rests.pop(micro)
        add = Fold(_ADD[self.kind], self._partial, share)
        self._partial = self.compiled.backward_params(rest, fold=add)

    def joined(self, found: Mapping[int, Partial]) -> Partial:
        """Joins the partials of several workers, which are given by rank."""
        # In the order of ranks: addition in floating point is not associative, and all
        # replicas need the same bits.
        return functools.reduce(
            lambda a, b: self._invoke(join, a, b, self.kind),
            (found[r] for r in sorted(found)),
        )

    def finished(self, joined: Partial, unrounded: bool = False) -> PyTree:
        """The gradient: the partial divided, if it is to be, and rounded.

        Args:
          joined: The partial of all micro-batches.
          unrounded: Whether it stays in the precision of the sum, for master weights.
            Else it has the dtypes of the parameters.
        """
        like = joined.gradient if unrounded else split_inexact(self.params)[0]
        leaves, structure = jax.tree.flatten(like)
        dtypes = tuple([str(jnp.result_type(leaf)) for leaf in leaves])
        return self._invoke(_finished, joined, dtypes, structure, self.kind)

    def clear(self) -> None:
        """Drops the accumulated gradient, so that the next one starts from zero."""
        self._partial = None

    def partial(self) -> Partial:
        """The accumulated gradient before its division, to be joined over replicas."""
        assert self._partial is not None
        return self._partial

    def _cotangent(self, cotangents: Mapping[str, PyTree]) -> PyTree:
        names = self.stage.outputs
        if len(names) == 1:
            return cotangents[names[0]], None
        return self._returns([cotangents[name] for name in names]), None


@jax.jit
def fold(key: jax.Array, number: int) -> jax.Array:
    """`jax.random.fold_in`, compiled."""
    return jax.random.fold_in(key, number)


def contribution(kind: str, d_params: PyTree, share: Partial) -> Partial:
    """The partial of one micro-batch, in the dtypes of the sum."""

    def wide(leaf: jax.Array) -> jax.Array:
        # Widened before the product: 16 bits hold a mean times a loss scale, but may
        # overflow with a sum.
        term = leaf.astype(wide_dtype(leaf.dtype))
        factor = jnp.asarray(share.weight, jnp.finfo(term.dtype).dtype)
        # A batch of weight 0 has no example to put in the place of those that do not
        # count; what 0 times its infinities made of the gradient must not count either.
        return jnp.where(factor == 0, 0, term if kind == "sum" else term * factor)

    value, weight = jnp.asarray(share.value), jnp.asarray(share.weight)
    return Partial(value, jax.tree.map(wide, d_params), weight)


def added(
    kind: str, so_far: Partial | None, d_params: PyTree, share: Partial
) -> Partial:
    """Adds a micro-batch's gradient to the sum; earlier ones come first."""
    own = contribution(kind, d_params, share)
    if so_far is None:
        # Without the barrier JAX may return an array of the caller, such as a
        # cotangent, as the result; the next addition donates it.
        return jax.lax.optimization_barrier(own)
    return reduction.combine(so_far, own, kind)


def gradient_of(joined: Partial, kind: str, like: PyTree) -> PyTree:
    """The gradient in the dtypes of `like`, from the partial of all micro-batches."""
    if kind == "mean":
        mean = reduction.divided(joined.gradient, joined.weight)
        joined = joined._replace(gradient=mean)
    return reduction.finish(joined, kind, like)[1]


@functools.lru_cache(maxsize=256)
def _nothing(
    kinds: tuple[Any, ...], places: tuple[Any, ...], kind: str
) -> Callable[[], list[jax.Array]]:
    """Makes the neutral element of the sum, which changes no bit of a partial.

    With it the first micro-batch is no special case, and a stage's backward pass is
    compiled once.

    Returns:
      A function that returns the leaves of the gradient, then value and weight.
    """

    def nothing_yet() -> list[jax.Array]:
        *leaves, value, weight = kinds
        # x + -0 is x for all x; -0 + 0 is 0, so that positive zeros would lose a sign.
        leaves = [-jnp.zeros(x.shape, wide_dtype(x.dtype)) for x in leaves]
        value, weight = _zero(value), _zero(weight)
        extreme = {"max": -jnp.inf, "min": jnp.inf}.get(kind)
        if extreme is not None:
            value = jnp.full_like(value, extreme)
        return [*leaves, value, weight]

    return jax.jit(nothing_yet, out_shardings=list(places))


def _zero(kind: Any) -> jax.Array:
    # Weak types stay weak in a sum: a zero with a strong type would change the dtype
    # of the second pass's argument, and thereby its program.
    return jnp.asarray(-0.0) if kind.weak_type else -jnp.zeros((), kind.dtype)


def _is_committed(leaf: object) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is not None
    return isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.committed


def _place(leaf: Any, bound: Any) -> jax.sharding.Sharding | None:
    """The sharding of a leaf's gradient, if `bound` is a committed array beside it."""
    if _is_committed(leaf):
        return leaf.sharding
    place = getattr(bound, "sharding", None)
    # A computation on a mesh replicates an uncommitted argument.
    if isinstance(place, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
    return place


# Made once: a function is a part of the key by which a compiled pass is found.
_ADD = {kind: functools.partial(added, kind) for kind in reduction.REDUCTIONS}


@functools.partial(jax.jit, static_argnums=2)
def join(first: Partial, second: Partial, kind: str) -> Partial:
    """Joins two partials; compiled."""
    return reduction.combine(first, second, kind)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _finished(
    part: Partial,
    dtypes: tuple[str, ...],
    structure: jax.tree_util.PyTreeDef,
    kind: str,
) -> PyTree:
    like = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct((), d) for d in dtypes])
    return gradient_of(part, kind, like)
