"""A function represented by its traced programs: its Python code runs once for each.

Values that a function reads besides its arguments are read while it is traced, and are
part of the program. Programs can therefore be compared with certainty, functions
cannot, and everything compiled from a function (its halves, its evaluation) is compiled
from one program.

All programs of one `Traced` are of one version of the function, that of the first. For
a new set of shapes the function is traced again; if values that it reads may have
changed since, it is traced for the old shapes as well, and refused if that program
differs from the first.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
from jdist.segment._lookup.contents import Contents, Watched, contents_of
from jdist.segment._lookup.program_key import likeness_of

Signature = tuple[Any, tuple[Any, ...], Any]
"""Tree structure and abstract values of arguments, and JAX's settings."""


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


class Traced:
    """A callable equivalent to a function, which evaluates its traced programs.

    Args:
      fn: The function, pure.
      user: Name of the public function that compiles it, for error messages.

    Attributes:
      reads: What `fn` reads.

    Raises:
      TypeError: `fn` refers to a value that is being traced; also on calling.
      ValueError: On calling: what `fn` reads has changed since its first program.
    """

    def __init__(self, fn: Callable[..., Any], user: str) -> None:
        self._fn = fn
        self._user = user
        self._programs: dict[Signature, TracedProgram] = {}
        self.reads = Watched({"the function": fn}, user)
        # Refuses what is being traced. A trace may leave such values where `fn` reads;
        # `refuse_hidden` finds those that it computes with.
        self.reads.contents = contents_of(fn, user)

    def __call__(self, *arguments: PyTree) -> PyTree:
        """Computes the outputs; called only while JAX traces."""
        return self.program(arguments).run(*arguments)

    @property
    def contents(self) -> Contents:
        """What `fn` read when it was traced last, or else when this was made."""
        assert self.reads.contents is not None
        return self.reads.contents

    def program(self, arguments: tuple[Any, ...]) -> TracedProgram:
        """The program for arguments of these shapes.

        Args:
          arguments: Pytrees of arrays, abstract ones too.
        """
        signature = signature_of(arguments)
        found = self._programs.get(signature)
        if found is None:
            if not (self.contents.complete and self.reads.holds()):
                # Under equal settings of JAX: other settings alone change the program.
                alike = [x for x in self._programs if x[-1] == signature[-1]]
                self._compare(alike[:1])
            found = self._programs[signature] = self._trace(signature)
            # After the trace, which may write to what it reads, as one that counts
            # traces does.
            self.reads.note()
        return found

    def check(self) -> None:
        """Checks that the function is still traced to the same programs.

        Raises:
          ValueError: What it reads has changed, and a program with it.
        """
        if self.contents.complete and self.reads.holds():
            return
        same = [x for x in self._programs if x[-1] == trace_context()]
        # Programs of other settings, as within a mapped function, cannot be compared.
        if len(same) < len(self._programs):
            self._refuse()
        self._compare(same)
        self.reads.note()

    def _trace(self, signature: Signature) -> TracedProgram:
        structure, kinds, _ = signature

        def called(*leaves: PyTree) -> PyTree:
            return self._fn(*jax.tree.unflatten(structure, leaves))

        closed, shapes = trace_whole(called, *kinds)
        refuse_hidden(self._user, closed)
        return TracedProgram(closed, jax.tree.structure(shapes))

    def _compare(self, signatures: list[Signature]) -> None:
        """Raises if the function is traced to other programs than before."""
        for signature in signatures:
            was, again = self._programs[signature], self._trace(signature)
            if likeness_of(was.closed) != likeness_of(again.closed):
                self._refuse()

    def _refuse(self) -> NoReturn:
        now = self.reads.read()
        rule = "must stay what it was when it was first compiled"
        changes = "; ".join(now.changes_since(self.contents))
        remedy = (
            "Pass what changes as an input, or make what holds the function (the "
            "segment, the pipeline) anew."
        )
        got = f"another program of {now.name}: {changes or 'what it reads changed'}"
        raise ValueError(requirement(f"{self._user}(fn)", rule, got, remedy))


def signature_of(arguments: PyTree) -> Signature:
    """The key of a program among those of one function."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple(map(jax.typeof, leaves)), trace_context()


def refuse_hidden(user: str, program: ClosedJaxpr) -> None:
    """Raises if a program closes over a tracer of an enclosing transformation."""
    # Anywhere in the program: such a value becomes a constant and loses its derivative.
    hidden = [x for x in constants_of(program) if is_traced(x)]
    if hidden:
        rule = "must not refer to values that are being traced; it reads one somewhere"
        remedy = "Pass it as an input; only inputs and parameters are differentiated."
        raise TypeError(requirement(f"{user}(fn)", rule, str(hidden[0]), remedy))
