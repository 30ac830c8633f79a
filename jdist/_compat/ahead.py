"""Programs made ahead of the first call, from the shapes of their arguments alone."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jdist._compat.staging import thread_pool_size


class Ahead:
    """Traces jitted functions on shapes, and compiles them afterwards.

    What `Traced.lower().compile()` has compiled, JAX finds again when the function is
    called with arguments of the same shapes, dtypes, weak types and places, which JAX
    documents nowhere. Where it does not find it, that call compiles as it would have.

    An argument is an array, a number, or a `jax.ShapeDtypeStruct`: with the sharding
    that the array will be committed to, or without one if it will not be committed.

    Args:
      places: Whether the places of all results are wanted. The compiler chooses those
        on a mesh: a function with an argument there is then compiled at once.
      called: Whether the functions will be called. Else, of programs that are the same
        but for the devices of their mesh, one is compiled.

    Attributes:
      traced: The traced functions, in order of their calls.
      undecided: Whether the compiler will choose the placement of some result, so that
        a function traced for its shape without a placement would be compiled for
        nothing.
    """

    def __init__(self, *, places: bool = False, called: bool = True) -> None:
        self.traced: list[jax.stages.Traced] = []
        self.undecided = False
        self._places = places
        self._called = called
        # Places of results, by the program's text.
        self._chosen: dict[str, list[PartitionSpec]] = {}
        self._left: dict[Any, jax.stages.Traced] = {}

    def __call__(self, function: Any, *arguments: Any) -> Any:
        """The shapes of the results of `function(*arguments)`, which is not called.

        Args:
          function: What `jax.jit` returned.
          *arguments: Its arguments; static ones as they are.
        """
        traced = function.trace(*arguments)
        self.traced.append(traced)
        each = tuple([_place(x) for x in jax.tree.leaves(arguments)])
        places = [x for x in each if x is not None]
        on_mesh = not all(isinstance(place, SingleDeviceSharding) for place in places)
        if on_mesh and self._places:
            leaves, structure = jax.tree.flatten(traced.out_info)
            chosen = self._places_of_results(traced.lower(), places)
            return jax.tree.unflatten(structure, map(_with_place, leaves, chosen))
        self.undecided |= on_mesh
        # Equal stages are one program, which two threads would compile twice.
        self._left.setdefault((function, id(traced.jaxpr), each), traced)
        place = places[0] if places and not on_mesh else None
        return jax.tree.map(lambda x: _with_place(x, place), traced.out_info)

    def _places_of_results(
        self, lowered: jax.stages.Lowered, places: Sequence[Sharding]
    ) -> list[Sharding]:
        """The shardings of results that the compiler chooses."""
        if self._called:
            return jax.tree.leaves(lowered.compile().output_shardings)
        # Results are named by the paths in their tree, which change no program.
        text = re.sub(r'jax\.result_info = "[^"]*"', "", lowered.as_text())
        specs = self._chosen.get(text)
        if specs is None:
            found = jax.tree.leaves(lowered.compile().output_shardings)
            specs = [place.spec for place in found if isinstance(place, NamedSharding)]
            if len(specs) < len(found):
                return found
            self._chosen[text] = specs
        mesh = next(place.mesh for place in places if isinstance(place, NamedSharding))
        return [NamedSharding(mesh, spec) for spec in specs]

    def compile(self) -> None:
        """Compiles what was traced and is not compiled yet, all of it at once."""
        # XLA compiles without Python's lock; tracing and lowering hold it.
        with ThreadPoolExecutor(thread_pool_size()) as threads:
            compiled = [
                threads.submit(traced.lower().compile) for traced in self._left.values()
            ]
        self._left.clear()
        for each in compiled:
            each.result()


def _with_place(x: Any, place: Sharding | None) -> jax.ShapeDtypeStruct:
    # A function that is told where to put a result does so.
    place = x.sharding if place is None else place
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place, weak_type=x.weak_type)


def _place(leaf: Any) -> Sharding | None:
    """The sharding to which an array is committed, or will be."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding
    if isinstance(leaf, jax.Array) and leaf.committed:
        return leaf.sharding
    return None
