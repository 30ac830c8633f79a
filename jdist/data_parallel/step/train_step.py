"""A training step over replicas, compiled once, with a donated state.

                     replica 0 .. K-1, each on its own rows
    state, batch --> [ micro-batch 1 .. k: forward, backward; partials summed ]
                     one reduction over the replicas
                 --> clip by the global norm --> optimizer --> state, metrics

Random numbers depend on the state only:

    key of micro-batch j on replica r at step t = fold(fold(fold(key, t), r), j)

with fold = `jax.random.fold_in`. They depend on the number of replicas; to avoid that,
put a key per example into the batch (`jax.random.split(key, examples)`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jdist._compat import Ahead, alike, called_outside_mesh, paced
from jdist._errors import (
    check_choice,
    check_flags,
    check_function,
    check_number,
    type_error,
    value_error,
)
from jdist._fit import Metrics
from jdist._tree import (
    PyTree,
    check_arrays,
    check_state,
    is_iterator,
    is_shape,
    shapes_of,
)
from jdist.data_parallel.gradient.buckets import Cap
from jdist.data_parallel.gradient.communication import Communication
from jdist.data_parallel.gradient.hook_state import check_hook_rows, structured
from jdist.data_parallel.gradient.loss import Loss
from jdist.data_parallel.gradient.scattered import can_scatter, scattered_spec
from jdist.data_parallel.hooks import Bucket, Hook
from jdist.data_parallel.replicas.broadcast import spread
from jdist.data_parallel.replicas.inputs import are_ready, brought, prepared
from jdist.data_parallel.replicas.layout import check_mesh, check_params
from jdist.data_parallel.replicas.mapping import EACH, over_replicas
from jdist.data_parallel.replicas.placement import Placement
from jdist.data_parallel.replicas.shards import (
    Weights,
    check_one_per_row,
    check_weighted,
    rows_in,
)
from jdist.data_parallel.step.model_state import RULES
from jdist.data_parallel.step.nnx_loss import check_stateless
from jdist.data_parallel.step.replica_step import ReplicaStep, evaluation
from jdist.data_parallel.step.train_state import TrainState
from jdist.data_parallel.step.zero import check_undivided, is_divided_over
from jdist.optim import Optimizer, clip_by_global_norm
from jdist.optim.internal import check_optimizer, computed_in
from jdist.segment.internal import GuardedJit


class Synchronization(TypedDict, total=False):
    """How a step joins the results of replicas and micro-batches; all are optional."""

    reduction: str
    """The reduction of the losses: "mean", the default, "sum", "max" or "min"; see
    `value_and_grad`."""

    accumulate: int
    """Micro-batches per replica and step, 1 by default, one after another: activations
    of one at a time, and one sum over the replicas for all."""

    method: str
    """Collective for gradients: "all_reduce" or "all_gather"; see `value_and_grad`."""

    bucket_cap_mb: Cap
    """Which gradients travel together; see `value_and_grad`."""

    hook: Hook | Callable[[PyTree, Bucket], tuple[PyTree, Bucket]] | None
    """Compresses gradients on their way; see `value_and_grad`."""

    states: str
    """Rule for model state: "mean", the default, or "first"; see `synchronized`."""


# `jax.jit` caches programs by a weak reference to the function.
@dataclass(frozen=True, slots=True, weakref_slot=True)
class TrainStep:
    """A compiled training step; made by `train_step`, and called like a function.

    Given shapes (`jax.ShapeDtypeStruct`) in place of arrays, `init` returns shapes and
    `lower` the program, for any mesh, also of devices that this machine lacks.

    Attributes:
      optimizer: The optimizer.
      placement: The replicas: their mesh or None, number, and axis.
      divisor: The number of a batch's rows must be a multiple of it.
      compiled: The compiled function `(state, key, batch, weights, overrides)`, to
        which the state is passed without its key.
      start: The compiled `(state, batch, weights) -> hook_state`, for the first step
        with a hook that has a state; else None.
      reduction: The reduction of the examples' losses.
      evaluated: The compiled function `(state, batch, weights) -> Metrics`.
    """

    optimizer: Optimizer
    placement: Placement
    divisor: int
    compiled: Any
    start: Any = None
    reduction: str = "mean"
    evaluated: Any = None

    @called_outside_mesh
    def init(
        self,
        params: PyTree,
        *,
        states: PyTree = None,
        key: jax.Array | None = None,
        opt_state: PyTree = None,
    ) -> TrainState:
        """The state before the first step, with copies of the values given.

        With several processes each calls it with its own values. They are compared,
        and replica 0's go to all.

        Args:
          params: The parameters, in full precision: with masters the state has their
            compute copies. Or their shapes, for the shapes of the state.
          states: Given to the loss function as `states=`, if not None.
          key: A PRNG key, given to the loss function as third argument, folded with
            step, replica and micro-batch, if not None.
          opt_state: None for `optimizer.init(params)`.

        Raises:
          ValueError: Processes disagree about structure, shapes or dtypes. A parameter
            is divided over the replicas, or not over this mesh. `params` is a Flax
            module with batch statistics or other variables that are no parameters.
        """
        trees = {"params": params, "states": states, "opt_state": opt_state, "key": key}
        for name, tree in trees.items():
            check_arrays(f"init({name}=...)", tree)
        check_stateless("init(params=...)", params)
        check_params("init(params=...)", params, self.placement)
        first: Any = np.int32(0)
        if any(map(is_shape, jax.tree.leaves(params))):
            given = shapes_of((first, params, opt_state, states, key))
            first, params, opt_state, states, key = given
        mesh = self.placement.mesh
        if mesh is None:
            # A mesh fixes the devices; replicas on one device use that of the arrays.
            given = (params, opt_state, states, key)
            given, _ = brought("init", self.placement, given, None)
            params, opt_state, states, key = given
        params = spread(params, mesh, "params")
        if opt_state is None and is_shape(first):
            # Unused parameters too: they determine the devices of the program.
            init = jax.jit(self.optimizer.init, keep_unused=True)
            opt_state = Ahead(places=True)(init, params)
        elif opt_state is None:
            # From replicated parameters, so that the state is on the same devices.
            opt_state = self.optimizer.init(params)
        else:
            opt_state = spread(opt_state, mesh, "opt_state")
        return TrainState(
            # A device array, since a Python number would compile another program.
            spread(first, mesh, "step"),
            # After the state, whose masters are the parameters in full precision.
            computed_in(self.optimizer, params),
            opt_state,
            spread(states, mesh, "states"),
            spread(key, mesh, "key"),
        )

    @called_outside_mesh
    def __call__(
        self,
        state: TrainState,
        batch: PyTree,
        weights: Weights = None,
        **overrides: PyTree,
    ) -> tuple[TrainState, Metrics]:
        """One step. `state` is donated: use the one that is returned.

        Args:
          state: What `init` or the last step returned.
          batch: As from `shard_batch`; its rows divide by replicas and micro-batches.
          weights: `(rows,)`, an array or a list of numbers, or None for 1 each. In
            device memory they are not looked at: negative or NaN, they make the loss
            and the new parameters NaN; all 0, the loss NaN and the gradient 0.
          **overrides: Hyperparameters of the optimizer for this step only; they may
            change without recompilation.

        Raises:
          ValueError: The rows do not divide, or NumPy weights are negative, not finite
            or all 0; the state was given to a step before, or lies on other devices,
            or has a hook's state that is not of this step's hook and replicas; and
            what the loss function and the optimizer refuse.
        """
        # In most calls no more is to be checked than shapes, which the program does
        # where it is traced: once for each signature.
        as_given = (
            isinstance(state, TrainState)
            and state.hook_state is None
            and self.start is None
            and (weights is None or _is_floating(weights))
            and not is_iterator(batch)
            and are_ready((state, batch, weights), self.placement.mesh)
        )
        if as_given:
            if weights is None:
                check_weighted("step", batch)
        else:
            batch, weights = self._given("step", state, batch, weights, self.divisor)
            state = self._with_hook_state(state, batch, weights)
        # Apart from the state: a donated key would have to be copied in each step.
        key = state.key
        moving = state if key is None else state._replace(key=None)
        moved, metrics = self.compiled(moving, key, batch, weights, overrides)
        paced(self.placement.mesh, metrics.loss)
        return moved if key is None else moved._replace(key=key), metrics

    @called_outside_mesh
    def evaluate(
        self, state: TrainState, batch: PyTree, weights: Weights = None
    ) -> Metrics:
        """Computes the loss of a batch by a forward pass; the state does not change.

        Args:
          state: What `init` or the last step returned; it is not donated.
          batch: As for a step; its rows divide by the replicas.
          weights: As for a step.

        Returns:
          Loss, counts and auxiliary outputs. With `in_evaluation` those of that
          function; otherwise those of the loss function, whose new model state is
          dropped, with the keys of the step that would come next.

        Raises:
          ValueError: What a step refuses.
        """
        divisor = self.placement.count
        batch, weights = self._given("evaluate", state, batch, weights, divisor)
        # Without the fields that an evaluation does not read.
        needed = state._replace(opt_state=None, hook_state=None)
        found: Metrics = self.evaluated(needed, batch, weights)
        paced(self.placement.mesh, found.loss)
        return found

    def _given(
        self,
        call: str,
        state: TrainState,
        batch: PyTree,
        weights: Weights,
        divisor: int,
    ) -> tuple[PyTree, PyTree]:
        """Checks batch and weights, and moves them to the devices of the program."""
        check_state(f"{call}(state=...)", state, TrainState, "step")
        given = (call, self.placement, state, batch, weights)
        return prepared(*given, divisor=divisor, reduction=self.reduction)

    def _with_hook_state(
        self,
        state: TrainState,
        batch: PyTree,
        weights: Weights,
        invoke: Callable[..., Any] = operator.call,
    ) -> PyTree:
        """The state, with the hook's first state, or one restored by path as a tree.

        `invoke(function, *arguments)` calls the function that makes the first one.
        """
        argument, kept = "step(state=...)", state.hook_state
        if kept is None and self.start is not None:
            # Its shapes depend on the buckets, known from the first backward pass.
            return state._replace(hook_state=invoke(self.start, state, batch, weights))
        if not jax.tree.leaves(kept):
            return state
        if self.start is None:
            rule = "must have no hook_state, as this step has no hook that keeps one"
            remedy = "To continue without it: `state._replace(hook_state=None)`."
            got = f"{len(jax.tree.leaves(kept))} arrays"
            raise value_error(argument, rule, got, remedy)
        if isinstance(kept, dict):  # From a checkpoint: a hook's own is a tuple.
            bare = state._replace(hook_state=None)
            like = jax.eval_shape(self.start, bare, batch, weights)
            state = state._replace(hook_state=structured(argument, kept, like))
        check_hook_rows(argument, kept, self.placement.count)
        return state

    @called_outside_mesh
    def lower(
        self,
        state: TrainState,
        batch: PyTree,
        weights: Weights = None,
        **overrides: PyTree,
    ) -> jax.stages.Lowered:
        """Lowers the program of a step, without compiling or running it.

        Arguments and errors are those of a step. Each array may be a shape: of the
        state those that `init` makes of the parameters' shapes; of the batch and the
        weights, without a sharding, they get the places that `shard_batch` gives.
        """
        batch, weights = self._given("lower", state, batch, weights, self.divisor)
        # Traced only: the devices of the mesh may be absent.
        state = self._with_hook_state(state, batch, weights, Ahead(places=True))
        key, moving = state.key, state._replace(key=None)
        return self.compiled.lower(moving, key, batch, weights, overrides)


def train_step(
    loss_fn: Callable[..., PyTree],
    optimizer: Optimizer,
    mesh: Mesh | None = None,
    *,
    replicas: int | None = None,
    data_axis: str = "data",
    max_norm: float | None = None,
    has_aux: bool = False,
    in_evaluation: Callable[..., PyTree] | None = None,
    **synchronization: Unpack[Synchronization],
) -> TrainStep:
    """A training step over replicas, equal to the step of one device on all examples.

    A parameter that no loss depends on is unchanged bit for bit, and so are its
    optimizer state and step count: neither weight decay nor momentum applies. One that
    the examples of some replicas do not use has a gradient of zero there.

    Args:
      loss_fn: `loss_fn(params, batch) -> losses`: one real loss per example. With a
        key in the state it is called with the key as third argument; with model state,
        with `states=`, and returns `(losses, new_states)`.
      optimizer: From `jdist.optim`. `zero` shards its state over the replicas.
      mesh: The devices.
      replicas: In place of a mesh: a number of replicas that share one device.
      data_axis: The mesh axis that counts replicas; collectives of `loss_fn` may use
        it.
      max_norm: Largest global norm of the gradient, or None.
      has_aux: Whether `loss_fn` returns auxiliary outputs last.
      in_evaluation: What `TrainStep.evaluate` calls instead of `loss_fn`, such as with
        dropout switched off: `in_evaluation(params, batch) -> losses`, or with
        `has_aux` `(losses, aux)`. With model state it is given `states=`, and
        returns no new one; it takes no key.
      **synchronization: How results are joined: `reduction`, `accumulate`, `method`,
        `bucket_cap_mb`, `hook` and `states`; see `Synchronization`.

    Returns:
      The step; begin with its `init`.

    Raises:
      ValueError: An argument breaks its rule; see `value_and_grad` for meshes.
      TypeError: An unknown argument; `accumulate` is not an integer; `optimizer` is not
        one of jdist.optim; neither a mesh nor replicas are given.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import data_parallel, optim
      >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
      >>> step = train_step(lambda w, x: (x @ w) ** 2, optim.sgd(lr=0.01), replicas=2)
      >>> state = step.init(jnp.array([0.3, 0.4]))
      >>> batch, weights = data_parallel.shard_batch(x, replicas=2, sizes=(2, 1))
      >>> for _ in range(2):
      ...     state, metrics = step(state, batch, weights)
      ...     print(f"{metrics.loss:.4f}", state.params)
      7.5567 [0.112... 0.162...]
      1.1796 [0.038... 0.068...]

    References:
      Li et al., PyTorch Distributed, VLDB 2020; `torch.nn.parallel
      .DistributedDataParallel` with `no_sync` and `find_unused_parameters`.
    """
    call = "train_step"
    check_function(f"{call}(loss_fn=...)", loss_fn)
    if in_evaluation is not None:
        check_function(f"{call}(in_evaluation=...)", in_evaluation)
    check_flags(call, has_aux=has_aux)
    placement = Placement.of(call, mesh, replicas, data_axis)
    check_optimizer(f"{call}(optimizer=...)", optimizer)
    if max_norm is not None:
        argument, rule = f"{call}(max_norm=...)", "must be at least 0"
        check_number(argument, max_norm, rule, lambda norm: norm >= 0)
    options = _checked_options(call, synchronization)
    # The other options are those of `Communication`.
    accumulate, rule = options.pop("accumulate", 1), options.pop("states", "mean")
    wanted, argument = "must be a number of micro-batches, at least 1", "accumulate=..."
    check_number(
        f"{call}({argument})", accumulate, wanted, lambda n: n >= 1, whole=True
    )
    check_choice(f"{call}(states=...)", rule, RULES)
    divided = check_mesh(call, placement)
    if divided:
        check_undivided(call, optimizer)
    communication = Communication(
        call,
        data_axis,
        **options,
        divided=divided,
        scattered=_scatters(optimizer, placement, options),
    )
    # Master weights take gradients in float32, not rounded to 16 bits.
    masters = optimizer.precision is not None
    loss = Loss(loss_fn, bool(has_aux))
    replica_step = ReplicaStep(loss, communication, accumulate, rule, wide=masters)
    divisor, mapped = placement.count * accumulate, _mapped(replica_step, placement)
    step = _step(mapped, optimizer, max_norm, divided, divisor)
    reads = {"loss_fn": loss_fn, "optimizer": optimizer, "hook": communication.hook}
    return TrainStep(
        optimizer,
        placement,
        divisor,
        # The state alone is donated: batches may be used again.
        GuardedJit(step, call, reads, donate_argnums=0),
        _start(replica_step, placement, reads) if communication.stateful else None,
        communication.reduction,
        evaluation(loss, in_evaluation, placement, communication.reduction),
    )


def _step(
    mapped: Any,
    optimizer: Optimizer,
    max_norm: float | None,
    divided: bool,
    divisor: int,
) -> Callable[..., PyTree]:
    """The function to compile: gradients, clipping, and the optimizer's step."""

    def step(
        state: TrainState,
        key: jax.Array | None,
        batch: PyTree,
        weights: jax.Array | None,
        overrides: PyTree,
    ) -> PyTree:
        count = rows_in("step", batch, divisor)
        if weights is not None:
            check_one_per_row("step", weights, count)
        scale = None
        if optimizer.loss_factor is not None:
            # Part of the state, so that a dynamic scale changes without recompilation.
            scale = optimizer.loss_factor(state.opt_state)
        value, grads, states, hook_state, aux = mapped(
            # Without the optimizer's state: as `EACH` in a mapped function, the arrays
            # that ZeRO divides would be gathered.
            state._replace(opt_state=None, hook_state=None, key=key),
            state.hook_state,
            scale,
            batch,
            weights,
        )
        # After the reduction, so that the norm is that of the whole batch.
        grads, norm = _clipped(grads, max_norm, scale)
        params, opt_state = optimizer.step(
            state.params, _ascending(grads), state.opt_state, **overrides
        )
        new = TrainState(state.step + 1, params, opt_state, states, None, hook_state)
        if divided:  # A donated buffer is reused for an array of the same layout only.
            new = jax.tree.map(alike, new, state)
        # The losses were scaled before the backward pass, and so is their mean.
        return new, Metrics(_unscaled(value, scale), grad_norm=norm, aux=aux)

    return step


