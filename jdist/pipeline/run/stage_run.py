"""One stage during one step: its passes, and what it keeps between them.

Both executors drive the same object, so that a pipeline over processes and one within a
process run the same compiled functions in the same order.
"""

import copy
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp

from jdist import reduction
from jdist._compat import is_traced
from jdist._tree import PyTree, add_trees, is_none, split_inexact, wide_dtype
from jdist.pipeline.stages.place import bytes_on_device, laid_like, on_mesh
from jdist.pipeline.stages.stage import Stage
from jdist.reduction import Partial
from jdist.segment import Segment
from jdist.segment.internal import (
    Deferred,
    Fold,
    Invoke,
    backward_deferring,
    join_deferred,
)


class MicroBatchShare(NamedTuple):
    """The share of a micro-batch in the gradient of the batch.

    Attributes:
      value: For max and min its extreme loss; 0 otherwise.
      weight: The sum of its weights; for max and min the number of its extremes.
    """

    value: PyTree
    weight: Any


class UpdateInBackward(NamedTuple):
    """An update that is a part of the backward pass, of its gradient alone.

    Attributes:
      fn: `fn(opt_state, d_params, (params, share)) -> (params, opt_state)`; one object
        for all passes, since it is part of what is compiled.
      opt_state: Of the optimizer; donated.
      params: The parameters that are updated.
    """

    fn: Callable[[PyTree, PyTree, tuple[PyTree, MicroBatchShare]], PyTree]
    opt_state: PyTree
    params: PyTree


