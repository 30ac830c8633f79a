"""Values that one half of a segment keeps for another, as pytrees.

Their arrays are children, and the program that reads them is part of the tree
structure, by which `jax.jit` finds the compiled backward pass. The parameters of the
forward pass are remembered by weak references, which keep nothing alive; these are lost
where JAX rebuilds the tree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, NoReturn
from weakref import ref

import jax
import numpy as np
from jax.sharding import (
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from jdist._compat import is_traced
from jdist._errors import requirement, type_error, value_error
from jdist._tree import PyTree, is_shape, path_of
from jdist.segment._programs import backward
from jdist.segment._programs.backward import Layout
from jdist.segment._programs.plan import ForwardPlan
from jdist.segment._programs.split import Split

Version = tuple[Callable[[], Any], ...]


@dataclass(slots=True, eq=False, repr=False)
class Residuals:
    """Values that one forward pass keeps for its backward pass: a pytree of arrays.

    It may pass through `jax.jit`, be stored, or moved between devices. It refers to the
    arrays of the caller that it can use, and holds no parameter nor anything computed
    from parameters only.
    """

    plan: ForwardPlan
    arrays: tuple[Any, ...]
    version: Version | None = None
    layout: Layout = None

    @property
    def owner(self) -> object:
        """Identity token shared by the residuals of one function and no others."""
        return self.plan.owner


@dataclass(slots=True, eq=False, repr=False)
class Rest:
    """The result of `backward_inputs` for `backward_params`: a pytree of arrays.

    It refers to parameters, residuals and cotangents that are needed, and holds
    computed values that would otherwise be computed again.
    """

    split: Split
    arrays: tuple[Any, ...]
    layout: Layout = None

    @property
    def owner(self) -> object:
        """Identity token shared by the values of one function and no others."""
        return self.split.gradient.plan.owner

    @property
    def computed(self) -> list[Any]:
        """The arrays other than parameters and residuals: cotangents and computed."""
        places = self.split.locations.places
        # Groups 0 and 1 are the parameters and the residuals.
        return [
            x for x, (group, _) in zip(self.arrays, places, strict=True) if group > 1
        ]

    @classmethod
    def of(
        cls,
        split: Split,
        params: Sequence[Any],
        residuals: Sequence[Any],
        computed: Sequence[Any],
    ) -> "Rest":
        """A rest of the same split with other arrays; `computed` as in the property."""
        held, others = (params, residuals), iter(computed)
        return cls(
            split,
            tuple(
                next(others) if group >= len(held) else held[group][place]
                for group, place in split.locations.places
            ),
        )


# `version` and `layout` are dropped when JAX flattens a tree: they describe these
# arrays, and JAX may rebuild the tree with others.
jax.tree_util.register_dataclass(Residuals, ["arrays"], ["plan"], ["version", "layout"])
jax.tree_util.register_dataclass(Rest, ["arrays"], ["split"], ["layout"])


def passed_on(residuals: Residuals, cotangents: Sequence[Any]) -> Sequence[Any] | None:
    """The inputs' cotangents, if they are outputs' cotangents, passed on unchanged.

    Args:
      residuals: The residuals of a segment without parameters, whose inputs are arrays.
      cotangents: The outputs' cotangents, one for each leaf.

    Returns:
      For each input one of these arrays, or None where no cotangent flows. None instead
      of the list if something must be computed or a cotangent does not fit its output.
    """
    # Kept arrays are there to be computed with; a layout constrains the cotangents.
    if residuals.arrays or residuals.layout is not None:
        return None
    places = backward.passed_on(residuals.plan)
    if places is None:
        return None
    shapes = jax.tree.leaves(residuals.plan.outputs)
    for shape, value in zip(shapes, cotangents, strict=True):
        # None and weakly typed values, which `backward` handles.
        if type(value) is not np.ndarray and getattr(value, "weak_type", True):
            return None
        if value.shape != shape.shape or value.dtype != shape.dtype:
            return None
    return [None if place is None else cotangents[place] for place in places]


# --- identity and sharding of arrays ---


def version_of(leaves: Sequence[Any]) -> Version:
    """Weak references to these objects, for a later comparison of identities."""
    return tuple([_reference(leaf) for leaf in leaves])


def _reference(leaf: PyTree) -> Callable[[], Any]:
    try:
        return ref(leaf)
    except TypeError:  # A Python number, which is not an array to keep alive.
        return lambda: leaf


def layout_of(leaves: Sequence[Any]) -> Layout:
    """The shardings of leaves on several devices; None if all are on one device."""
    # Loops, here and below: a generator would cost more than what it computes.
    for leaf in leaves:
        if type(getattr(leaf, "sharding", None)) not in _ONE_DEVICE:
            break
    else:
        return None
    return tuple([_place_of(leaf) for leaf in leaves])


def _place_of(leaf: PyTree) -> Sharding | None:
    """The leaf's sharding on several devices, in canonical form; else None."""
    place = getattr(leaf, "sharding", None)
    if type(place) in _ONE_DEVICE:
        return None
    # JAX turns P() into P(None, None) when it computes with explicit axes; a layout is
    # a static argument, so that the two forms would compile twice.
    if isinstance(place, NamedSharding) and len(place.spec) < leaf.ndim:
        spec, more = place.spec, [None] * (leaf.ndim - len(place.spec))
        kinds = {"unreduced": spec.unreduced, "reduced": spec.reduced}
        whole = PartitionSpec(*spec, *more, **kinds)
        return NamedSharding(place.mesh, whole, memory_kind=place.memory_kind)
    return place


