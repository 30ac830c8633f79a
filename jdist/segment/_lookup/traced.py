"""A function by the programs that it is traced to: its Python runs once for each.

What a function reads beside its arguments is read while it is traced, and the program
has it all. So programs, not functions, are what is certainly the same, and everything
that is compiled of a function (its halves, its evaluation) is made of one program.

`Traced` also keeps the versions of what a function reads apart. All programs of one
`Traced` are of one version, that of the first. For a new set of shapes the function is
traced again; where what it reads may have changed since, it is traced for the old
shapes as well, and refused if the program there is another one.

What was compiled for one function serves others of equal contents. If the first of them
is no longer what it was, it cannot be traced for the others: `Changed` is raised, and
each of them goes on with its own function (`Traced.aside`).
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jdist._compat import (
    constants_of,
    evaluate,
    is_traced,
    trace_context,
    trace_whole,
)
from jdist._errors import requirement
from jdist._tree import PyTree
from jdist.segment._lookup.contents import Contents, contents_of
from jdist.segment._lookup.program_key import calls_user, likeness_of


class StaticValue:
    """An argument that is part of what is compiled; equal by its key.

    Args:
      place: Its position.
      value: The argument.
      key: What it is made of.
    """

    __slots__ = ("key", "place", "value")

    def __init__(self, place: int, value: PyTree, key: Hashable) -> None:
        self.place = place
        self.value = value
        self.key = key

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StaticValue)
            and self.place == other.place
            and self.key == other.key
        )

    def __hash__(self) -> int:
        return hash((self.place, self.key))


Static = tuple[StaticValue, ...]
Signature = tuple[Any, tuple[Any, ...], Static, Any]
"""Structure and abstract values of the arguments, static ones, and JAX's settings."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedProgram:
    """A function for one set of shapes: its traced program.

    Attributes:
      closed: From the leaves of the arguments to those of the outputs.
      outputs: The structure of the outputs.
    """

    closed: ClosedJaxpr
    outputs: Any

    def run(self, *arguments: PyTree) -> PyTree:
        """Computes the outputs; traced and differentiated as the function would be."""
        found = evaluate(self.closed, jax.tree.leaves(arguments))
        return jax.tree.unflatten(self.outputs, list(found))


class Changed(Exception):
    """A function is to be traced, and is not what it was found by any more."""


class Traced:
    """A function in place of another: it computes the same, from its programs.

    Args:
      fn: The function, pure.
      user: Name of the public function that compiles it, for errors.
      contents: What `fn` is made of at this moment.
      alone: Whether nothing but `fn` itself uses these programs. Otherwise they were
        found by the contents, for functions that were equal to `fn` then.
      programs: Of `fn` as it was then, by signature.

    Raises:
      TypeError: On calling: `fn` refers to a value that is being traced.
      ValueError: On calling: what `fn` reads has changed since its first program.
      Changed: On calling: `fn` is to be traced and is not alone; and it has changed, or
        calls functions on the host.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        user: str,
        contents: Contents,
        alone: bool = False,
        programs: Mapping[Signature, TracedProgram] = MappingProxyType({}),
    ) -> None:
        self._fn = fn
        self._user = user
        self._contents = contents
        # What is not read completely was not found by contents either: nothing shares
        # it.
        self._alone = alone or not contents.complete
        self._programs = dict(programs)

    def __call__(self, *arguments: PyTree) -> PyTree:
        """Computes the outputs, while JAX traces only."""
        return self.program(arguments).run(*arguments)

    def program(self, arguments: tuple[Any, ...], static: Static = ()) -> TracedProgram:
        """The program for arguments of these shapes.

        Args:
          arguments: Pytrees of arrays, abstract ones too.
          static: The arguments that are not arrays.
        """
        signature = signature_of(arguments, static)
        found = self._programs.get(signature)
        if found is None:
            self._check(signature)
            found = self._programs[signature] = self._trace(signature)
        return found

    def aside(self, fn: Callable[..., Any]) -> "Traced":
        """For one of the functions that share these programs, which goes on alone."""
        return Traced(fn, self._user, self._contents, True, self._programs)

    def _trace(self, signature: Signature) -> TracedProgram:
        structure, kinds, static, _ = signature

        def called(*leaves: PyTree) -> PyTree:
            arguments = list(jax.tree.unflatten(structure, leaves))
            for each in static:
                # Static arguments arrived as None in their places.
                arguments[each.place] = each.value
            return self._fn(*arguments)

        closed, shapes = trace_whole(called, *kinds)
        refuse_hidden(self._user, closed)
        if not self._alone and calls_user(closed):
            raise Changed  # Objects of equal contents are not the same to write to.
        return TracedProgram(closed, jax.tree.structure(shapes))

    def _check(self, new: Signature) -> None:
        """Refuses a function that is another one than when it was first traced."""
        # Only for a new set of shapes: programs that are there cannot change.
        now = contents_of(self._fn, self._user)
        if now.complete and now == self._contents:
            return
        if not self._alone:
            raise Changed
        # Under other settings of JAX the old program would be another one for that.
        earlier = [x for x in self._programs if x[-1] == new[-1]]
        if not earlier:
            return
        was, again = self._programs[earlier[0]], self._trace(earlier[0])
        if likeness_of(was.closed) != likeness_of(again.closed):
            rule = "must stay what it was when it was first compiled"
            changes = "; ".join(now.changes_since(self._contents))
            remedy = (
                "Pass what changes as an input, or make what holds the function (the "
                "segment, the pipeline) anew."
            )
            got = f"another program of {now.name}: {changes or 'what it reads changed'}"
            raise ValueError(requirement(f"{self._user}(fn)", rule, got, remedy))


def signature_of(arguments: PyTree, static: Static = ()) -> Signature:
    """The key of a program among those of one function."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple(map(jax.typeof, leaves)), static, trace_context()


def refuse_hidden(user: str, program: ClosedJaxpr) -> None:
    """Refuses a program that closes over a value of a transformation around it."""
    # Wherever the function has found such a value: as a constant its derivative is
    # lost.
    hidden = [x for x in constants_of(program) if is_traced(x)]
    if hidden:
        rule = "must not refer to values that are being traced; it reads one somewhere"
        remedy = "Pass it as an input; only inputs and parameters are differentiated."
        raise TypeError(requirement(f"{user}(fn)", rule, str(hidden[0]), remedy))