@final
class StageRun:
    """The passes of one stage, and its gradient as it grows.

    Args:
      stage: The stage.
      compiled: Its segment.
      params: Its parameters, on its device.
      state: What it starts from, if it has a state.
      key: A PRNG key of this step and stage, if it takes keys.
      kind: The reduction.
      single: Whether its gradient is that of a single micro-batch.
      of_means: Whether each micro-batch's cotangents are those of its own mean, so that
        its gradient is weighted where it is added.

    Attributes:
      params: As above.
      kind: Likewise.
      state: What the last forward pass left behind.
      update: Made by the next backward pass, which then adds no gradient up; or None.
      updated: What that update has returned.
      live: Numbers of the micro-batches whose backward pass is still to come.
    """

    def __init__(
        self,
        stage: Stage,
        compiled: Segment,
        params: PyTree,
        state: PyTree,
        key: jax.Array | None,
        kind: str,
        single: bool = False,
        of_means: bool = False,
    ) -> None:
        self.params = params
        self.state = state
        self.update: UpdateInBackward | None = None
        self.updated: PyTree = None
        self._stage = stage
        self._compiled = compiled
        self._key = key
        self.kind = kind
        self._single = single
        self._invoke: Invoke = operator.call
        self._on_mesh = on_mesh(state)
        self._add: Callable[..., Partial] = added_mean if of_means else _ADD[kind]
        self._residuals: dict[int, PyTree] = {}
        self._returns: Callable[..., Any] = tuple
        self._rests: dict[int, tuple[PyTree, MicroBatchShare]] = {}
        self._deferred: dict[int, Deferred] = {}
        self._partial: Partial | None = None

    def through(self, invoke: Invoke) -> "StageRun":
        """The same stage with nothing kept, and compiled functions called by another.

        Args:
          invoke: See `Segment.through`; what it returns takes the place of arrays.
        """
        made = copy.copy(self)
        made._compiled = self._compiled.through(invoke)
        made._invoke = invoke
        made._residuals, made._rests, made._deferred = {}, {}, {}
        made._partial = None
        return made

    @property
    def live(self) -> list[int]:
        """See the class."""
        return sorted(set().union(*self._kept))

    @property
    def _kept(self) -> tuple[dict[int, PyTree], ...]:
        """Arrays that wait for a part of the backward pass, by micro-batch."""
        return self._residuals, self._rests, self._deferred

    def arrays(self) -> PyTree:
        """All arrays that it has at the moment, beside parameters and keys."""
        return self._kept, self._partial, self.state

    def kept(self, micro: int | None = None) -> dict[int, int]:
        """The bytes of each array that waits for a backward pass, by its `id`.

        On each device, if it is divided over a mesh. Parameters, which pending weight
        gradients may refer to, are not among them.

        Args:
          micro: A micro-batch; None: all of them.
        """
        of = self._kept
        kept: Any = of if micro is None else [some.get(micro) for some in of]
        own = {id(x) for x in jax.tree.leaves(self.params)}
        arrays = [x for x in jax.tree.leaves(kept) if isinstance(x, jax.Array)]
        return {id(x): bytes_on_device(x) for x in arrays if id(x) not in own}

    def forward(self, micro: int, inputs: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The outputs by name."""
        given = self._given(micro, inputs)
        # The state goes from micro-batch to micro-batch, in the schedule's order.
        (returned, state), residuals = self._compiled.forward(*given)
        # On a mesh the compiler chooses where results lie: the next pass would compile.
        self.state = laid_like(state, self.state) if self._on_mesh else state
        # Outputs are not kept: they belong to the stages that take them.
        self._residuals[micro] = residuals
        # A named tuple's cotangent has to be one, too.
        self._returns = getattr(type(returned), "_make", type(returned))
        return self._named(returned)

    def outputs(self, micro: int, inputs: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """The outputs by name, where no backward pass follows; nothing is kept."""
        returned, _ = self._compiled.outputs(*self._given(micro, inputs))
        return self._stage.named(returned)

    def _given(self, micro: int, inputs: Mapping[str, PyTree]) -> tuple[PyTree, ...]:
        """The arguments of the segment."""
        key = None
        if self._key is not None:
            key = self._invoke(fold, self._key, micro)
        values = tuple([inputs[name] for name in self._stage.inputs])
        return self.params, self.state, values, key

    def _named(self, returned: PyTree) -> dict[str, PyTree]:
        names = self._stage.outputs
        # Their number was checked when the shapes were.
        return dict(
            zip(names, [returned] if len(names) == 1 else returned, strict=True)
        )

    def backward(
        self,
        micro: int,
        cotangents: Mapping[str, PyTree],
        share: MicroBatchShare,
        split: bool,
    ) -> dict[str, PyTree]:
        """The cotangents of the inputs by name, None where none flows.

        Args:
          micro: Number of the micro-batch.
          cotangents: Of the outputs by name, None where none flows.
          share: See there.
          split: Whether `backward_params` comes later.
        """
        # Taken out first, so that their memory is free once the pass is done.
        residuals = self._residuals.pop(micro)
        d_outputs = self._cotangent(cotangents)
        passes, given = self._compiled, (self.params, residuals, d_outputs)
        if self.update is not None:
            fn, opt_state, params = self.update
            step = Fold(fn, opt_state, (params, share))
            self.updated, (_, d_inputs, _) = passes.backward(*given, fold=step)
            return self._by_input(d_inputs)
        # At the first pass: only now the places of cotangents are known.
        if self._partial is None:
            self._partial = self._begun(share, d_outputs)
        add = Fold(self._add, self._partial, share)
        # The operands wait; one product over all micro-batches follows in `finish`.
        if self._stage.join_weight_gradients:
            found = backward_deferring(passes, *given, add)
            self._partial, (_, d_inputs, _), self._deferred[micro] = found
        # The cotangent travels on before the weight gradient is computed.
        elif split:
            (_, d_inputs, _), rest = passes.backward_inputs(*given)
            self._rests[micro] = rest, share
        else:
            self._partial, (_, d_inputs, _) = passes.backward(*given, fold=add)
        return self._by_input(d_inputs)

    def _by_input(self, d_inputs: PyTree) -> dict[str, PyTree]:
        if d_inputs is None:
            return dict.fromkeys(self._stage.inputs)
        return dict(zip(self._stage.inputs, d_inputs, strict=True))

    def _begun(self, share: MicroBatchShare, d_outputs: PyTree) -> Partial | None:
        """The zero that gradients are added to; None for a single micro-batch."""
        if self._single:
            return None
        structure: Any
        leaves, structure = jax.tree.flatten(split_inexact(self.params)[0])
        others = jax.tree.leaves((leaves, share, d_outputs))
        bound = next(filter(_is_committed, others), None)
        kinds = tuple([jax.typeof(x) for x in (*leaves, *share)])
        places = tuple([_place(x, bound) for x in (*leaves, *share)])
        *leaves, value, weight = self._invoke(_nothing(kinds, places, self.kind))
        return Partial(value, structure.unflatten(leaves), weight)

    def backward_params(self, micro: int) -> None:
        """The other half of a split backward pass, if it is not for `finish`."""
        # `finish` computes it with all others.
        if micro in self._deferred:
            return
        rest, share = self._rests.pop(micro)
        add = Fold(self._add, self._partial, share)
        self._partial = self._compiled.backward_params(rest, fold=add)

    def finish(self) -> None:
        """After the last backward pass: the weight gradients of all, if joined."""
        deferred = list(self._deferred.values())
        self._deferred.clear()
        complete = Fold(_completed, self._partial)
        self._partial = join_deferred(self._compiled, deferred, complete)

    def finish_like(self, stand_ins: Sequence[int]) -> None:
        """`finish`, of a rehearsal in which some micro-batches stood for all.

        Args:
          stand_ins: For each micro-batch of the stage here the one that stood for it.
        """
        if self._deferred:
            put_off = dict(enumerate([self._deferred[micro] for micro in stand_ins]))
            self._deferred = put_off
        self.finish()

    def joined(self, found: Mapping[int, Partial]) -> Partial:
        """The partial that those of several workers make, by rank."""
        # By rank, so that all of them get the same bits.
        return functools.reduce(
            lambda a, b: self._invoke(join, a, b, self.kind),
            (found[r] for r in sorted(found)),
        )

    def finished(self, joined: Partial, unrounded: bool = False) -> PyTree:
        """The gradient that a partial makes.

        Args:
          joined: The partial of all micro-batches.
          unrounded: Whether it stays in the precision of the sum, for masters. Else it
            has the dtypes of the parameters.
        """
        if unrounded:
            return self._invoke(_unrounded, joined, self.kind)
        leaves, structure = jax.tree.flatten(split_inexact(self.params)[0])
        dtypes = tuple([str(jnp.result_type(leaf)) for leaf in leaves])
        return self._invoke(_finished, joined, dtypes, structure, self.kind)

    def clear(self) -> None:
        """The gradient so far has been used; the next one grows from nothing."""
        self._partial = None

    def partial(self) -> Partial:
        """The gradient so far, not divided yet; to be joined with other replicas'."""
        self.finish()
        assert self._partial is not None
        return self._partial

    def _cotangent(self, cotangents: Mapping[str, PyTree]) -> PyTree:
        names = self._stage.outputs
        if len(names) == 1:
            return cotangents[names[0]], None
        return self._returns([cotangents[name] for name in names]), None


@jax.jit
def fold(key: jax.Array, number: int) -> jax.Array:
    """`jax.random.fold_in`, compiled."""
    return jax.random.fold_in(key, number)


def contribution(d_params: PyTree, share: MicroBatchShare) -> Partial:
    """The partial of one micro-batch, in the dtypes of the sum."""
    wide = jax.tree.map(lambda g: g.astype(wide_dtype(g.dtype)), d_params)
    return Partial(jnp.asarray(share.value), wide, jnp.asarray(share.weight))


def added(
    kind: str, so_far: Partial | None, d_params: PyTree, share: MicroBatchShare
) -> Partial:
    """The gradient with another micro-batch's; earlier ones come first in the sum."""
    own = contribution(d_params, share)
    if so_far is not None:
        wide = jax.tree.map(_or_nothing, own.gradient, so_far.gradient, is_leaf=is_none)
        own = own._replace(gradient=wide)
    if so_far is None:
        # Without the barrier a gradient that is an array of the caller, a cotangent
        # say, would be passed through as it is; the next addition donates it.
        return jax.lax.optimization_barrier(own)
    return reduction.combine(so_far, own, kind)


def added_mean(
    so_far: Partial | None, d_params: PyTree, share: MicroBatchShare
) -> Partial:
    """The gradient with that of another micro-batch's mean, times what it weighs.

    In full precision: 16 bits hold a mean times a loss scale, but not any sum.
    """
    return added("mean", so_far, weighted(d_params, share), share)


def weighted(d_params: PyTree, share: MicroBatchShare) -> PyTree:
    """The gradient of a micro-batch's mean, times what it weighs."""

    def of_sum(mean: jax.Array) -> jax.Array:
        wide = mean.astype(wide_dtype(mean.dtype))
        return wide * jnp.asarray(share.weight, wide.dtype)

    return jax.tree.map(of_sum, d_params)


def _or_nothing(own: jax.Array | None, so_far: jax.Array | None) -> jax.Array | None:
    """A gradient that was put off adds nothing yet."""
    return -jnp.zeros_like(so_far) if own is None and so_far is not None else own


@functools.lru_cache(maxsize=256)
def _nothing(
    kinds: tuple[Any, ...], places: tuple[Any, ...], kind: str
) -> Callable[[], list[jax.Array]]:
    """Makes the partial of no micro-batch: added to any other, it changes no bit.

    Of the gradient the leaves, and then value and weight.

    With it the first micro-batch is no special case, and a stage's backward pass is
    compiled once. Zeros are negative, because 0 + -0 is 0.
    """

    def nothing_yet() -> list[jax.Array]:
        *leaves, value, weight = kinds
        leaves = [-jnp.zeros(x.shape, wide_dtype(x.dtype)) for x in leaves]
        value, weight = _zero(value), _zero(weight)
        extreme = {"max": -jnp.inf, "min": jnp.inf}.get(kind)
        if extreme is not None:
            value = jnp.full_like(value, extreme)
        return [*leaves, value, weight]

    return jax.jit(nothing_yet, out_shardings=list(places))


def _zero(kind: Any) -> jax.Array:
    # A Python number's type yields to others, and its sum's too.
    return jnp.asarray(-0.0) if kind.weak_type else -jnp.zeros((), kind.dtype)


def _is_committed(leaf: object) -> bool:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is not None
    return isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.committed


def _place(leaf: Any, bound: Any) -> jax.sharding.Sharding | None:
    """Where the gradient of a leaf will be, among computations with a bound array."""
    if _is_committed(leaf):
        return leaf.sharding
    place = getattr(bound, "sharding", None)
    if isinstance(place, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
    return place


def _completed(so_far: Partial, joined: PyTree, given: None) -> Partial:
    """The gradient with what was put off; its weights are there already."""
    wide = jax.tree.map(lambda g: g.astype(wide_dtype(g.dtype)), joined)
    return so_far._replace(gradient=add_trees(so_far.gradient, wide))


_ADD = {kind: functools.partial(added, kind) for kind in reduction.REDUCTIONS}


@functools.partial(jax.jit, static_argnums=2)
def join(first: Partial, second: Partial, kind: str) -> Partial:
    """The partial of both, compiled."""
    return reduction.combine(first, second, kind)


@functools.partial(jax.jit, static_argnums=1)
def _unrounded(part: Partial, kind: str) -> PyTree:
    return reduction.finish(part, kind, part.gradient)[1]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _finished(
    part: Partial,
    dtypes: tuple[str, ...],
    structure: jax.tree_util.PyTreeDef,
    kind: str,
) -> PyTree:
    like = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct((), d) for d in dtypes])
    return reduction.finish(part, kind, like)[1]
