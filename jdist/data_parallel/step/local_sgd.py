"""Local SGD: replicas step independently and average their parameters periodically.

Between two averages nothing is communicated, or gradients within small groups only. The
parameters of replica i after its own steps are w_i, and the average over the examples
that each has seen since the last one, n_i,

    w = sum_i n_i w_i / sum_i n_i

With plain SGD and an average after every step this is ordinary data parallelism, for
any numbers of examples: sum_i (B_i/B) (w - lr g_i) = w - lr sum_i (B_i/B) g_i.

The schedule is PyTorch's. Counting steps from 0, the parameters are averaged after step
t if t >= start and (t - start) is a multiple of the period; before `start` all replicas
use the whole batch's gradient and keep equal parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jdist import reduction as reductions
from jdist._compat import called_outside_mesh, paced
from jdist._errors import check_at_least, check_function, value_error
from jdist._tree import (
    PyTree,
    check_arrays,
    check_state,
    examples_in,
    is_shape,
    merge,
    owned,
    split_inexact,
)
from jdist.data_parallel.gradient.communication import Communication
from jdist.data_parallel.gradient.gradient_order import with_gradient_order
from jdist.data_parallel.hooks import Bucket, Hook, all_reduce
from jdist.data_parallel.hooks.hook_switch import one_of
from jdist.data_parallel.replicas.inputs import check_alive, prepared
from jdist.data_parallel.replicas.layout import check_alone, check_params
from jdist.data_parallel.replicas.mapping import EACH, as_row, over_replicas, own_row
from jdist.data_parallel.replicas.placement import Placement
from jdist.data_parallel.replicas.shards import Weights
from jdist.data_parallel.step.nnx_loss import check_stateless
from jdist.optim import Optimizer
from jdist.optim.internal import check_optimizer, copies_over
from jdist.segment.internal import GuardedJit


class LocalState(NamedTuple):
    """The state between two steps; leaves other than `step` have a row per replica."""

    step: jax.Array
    """Steps taken, int32 scalar."""

    params: PyTree
    """Each replica's own parameters."""

    opt_state: PyTree
    """Each replica's own optimizer state; never averaged."""

    seen: jax.Array
    """Total weight of the examples that each replica has seen since the last
    average."""


