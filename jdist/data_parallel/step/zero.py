"""ZeRO, stage 1: each replica keeps and updates a part of the optimizer's state.

Without it every replica holds the whole state, for Adam twice the parameters, and all
compute the same update. With it each of K replicas holds 1/K:

    gradients --- reduce-scatter --+
    parameters, whole -> own part -+-> optimizer --> own part of the state, kept
                                               `--> own part of the parameters
                                                    --> all-gather --> whole

An elementwise update performs the same operations on divided arrays and gives the same
bits, except that a compiler may contract a product and a sum to one rounding in one of
the programs only (without such instructions, under
`XLA_FLAGS=--xla_cpu_max_isa=AVX`, all bits are the same). Reductions over an array (a
norm, the check of a loss scale for infinities) still cover the whole array, since only
the *layout* of arrays changes, and the compiler adds the communication.

Each array is divided along its first dimension that K divides. If there is none, its
largest dimension is padded with zeros, which affect no element of an elementwise
update. Other updates (Muon's, Adafactor's, optax's, of which nothing is known) would
take the zeros for a part of the parameter: for these such an array is whole on every
replica. A dimension that a further axis of the mesh divides (tensor parallelism) is
left to that axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jdist._compat import laid_out
from jdist._errors import check_type, value_error
from jdist._tree import PyTree, is_inexact, map_some, named_leaves, path_of
from jdist.data_parallel.replicas.layout import check_alone, check_params
from jdist.data_parallel.replicas.placement import Placement
from jdist.optim import Optimizer
from jdist.optim.internal import check_optimizer


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Sharded:
    """An array of an optimizer's state, divided over replicas.

    Attributes:
      array: The array, padded along one dimension to a multiple of the number of
        replicas.
      shape: Shape of the array without the padding.
      spec: Partition of the array over further mesh axes.
    """

    array: jax.Array
    shape: tuple[int, ...] = field(metadata={"static": True})
    spec: PartitionSpec = field(default=PartitionSpec(), metadata={"static": True})

    def whole(self) -> jax.Array:
        """The array without padding, as in an optimizer that is not sharded."""
        return self.array[tuple(slice(size) for size in self.shape)]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ZeroOptimizer(Optimizer):
    """An optimizer whose state is divided.

    Attributes:
      layout: The layout of the optimizer's state.
    """

    layout: _StateLayout
    of: Optimizer

    @property
    def rule(self) -> tuple[Any, ...]:
        """See `Optimizer`; another number of replicas may round differently."""
        return (*self.of.rule, "zero", self.layout.placement.count)


def is_divided_over(optimizer: Optimizer, placement: Placement) -> bool:
    """Whether an optimizer uses only each replica's part of a gradient."""
    if not isinstance(optimizer, ZeroOptimizer):
        return False
    # With specs the state is divided over further axes too, unlike a scattered sum.
    return optimizer.layout.placement == placement and optimizer.layout.specs is None


def check_undivided(call: str, optimizer: Optimizer) -> None:
    """Checks that an optimizer is undivided, where parameters may be divided.

    Raises:
      ValueError: Its state is divided.
    """
    if isinstance(optimizer, ZeroOptimizer):
        rule = "must not be divided by `zero` on a mesh with further axes: the "
        rule += "compiler would choose how parameters lie after a step"
        remedy = (
            "`Pipeline` takes it there, with `specs=`, and so does jax.jit(opt.step)."
        )
        raise value_error(f"{call}(optimizer=...)", rule, optimizer.name, remedy)