_ONE_DEVICE = (SingleDeviceSharding, NoneType)


# --- errors ---


def refuse_origin(call: str, value: PyTree, kind: type) -> NoReturn:
    """Raises for a value that another method, or another segment, has returned."""
    names = "residuals", "forward"
    argument, maker = names if kind is Residuals else ("rest", "backward_inputs")
    rule = f"must be what `{maker}` of this very segment returned"
    if type(value) is kind:
        raise value_error(f"{call}({argument}=...)", rule, "that of another segment")
    raise type_error(f"{call}({argument}=...)", rule, value)


def check_version(call: str, params: PyTree, version: Version | None) -> None:
    """Raises if parameters are not the very arrays of the forward pass.

    Tracers that a transformation has put in their place cannot be checked, and pass.
    """
    if version is None:
        return
    leaves = jax.tree.leaves(params)
    if len(leaves) != len(version):
        got = f"{len(leaves)} leaves instead of {len(version)}"
    else:
        for place, (leaf, was) in enumerate(zip(leaves, version, strict=True)):
            # Under a transformation identity says nothing.
            if was() is not leaf and not is_traced(leaf):
                got = f"another array at {_leaves_by_path(params)[place][0]}"
                break
        else:
            return
    rule = "must be the very arrays that the forward pass was given"
    remedy = (
        "Keep each version of the parameters until the backward passes of all its "
        "forward passes have run, and pass it to them."
    )
    raise ValueError(requirement(f"{call}(params=...)", rule, got, remedy))


def explain(call: str, error: Exception, trees: Mapping[str, Any]) -> None:
    """Raises an error that names the leaf, if one that JAX cannot read made it fail."""
    # Searched after the failure: before each call it would cost more than the call.
    # JAX raises one of two types for a deleted array, depending on whether the call
    # took its fast path.
    for name, tree in trees.items():
        argument = f"{call}({name}=...)"
        for path, leaf in _leaves_by_path(tree):
            if is_shape(leaf) or is_traced(leaf):
                continue
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                rule = "must be alive: a backward pass that is pending needs it"
                got = f"a buffer that was donated or deleted, at {path}"
                remedy = (
                    "Donate parameters, inputs and outputs of a segment only after "
                    "the backward passes of all forward passes that used them."
                )
                message = requirement(argument, rule, got, remedy)
                raise ValueError(message) from error
            try:
                jax.typeof(leaf)
            except TypeError:
                rule, got = "must be a tree of arrays", f"{leaf!r} at {path}"
                raise TypeError(requirement(argument, rule, got)) from error


def _leaves_by_path(tree: PyTree) -> list[tuple[str, Any]]:
    return [(path_of(keys), leaf) for keys, leaf in jax.tree.leaves_with_path(tree)]
