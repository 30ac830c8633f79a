"""Flax NNX modules whose parameters are variables.

A trainable module is split. Each of its parameters becomes a variable, which backward
passes find and optimizers step. The rest, its *state* (statistics, random streams,
constants), is an input without a derivative of each call, and an output: the new value
for the next call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jdist._compat import placed_as
from jdist._errors import type_error, value_error
from jdist._flax import (
    ModuleParts,
    RandomStreams,
    check_module,
    code_of,
    put_together,
    taken_apart,
)
from jdist._tree import PyTree, abbreviated, first_difference, is_inexact, is_key
from jdist.autograd.recording.pure import Constant, eager, refuse_in_pure
from jdist.autograd.recording.recorded import record
from jdist.autograd.recording.variable import Variable, holding
from jdist.rpc import RRef
from jdist.rpc.extension import InterruptSafeLock, StandIn, current_agent, make_module

if TYPE_CHECKING:
    from flax import nnx

T = TypeVar("T")
ModuleMethod = Callable[..., PyTree]
_PLAIN = (bool, int, float, complex, str, bytes, type(None), jax.Array)


@eager
def create(
    factory: ModuleMethod, args: tuple[object, ...], kwargs: dict[str, PyTree]
) -> RRef[Any]:
    """Makes a trainable module on its owner's device; returns references to it."""
    return make_module(_made, (factory, args, kwargs), {})


