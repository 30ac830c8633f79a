"""Functions by name: which ones others may call, and how they are found.

A function travels as `module:qualname`. The callee looks the name up itself and runs
what it finds, so the question is only which names it answers. It answers a name when

- the module is the main program, the package of the main program, `jdist`, or what
  `allow=` names; and
- the thing found says of itself that it has exactly this name.

Of a class, those are its public functions and methods. A leading underscore at the top
of a module closes nothing: torch's own examples call `_remote_method` and its like. A
class that a peer names, it may construct: so its constructor must be of an allowed
module too, or one of Python's own that only keep what they are given.

The second rule is what keeps the first one honest: `mypkg:system` is not a function of
`mypkg` although `from os import system` stands there, because `os.system` calls itself
`posix:system`. On the way from the module to the thing only classes are crossed, never
a module, an instance or a function, no attribute with two underscores on both sides is
looked at, and no code of the looked-up objects runs.

`jax.numpy` and `jax.nn` do not say their own names (`jnp.add.__qualname__` does not
exist), so their functions are known by a table, as are a few harmless functions of
Python itself.
"""

import builtins
import functools
import importlib
import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import listed, requirement, value_error
from jdist.rpc.base.errors import ForbiddenFunction

_NEVER = frozenset((
    "builtins", "code", "codeop", "ctypes", "importlib", "marshal", "multiprocessing",
    "nt", "os", "pickle", "posix", "pty", "runpy", "shutil", "subprocess", "sys",
))  # fmt: skip
"""Modules that no `allow=` opens: a caller that reaches one of them runs anything."""

_BUILTINS = (
    "abs", "all", "any", "bool", "complex", "dict", "divmod", "float", "frozenset",
    "int", "len", "list", "max", "min", "range", "round", "set", "sorted", "str", "sum",
    "tuple",
)  # fmt: skip
"""Functions of Python that only compute; its exceptions are open as well."""

_CLOSED = (
    "jdist._compat", "jdist._compilation_cache", "jdist._own_code",
    "jdist._scheduling",
    "jdist.data_parallel.data.process_group",
    "jdist.matrix.processes", "jdist.launch", "jdist.ray", "jdist.rpc",
    "jdist.targets", "jdist.verify",
)  # fmt: skip
"""Parts of jdist that steer processes, write files, or import modules by name."""

_KEEPING = frozenset((
    object, bool, complex, dict, float, frozenset, int, list, set, str, tuple,
))  # fmt: skip
"""Classes whose constructors keep their arguments; so do those of exceptions."""

_KEEPING_MODULES = ("collections", "enum", "flax.linen", "flax.nnx", "typing")
"""Modules whose classes also keep what they are given."""

_PATH = re.compile(r"\b(Path|PathLike)\b")
"""Matches annotations of functions that read or write files."""

_OPEN_PARTS = (
    "jdist.rpc.base.errors", "jdist.rpc.base.worker_info", "jdist.rpc.modules",
)  # fmt: skip
"""Parts of those that are values, or do no more than a caller could do by itself."""

_NOT_PURE = frozenset({"load", "set_printoptions", "printoptions"})
"""Functions of `jax.numpy` that read files or change settings of the process."""

_NAMES = "must be names such as 'mypkg' or 'mypkg.ops:step'"

_REMEDY = (
    "Name its module in `allow=` of `init_rpc` on every worker, or wrap it in a "
    "function of your own program."
)


