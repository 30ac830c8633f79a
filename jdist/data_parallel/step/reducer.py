"""Buckets reduced while the backward pass of earlier layers still runs.

The model is a list of layers, each compiled into a forward and a backward half (a
`jdist.segment`). The host dispatches, and does not wait:

    compute      ... backward 3 | backward 2 | backward 1 | backward 0 |
    collectives                 | bucket 0 (3) | bucket 1 (2, 1)  | bucket 2 (0) |

The collective of a bucket is dispatched right after its last gradient. It runs when the
gradients are computed, in parallel with later backward halves. PyTorch's reducer works
in the same way, with hooks of autograd in place of the list of layers. In one compiled
program (`data_parallel.value_and_grad`) the compiler chooses the order.

Overlap needs free threads. On CPU XLA's pool has one per core or per device, whichever
are more (the environment variable `PJRT_NPROC` sets it), and on one core computation
and communication share the time anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jdist import reduction as reductions
from jdist._compat import Ahead, ArrayImpl, called_outside_mesh, map_shards, paced
from jdist._errors import check_choice, requirement
from jdist._lru_cache import LRUCache
from jdist._tree import (
    PyTree,
    examples_in,
    is_inexact,
    named_leaves,
    shapes_of,
    split_inexact,
    wide_dtype,
)
from jdist.data_parallel.gradient.buckets import (
    Cap,
    check_cap,
    check_paths,
    plan_buckets,
)
from jdist.data_parallel.hooks.hook import flatten, split
from jdist.data_parallel.replicas.layout import check_params
from jdist.data_parallel.replicas.placement import Placement
from jdist.data_parallel.replicas.shards import (
    Weights,
    check_rows,
    weights_given,
)
from jdist.reduction import Partial
from jdist.segment import Segment, segment
from jdist.segment.internal import GuardedJit, Invoke, Watched, unguarded

# The extreme of all replicas is not known before the backward pass.
REDUCTIONS = ("mean", "sum")
Layer = Callable[[Any, Any], Any]


def reducer(
    layers: Sequence[Layer],
    loss_fn: Callable[[PyTree, PyTree], jax.Array],
    mesh: Mesh,
    *,
    data_axis: str = "data",
    reduction: str = "mean",
    bucket_cap_mb: Cap = None,
    on_reduce: Callable[[int, jax.Array], None] | None = None,
) -> Reducer:
    """The whole batch's loss and gradient, dispatched by the host layer by layer.

    Args:
      layers: Functions `(params, inputs) -> outputs`. The first is given the batch,
        each other one the outputs of the previous one. Each layer is dispatched by
        itself: group layers that are too small to be worth a dispatch.
      loss_fn: `loss_fn(outputs, batch) -> losses` of the last layer's outputs, one real
        loss per example. No collectives, here or in the layers.
      mesh: One axis of devices; with several processes each drives its own.
      data_axis: The axis's name.
      reduction: "mean" or "sum"; an extreme is not known before the backward pass.
      bucket_cap_mb: As in `value_and_grad`, gradients being ready layer by layer, the
        last layer's first. Paths begin with the layer's number: `"2/w"`.
      on_reduce: Called with each bucket's number and its sum, a flat array that may not
        be computed yet, when its collective has been dispatched; for timelines.

    Returns:
      `fn(params, batch, weights=None) -> (loss, gradient)`, not to be jitted. `params`
      is a sequence with the parameters of each layer; no array may be in two layers.
      Batch and weights come from `shard_batch`. `fn.lower` has its programs.

    Raises:
      ValueError: There are no layers, the mesh has other axes, the reduction is neither
        mean nor sum, or a limit is below 0. On calling: another number of parameters
        than layers, and what `value_and_grad`'s function refuses.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jdist import data_parallel
      >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
      >>> layers = [lambda w, x: jnp.tanh(x * w), lambda w, h: h @ w]
      >>> fn = data_parallel.reducer(layers, lambda y, x: y**2, mesh)
      >>> params = [jnp.array(0.5), jnp.array([1.0, 2.0])]
      >>> loss, gradient = fn(params, jnp.array([[0.3, -0.1], [0.2, 0.4]]))
      >>> print(f"{loss:.4f} {gradient[0]:.4f} {gradient[1]}")
      0.1234 0.4826 [0.05656835 0.09513963]

    References:
      Li et al., PyTorch Distributed, VLDB 2020, section 4.2; `torch.nn.parallel
      .DistributedDataParallel`'s reducer.
    """
    call = "reducer"
    _check_options(call, layers, mesh, reduction)
    placement = Placement.of(call, mesh, axis=data_axis)
    check_cap(f"{call}(bucket_cap_mb=...)", bucket_cap_mb)
    driver = _Driver(layers, loss_fn, mesh, placement, reduction)
    return Reducer(driver, bucket_cap_mb, on_reduce)


@final
@dataclass(frozen=True, slots=True)
class Reducer:
    """A function of parameters and batch; made by `data_parallel.reducer`."""

    _driver: _Driver
    _cap: Cap
    _on_reduce: Callable[[int, jax.Array], None] | None
    _plans: LRUCache[Any, _BucketPlan] = field(default_factory=lambda: LRUCache(8))

    @called_outside_mesh
    def __call__(
        self, params: Sequence[PyTree], batch: PyTree, weights: Weights = None
    ) -> tuple[jax.Array, PyTree]:
        """The whole batch's loss and gradient; see `data_parallel.reducer`."""
        plan, given = self._given("fn", params, batch, weights)
        return self._driver.run(plan, params, given, self._on_reduce)

    @called_outside_mesh
    def lower(
        self, params: Sequence[PyTree], batch: PyTree, weights: Weights = None
    ) -> dict[str, jax.stages.Lowered]:
        """Lowers the programs of a call, without compiling or running them.

        Arguments and errors are those of a call. Each array may be a shape
        (`jax.ShapeDtypeStruct`), and the mesh's devices need not be here.

        Returns:
          In the order of a call: `"weights"`, the layers' forward halves, `"loss"`, the
          layers' backward halves, what fills and what reduces each bucket, and
          `"gradient"`. Halves, the loss and what fills a bucket run on each device by
          itself, and are those of the first; equal programs occur more than once.

        Example:
          >>> import jax, jax.numpy as jnp, numpy as np
          >>> from jdist import data_parallel
          >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
          >>> fn = data_parallel.reducer([lambda w, x: x @ w], lambda y, x: y**2, mesh)
          >>> shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
          >>> list(fn.lower([shape(3)], shape(8, 3)))  # doctest: +NORMALIZE_WHITESPACE
          ['weights', 'layer 0: forward', 'loss', 'sum of losses', 'layer 0: backward',
           'bucket 0: fill', 'bucket 0: reduce', 'gradient']
        """
        plan, given = self._given("lower", params, batch, weights)
        return self._driver.lower(plan, params, given)

    def _given(
        self, call: str, params: Sequence[PyTree], batch: PyTree, weights: Weights
    ) -> tuple[_BucketPlan, tuple[PyTree, PyTree]]:
        """Plans the buckets, and checks batch and weights."""
        driver = self._driver
        driver.find_layers()
        count = examples_in(batch, f"{call}(params, batch)")
        check_rows(count, driver.placement.count)
        weights = weights_given(call, batch, weights, count, driver.reduction)
        if len(params) != len(driver.segments):
            rule = "must have the parameters of each of the "
            rule += f"{len(driver.segments)} layers"
            got = f"{len(params)} trees"
            raise ValueError(requirement(f"{call}(params=...)", rule, got))
        if weights is None:
            weights = np.ones(count, np.float32)
        check_params(f"{call}(params=...)", params, driver.placement)
        return self._plan(params), (batch, weights)

    def _plan(self, params: Sequence[PyTree]) -> _BucketPlan:
        """The plan of the buckets, made once for parameters of a structure."""
        leaves, structure = jax.tree.flatten(list(params))
        kinds = tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
        return self._plans.get_or_make(
            (structure, kinds), lambda: _BucketPlan.of("reducer", params, self._cap)
        )