def _is_floating(weights: Weights) -> bool:
    """Whether weights are an array of JAX that is neither converted nor looked at."""
    return isinstance(weights, jax.Array) and jnp.issubdtype(
        weights.dtype, jnp.floating
    )


def _mapped(replica_step: ReplicaStep, placement: Placement) -> PyTree:
    rows = PartitionSpec(placement.axis)
    takes = (EACH, rows, EACH, rows, rows)

    def layout(param: PyTree) -> PartitionSpec:
        return scattered_spec(jnp.shape(param), placement.count, placement.axis)

    def mapped(state: TrainState, *rest: PyTree) -> tuple[PyTree, ...]:
        scattered = replica_step.communication.scattered
        # Here, while the step is traced: layouts depend on the shapes of parameters.
        grads = jax.tree.map(layout, state.params) if scattered else EACH
        gives = (EACH, grads, EACH, rows, rows)
        return over_replicas(replica_step.step, placement, takes, gives)(state, *rest)

    return mapped


def _scatters(
    optimizer: Optimizer, placement: Placement, options: Mapping[str, Any]
) -> bool:
    """Whether sums of gradients stay divided, as a ZeRO optimizer takes them."""
    # Hooks and the method "all_gather" give whole sums.
    plain = options.get("method", "all_reduce") == "all_reduce"
    if not plain or options.get("hook") is not None or placement.mesh is None:
        return False
    return is_divided_over(optimizer, placement) and can_scatter(placement.mesh)


