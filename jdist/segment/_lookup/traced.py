"""A function represented by its traced programs: its Python code runs once for each.

Values that a function reads besides its arguments are read while it is traced, and are
part of the program. Programs can therefore be compared with certainty, functions
cannot, and everything compiled from a function (its halves, its evaluation) is compiled
from one program.

`Traced` also separates versions of a function. All programs of one `Traced` are of one
version, that of the first. For a new set of shapes the function is traced again; if
values that it reads may have changed since, it is traced for the old shapes as well,
and refused if that program differs from the first.

Programs compiled for one function serve others of equal contents. If the first function
has changed, it cannot be traced for the others: `Changed` is raised, and each of them
continues with its own function (`Traced.aside`).
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

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
    """A static argument, compared by position and key.

    Args:
      place: The position of the argument.
      value: The argument.
      key: The contents of the argument, hashable.
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
"""Tree structure and abstract values of arguments, static ones, JAX's settings."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedProgram:
    """The traced program of a function for one set of shapes.

    Attributes:
      closed: The program, from the leaves of the arguments to those of the outputs.
      outputs: The tree structure of the outputs.
    """

    closed: ClosedJaxpr
    outputs: Any

    def run(self, *arguments: PyTree) -> PyTree:
        """Computes the outputs; may be traced and differentiated like the function."""
        found = evaluate(self.closed, jax.tree.leaves(arguments))
        return jax.tree.unflatten(self.outputs, list(found))


class Changed(Exception):
    """Raised if a function to be traced no longer has the contents it was found by."""


class Traced:
    """A callable equivalent to a function, which evaluates its traced programs.

    Args:
      fn: The function, pure.
      user: Name of the public function that compiles it, for error messages.
      contents: The present contents of `fn`.
      alone: Whether only `fn` itself uses these programs. Otherwise they are shared by
        functions whose contents were equal to those of `fn` when they were looked up.
      programs: Programs traced earlier from this version of `fn`, by signature.

    Attributes:
      count: How often `fn` was traced.

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
        # Incomplete contents are never looked up, so that no other function shares
        # these programs.
        self._alone = alone or not contents.complete
        self._programs = dict(programs)
        self.count = 0

    def __call__(self, *arguments: PyTree) -> PyTree:
        """Computes the outputs; called only while JAX traces."""
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
        """A `Traced` for `fn` alone, one of the functions that share these programs."""
        return Traced(fn, self._user, self._contents, True, self._programs)

    def check(self, fn: Callable[..., Any]) -> "Traced":
        """The programs for `fn`, which must still be traced to them.

        Args:
          fn: One of the functions that share these programs.

        Raises:
          ValueError: What it reads has changed, and a program with it.
        """
        now = contents_of(fn, self._user)
        if now.complete and now == self._contents:
            return self
        own = self if self._alone and fn is self._fn else self.aside(fn)
        same = [x for x in self._programs if x[-1] == trace_context()]
        # Programs of other settings, as within a mapped function, cannot be compared.
        if len(same) < len(self._programs):
            own._refuse(now)
        for signature in same:
            own._compare(signature, now)
        return own

    def _trace(self, signature: Signature) -> TracedProgram:
        structure, kinds, static, _ = signature

        def called(*leaves: PyTree) -> PyTree:
            arguments = list(jax.tree.unflatten(structure, leaves))
            for each in static:
                # Static arguments arrived as None in their places.
                arguments[each.place] = each.value
            return self._fn(*arguments)

        self.count += 1
        closed, shapes = trace_whole(called, *kinds)
        refuse_hidden(self._user, closed)
        if not self._alone and calls_user(closed):
            raise Changed  # A callback may write to an object: equality is not enough.
        return TracedProgram(closed, jax.tree.structure(shapes))

    def _check(self, new: Signature) -> None:
        """Raises if the function has changed since it was first traced."""
        # Called only for a new set of shapes: existing programs cannot change.
        now = contents_of(self._fn, self._user)
        if now.complete and now == self._contents:
            return
        if not self._alone:
            raise Changed
        # Under equal settings of JAX: other settings alone change the program.
        earlier = [x for x in self._programs if x[-1] == new[-1]]
        if earlier:
            self._compare(earlier[0], now)

    def _compare(self, signature: Signature, now: Contents) -> None:
        """Raises if the function is traced to another program than before."""
        was, again = self._programs[signature], self._trace(signature)
        if likeness_of(was.closed) != likeness_of(again.closed):
            self._refuse(now)

    def _refuse(self, now: Contents) -> NoReturn:
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
    """Raises if a program closes over a tracer of an enclosing transformation."""
    # Anywhere in the program: such a value becomes a constant and loses its derivative.
    hidden = [x for x in constants_of(program) if is_traced(x)]
    if hidden:
        rule = "must not refer to values that are being traced; it reads one somewhere"
        remedy = "Pass it as an input; only inputs and parameters are differentiated."
        raise TypeError(requirement(f"{user}(fn)", rule, str(hidden[0]), remedy))