@dataclass(frozen=True, slots=True)
class _BucketPlan:
    """The assignment of leaves to buckets, in the order in which they are sent.

    Attributes:
      places: The layer of each leaf, and its number within the layer.
      buckets: Lists of leaves, numbered over all layers.
    """

    places: list[tuple[int, int]]
    buckets: list[list[int]]

    @staticmethod
    def of(call: str, params: Sequence[PyTree], cap: Cap) -> _BucketPlan:
        named = {k: x for k, x in named_leaves(list(params)).items() if is_inexact(x)}
        paths = list(named)
        # In the dtypes of the sums, which decide the sizes of buckets.
        leaves = [
            jax.ShapeDtypeStruct(np.shape(x), wide_dtype(jnp.result_type(x)))
            for x in named.values()
        ]
        check_paths(f"{call}(bucket_cap_mb=...)", leaves, paths, cap)
        owners = [int(path.split("/")[0]) for path in paths]
        # Backward halves run from the last layer to the first.
        ready = [-owner for owner in owners]
        places = [(owner, i - owners.index(owner)) for i, owner in enumerate(owners)]
        return _BucketPlan(places, plan_buckets(leaves, ready, paths, cap))

    @property
    def static(self) -> tuple[tuple[int, ...], ...]:
        """The buckets as a static argument."""
        return tuple(map(tuple, self.buckets))

    def first_layer(self, bucket: list[int]) -> int:
        """The layer whose backward half completes a bucket."""
        return min(self.places[leaf][0] for leaf in bucket)