class LocalSGD:
    """Training with parameters that are averaged every `period` steps.

    Begin with `init`; `step` and `average` are compiled.

    Args:
      loss_fn: `loss_fn(params, batch) -> losses`, one per example; their mean counts.
      optimizer: From `jdist.optim`; each replica has a state of its own.
      mesh: The devices.
      replicas: In place of a mesh: a number of replicas that share one device.
      period: Steps from one average to the next.
      start: Steps of ordinary data parallelism first.
      group_size: Consecutive replicas that share their gradients all the time: the
        gradient of a group is the mean over its examples, 0 where it has none.
      data_axis: The mesh axis that counts replicas.

    Raises:
      TypeError: An argument is of another type; neither a mesh nor replicas are given.
      ValueError: `period` or `group_size` below 1, or `start` below 0; a mesh and
        replicas are given. The optimizer has masters: each replica's would stay its
        own, and undo every average. In `step`: groups that do not divide the replicas.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import data_parallel, optim
      >>> local = data_parallel.LocalSGD(
      ...     lambda w, x: (x - w) ** 2, optim.sgd(lr=0.25), replicas=2, period=2
      ... )
      >>> state = local.init(jnp.array(0.0))
      >>> for _ in range(3):
      ...     state, loss = local.step(state, jnp.array([1.0, 2.0, 5.0, 8.0]))
      ...     print(f"{loss:.2f}", state.params)
      23.50 [2. 2.]
      11.50 [1.75 4.25]
      3.81 [3.5 3.5]

    References:
      Stich, Local SGD converges fast and communicates little, ICLR 2019; Lin et al.,
      Don't use large mini-batches, use local SGD, ICLR 2020; `torch.distributed
      .algorithms.ddp_comm_hooks.post_localSGD_hook`, `torch.distributed.algorithms
      .model_averaging.averagers.PeriodicModelAverager` and `torch.distributed.optim
      .PostLocalSGDOptimizer`, which average without weights.
    """

    def __init__(
        self,
        loss_fn: Callable[[PyTree, PyTree], jax.Array],
        optimizer: Optimizer,
        mesh: Mesh | None = None,
        *,
        replicas: int | None = None,
        period: int,
        start: int = 0,
        group_size: int = 1,
        data_axis: str = "data",
    ) -> None:
        """Checks the arguments; nothing is compiled yet."""
        placement = Placement.of("LocalSGD", mesh, replicas, data_axis)
        check_alone("LocalSGD", placement)
        _check_options(loss_fn, optimizer, period, start)
        self._optimizer, self._placement = optimizer, placement
        axis = placement.axis
        hooks = (all_reduce(), group_mean(group_size))

        def on_replica(step: PyTree, *arguments: PyTree) -> PyTree:
            *stacked, batch, weights = arguments
            params, opt_state, seen = own_row(stacked)

            def part_of(params: PyTree, batch: PyTree, weights: jax.Array) -> PyTree:
                return reductions.partial(loss_fn, params, batch, weights, "mean")

            hook = _of_two(step < start, hooks)
            communication = Communication("LocalSGD", axis, hook=hook)
            if weights is None:
                weights = jnp.ones(examples_in(batch, "step"), jnp.float32)
            # Before they are shares: averages weigh replicas by their examples.
            seen = seen + jnp.sum(reductions.wide_weights(weights)).astype(seen.dtype)
            weights = communication.weights_of(batch, weights, params)
            part, ready = with_gradient_order(part_of, params, batch, weights)
            loss, grads, _ = communication(part, ready, params)
            with copies_over(axis):
                params, opt_state = optimizer.step(params, grads, opt_state)
            # All replicas have the same step and take the same branch: otherwise a
            # collective inside `cond` would never end.
            params, seen = jax.lax.cond(
                (step >= start) & ((step - start) % period == 0),
                lambda: (_averaged(params, seen, axis), jnp.zeros_like(seen)),
                lambda: (params, seen),
            )
            return step + 1, as_row((params, opt_state, seen)), loss

        def average(params: PyTree, seen: jax.Array) -> tuple[PyTree]:
            own, weight = own_row((params, seen))
            return (_averaged(own, weight, axis),)

        rows = PartitionSpec(axis)
        takes = (EACH, rows, rows, rows, rows, rows)
        step = over_replicas(on_replica, placement, takes, (EACH, rows, EACH))
        mean = over_replicas(average, placement, (rows, rows), (EACH,))
        reads = {"loss_fn": loss_fn, "optimizer": optimizer}
        # The whole state is replaced, so its buffers can be reused.
        self._step = GuardedJit(step, "LocalSGD", reads, donate_argnums=(0, 1, 2, 3))
        self._average = jax.jit(lambda *given: mean(*given)[0])

    @called_outside_mesh
    def init(self, params: PyTree) -> LocalState:
        """The state before the first step: a copy of the parameters for each replica.

        Given shapes (`jax.ShapeDtypeStruct`), it has shapes, for `lower`.
        """
        count, mesh = self._placement.count, self._placement.mesh
        # Sums of weights over a period: as wide as the precision in use allows.
        nothing = jnp.zeros((), jnp.result_type(float))
        check_arrays("init(params=...)", params)
        check_stateless("init(params=...)", params)
        check_params("init(params=...)", params, self._placement)

        def stacked(params: PyTree) -> PyTree:
            own = (params, self._optimizer.init(params), nothing)
            return jax.tree.map(
                lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), own
            )

        rows = None if mesh is None else self._placement.rows
        if any(map(is_shape, jax.tree.leaves(params))):
            found = jax.eval_shape(stacked, params)
            found = jax.tree.map(lambda x: x.update(sharding=rows), found)
            first: PyTree = jax.ShapeDtypeStruct((), jnp.int32)
            return LocalState(first, *found)
        found = stacked(owned(params))
        if rows is not None:
            found = jax.device_put(found, rows)
        return LocalState(jnp.zeros((), jnp.int32), *found)

    @called_outside_mesh
    def step(
        self, state: LocalState, batch: PyTree, weights: Weights = None
    ) -> tuple[LocalState, jax.Array]:
        """One step of each replica on its own rows, followed by an average if due.

        Args:
          state: What `init` or the last step returned; donated.
          batch: As from `shard_batch`.
          weights: `(rows,)`, or None for 1 each.

        Returns:
          The state, and the mean loss of all examples, each under the parameters of the
          replica that has it.

        Raises:
          ValueError: As `value_and_grad`'s function; the state was given to a step
            before, or lies on other devices.
        """
        batch, weights = self._given("step", state, batch, weights)
        step, own, loss = self._step(*state, batch, weights)
        paced(self._placement.mesh, loss)
        return LocalState(step, *own), loss

    @called_outside_mesh
    def lower(
        self, state: LocalState, batch: PyTree, weights: Weights = None
    ) -> jax.stages.Lowered:
        """Lowers the program of a step, without compiling or running it.

        Arguments and errors are those of a step. Each array may be a shape: of the
        state those that `init` makes of the parameters' shapes.
        """
        batch, weights = self._given("lower", state, batch, weights)
        return self._step.lower(*state, batch, weights)

    def _given(
        self, call: str, state: LocalState, batch: PyTree, weights: Weights
    ) -> tuple[PyTree, PyTree]:
        """Checks batch and weights, and moves them to the devices of the program."""
        check_state(f"{call}(state)", state, LocalState, "local")
        place = self._placement
        given = (call, place, state, batch, weights)
        return prepared(*given, divisor=place.count, reduction="mean")

    @called_outside_mesh
    def average(self, state: LocalState) -> PyTree:
        """Averages the parameters over replicas, for evaluation or after the end."""
        check_state("average(state)", state, LocalState, "local")
        check_alive("average(state=...)", state)
        return self._average(state.params, state.seen)