class FunctionTable:
    """The functions and classes of one worker that others may name.

    Args:
      allow: Names to allow beside the main program, its package, `jax.numpy`, `jax.nn`
        and `jdist`: modules, with all that is below them (`"mypkg"`), or single objects
        (`"mypkg.ops:step"`).
      main: The main program; by default this process's `__main__`.

    Raises:
      ValueError: `allow` names a module such as `os` that is never allowed.

    Source: torch pickles functions by name without any list.

    Example:
      >>> table = FunctionTable()
      >>> table.reference(jnp.add), table.resolve("builtins:min") is min
      ('jax.numpy:add', True)
    """

    def __init__(
        self, allow: Iterable[str] = (), main: types.ModuleType | None = None
    ) -> None:
        allow = [allow] if isinstance(allow, str) else allow
        allow = listed("init_rpc(allow=...)", allow, object, _NAMES)
        _check_allow(allow)
        self._main = main
        self._objects = frozenset(name for name in allow if ":" in name)
        self._modules = ("jdist", *(name for name in allow if ":" not in name))
        self._found: dict[str, Any] = {}  # at the top of modules
        self._known = dict(_always_known())
        for name in self._modules:
            if _within(name, ("jax",)):
                self._known |= _public(name)
        # The first name of objects with several; `_known` keeps them alive, so that
        # their ids stay theirs.
        self._names = {id(it): ref for ref, it in reversed(self._known.items())}

    def reference(self, function: Any) -> str:
        """Returns the name under which other workers find a function or class.

        Raises:
          ValueError: It has no name that others could look up: a lambda, a function
            inside a function, a name that now means something else.
          ForbiddenFunction: Its module is not allowed.
        """
        known = self._names.get(id(function))
        if known is not None:
            return known
        ref = own_name(function)
        if ref is None or "<" in ref:
            raise ValueError(_unnamed(function, ref))
        if self.resolve(ref) is not function:
            rule = f"must still be what its name {ref!r} means"
            remedy = "Was it redefined, or decorated without `functools.wraps`?"
            raise value_error("rpc(function)", rule, function, remedy)
        return ref

    def resolve(self, ref: str) -> Any:
        """Finds the function or class of a name.

        Raises:
          ForbiddenFunction: The name is not allowed, or nothing here has it.
        """
        known = self._known.get(ref)
        if known is not None:
            return known
        module, colon, qualname = ref.partition(":")
        before, home = self._found.get(ref), sys.modules.get(module)
        # Modules may be reloaded and functions redefined at any time.
        if before is not None and home and vars(home).get(qualname) is before:
            return before
        if not colon or not self._allows(module, ref):
            rule = "must be in a module that other workers may name"
            raise ForbiddenFunction(requirement("rpc(function)", rule, ref, _REMEDY))
        found: Any = self._load(module, ref)
        for part in qualname.split("."):
            found = _step(found, part, ref)
        # An imported name: `mypkg:system` calls itself `posix:system`.
        if own_name(found) != ref:
            rule = "must be defined where its name says, not imported there"
            raise ForbiddenFunction(requirement("rpc(function)", rule, ref, _REMEDY))
        _check_files(found, ref)
        self._check_public(found, ref)
        if "." not in qualname:
            self._found[ref] = found
        return found

    def named(self, ref: str) -> Any:
        """Finds the function or class of a name for a peer to call.

        Raises:
          ForbiddenFunction: As `resolve`; or the class has the constructor of a class
            in a module that is not allowed, such as `subprocess.Popen`.
        """
        found = self.resolve(ref)
        # A class that the user has named by itself is the user's own judgement.
        if isinstance(found, type) and not (ref in self._known or ref in self._objects):
            self._check_constructor(found, ref)
        return found

    def method(self, owner: Any, name: str) -> Callable[..., Any]:
        """Finds the method `name` of `owner`: an object, or a class for a class method.

        "__call__" is allowed, any other name with a leading underscore is not.

        Raises:
          ForbiddenFunction: It is no method, or is defined in a module not allowed.
        """
        of_class = isinstance(owner, type)
        kind = owner if of_class else type(owner)
        raw: Any = None
        if name.isidentifier() and (name[0] != "_" or name == "__call__"):
            raw = inspect.getattr_static(kind, name, None)
        function = getattr(raw, "__func__", raw)
        ref = own_name(function)
        if (
            ref is None
            or not callable(function)
            or isinstance(function, type)
            or (of_class and not isinstance(raw, classmethod))
        ):
            rule = (
                "must be a method that its class defines, without a leading underscore"
            )
            shown = f"{name!r} of {kind.__qualname__}"
            remedy = "A function does it too: `jnp.sum` for the method of an array."
            raise ForbiddenFunction(requirement("rpc(method)", rule, shown, remedy))
        if not self._allows(ref.partition(":")[0], ref):
            rule = "must be defined in a module that other workers may name"
            raise ForbiddenFunction(requirement("rpc(method)", rule, ref, _REMEDY))
        _check_files(function, ref)
        # Not by getattr, which an attribute of the object could answer.
        return raw.__get__(None if of_class else owner, kind)

    def _check_public(self, found: Any, ref: str) -> None:
        """Refuses a private function of a class, but not a private class."""
        inner = ref.partition(":")[2].split(".")[1:]
        private = any(part.startswith("_") for part in inner)
        if private and not isinstance(found, type) and ref not in self._objects:
            rule = "must not be a private member of a class"
            remedy = "Functions of a module may be named whatever they are called."
            raise ForbiddenFunction(requirement("rpc(function)", rule, ref, remedy))

    def _check_constructor(self, kind: type, ref: str) -> None:
        for name in ("__new__", "__init__"):
            base = next(base for base in kind.__mro__ if name in vars(base))
            is_error = base.__module__ == "builtins" and issubclass(base, BaseException)
            if base in _KEEPING or is_error:
                continue
            home = own_name(base) or ""
            module = home.partition(":")[0]
            if self._allows(module, home) or _within(module, _KEEPING_MODULES):
                continue
            rule = "must have a constructor from a module that other workers may name"
            got = f"{ref} with {name} of {home}"
            remedy = f'Define one, or name the class itself: `allow=["{ref}"]`.'
            raise ForbiddenFunction(requirement("rpc(function)", rule, got, remedy))

    def _allows(self, module: str, ref: str) -> bool:
        if ref in self._objects:
            return True
        if _within(module, _NEVER) or module.endswith(".__main__"):
            return False
        if _within(module, _CLOSED):
            return _within(module, _OPEN_PARTS)
        package = getattr(self._main_module(), "__package__", None) or "__main__"
        # Of the main program the whole package, not only one folder.
        whole = package.partition(".")[0]
        return _within(module, ("__main__", whole, *self._modules))

    def _main_module(self) -> types.ModuleType:
        return self._main or sys.modules["__main__"]

    def _load(self, module: str, ref: str) -> types.ModuleType:
        if module == "__main__":
            return self._main_module()
        if not all(map(str.isidentifier, module.split("."))):
            raise ForbiddenFunction(_absent(ref))
        try:
            # Also what is there already: another thread may still be importing it. And
            # packages first: a thread that holds a module while it waits for a package,
            # of which another thread's import wants that module, is a deadlock, and
            # Python ends it by handing out half a module.
            for name in itertools.accumulate(module.split("."), "{}.{}".format):
                found = importlib.import_module(name)
        except Exception as error:
            raise ForbiddenFunction(f"{_absent(ref)} ({error})") from error
        return found