def _made(
    factory: ModuleMethod, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> TrainableModule:
    made = factory(*args, **kwargs)
    device = current_agent().options.device
    if device is None:
        return TrainableModule(made)
    check_module("TrainableModule(nnx_module)", made)

    def placed(leaf: PyTree) -> PyTree:
        # A committed array stays: the user has chosen its device.
        free = isinstance(leaf, jax.Array) and not leaf.committed
        return jax.device_put(leaf, device) if free else leaf

    # Arrays that arrive here are committed to the device. The module's own must be so,
    # or its calls are compiled again after the first argument from another worker.
    graph, *states = taken_apart(made)
    return TrainableModule(put_together(graph, *jax.tree.map(placed, states)))


class TrainableModule(StandIn):
    """A Flax NNX module that is trained within contexts.

    Its floating `nnx.Param`s become variables. Its calls are recorded, within a context
    or not. Statistics and random streams continue from call to call, in the order of
    the calls, and are never differentiated.

    It is called like the module. Threads may call it at the same time; with a state,
    calls run one after another.

    Args:
      nnx_module: The module. It is not changed, and shares no state with the result.
      key: A PRNG key from which all random streams of the module begin anew; by default
        they continue.

    Raises:
      TypeError: It is no NNX module, or holds no arrays yet; or `key` is no key.

    Source: `torch.nn.Module`, as torch's distributed autograd trains it.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> from jdist import autograd, optim, rpc
      >>> layer = autograd.TrainableModule(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
      >>> list(layer.parameters())
      ['bias', 'kernel']
      >>> with rpc.local_cluster(["worker0"]), autograd.context() as context_id:
      ...     autograd.backward(context_id, [layer(jnp.ones((5, 3))).sum()])
      ...     autograd.get_gradients(context_id)[layer.parameters()["bias"]]
      Array([5., 5.], dtype=float32)
    """

    def __init__(self, nnx_module: nnx.Module, key: jax.Array | None = None) -> None:
        check_module("TrainableModule(nnx_module)", nnx_module)
        # A stream of Flax has an attribute of any name, a dtype too.
        if key is not None and not (isinstance(key, jax.Array) and is_key(key)):
            rule, remedy = "must be a PRNG key", "Such as `jax.random.key(0)`."
            raise type_error("TrainableModule(key=...)", rule, key, remedy)
        parts = taken_apart(nnx_module, is_inexact)
        if key is not None:
            streams = RandomStreams.of(parts.streams).begun(key)
            parts = parts._replace(streams=streams)
        layout = _ModuleLayout(parts)
        self._variables = tuple(map(Variable, jax.tree.leaves(parts.params)))
        self._state = tuple(jax.tree.leaves((parts.streams, parts.rest)))
        # One for each mode, train and eval: a mode that comes again finds the functions
        # that were compiled for it.
        self._layouts = [layout]
        self._layout = layout
        self._lock = InterruptSafeLock()
        kind = type(nnx_module).__name__
        forward = type(nnx_module).__call__
        self._function = _function(kind, forward, tuple(code_of(nnx_module, _PLAIN)))

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the module and records the call.

        Raises:
          TypeError: An argument can be neither an input nor a constant (see `apply`);
            or the call changes something of the module that is no state: a parameter,
            an attribute, or which variables there are.
          RpcTimeout: Other calls took longer than this one may.
          Exception: What the module raises. Its state is as before.
        """
        return self._run("__call__", args, kwargs)

    def method(self, name: str) -> ModuleMethod:
        """Returns another method of the module, recorded: `module.method("encode")(x)`.

        Raises:
          AttributeError: The module has no such method.
        """
        if not callable(getattr(self.original(), name, None)):
            kind = self._function.__name__
            raise AttributeError(f"{kind!r} object has no method {name!r}")

        def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
            return self._run(name, args, kwargs)

        return call

    def parameters(self) -> dict[str, Variable]:
        """The variables, by the paths of the parameters, `"layers.0.kernel"`."""
        return dict(zip(self._layout.names, self._variables, strict=True))

    def state(self) -> dict[str, jax.Array]:
        """Returns statistics, keys and counts of random streams and constants, by path.

        The parameters and the state are all that the module consists of.
        """
        return dict(zip(self._layout.state_names, self._state, strict=True))

    def load_state(self, state: Mapping[str, ArrayLike]) -> None:
        """Sets the state to what `state` returned.

        Raises:
          ValueError: It has other paths, shapes or dtypes than the module's state.
        """

        def act() -> None:
            here = self.state()
            given = {path: jnp.asarray(leaf) for path, leaf in state.items()}
            shown = [{p: abbreviated(x) for p, x in d.items()} for d in (here, given)]
            if found := first_difference(*shown):
                path, is_here, is_given = found
                rule = f"must have {is_here} at {path}, as the module"
                raise value_error("TrainableModule.load_state(state)", rule, is_given)
            self._state = tuple([placed_as(given[p], x) for p, x in here.items()])

        self._alone(act)

    def train(self, **attributes: object) -> None:
        """Calls the module's own `train`: dropout is active, statistics are updated."""
        self._set_mode("train", attributes)

    def eval(self, **attributes: object) -> None:
        """Calls the module's own `eval`: no dropout, statistics are used."""
        self._set_mode("eval", attributes)

    def to_nnx(self) -> nnx.Module:
        """Returns a copy as an NNX module, which shares no state with this one."""

        def act() -> PyTree:
            values = [variable.value for variable in self._variables]
            return self._layout.module(values, self._state)

        return self._alone(act)

    def original(self) -> nnx.Module:
        """Returns the module with shapes in place of its arrays: see `StandIn`."""
        leaves = [variable.value for variable in self._variables]
        shapes = [jax.typeof(leaf) for leaf in (*leaves, *self._state)]
        return self._layout.module(shapes[: len(leaves)], shapes[len(leaves) :])

    def _run(
        self, name: str, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
    ) -> PyTree:
        refuse_in_pure("a call of the module {}", self._function.__name__)

        def act() -> PyTree:
            given = (self._layout, self._variables, self._state, name, args, kwargs)
            output, state = record(self._function, given, {})
            # Only after the call: one that raises leaves the state as it was.
            self._state = tuple(state)
            return output

        # Without a state calls change nothing, and run at the same time.
        return self._alone(act) if self._state else act()

    def _set_mode(self, name: str, attributes: Mapping[str, object]) -> None:

        def act() -> None:
            changed = self.original()
            getattr(changed, name)(**attributes)
            layout = _ModuleLayout(taken_apart(changed, is_inexact))
            # By equality: a structure may have attributes that cannot be hashed.
            known = [each for each in self._layouts if each.graph == layout.graph]
            self._layout = known[0] if known else layout
            if not known:
                self._layouts.append(layout)

        self._alone(act)

    def _alone(self, action: Callable[[], T]) -> T:
        """Calls `action` while no other call changes the state."""
        busy = f"while other calls had the state of {self._function.__name__}"
        return holding([self._lock], busy, action)

    def __repr__(self) -> str:
        return f"TrainableModule({self._function.__name__})"


class _ModuleLayout(Constant):
    """The structure of a module without its arrays, in one mode.

    Args:
      parts: The parts of the module. Its state are its random streams and the rest.

    Attributes:
      graph: The structure of `parts`.
      names: Paths of the parameters.
      state_names: Paths of the leaves of the state.
    """

    def __init__(self, parts: ModuleParts) -> None:
        self.graph = parts.graph
        self.names = _names(parts.params)
        self.state_names = _names(parts.streams) + _names(parts.rest)
        self._params: Any = jax.tree.structure(parts.params)
        self._state: Any = jax.tree.structure((parts.streams, parts.rest))

    def module(self, params: Sequence[PyTree], state: Sequence[PyTree]) -> nnx.Module:
        """Builds the module from these leaves."""
        streams, rest = self._state.unflatten(state)
        return put_together(self.graph, self._params.unflatten(params), streams, rest)

    def state_of(self, module: nnx.Module, params: Sequence[PyTree]) -> list[PyTree]:
        """Returns the leaves of a module's state after a call.

        Raises:
          TypeError: The call has changed something that is not state.
        """
        graph, params_after, *state = taken_apart(module, is_inexact)
        kinds = jax.tree.structure(params_after), jax.tree.structure(tuple(state))
        changed = set()
        if kinds != (self._params, self._state):
            after = {path for part in state for path in _names(part)}
            changed = after ^ set(self.state_names) or {"its structure"}
        else:
            leaves = zip(self.names, params, jax.tree.leaves(params_after), strict=True)
            # By identity: inside a trace the values of two tracers cannot be compared.
            changed = {path for path, before, after in leaves if before is not after}
        if not changed and graph != self.graph:
            pairs = zip(self.graph.attributes, graph.attributes, strict=False)
            other = {str(path) for (path, old), (_, new) in pairs if old != new}
            changed = other or {"an attribute"}
        if changed:
            rule = "must change nothing but its state in a call"
            remedy = (
                "Return what the call computes, or make what changes an nnx.Variable "
                "that is no nnx.Param."
            )
            got = f"a change of {', '.join(sorted(changed))}"
            call = f"TrainableModule({type(module).__name__})"
            raise type_error(call, rule, got, remedy)
        return jax.tree.leaves(state)


def _function(name: str, call: ModuleMethod, code: tuple[object, ...]) -> ModuleMethod:
    """Builds the function that is compiled: from a module's arrays to output and state.

    Args:
      name: Name of the module's class.
      call: Its `__call__`, whose source line messages name.
      code: Classes and functions on which the module's behaviour depends.
    """

    def called(
        layout: _ModuleLayout,
        params: PyTree,
        state: PyTree,
        method: str,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
    ) -> PyTree:
        # Not used, but the compiled function is found again by all that this function
        # refers to, and what the module's classes read may change.
        _ = call, code
        module = layout.module(params, state)
        output = getattr(module, method)(*args, **kwargs)
        return output, jax.lax.stop_gradient(layout.state_of(module, params))

    called.__name__ = called.__qualname__ = name
    return called


def _names(state: PyTree) -> tuple[str, ...]:
    """Returns the paths of the leaves, as Flax's users write them."""
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
