"""A traced program as a key: equal keys, equal programs.

Two programs are compared equation by equation, with numbers in place of variables. The
arrays that a program closes over are compared as in `contents`: JAX arrays by identity,
NumPy arrays by their bytes. So are the Python functions that a program still refers to:
derivative rules, which are pure, by their contents; host callbacks, which read and
write when the program runs, by the identity of the objects that they refer to.
"""

import enum
import hashlib
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jdist._compat import STATIC_ARGUMENT, WRAPPED_FUNCTION
from jdist.segment._lookup import guards
from jdist.segment._lookup.contents import (
    MOST_BYTES,
    SameObject,
    contents_of,
    is_method,
    of_library,
)
from jdist.segment._lookup.guards import BOUND, CONTAINERS

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.dtype, enum.Enum, type)


def identity_of(program: ClosedJaxpr) -> Hashable:
    """A key that is equal only for equal programs; unique if one cannot be read."""
    # Compiled code is shared by it: a NumPy array too large to be read in every call,
    # or a rule that cannot be read, therefore makes the key unique.
    return _Writer(certain=True).closed(program)


def likeness_of(program: ClosedJaxpr) -> Hashable:
    """A key that differs only where programs certainly differ."""
    # Changed functions are refused by it: what cannot be compared, such as a callback,
    # is left out.
    return _Writer(certain=False).closed(program)


class _Writer:
    """Encodes one program as nested tuples."""

    def __init__(self, certain: bool) -> None:
        self._certain = certain
        self._numbers: dict[Var, int] = {}
        self._contexts: dict[int, str] = {}
        self._host = False
        self._bytes = MOST_BYTES

    def closed(self, program: ClosedJaxpr) -> Hashable:
        constants = tuple([self._constant(x) for x in program.consts])
        return self._jaxpr(program.jaxpr), constants

    def _jaxpr(self, jaxpr: Jaxpr) -> Hashable:
        given = tuple([self._new(x) for x in (*jaxpr.constvars, *jaxpr.invars)])
        equations = tuple([self._equation(each) for each in jaxpr.eqns])
        return len(jaxpr.constvars), given, equations, self._read(jaxpr.outvars)

    def _equation(self, equation: JaxprEqn) -> Hashable:
        # Sorted: their order is that of the keyword arguments in the call to `bind`.
        params = sorted(equation.params.items())
        # Callables in the parameters of a callback count by identity: see `_callable`.
        self._host = "callback" in equation.primitive.name
        return (
            equation.primitive.name,
            self._read(equation.invars),
            tuple([(name, self._parameter(value)) for name, value in params]),
            tuple([self._new(x) for x in equation.outvars]),
            self._context(equation.ctx),
        )

    def _context(self, context: object) -> str:
        """The settings under which an equation was traced, memoized; many share one."""
        if id(context) not in self._contexts:
            self._contexts[id(context)] = repr(context)
        return self._contexts[id(context)]

    def _new(self, variable: Var) -> Hashable:
        self._numbers[variable] = len(self._numbers)
        return variable.aval

    def _read(self, atoms: Iterable[Any]) -> Hashable:
        return tuple(
            [
                (x.aval, _bits(np.asarray(x.val)))
                if isinstance(x, Literal)
                else self._numbers[x]
                for x in atoms
            ]
        )

    def _constant(self, array: object) -> Hashable:
        if isinstance(array, np.ndarray | np.generic):
            self._bytes -= array.nbytes
            # A new object is equal to nothing, which makes the key unique.
            too_large = self._certain and self._bytes < 0
            return object() if too_large else _bits(np.asarray(array))
        comparable = isinstance(array, jax.Array) and not jnp.issubdtype(
            array.dtype, jax.dtypes.extended
        )
        if self._certain or not comparable:
            return SameObject(array)
        return _bits(np.asarray(array))

    def _parameter(self, value: object) -> Hashable:
        readers = (read for kinds, read in _PARAMETERS if isinstance(value, kinds))
        return next(readers)(self, value)

    def _other(self, value: object) -> Hashable:
        """The key of a parameter of any other type."""
        kind: Any = type(value)
        if callable(value) or isinstance(value, WRAPPED_FUNCTION):
            return self._callable(value)
        # Such as JAX's dimension numbers: libraries' types with an equality of values.
        comparable = kind.__eq__ is not object.__eq__ and kind.__hash__ is not None
        if of_library(kind) and comparable:
            return kind, value
        # The safe side of each use: never equal by mistake, never changed by mistake.
        return SameObject(value) if self._certain else kind

    def _callable(self, fn: object) -> Hashable:
        if not self._certain:
            return "callable"
        if self._host:
            return tuple([_referents(each) for each in users_parts(fn)])
        return tuple([self._rule(each) for each in users_parts(fn)])

    def _rule(self, part: Any) -> Hashable:
        # A `nondiff_argnums` argument decides what the rule computes.
        if isinstance(part, STATIC_ARGUMENT):
            return self._parameter(part.val)
        contents = contents_of(part, "segment")
        return contents.key() if contents.complete else object()


_PARAMETERS: tuple[tuple[Any, Callable[[_Writer, Any], Hashable]], ...] = (
    (ClosedJaxpr, _Writer.closed),
    (Jaxpr, _Writer._jaxpr),
    (float, lambda _, x: (float, repr(x))),
    (_PLAIN, lambda _, x: (type(x), x)),
    (tuple | list, lambda w, x: (type(x), tuple([w._parameter(y) for y in x]))),
    (dict, lambda w, x: tuple([(k, w._parameter(y)) for k, y in x.items()])),
    (np.ndarray | np.generic | jax.Array, _Writer._constant),
    (object, _Writer._other),
)


def _bits(array: np.ndarray) -> Hashable:
    digest = hashlib.blake2b(array.tobytes(), digest_size=16).digest()
    # A digest in place of the bytes: keys of many programs are kept.
    return array.dtype, array.shape, digest


def users_parts(fn: object) -> Iterator[Any]:
    """The user's functions among all that a callable refers to, and the arguments that
    it holds for them."""
    waiting, met = [fn], {}
    while waiting:
        value = waiting.pop()
        is_function = callable(value) and not isinstance(value, type)
        if id(value) in met:
            continue
        met[id(value)] = value
        if isinstance(value, STATIC_ARGUMENT) or (is_function and _of_user(value)):
            yield value
        elif isinstance(value, types.FunctionType):
            waiting += guards.in_cells(value)
        elif is_function or isinstance(value, tuple | list | WRAPPED_FUNCTION):
            waiting += guards.in_object(value)


def _of_user(fn: Any) -> bool:
    if isinstance(fn, BOUND) and hasattr(fn, "__self__"):
        # Such as a list's `append`.
        own = is_method(fn) and not of_library(type(fn.__self__))
        return own or isinstance(fn.__self__, CONTAINERS) or _of_user(type(fn))
    return not of_library(fn if isinstance(fn, types.FunctionType) else type(fn))


def _referents(fn: Any) -> Hashable:
    """The key of a function: its code, and the identity of what it refers to."""
    if isinstance(fn, BOUND):
        return getattr(fn, "__func__", fn.__name__), SameObject(fn.__self__)
    inside = guards.in_function(fn) if isinstance(fn, types.FunctionType) else (fn,)
    return tuple(map(SameObject, inside))