def own_name(thing: Any) -> str | None:
    """Return the name `module:qualname` in the attributes of `thing`, or None."""
    # The main program is `__main__` on all workers; multiprocessing imports it under
    # another name.
    module = getattr(thing, "__module__", None)
    qualname = getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str):
        return None
    return f"{'__main__' if module == '__mp_main__' else module}:{qualname}"


def _check_allow(allow: list[str]) -> None:
    for name in allow:
        if not isinstance(name, str) or not name:
            raise value_error("init_rpc(allow=...)", _NAMES, name)
        if _within(name.partition(":")[0], _NEVER):
            rule = "must not open what can run anything"
            remedy = "Write a function of your own that does only what you need."
            raise value_error("init_rpc(allow=...)", rule, name, remedy)


def _within(module: str, parents: Iterable[str]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in parents)


def _is_reserved(part: str) -> bool:
    return not part.isidentifier() or (part.startswith("__") and part.endswith("__"))


def _step(found: Any, part: str, ref: str) -> Any:
    """Look up one name in the dictionary of a module or class."""
    # Without running code: no descriptor, no module's `__getattr__`.
    if _is_reserved(part):
        rule = "must be reached by ordinary names"
        raise ForbiddenFunction(requirement("rpc(function)", rule, ref))
    if isinstance(found, type):
        found = inspect.getattr_static(found, part, None)
        found = found.__func__ if isinstance(found, staticmethod) else found
    else:
        found = vars(found).get(part) if isinstance(found, types.ModuleType) else None
    if found is None:
        raise ForbiddenFunction(_absent(ref))
    if not callable(found):
        rule = "must be a function or class, reached through classes only"
        raise ForbiddenFunction(requirement("rpc(function)", rule, ref))
    return found


def _check_files(thing: Any, ref: str) -> None:
    """Refuse functions of jdist that take or return a path."""
    # Callers must not choose files here. Users judge the functions that they allow.
    if not ref.startswith("jdist."):
        return
    made_by = (inspect.getattr_static(thing, n, None) for n in ("__init__", "__new__"))
    functions = made_by if isinstance(thing, type) else [thing]
    annotations = [getattr(each, "__annotations__", {}).values() for each in functions]
    if any(_PATH.search(str(one)) for each in annotations for one in each):
        rule = "must not read or write files that its caller names"
        raise ForbiddenFunction(requirement("rpc(function)", rule, ref, _REMEDY))


def _absent(ref: str) -> str:
    # The last sentence is what torch's users search for.
    return (
        f"`rpc(function)` must name something that the callee has. Got {ref!r}. The "
        "default RPC pickler does not serialize function code: ensure that the "
        "function is defined in the same module on both caller and callee."
    )


def _unnamed(function: Any, ref: str | None) -> str:
    shown = ref or f"{type(function).__qualname__} object"
    rule = "must be a function or class that other workers can find by its name"
    remedy = (
        "A lambda, a function inside a function or a partial has none: define a "
        "function at the top of a module and pass what it closes over as arguments."
    )
    return requirement("rpc(function)", rule, shown, remedy)


@functools.cache
def _always_known() -> dict[str, Any]:
    """Return the names open on every worker: jax.numpy, jax.nn, and a few more."""
    known = {f"builtins:{name}": getattr(builtins, name) for name in _BUILTINS}
    for module in (builtins, jax.errors, jax.dtypes, np.exceptions, np.linalg):
        known |= {
            f"{module.__name__}:{name}": thing
            for name, thing in vars(module).items()
            if isinstance(thing, type) and issubclass(thing, Exception)
        }
    for module in (jnp, jnp.fft, jnp.linalg, jax.nn):
        known |= _public(module.__name__)
    return known


def _public(module: str) -> dict[str, Any]:
    """Return JAX's own functions and classes among a module's public names."""
    found = importlib.import_module(module)
    return {
        f"{module}:{name}": thing
        for name, thing in sorted(vars(found).items())
        if not name.startswith("_") and name not in _NOT_PURE and _is_jax(thing)
    }


def _is_jax(thing: Any) -> bool:
    home = getattr(thing, "__module__", None)
    return callable(thing) and isinstance(home, str) and _within(home, ("jax",))