class _Driver:
    """The compiled parts of one model, and the order in which they are dispatched."""

    def __init__(
        self,
        layers: Sequence[Layer],
        loss_fn: Callable[[PyTree, PyTree], jax.Array],
        mesh: Mesh,
        placement: Placement,
        reduction: str,
    ) -> None:
        # Each process dispatches to its own devices; collectives join those of others.
        here = jax.process_index()
        self.devices = [d for d in mesh.devices.flat if d.process_index == here]
        axis = placement.axis
        self.mesh, self.placement, self.reduction = mesh, placement, reduction
        self.rows, self.whole = placement.rows, placement.whole
        self._layers = tuple(layers)
        reads = {f"layer {n}": layer for n, layer in enumerate(layers)}
        self._contents = Watched(reads, "reducer")
        self.find_layers()

        def head(outputs: PyTree, batch: PyTree, weights: jax.Array) -> PyTree:
            part = reductions.partial(loss_fn, outputs, batch, weights, reduction)
            trainable, _ = split_inexact(outputs)
            # `pull_back` of the last layer takes cotangents in the dtypes of its
            # outputs.
            cast = jax.tree.map(
                lambda g, x: g.astype(x.dtype), part.gradient, trainable
            )
            # A row per replica: the rows of all devices form one array.
            return jnp.stack([part.value, part.weight])[None], cast

        def shard(batch: PyTree, weights: jax.Array) -> tuple[PyTree, jax.Array]:
            total = jax.lax.psum(reductions.total_weight(weights), axis)
            # Before the first layer: `head` replaces what the loss reads alone.
            batch = reductions.without_excluded(batch, weights)
            return batch, reductions.shares(weights, reduction, total)

        def reduce_bucket(buffer: jax.Array) -> jax.Array:
            return jax.lax.psum(buffer[0], axis)

        spec = PartitionSpec(axis)
        self.head = GuardedJit(head, "reducer", {"loss_fn": loss_fn})
        # One program over all devices, since the total is that of all replicas.
        own_rows = map_shards(shard, mesh, (spec, spec), (spec, spec))
        self.shards = jax.jit(_named("shards", own_rows))
        summed = map_shards(reduce_bucket, mesh, (spec,), PartitionSpec())
        self.reduce = jax.jit(_named("reduce_bucket", summed))
        # The plan is static, since it determines how sums are split.
        self.finish = jax.jit(self._finished, static_argnums=0)

    def find_layers(self) -> None:
        """Looks the compiled layers up, again where what they read has changed."""
        if self._contents.holds():
            return
        # All first layers share the code of the wrapper: the label tells them apart.
        first = self._layers[0]
        label = ("reducer", getattr(first, "__code__", type(first)))
        own = segment(_first(first), label=label)
        others = map(segment, self._layers[1:])
        # `self._contents` looks for changes of all, once for a step.
        self.segments = [unguarded(each) for each in (own, *others)]

    def run(
        self,
        plan: _BucketPlan,
        params: Sequence[PyTree],
        given: tuple[PyTree, PyTree],
        on_reduce: Callable[[int, jax.Array], None] | None,
    ) -> tuple[jax.Array, PyTree]:
        """Dispatches one forward and backward pass."""
        params = _laid_out(list(params), self.whole)
        own_params = self._by_device(params)
        own_given = self._by_device(self.shards(*_laid_out(given, self.rows)))
        passes = [
            _ReplicaPass(self.segments, self.head, p, *g)
            for p, g in zip(own_params, own_given, strict=True)
        ]
        # All devices before the next layer, here and in the backward pass, so that no
        # collective waits for a device whose work is not yet dispatched.
        for layer in range(len(self.segments)):
            for one in passes:
                one.forward(layer)
            paced(self.mesh, *[one.value for one in passes])
        scalars = self._reduced([one.losses() for one in passes])
        sums: list[jax.Array] = []
        # Dispatch does not wait: a bucket's collective is enqueued right after the last
        # backward half that fills it, and runs in parallel with those that follow.
        for layer in reversed(range(len(self.segments))):
            for one in passes:
                one.backward(layer)
            paced(self.mesh, *[one.done[layer] for one in passes])
            while len(sums) < len(plan.buckets):
                bucket = plan.buckets[len(sums)]
                if plan.first_layer(bucket) < layer:
                    break  # A leaf of it belongs to an earlier layer.
                with jax.profiler.TraceAnnotation(f"bucket {len(sums)}"):
                    filled = [
                        _fill_bucket(one.gradients(plan, bucket), one.weights)
                        for one in passes
                    ]
                    sums.append(self._reduced(filled))
                if on_reduce is not None:
                    on_reduce(len(sums) - 1, sums[-1])
        if not self._contents.holds():
            # After the traces, which may write to what they read.
            self._contents.note()
        found: tuple[jax.Array, PyTree]
        found = self.finish(plan.static, sums, scalars, params)
        paced(self.mesh, found[0])
        return found

    def lower(
        self, plan: _BucketPlan, params: Sequence[PyTree], given: tuple[PyTree, PyTree]
    ) -> dict[str, jax.stages.Lowered]:
        """Runs a pass on shapes; see `Reducer.lower`."""
        ahead, found = Ahead(), {}

        def call(name: str, function: Any, *arguments: PyTree) -> PyTree:
            shapes = ahead(function, *arguments)
            found[name] = ahead.traced[-1]
            return shapes

        one = SingleDeviceSharding(self.mesh.devices.flat[0])
        batch, weights = call("weights", self.shards, *_placed(given, self.rows))
        # The replicas divide the rows of the batch evenly.
        own = jax.tree.map(
            lambda x: x.update(shape=(x.shape[0] // self.mesh.size, *x.shape[1:])),
            (batch, weights),
        )
        half = "forward"  # Until all layers' first halves have been called.
        segments = [
            seg.through(lambda *called, n=n: call(f"layer {n}: {half}", *called))
            for n, seg in enumerate(self.segments)
        ]
        replica = _ReplicaPass(
            segments,
            partial(call, "loss", self.head),
            _placed(list(params), one),
            *_placed(own, one),
        )

        def reduced(name: str, row: PyTree) -> PyTree:
            shape = (self.mesh.size, *row.shape[1:])
            return call(name, self.reduce, row.update(shape=shape, sharding=self.rows))

        for layer in range(len(segments)):
            replica.forward(layer)
        scalars = reduced("sum of losses", replica.losses())
        half = "backward"
        for layer in reversed(range(len(segments))):
            replica.backward(layer)
        sums = []
        for number, bucket in enumerate(plan.buckets):
            gradients = replica.gradients(plan, bucket)
            filled = call(
                f"bucket {number}: fill", _fill_bucket, gradients, replica.weights
            )
            sums.append(reduced(f"bucket {number}: reduce", filled))
        whole = _placed((sums, scalars, list(params)), self.whole)
        call("gradient", self.finish, plan.static, *whole)
        return {name: traced.lower() for name, traced in found.items()}

    def _reduced(self, rows: list[jax.Array]) -> jax.Array:
        """The sum over all replicas of one row from each."""
        shape = (self.mesh.size, *rows[0].shape[1:])
        # The rows stay where they are: nothing is copied.
        make = jax.make_array_from_single_device_arrays
        found: jax.Array = self.reduce(make(shape, self.rows, rows))
        paced(self.mesh, found)
        return found

    def _by_device(self, tree: PyTree) -> list[PyTree]:
        """The tree on each device of this process, without copies."""
        leaves, structure = jax.tree.flatten(tree)
        held = [{s.device: s.data for s in leaf.addressable_shards} for leaf in leaves]
        return [
            jax.tree.unflatten(structure, [shards[device] for shards in held])
            for device in self.devices
        ]

    def _finished(
        self,
        buckets: tuple[tuple[int, ...], ...],
        sums: list[jax.Array],
        scalars: jax.Array,
        params: list[PyTree],
    ) -> tuple[jax.Array, PyTree]:
        trainable, _ = split_inexact(params)
        like, structure = jax.tree.flatten(trainable)
        leaves: dict[int, jax.Array] = {}
        for bucket, buffer in zip(buckets, sums, strict=True):
            pieces = split(buffer, [like[i].shape for i in bucket])
            leaves.update(zip(bucket, pieces, strict=True))
        gradient = jax.tree.unflatten(structure, [leaves[i] for i in range(len(like))])
        whole = Partial(scalars[0], gradient, scalars[1])
        return reductions.finish(whole, self.reduction, like=params)


class _ReplicaPass:
    """The forward and backward pass of one replica, as far as it is dispatched."""

    def __init__(
        self,
        segments: Sequence[Segment],
        head: Invoke,
        params: Sequence[PyTree],
        batch: PyTree,
        weights: jax.Array,
    ) -> None:
        self.segments, self.head, self.params = segments, head, params
        self.batch, self.weights, self.value = batch, weights, batch
        self.residuals: list[PyTree] = []
        self.cotangent: PyTree = None
        self.done: dict[int, list[jax.Array]] = {}

    def forward(self, layer: int) -> None:
        """Dispatches the forward half of a layer."""
        params = self.params[layer]
        self.value, residuals = self.segments[layer].forward(params, self.value)
        self.residuals.append(residuals)

    def losses(self) -> jax.Array:
        """Dispatches the loss; returns the replica's value and weight."""
        # The last outputs are dropped: the backward pass has what it needs of them.
        value, self.value = self.value, None
        scalars, self.cotangent = self.head(value, self.batch, self.weights)
        return scalars

    def backward(self, layer: int) -> None:
        """Dispatches the backward half of a layer, and drops its residuals."""
        # The only reference: activations are freed during the backward pass.
        params, residuals = self.params[layer], self.residuals.pop()
        d_params, (self.cotangent, *_) = self.segments[layer].backward(
            params, residuals, self.cotangent
        )
        self.done[layer] = jax.tree.leaves(d_params)

    def gradients(self, plan: _BucketPlan, bucket: list[int]) -> list[jax.Array]:
        """The leaves of a bucket."""
        places = (plan.places[leaf] for leaf in bucket)
        return [self.done[layer][number] for layer, number in places]


def _laid_out(tree: PyTree, place: NamedSharding) -> PyTree:
    """`jax.device_put`, which takes some 15 us for an array that is there already."""
    if all(type(x) is ArrayImpl and x.sharding == place for x in jax.tree.leaves(tree)):
        return tree
    return jax.device_put(tree, place)


def _placed(tree: PyTree, place: jax.sharding.Sharding) -> PyTree:
    """Shapes of the arrays of a tree, with a sharding."""
    return jax.tree.map(lambda x: x.update(sharding=place), shapes_of(tree))


@jax.jit
def _fill_bucket(gradients: list[jax.Array], weights: jax.Array) -> jax.Array:
    # Sums over replicas are float32 at least, as in the compiled step.
    filled = flatten([g.astype(wide_dtype(g.dtype)) for g in gradients])[None]
    # A shard without an example that counts has its own rows, as in `partial`.
    return jnp.where(jnp.any(weights != 0), filled, 0)


def _first(layer: Layer) -> Layer:
    """Wraps the first layer so that the batch has no gradient."""

    def first(params: PyTree, batch: PyTree) -> PyTree:
        # Its backward half would otherwise compute a gradient that is not used.
        return layer(params, jax.tree.map(jax.lax.stop_gradient, batch))

    return first


def _named(name: str, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Renames a function for profiles."""

    def call(*arguments: PyTree) -> PyTree:
        return fn(*arguments)

    call.__name__ = name
    return call


def _check_options(
    call: str, layers: Sequence[Layer], mesh: Mesh, reduction: str
) -> None:
    if not layers:
        raise ValueError(requirement(f"{call}(layers)", "must have a layer", layers))
    if not isinstance(mesh, Mesh) or len(mesh.axis_names) != 1:
        rule = "must be a mesh with one axis: the host drives each device by itself"
        got = f"{mesh}"
        raise ValueError(requirement(f"{call}(mesh=...)", rule, got))
    check_choice(f"{call}(reduction=...)", reduction, REDUCTIONS)