def zero(
    optimizer: Optimizer, mesh: Mesh, *, data_axis: str = "data", specs: PyTree = None
) -> Optimizer:
    """Divides the state of an optimizer over the replicas; results are the same.

    `init` and `step` see whole parameters and gradients, in the global view: under jit
    or outside, not inside shard_map. `train_step` takes it as any other optimizer.

    Args:
      optimizer: Any optimizer of jdist, `by_label` and `with_master_weights` too; the
        masters are divided as well.
      mesh: The devices. Replicas that share one device have nothing to divide.
      data_axis: The mesh axis that counts replicas.
      specs: Where the mesh has further axes, a `PartitionSpec` over them for each
        parameter or for each subtree, None: not divided. The parameters have these
        layouts, and keep them.

    Returns:
      An optimizer whose state has a `Sharded` in the place of each array.

    Raises:
      ValueError: The mesh has no such axis, or further ones without `specs`. In `init`:
        the state has an array that is not like its parameter, and padding is needed;
        `specs` is no tree like the parameters.
      TypeError: `mesh` is no mesh, or `optimizer` not one of jdist.optim.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jdist import optim
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> opt = zero(optim.adam(lr=0.1), mesh)
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> params, state = opt.step(params, {"w": jnp.ones(2)}, opt.init(params))
      >>> found = (params["w"], state["w"].exp_avg.whole())
      >>> print(*(np.asarray(x).round(3) for x in found))
      [0.9 1.9] [0.1 0.1]

    References:
      Rajbhandari et al., ZeRO, SC 2020, section 5.1;
      `torch.distributed.optim.ZeroRedundancyOptimizer`, which gives each rank whole
      parameters and so can divide no single large one.
    """
    rule = "must be a jax.sharding.Mesh: one device has nothing to divide"
    check_type("zero(mesh=...)", mesh, Mesh, rule)
    check_optimizer("zero(optimizer=...)", optimizer)
    placement = Placement.of("zero", mesh, axis=data_axis)
    layout = _StateLayout(mesh, placement, specs, pads=optimizer.elementwise)
    if specs is None:
        check_alone("zero", placement)

    def init_tree(params: PyTree) -> PyTree:
        check_params("init(params=...)", params, placement)
        # Shapes without padding: those of a state that is not divided.
        wanted, each = jax.eval_shape(optimizer.init_tree, params), layout.each(params)

        def init(params: PyTree) -> PyTree:
            # Created divided, so that no device ever holds the whole state.
            state = optimizer.init_tree(layout.parts(params, each))
            return layout.wrapped(state, wanted, layout.by_path(params))

        # Unused parameters are kept too: they determine the devices of the program.
        return jax.jit(init, keep_unused=True)(params)

    def step_tree(
        params: PyTree,
        grads: PyTree,
        state: PyTree,
        overrides: Mapping[str, PyTree],
        **form: bool,
    ) -> tuple[PyTree, PyTree]:
        each = layout.each(params)
        # Gradients from a reduce-scatter have this layout already.
        own, own_grads = (layout.parts(tree, each) for tree in (params, grads))
        moved, inner = optimizer.step_tree(
            own, own_grads, _unwrapped(state), overrides, **form
        )

        def joined(old: Any, grad: Any, new: Any, spec: PartitionSpec) -> Any:
            # A parameter without a gradient keeps its array, bit for bit.
            kept = grad is None and not form
            return old if kept else layout.joined(new, old, spec)

        new_params = jax.tree.map(joined, params, grads, moved, each)
        return new_params, layout.rewrapped(inner, state)

    factor = optimizer.loss_factor
    return ZeroOptimizer(
        optimizer.name,
        init_tree,
        step_tree,
        optimizer.hyperparameters,
        None if factor is None else lambda state: factor(_unwrapped(state)),
        optimizer.precision,
        optimizer.elementwise,
        layout=layout,
        of=optimizer,
    )


