"""What is kept between the halves of a segment: arrays, and how to read them.

Both classes are pytrees. Their arrays are children, and the program that reads them is
part of the structure, so that `jax.jit` finds the compiled backward pass by it. Which
parameters the forward pass used is known by weak references, which keep nothing alive;
it is forgotten where JAX takes the tree apart.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdist.segment._backward import Layout
from jdist.segment._plan import Plan
from jdist.segment._split import Split

Version = tuple[Callable[[], Any], ...]


@jax.tree_util.register_pytree_node_class
class Residuals:
    """What one forward pass keeps for its backward pass: a pytree of arrays.

    It may pass through `jax.jit`, be stored, or moved between devices. It refers to the
    arrays of the caller that it can use, and holds no parameter nor anything computed
    from parameters only.
    """

    __slots__ = ("arrays", "layout", "plan", "version")

    def __init__(
        self,
        plan: Plan,
        arrays: tuple[Any, ...],
        version: Version | None = None,
        layout: Layout = None,
    ) -> None:
        self.plan = plan
        self.arrays = arrays
        self.version = version
        self.layout = layout

    def tree_flatten(self) -> tuple[tuple[Any, ...], Plan]:
        """The arrays; the plan is part of the structure."""
        return self.arrays, self.plan

    @classmethod
    def tree_unflatten(cls, plan: Plan, arrays: Sequence[Any]) -> "Residuals":
        """Residuals of the same plan; which parameters they are of is not known."""
        return cls(plan, tuple(arrays))


@jax.tree_util.register_pytree_node_class
class Rest:
    """What `backward_inputs` leaves for `backward_params`: a pytree of arrays.

    It refers to parameters, residuals and cotangents that it needs, and holds what the
    first half has computed and the second would otherwise compute again.
    """

    __slots__ = ("arrays", "layout", "split")

    def __init__(
        self, split: Split, arrays: tuple[Any, ...], layout: Layout = None
    ) -> None:
        self.split = split
        self.arrays = arrays
        self.layout = layout

    def tree_flatten(self) -> tuple[tuple[Any, ...], Split]:
        """The arrays; how to use them is part of the structure."""
        return self.arrays, self.split

    @classmethod
    def tree_unflatten(cls, split: Split, arrays: Sequence[Any]) -> "Rest":
        """The rest of the same split."""
        return cls(split, tuple(arrays))