def _start(
    replica_step: ReplicaStep, placement: Placement, reads: Mapping[str, Any]
) -> PyTree:
    rows = PartitionSpec(placement.axis)
    mapped = over_replicas(replica_step.start, placement, (EACH, rows, rows), (rows,))

    def start(state: TrainState, batch: PyTree, weights: Weights) -> PyTree:
        return mapped(state._replace(opt_state=None), batch, weights)[0]

    return GuardedJit(start, "train_step", reads)


def _unscaled(number: jax.Array, scale: jax.Array | None) -> jax.Array:
    return number if scale is None else number / scale.astype(number.dtype)


def _clipped(
    grads: PyTree, max_norm: float | None, scale: jax.Array | None
) -> tuple[PyTree, jax.Array | None]:
    """Clips gradients by their norm without the loss scale; returns that norm too."""
    if max_norm is None:
        return grads, None
    # The gradients keep the scale: the optimizer removes it in float32.
    limit = max_norm if scale is None else max_norm * scale
    clipped, norm = clip_by_global_norm(grads, limit)
    return clipped, _unscaled(norm, scale)


def _ascending(grads: PyTree) -> PyTree:
    """Conjugates gradients of complex parameters for the optimizer; see `Optimizer`."""
    return jax.tree.map(lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, grads)


def _checked_options(call: str, options: Any) -> dict[str, Any]:
    known = Synchronization.__annotations__
    for name in options:
        if name not in known:
            rule = f"may have the further arguments {', '.join(known)}"
            raise type_error(call, rule, name)
    return dict(options)
