"""Communication: from every replica's partial gradient to the whole batch's.

Each bucket of gradients takes one collective, or its hook; the loss and the sum of
weights are sent with the first bucket, or before the hooks. The summands are *shares*
of the finished gradient, since the seeds of the backward pass were:

    share_i = S (w / S w) dl/dW over replica i's examples       gradient = sum_i share_i

A share of max or min is divided by the ties of all replicas: at the end or, with a
hook, before it.

The collectives are kept apart and in the order of the buckets by a data dependence (see
`jdist._compat.after`).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jdist import reduction as reductions
from jdist._compat import after, alike
from jdist._errors import check_choice, quoted, type_error, value_error
from jdist._tree import (
    PyTree,
    described,
    examples_in,
    named_leaves,
    split_inexact,
    type_name,
)
from jdist.data_parallel.gradient.buckets import (
    ALONE,
    Cap,
    bytes_of,
    limits_of,
    plan_buckets,
)
from jdist.data_parallel.gradient.scattered import (
    by_replica,
    part_shape,
    scattered_dimension,
)
from jdist.data_parallel.hooks.hook import Bucket, Hook, flatten, split
from jdist.data_parallel.replicas.mapping import share_a_device, summed, summed_in_order
from jdist.reduction import Partial


def _swaps(axis_name: Hashable) -> bool:
    """Whether a sum over this axis is one between two CPU processes."""
    two = jax.lax.axis_size(axis_name) == 2 and jax.process_count() > 1
    on_cpu = jax.default_backend() == "cpu"
    return two and on_cpu and not share_a_device(axis_name)


def _by_all_reduce(array: jax.Array, axis_name: Hashable) -> jax.Array:
    """The sum over replicas; two CPU processes swap their arrays and add."""
    # Both add the same two numbers, so the bits are equal, and XLA fuses the addition
    # with what follows: a fifth to a third less time than gloo's all-reduce
    # (docs/data_parallel.md, "Many processes").
    if _swaps(axis_name):
        return array + jax.lax.ppermute(array, axis_name, [(0, 1), (1, 0)])
    return summed(array, axis_name)


METHODS: dict[str, Callable[[jax.Array, Hashable], jax.Array]] = {
    "all_reduce": _by_all_reduce,
    "all_gather": summed_in_order,
}


def _as_hook(hook: Hook | Callable[..., PyTree]) -> Hook:
    """Wraps a plain function as a stateless hook."""
    if isinstance(hook, Hook):
        return hook
    return Hook(getattr(hook, "__name__", "hook"), hook)


def _chosen(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


class _Leaves(NamedTuple):
    """The leaves of a gradient with their paths, and its buckets."""

    arrays: list[jax.Array]
    paths: list[str]
    buckets: list[list[int]]


@dataclass(frozen=True, slots=True)
class Communication:
    """Combines the partials of all replicas; options are checked when it is created.

    Attributes:
      call: The calling public function, for error messages.
      axis: The axis of replicas.
      reduction: One of `jdist.reduction.REDUCTIONS`.
      method: "all_reduce" or "all_gather".
      bucket_cap_mb: See `data_parallel.value_and_grad`.
      hook: See `data_parallel.value_and_grad`.
      divided: Whether gradients may be divided over further axes of the mesh. Each is
        then summed by itself, in its own shape, and is neither concatenated nor
        gathered.
      scattered: Whether each replica keeps only its part of a sum, where the replicas
        divide the array; see `jdist.data_parallel.gradient.scattered`.
    """

    call: str
    axis: str
    reduction: str = "mean"
    method: str = "all_reduce"
    bucket_cap_mb: Cap = None
    hook: Any = None
    divided: bool = False
    scattered: bool = False

    def __post_init__(self) -> None:
        """Checks the options."""
        reductions.check_reduction(self.call, self.reduction)
        check_choice(f"{self.call}(method=...)", self.method, METHODS)
        limits_of(f"{self.call}(bucket_cap_mb=...)", self.bucket_cap_mb)
        if self.divided:
            self._check_divided()
        self._check_hook()

    @property
    def stateful(self) -> bool:
        """Whether there is a hook with a state."""
        return isinstance(self.hook, Hook) and self.hook.init is not None

    def weights_of(
        self, batch: PyTree, weights: jax.Array | None, params: PyTree
    ) -> jax.Array:
        """This replica's weights as `partial` takes them; None stands for 1 each.

        For a mean they are shares of the total over all replicas, which takes a
        collective of one number. They are float64 beside anything of float64: TPUs
        have no sum of float64 over the replicas of a mesh with further axes.
        """
        wide = reductions.wide_of((params, batch, weights))
        count = examples_in(batch, self.call)
        # Without weights the total is known without a collective.
        total: ArrayLike = count * jax.lax.axis_size(self.axis)
        if weights is None:
            weights = jnp.ones(count, jnp.float32)
        elif self.reduction == "mean":
            # Depends on the weights only, so that it can run beside the forward pass.
            total = reductions.total_weight(weights, wide)
            if jax.lax.axis_size(self.axis) > 1:
                total = METHODS[self.method](total, self.axis)
        return reductions.shares(weights, self.reduction, total, wide)

    def start(self, part: Partial, ready: Partial) -> tuple[PyTree, ...]:
        """The hook's first state on one replica, by bucket."""
        hook = _as_hook(self.hook)
        leaves = self._take_apart(part.gradient, ready.gradient)
        # A hook's state begins from zeros: only shapes are used here.
        nothing = jnp.zeros((), part.weight.dtype)
        return tuple(
            hook.start(bucket.replaced(jnp.zeros_like(bucket.buffer)))
            for bucket in self._filled(leaves, nothing)
        )

    def __call__(
        self,
        part: Partial,
        ready: Partial,
        like: PyTree,
        state: tuple[PyTree, ...] = (),
    ) -> tuple[jax.Array, PyTree, tuple[PyTree, ...]]:
        """Combines the partials of all replicas; call it where the axis is bound.

        Args:
          part: The partial of this replica.
          ready: Tree like `part` of integers: when each leaf becomes final.
          like: The parameters, whose dtypes the gradient gets.
          state: The hook's state, from `start` or the previous step.

        Returns:
          The loss, the gradient, and the hook's new state. With `scattered`, this
          replica's part of each array that the replicas divide.
        """
        part = self._as_parameters(part, like)
        # For an extreme: replicas that do not hold it contribute nothing.
        part = reductions.aligned(part, self.reduction, self.axis)
        leaves = self._take_apart(part.gradient, ready.gradient)
        if self.hook is None:
            whole, arrays = self._without_hook(part, leaves)
        else:
            whole, arrays, state = self._with_hook(part, leaves, state)
        gradient = jax.tree.unflatten(jax.tree.structure(part.gradient), arrays)
        whole = whole._replace(gradient=gradient)
        return *reductions.finish(whole, self.reduction, like), state

    def _as_parameters(self, part: Partial, like: PyTree) -> Partial:
        """Lays the gradient of a partial out as the parameters are."""
        if not self.divided:
            return part
        # Under jit only the compiler knows the layout of the parameters, so the
        # gradient is tied to it.
        trainable, _ = split_inexact(like)
        return part._replace(gradient=jax.tree.map(alike, part.gradient, trainable))

    def _without_hook(
        self, part: Partial, leaves: _Leaves
    ) -> tuple[Partial, list[jax.Array]]:
        if jax.lax.axis_size(self.axis) == 1:
            return part, leaves.arrays  # Neither buckets nor copies.
        scalars = self._scalars(part)
        sent = [[leaves.arrays[i] for i in indices] for indices in leaves.buckets]
        # Loss and total weight are sent in a bucket, or in a collective of their own.
        dtype = scalars[0].dtype
        carriers = (n for n, arrays in enumerate(sent) if self._carries(arrays, dtype))
        carrier = next(carriers, None)
        if carrier is None:
            carrier, sent = 0, [[], *sent]
        sent[carrier] += scalars
        sums = self._in_order(sent)
        totals = [sums[carrier].pop() for _ in scalars][::-1]
        order = chain.from_iterable(leaves.buckets)
        found = dict(zip(order, chain.from_iterable(sums), strict=True))
        arrays = [found[i] for i in range(len(found))]
        return self._with_scalars(part, totals), arrays

    def _carries(self, arrays: Sequence[jax.Array], dtype: Any) -> bool:
        """Whether a bucket is copied anyway and can hold loss and total weight."""
        # A small bucket is copied into a buffer anyway. A large array is sent without a
        # copy, which two more numbers would require.
        is_copied = len(arrays) > 1 or bytes_of(arrays[0]) < ALONE
        # Each replica needs the whole of these two numbers.
        is_whole = not (self.divided or self._scatters(arrays))
        return is_copied and is_whole and arrays[0].dtype == dtype

    def _in_order(self, buffers: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """One collective for each list of arrays, in order."""
        sums, previous = [], None
        # XLA does not merge swaps and keeps them in the program's order; a dependence
        # would prevent the fusion of their additions. Divided gradients have no
        # buckets, and one device has no collectives.
        swaps = self.method == "all_reduce" and _swaps(self.axis)
        free = self.divided or swaps or share_a_device(self.axis)
        replicas = jax.lax.axis_size(self.axis)
        for arrays in buffers:
            scatters, dimension = self._scatters(arrays), 0
            if scatters:
                buffer, dimension = by_replica(arrays, replicas)
            else:
                # A single array keeps its shape, so that it is not copied.
                buffer = arrays[0] if len(arrays) == 1 else flatten(arrays)
            # Without the dependence XLA would merge all collectives. On CPU the merged
            # one starts when the last gradient is ready, and still costs a call per
            # array.
            if previous is not None and not free:
                buffer = after(buffer, previous)
            if scatters:
                previous = jax.lax.psum_scatter(
                    buffer, self.axis, scatter_dimension=dimension, tiled=True
                )
            else:
                previous = METHODS[self.method](buffer, self.axis)
            shapes = [
                part_shape(x.shape, replicas) if scatters else x.shape for x in arrays
            ]
            alone = len(arrays) == 1
            sums.append([previous] if alone else split(flatten([previous]), shapes))
        return sums

    def _scatters(self, arrays: Sequence[jax.Array]) -> bool:
        """Whether each replica gets only its part of these sums."""
        replicas = jax.lax.axis_size(self.axis)
        return self.scattered and all(
            scattered_dimension(x.shape, replicas) is not None for x in arrays
        )

    def _with_hook(
        self, part: Partial, leaves: _Leaves, state: tuple[PyTree, ...]
    ) -> tuple[Partial, list[jax.Array], tuple[PyTree, ...]]:
        hook = _as_hook(self.hook)
        scalars = jnp.stack(self._scalars(part))
        found = METHODS[self.method](scalars, self.axis)
        whole = self._with_scalars(part, list(found))
        shares = leaves.arrays
        fraction = reductions.divided(part.weight, whole.weight)  # B_i / B
        if self.reduction in ("max", "min"):
            shares = reductions.divided(shares, whole.weight)
            # What is left to divide by.
            whole = whole._replace(weight=jnp.where(whole.weight > 0, 1, whole.weight))
        arrays: dict[int, jax.Array] = {}
        new_state, previous = [], None
        filled = self._filled(leaves._replace(arrays=shares), fraction)
        # A stateless hook is given `()` for each bucket.
        state = state or tuple(hook.start(bucket) for bucket in filled)
        for bucket, own, indices in zip(filled, state, leaves.buckets, strict=True):
            given = (
                bucket.buffer if previous is None else after(bucket.buffer, previous)
            )
            new, result = self._checked(
                bucket, hook.reduce(own, bucket.replaced(given))
            )
            previous = result.buffer
            arrays.update(zip(indices, result.gradients(), strict=True))
            # An optimizer skips a step that is not finite. A hook's state from such a
            # step would make all later ones NaN.
            finite = jnp.all(jnp.isfinite(result.buffer))
            new_state.append(_chosen(finite, new, own))
        return whole, [arrays[i] for i in range(len(arrays))], tuple(new_state)

    def _take_apart(self, gradient: PyTree, ready: PyTree) -> _Leaves:
        """The leaves of a gradient with their paths and buckets."""
        named = {k: g for k, g in named_leaves(gradient).items() if g is not None}
        arrays, paths = list(named.values()), list(named)
        # None is no leaf in either tree, so that both lists have the same gradients.
        when = jax.tree.leaves(ready)
        # A limit of 0 closes each bucket after one leaf.
        cap = 0 if self.divided else self.bucket_cap_mb
        buckets = plan_buckets(arrays, when, cap)
        if self.scattered:
            # A reduce-scatter and an all-reduce cannot share a collective.
            scatters = [self._scatters([x]) for x in arrays]
            chosen = [
                [i for i in bucket if scatters[i] is kind]
                for bucket in buckets
                for kind in (True, False)
            ]
            buckets = [bucket for bucket in chosen if bucket]
        return _Leaves(arrays, paths, buckets)

    def _filled(self, leaves: _Leaves, weight: jax.Array) -> list[Bucket]:
        count = len(leaves.buckets)
        return [
            Bucket(
                buffer=flatten([leaves.arrays[i] for i in indices]),
                weight=weight,
                index=number,
                is_last=number == count - 1,
                axis_name=self.axis,
                paths=tuple(leaves.paths[i] for i in indices),
                shapes=tuple(leaves.arrays[i].shape for i in indices),
            )
            for number, indices in enumerate(leaves.buckets)
        ]

    def _scalars(self, part: Partial) -> list[jax.Array]:
        """The numbers that are summed besides the gradient."""
        if self.reduction in ("max", "min"):
            # `aligned` has found the extreme already.
            return [part.weight]
        return [part.weight, part.value.astype(part.weight.dtype)]

    def _with_scalars(self, part: Partial, found: Sequence[jax.Array]) -> Partial:
        values = (part.value,) if len(found) == 1 else (found[1],)
        return Partial(*values, None, found[0])

    def _check_divided(self) -> None:
        """Checks that no option gathers a gradient that is divided over other axes."""
        defaults = {"method": "all_reduce", "bucket_cap_mb": None, "hook": None}
        for name, default in defaults.items():
            given = getattr(self, name)
            if given != default:
                rule = f"must be left out on a mesh with axes beside {self.axis!r}"
                remedy = (
                    "Over those a gradient may be divided, and it would be made whole. "
                    f"Parameters that are whole need a mesh with {self.axis!r} alone."
                )
                argument = f"{self.call}({name}=...)"
                raise value_error(argument, rule, repr(given), remedy)

    def _check_hook(self) -> None:
        argument = f"{self.call}(hook=...)"
        if self.hook is None:
            return
        if not (isinstance(self.hook, Hook) or callable(self.hook)):
            rule = "must be a hook, such as data_parallel.hooks.bf16(), or a function"
            raise type_error(argument, rule, quoted(self.hook))
        if self.method != "all_reduce":
            rule = "must be left out where a hook sums the gradients"
            raise value_error(f"{self.call}(method=...)", rule, repr(self.method))

    def _checked(self, given: Bucket, result: PyTree) -> tuple[PyTree, Bucket]:
        """The state and the bucket that a hook has returned."""
        rule = "must return (state, bucket) with a buffer of the shape and dtype given"
        match result:
            case (_, Bucket() as found):
                own, wanted = found.buffer, given.buffer
                if (own.shape, own.dtype) == (wanted.shape, wanted.dtype):
                    return result
                got = f"{described(own)}, not {described(wanted)}"
            case (_, other):
                got = f"{type_name(other)} for the bucket"
            case _:
                got = type_name(result)
        raise value_error(f"{self.call}(hook=...)", rule, got)
