"""Flax NNX modules whose parameters are variables.

A module that is to be trained is taken apart. Each of its parameters becomes a
variable, so that backward passes find it and optimizers step it. All else that it
holds, its *state* (statistics, random streams, constants), goes into each call as an
input without a derivative and comes out of it as a new value, for the next call.

Flax is not imported here: a caller that has a module has.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jdist._errors import requirement
from jdist._tree import PyTree, abbreviated, is_inexact
from jdist.autograd.context.locks import holding
from jdist.autograd.graph.pure import Constant
from jdist.autograd.graph.purity import eager, refuse_in_pure
from jdist.autograd.graph.recorded import record
from jdist.autograd.graph.variable import Variable
from jdist.rpc import RRef
from jdist.rpc.extension import (
    InterruptSafeLock,
    StandIn,
    current_agent,
    is_module,
    parameters,
)

T = TypeVar("T")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), jax.Array)


def module(nnx_module: Any, key: jax.Array | None = None) -> "TrainableModule":
    """A Flax NNX module that is trained within contexts.

    Its floating `nnx.Param`s become variables. What it computes is recorded, within a
    context or not. Statistics and random streams go on from call to call, in the order
    of the calls, and are never differentiated.

    Args:
      nnx_module: The module. It stays as it is, and shares no state with the result.
      key: A PRNG key from which all random streams of the module begin anew; by default
        they go on where they are.

    Raises:
      TypeError: It is no NNX module, or holds no arrays yet; or `key` is no key.

    Source: `torch.nn.Module`, as torch's distributed autograd trains it.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> from jdist import autograd, optim, rpc
      >>> layer = autograd.module(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
      >>> list(layer.parameters())
      ['bias', 'kernel']
      >>> with rpc.local_cluster(["worker0"]), autograd.context() as context_id:
      ...     autograd.backward(context_id, [layer(jnp.ones((5, 3))).sum()])
      ...     autograd.get_gradients(context_id)[layer.parameters()["bias"]]
      Array([5., 5.], dtype=float32)
    """
    _check_module(nnx_module)
    if key is not None and not _is_key(key):
        rule, remedy = "must be a PRNG key", "Such as `jax.random.key(0)`."
        raise TypeError(requirement("module(key=...)", rule, key, remedy))
    return TrainableModule(nnx_module, key)


def _check_module(nnx_module: Any) -> None:
    if not is_module(nnx_module):
        rule = "must be a Flax NNX module"
        got = f"a {type(nnx_module).__qualname__}"
        raise TypeError(requirement("module(nnx_module)", rule, got))


@eager
def create(
    factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RRef[Any]:
    """On the owner: a trainable module, made on the worker's device, by reference."""
    return parameters.create(_made, (factory, args, kwargs), {})


def _made(factory: Callable[..., Any], args: Any, kwargs: Any) -> "TrainableModule":
    made = factory(*args, **kwargs)
    _check_module(made)
    # What arrives here is bound to the device. So must be what the module begins with,
    # or its calls are compiled again once it has met something that arrived.
    return TrainableModule(made, device=current_agent().options.device)


class TrainableModule(StandIn):
    """A Flax NNX module with variables in place of its parameters: see `module`.

    It is called like the module. Threads may call it at the same time; where it has a
    state, one after another.
    """

    def __init__(
        self,
        nnx_module: Any,
        key: jax.Array | None = None,
        device: jax.Device | None = None,
    ) -> None:
        layout, params, state = _taken_apart(nnx_module)
        state = state if key is None else layout.reseeded(state, key)
        self._variables = tuple([Variable(_bound(leaf, device)) for leaf in params])
        self._state = tuple([_bound(leaf, device) for leaf in state])
        self._layouts = [layout]
        self._layout = layout
        self._lock = InterruptSafeLock()
        kind = type(nnx_module).__name__
        forward = type(nnx_module).__call__
        self._function = _function(kind, forward, tuple(_code_of(nnx_module)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns, recorded.

        Raises:
          TypeError: An argument can be neither an input nor a constant (see `apply`);
            or the call changes something of the module that is no state: a parameter,
            an attribute, or which variables there are.
          RpcTimeout: Other calls took longer than this one may.
          Exception: What the module raises. Its state is as before.
        """
        return self._run("__call__", args, kwargs)

    def method(self, name: str) -> Callable[..., Any]:
        """Another method of the module, `module.method("encode")(x)`, recorded.

        Raises:
          AttributeError: The module has no such method.
        """
        if not callable(getattr(self.original(), name, None)):
            kind = self._function.__name__
            raise AttributeError(f"{kind!r} object has no method {name!r}")

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._run(name, args, kwargs)

        return call

    def parameters(self) -> dict[str, Variable]:
        """The variables, by the paths of the parameters, `"layers.0.kernel"`."""
        return dict(zip(self._layout.names, self._variables, strict=True))

    def state(self) -> dict[str, jax.Array]:
        """Statistics, keys and counts of the random streams, and constants, by path.

        With the parameters it is all that the module consists of.
        """
        return dict(zip(self._layout.state_names, self._state, strict=True))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned.

        Raises:
          ValueError: It has other paths, shapes or dtypes than the module's state.
        """

        def act() -> None:
            here = self.state()
            given = {path: jnp.asarray(leaf) for path, leaf in state.items()}
            shown = [{p: abbreviated(x) for p, x in d.items()} for d in (here, given)]
            for path in sorted(here.keys() | given.keys()):
                is_here, is_given = (d.get(path, "no leaf") for d in shown)
                if is_here != is_given:
                    rule = f"must have {is_here} at {path}, as the module"
                    call = "Module.load_state(state)"
                    raise ValueError(requirement(call, rule, is_given))
            self._state = tuple([_placed_as(given[p], x) for p, x in here.items()])

        self._alone(act)

    def train(self, **attributes: Any) -> None:
        """As the module's own `train`: from now on dropout drops, statistics move."""
        self._set_mode("train", attributes)

    def eval(self, **attributes: Any) -> None:
        """As the module's own `eval`: dropout passes all, statistics are used."""
        self._set_mode("eval", attributes)

    def to_nnx(self) -> Any:
        """An NNX module as this one is now; it shares nothing with it."""

        def act() -> Any:
            values = [variable.value for variable in self._variables]
            return self._layout.module(values, self._state)

        return self._alone(act)

    def original(self) -> Any:
        """The module with shapes in place of its arrays: see `StandIn`."""
        leaves = [variable.value for variable in self._variables]
        shapes = [jax.typeof(leaf) for leaf in (*leaves, *self._state)]
        return self._layout.module(shapes[: len(leaves)], shapes[len(leaves) :])

    def _run(self, name: str, args: Any, kwargs: Any) -> Any:
        refuse_in_pure("a call of the module {}", self._function.__name__)
        if not self._state:
            return self._record(name, args, kwargs)[0]

        def act() -> Any:
            output, state = self._record(name, args, kwargs)
            self._state = tuple(state)
            return output

        return self._alone(act)

    def _record(self, name: str, args: Any, kwargs: Any) -> Any:
        given = (self._layout, self._variables, self._state, name, args, kwargs)
        return record(self._function, given, {})

    def _set_mode(self, name: str, attributes: Mapping[str, Any]) -> None:

        def act() -> None:
            changed = self.original()
            getattr(changed, name)(**attributes)
            layout, *_ = _taken_apart(changed)
            known = [each for each in self._layouts if each.graph == layout.graph]
            if not known:
                self._layouts.append(layout)
            self._layout = known[0] if known else layout

        self._alone(act)

    def _alone(self, action: Callable[[], T]) -> T:
        """Calls it while no other call changes the state."""
        busy = f"while other calls had the state of {self._function.__name__}"
        return holding([self._lock], busy, action)

    def __repr__(self) -> str:
        return f"Module({self._function.__name__})"


class _ModuleLayout(Constant):
    """How a module is made of its arrays, in one mode.

    Args:
      graph: Its structure.
      params: Its parameters, as Flax's state.
      state: All else that it holds, likewise.

    Attributes:
      graph: See there.
      names: Paths of the parameters.
      state_names: Paths of the leaves of the state.
    """

    def __init__(self, graph: Any, params: PyTree, state: PyTree) -> None:
        self.graph = graph
        self.names = _names(params)
        self.state_names = _names(state)
        self._params: Any = jax.tree.structure(params)
        self._state: Any = jax.tree.structure(state)
        self._kinds = [
            type(one)
            for one in jax.tree.leaves(state, is_leaf=_is_variable)
            for _ in jax.tree.leaves(one)
        ]

    def module(self, params: Sequence[Any], state: Sequence[Any]) -> Any:
        """The module of these leaves."""
        given = (self._params.unflatten(params), self._state.unflatten(state))
        return _nnx().merge(self.graph, *given)

    def state_of(self, module: Any, params: Sequence[Any]) -> list[Any]:
        """The leaves of the state of a module after a call.

        Raises:
          TypeError: The call has changed what is no state.
        """
        graph, params_after, state = _split(module)
        name = type(module).__name__
        kinds = jax.tree.structure(params_after), jax.tree.structure(state)
        if kinds != (self._params, self._state):
            strange = set(_names(state)) ^ set(self.state_names) or {"its structure"}
            rule = "must keep the variables that it has"
            got = f"another number or kind: {', '.join(sorted(strange))}"
            remedy = "Return what the call computes, instead of storing it."
            raise TypeError(requirement(f"module({name})", rule, got, remedy))
        leaves = zip(self.names, params, jax.tree.leaves(params_after), strict=True)
        changed = [path for path, before, after in leaves if before is not after]
        if changed:
            rule = "must not change its own nnx.Param in a call"
            remedy = "Optimizers do; make it an nnx.Variable of another kind."
            got = ", ".join(changed)
            raise TypeError(requirement(f"module({name})", rule, got, remedy))
        if graph != self.graph:
            rule = "must not change its attributes in a call: the change would be lost"
            remedy = "Make what changes an nnx.Variable."
            pairs = zip(self.graph.attributes, graph.attributes, strict=False)
            other = {str(path) for (path, old), (_, new) in pairs if old != new}
            got = f"another value of {', '.join(sorted(other)) or 'one'}"
            raise TypeError(requirement(f"module({name})", rule, got, remedy))
        return jax.tree.leaves(state)

    def reseeded(self, state: Sequence[Any], key: jax.Array) -> list[Any]:
        """The state with all random streams at their beginning, each with its key."""
        nnx, found = _nnx(), []
        for number, (kind, leaf) in enumerate(zip(self._kinds, state, strict=True)):
            new = leaf
            if issubclass(kind, nnx.RngKey):
                new = _stream(leaf, jax.random.fold_in(key, number))
            elif issubclass(kind, nnx.RngCount):
                new = jnp.zeros_like(leaf)
            found.append(new)
        return found


def _function(
    name: str, call: Callable[..., Any], code: tuple[Any, ...]
) -> Callable[..., Any]:
    """What is compiled: a call of a module, from its arrays to its output and state.

    Args:
      name: Of the module's class.
      call: Its `__call__`, whose place messages name.
      code: What else the module's behaviour depends on.
    """

    def called(
        layout: _ModuleLayout,
        params: PyTree,
        state: PyTree,
        method: str,
        args: Any,
        kwargs: Any,
    ) -> Any:
        # Not used, but by what it refers to the compiled function is found again: what
        # the classes of the module read may change.
        _ = call, code
        module = layout.module(params, state)
        output = getattr(module, method)(*args, **kwargs)
        return output, jax.lax.stop_gradient(layout.state_of(module, params))

    called.__name__ = called.__qualname__ = name
    return called


def _code_of(module: Any) -> list[Any]:
    """The classes of a module's parts, and what its attributes refer to, once each."""
    nnx = _nnx()
    found: dict[int, Any] = {}
    for path, value in nnx.iter_graph(module):
        of_class = isinstance(value, (nnx.Pytree, nnx.Variable))
        thing = type(value) if of_class else value
        own = not path or not str(path[-1]).startswith("_pytree__")
        if own and not isinstance(thing, _PLAIN):
            found[id(thing)] = thing
    return list(found.values())


def _taken_apart(module: Any) -> tuple[_ModuleLayout, list[Any], list[Any]]:
    graph, params, state = _split(module)
    leaves = jax.tree.leaves(params), jax.tree.leaves(state)
    return _ModuleLayout(graph, params, state), *leaves


def _split(module: Any) -> Any:
    return _nnx().split(module, _is_parameter, ...)


def _is_parameter(path: Any, variable: Any) -> bool:
    leaves = jax.tree.leaves(variable)
    is_param = isinstance(variable, _nnx().Param)
    return is_param and bool(leaves) and all(map(is_inexact, leaves))


def _is_variable(value: PyTree) -> bool:
    return isinstance(value, _nnx().Variable)


def _names(state: PyTree) -> tuple[str, ...]:
    """Paths of the leaves, as Flax's users write them."""
    return tuple(
        [
            ".".join(
                jax.tree_util.keystr((key,), simple=True)
                for key in keys
                if not isinstance(key, jax.tree_util.GetAttrKey)
            )
            for keys, _ in jax.tree.leaves_with_path(state)
        ]
    )


def _is_key(value: PyTree) -> bool:
    is_array = isinstance(value, jax.Array)
    return is_array and bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


def _stream(leaf: PyTree, key: jax.Array) -> jax.Array:
    """Keys in place of those of a stream, which may have several."""
    shape = leaf.shape if _is_key(leaf) else leaf.shape[:-1]
    keys = jax.random.split(key, shape) if shape else key
    return keys if _is_key(leaf) else jax.random.key_data(keys)


def _bound(leaf: PyTree, device: jax.Device | None) -> Any:
    placed = device is None or not isinstance(leaf, jax.Array) or leaf.committed
    return leaf if placed else jax.device_put(leaf, device)


def _placed_as(array: jax.Array, before: jax.Array) -> jax.Array:
    return jax.device_put(array, before.sharding) if before.committed else array


def _nnx() -> Any:
    return sys.modules["flax.nnx"]