@dataclass(frozen=True, slots=True)
class _StateLayout:
    """The layout of arrays that are divided over the replicas of a mesh axis."""

    mesh: Mesh
    placement: Placement
    specs: PyTree
    pads: bool

    def each(self, params: PyTree) -> PyTree:
        """A tree like the parameters, with the specs of further axes."""
        try:
            # A spec, or None, may stand for a whole subtree.
            found = jax.tree.broadcast(self.specs, params, is_leaf=_is_spec)
        except ValueError as error:
            rule = "must be a tree like the parameters, or a part of it from the top"
            got = str(error).splitlines()[0]
            raise value_error("zero(specs=...)", rule, got) from error

        def given(_: object, spec: PartitionSpec | None) -> PartitionSpec:
            rule = "must have a PartitionSpec or None for each parameter"
            check_type("zero(specs=...)", spec, PartitionSpec | None, rule)
            return PartitionSpec() if spec is None else spec

        return jax.tree.map(given, params, found)

    def by_path(self, params: PyTree) -> dict[str, PartitionSpec]:
        """The specs of further axes by the parameters' paths."""
        specs = jax.tree.leaves(self.each(params))
        named = {path: x for path, x in named_leaves(params).items() if x is not None}
        return dict(zip(named, specs, strict=True))

    def dimension(self, shape: tuple[int, ...], spec: PartitionSpec) -> int | None:
        """The first free dimension that the replicas divide, or else one to pad."""
        entries = (*spec, *[None] * (len(shape) - len(spec)))
        free = [i for i, entry in enumerate(entries) if entry is None]
        even = (i for i in free if shape[i] % self.placement.count == 0)
        if not self.pads:
            return next(even, None)
        # Padding the largest dimension adds the fewest elements.
        return next(even, max(free, key=lambda i: shape[i], default=None))

    def padded(self, shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
        """The shape with its divided dimension rounded up."""
        d = self.dimension(shape, spec)
        if d is None:
            return shape
        return (
            *shape[:d],
            -(-shape[d] // self.placement.count) * self.placement.count,
            *shape[d + 1 :],
        )

    def parts(self, tree: PyTree, each: PyTree) -> PyTree:
        """Pads and divides parameters, or gradients, which may be None."""
        return map_some(self.part, tree, each)

    def part(self, leaf: Any, spec: PartitionSpec) -> PyTree:
        """Pads and divides a parameter or gradient, but no scalar or integer."""
        if not is_inexact(leaf) or not jnp.ndim(leaf):
            return leaf  # Nothing to divide.
        array = jnp.asarray(leaf)
        pairs = zip(self.padded(array.shape, spec), array.shape, strict=True)
        padding = [(0, wide - size) for wide, size in pairs]
        return self.divided(
            jnp.pad(array, padding) if any(map(max, padding)) else array, spec
        )

    def divided(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Lays an array out over the axis, which must divide its dimension."""
        d = self.dimension(array.shape, spec)
        entries = [*spec, *[None] * (array.ndim - len(spec))]
        if d is not None:
            entries[d] = self.placement.axis
        return laid_out(array, self.mesh, PartitionSpec(*entries))

    def joined(
        self, part: jax.Array, like: jax.Array, spec: PartitionSpec
    ) -> jax.Array:
        """Inverse of `part`: gathers the whole array on every replica."""
        if not is_inexact(like):
            return part
        # First whole, then cut: an explicit axis cannot be sliced while it is divided.
        padded = laid_out(part, self.mesh, spec)
        whole = padded[tuple(slice(size) for size in jnp.shape(like))]
        return laid_out(whole, self.mesh, spec)

    def wrapped(
        self, state: PyTree, wanted: PyTree, specs: Mapping[str, PartitionSpec]
    ) -> PyTree:
        """Wraps the arrays of a new state.

        Args:
          state: The state of divided parameters.
          wanted: The shapes of the undivided state.
          specs: The specs of the parameters, by path.
        """

        def wrapped(keys: Any, leaf: jax.Array, whole: jax.ShapeDtypeStruct) -> PyTree:
            path, shape = path_of(keys), whole.shape
            spec = _spec_for(path, shape, specs)
            padded = self.padded(shape, spec)
            # A count or a norm, whose shape is not that of its parameter's part.
            if not shape or leaf.shape == shape != padded:
                return laid_out(leaf, self.mesh, PartitionSpec())
            if leaf.shape == padded:
                return Sharded(self.divided(leaf, spec), shape, spec)
            rule = "must keep state arrays like their parameters, if those do not "
            rule += f"divide by the {self.placement.count} replicas"
            got = f"{leaf.shape} for {shape} at {path}"
            raise value_error("zero(optimizer=...)", rule, got)

        return jax.tree.map_with_path(wrapped, state, wanted)

    def rewrapped(self, inner: PyTree, like: PyTree) -> PyTree:
        """Wraps the arrays of an updated state like those of the state before."""

        def rewrapped(old: Any, new: jax.Array) -> PyTree:
            if isinstance(old, Sharded):
                return Sharded(self.divided(new, old.spec), old.shape, old.spec)
            return laid_out(new, self.mesh, PartitionSpec())

        return jax.tree.map(rewrapped, like, inner, is_leaf=_is_sharded)


def _spec_for(
    path: str, shape: tuple[int, ...], specs: Mapping[str, PartitionSpec]
) -> PartitionSpec:
    """The spec of a state array: that of the parameter whose path it contains."""
    # A wrong match would cost memory, but change no value. With slashes around both,
    # `w` does not match `w2`.
    own = [
        name
        for name, spec in specs.items()
        if f"/{name}/" in f"/{path}/" and len(spec) <= len(shape)
    ]
    spec = specs[max(own, key=len)] if own else PartitionSpec()
    # A factor of Adafactor has one number along a dimension of its parameter.
    entries = zip(shape, (*spec, *[None] * (len(shape) - len(spec))), strict=True)
    return PartitionSpec(*(None if size == 1 else entry for size, entry in entries))


def _is_spec(x: object) -> bool:
    return x is None or isinstance(x, PartitionSpec)


def _is_sharded(x: object) -> bool:
    return isinstance(x, Sharded)


def _unwrapped(state: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: x.array if isinstance(x, Sharded) else x, state, is_leaf=_is_sharded
    )