def _check_options(
    loss_fn: object, optimizer: Optimizer, period: int, start: int
) -> None:
    check_function("LocalSGD(loss_fn=...)", loss_fn)
    check_optimizer("LocalSGD(optimizer=...)", optimizer)
    if optimizer.precision is not None:
        rule = "must have no masters, which are state and are not averaged"
        remedy = "Train in float32, or in 16 bits without masters."
        raise value_error("LocalSGD(optimizer=...)", rule, optimizer.name, remedy)
    for name, value, least in (("period", period, 1), ("start", start, 0)):
        check_at_least(f"LocalSGD({name}=...)", value, least)


def _of_two(first: jax.Array, hooks: tuple[Hook, Hook]) -> Hook:
    """The first of two hooks without a state where `first` holds, else the second."""

    # Not `switch`, which would count steps a second time.
    def summed(state: PyTree, bucket: Bucket) -> tuple[PyTree, Bucket]:
        _, result = one_of(first, hooks, ((), ()), bucket)
        return state, result

    return Hook("LocalSGD", summed)


def _averaged(params: PyTree, seen: jax.Array, axis: str) -> PyTree:
    """The mean of parameters, weighted by the examples that each replica has seen."""
    total = jax.lax.psum(seen, axis)
    floating, rest = split_inexact(params)
    # Right after an average nothing has been seen, and the mean would be 0 / 0.
    weight = jnp.where(total > 0, seen, 1)
    means = reductions.weighted_mean(floating, weight, axis)
    means = jax.tree.map(lambda m, x: jnp.where(total > 0, m, x), means, floating)
    return merge(means, rest)


def group_mean(size: int) -> Hook:
    """A hook that gives each group of replicas the gradient of its own examples.

    It is the mean over them, `sum_i B_i g_i / sum_i B_i` with i in the group; 0 where
    the group has no examples.
    """
    check_at_least("LocalSGD(group_size=...)", size, 1)

    def mean(state: PyTree, bucket: Bucket) -> tuple[PyTree, Bucket]:
        weight = _group_sum(bucket.weight, bucket, size)
        total = _group_sum(bucket.buffer, bucket, size)
        # Real, also for complex gradients, and as wide as their parts.
        divisor = weight.astype(jnp.finfo(total.dtype).dtype)
        # A group without examples has no mean; its gradient is 0, not NaN.
        return state, bucket.replaced(jnp.where(weight == 0, 0, total / divisor))

    return Hook(f"groups of {size}", mean)


def _group_sum(array: jax.Array, bucket: Bucket, size: int) -> jax.Array:
    """The sum over the group of consecutive replicas that this one belongs to."""
    count = bucket.replicas
    if count % size:
        rule = f"must divide the {count} replicas"
        raise value_error("LocalSGD(group_size=...)", rule, size)
    # Each array is passed around its group, and all members add them in rank order, so
    # that they get the same bits.
    rows = [array]
    for shift in range(1, size):
        pairs = [(k, k // size * size + (k - shift) % size) for k in range(count)]
        rows.append(jax.lax.ppermute(array, bucket.axis_name, pairs))
    # Row s came from the member s places further on; now member 0 comes first.
    place = jax.lax.axis_index(bucket.axis_name) % size
    ordered = jnp.roll(jnp.stack(rows), place, axis=0)
    return reduce(jnp.add, list(ordered))
