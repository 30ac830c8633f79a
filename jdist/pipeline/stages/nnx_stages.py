"""Modules and stages made of Flax NNX modules."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from jdist._errors import requirement
from jdist.pipeline.stages.module import Module
from jdist.pipeline.stages.module_stages import FromModules, assembled

if TYPE_CHECKING:
    from flax import nnx

Key = TypeVar("Key", bound=Hashable)
Names = Mapping[Key, Sequence[str]]
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


def modules_from_nnx(
    layers: "Mapping[str, nnx.Module]",
    *,
    inputs: Names[str] = _NOTHING,
    outputs: Names[str] = _NOTHING,
    tied: Mapping[str, Mapping[str, str]] = _NOTHING,
) -> list[Module]:
    """Flax NNX modules as the modules that `profile` and `stages_from_modules` take.

    A layer's `nnx.Param`s are its parameters. It takes a key if it has random streams
    that it may draw from: those of an `nnx.Dropout` of rate 0, or a deterministic one,
    do not count. All its other variables are its state. In evaluation the layer is put
    into evaluation mode (`Module.eval`).

    A parameter that several layers hold, such as an embedding that the head uses too,
    is tied: it stays one parameter, whichever stages they come to.

    Args:
      layers: The layers by name, in an order in which they can run; they are read, not
        changed. They may have shapes in place of arrays (`nnx.eval_shape`).
      inputs: Names of the values that a layer takes, by its name; by default ("x",).
      outputs: Names of the values that it returns; by default ("x",).
      tied: Equal parameters that are to stay so though they are different variables: to
        a name, the path of its copy in each layer that has one, such as
        `{"tokens": {"embed": "embedding", "head": "kernel"}}`.

    Raises:
      TypeError: A layer is no NNX module.
      ValueError: A name is of no layer; layers share a variable that is no parameter.

    Example:
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(0)
      >>> layers = {
      ...     "norm": nnx.BatchNorm(3, rngs=rngs),
      ...     "dense": nnx.Linear(3, 2, rngs=rngs),
      ... }
      >>> made = modules_from_nnx(layers, outputs={"dense": ("y",)})
      >>> [(m.name, m.inputs, m.outputs, m.state is not None) for m in made]
      [('norm', ('x',), ('x',), True), ('dense', ('x',), ('y',), False)]
    """
    call = "modules_from_nnx"
    _check_layers(call, layers.values())
    for argument, found in (("inputs", inputs), ("outputs", outputs)):
        _check_keys(f"{call}({argument}=...)", layers, found)
    ties = _tied(call, layers, tied)
    return [
        _module(
            name,
            layer,
            tuple(inputs.get(name, ("x",))),
            tuple(outputs.get(name, ("x",))),
            ties[name],
        )
        for name, layer in layers.items()
    ]


def stages_from_nnx(
    modules: "Sequence[nnx.Module | Sequence[nnx.Module]]",
    names: Sequence[str] | None = None,
    recompute: Any = False,
    *,
    inputs: Names[int] = _NOTHING,
    outputs: Names[int] = _NOTHING,
    tied: Mapping[str, Mapping[int, str]] = _NOTHING,
    loss_inputs: Sequence[str] | None = None,
) -> FromModules:
    """Stages of Flax NNX modules: a chain, but for what is said otherwise.

    Parameters, keys, states and evaluation are those of `modules_from_nnx`. A stage of
    one module has its parameters (an `nnx.State`) and its state as they are; one of a
    list of modules has dicts of them, by "layer0" and so on, numbered over all stages.

    Args:
      modules: For each stage its module, or a list of its modules.
      names: Of the values between stages: what the first one takes, and what each puts
        out. By default "x", "h1", "h2" and so on to "y".
      recompute: As for `Stage`.
      inputs: Names of the values that a module takes, by its number, where these are
        not all that the module before puts out: entries of the batch such as a mask,
        or values that skip modules.
      outputs: Names of the values that a module returns, by its number, where it is not
        one with its name in the chain.
      tied: As for `modules_from_nnx`, by number.
      loss_inputs: Names of what the loss takes, if not what the last one puts out.

    Raises:
      TypeError: Something is no NNX module.
      ValueError: There is not one name more than stages; a stage has no module; what
        `modules_from_nnx` and `stages_from_modules` refuse.

    Example:
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(0)
      >>> layers = [nnx.Linear(3, 5, rngs=rngs), nnx.Linear(5, 2, rngs=rngs)]
      >>> made = stages_from_nnx(layers)
      >>> [(stage.inputs, stage.outputs) for stage in made.stages]
      [(('x',), ('h1',)), (('h1',), ('y',))]
      >>> [type(layer).__name__ for layer in made.modules(made.params, made.states)]
      ['Linear', 'Linear']
    """
    call = "stages_from_nnx"
    groups: list[list[Any]] = [
        list(group) if isinstance(group, list | tuple) else [group] for group in modules
    ]
    if not groups or not all(groups):
        rule = "must have a module for each stage, and one stage at least"
        raise ValueError(requirement(f"{call}(modules)", rule, modules))
    flat = [module for group in groups for module in group]
    _check_layers(call, flat)
    between = _chain(groups, names)
    numbers = range(len(flat))
    for argument, given in (("inputs", inputs), ("outputs", outputs)):
        _check_keys(f"{call}({argument}=...)", numbers, given)
    ties = _tied(call, dict(enumerate(flat)), tied)
    puts_out = [tuple(outputs.get(k, (between[k + 1],))) for k in numbers]
    before = [(between[0],), *puts_out]
    made = [
        _module(
            f"layer{k}", flat[k], tuple(inputs.get(k, before[k])), puts_out[k], ties[k]
        )
        for k in numbers
    ]
    stages = [j for j, group in enumerate(groups) for _ in group]
    stage_of = {m.name: j for m, j in zip(made, stages, strict=True)}
    alone = {
        m.name for m, j in zip(made, stages, strict=True)
        if not isinstance(modules[j], list | tuple)
    }  # fmt: skip
    return assembled(made, stage_of, loss_inputs, recompute, frozenset(alone))


def _chain(groups: Sequence[Sequence[Any]], names: Sequence[str] | None) -> list[str]:
    """The value before the first module, and the one after each."""
    between = [f"h{number}" for number in range(1, len(groups))]
    ends = ["x", *between, "y"] if names is None else list(names)
    if len(ends) != len(groups) + 1:
        rule = f"must be {len(groups) + 1} names: one between each two stages, and "
        rule += "one at both ends"
        raise ValueError(requirement("stages_from_nnx(names=...)", rule, ends))
    found = [ends[0]]
    for group, end in zip(groups, ends[1:], strict=True):
        found += [f"{end}.{number}" for number in range(1, len(group))] + [end]
    return found


def _check_layers(call: str, layers: Any) -> None:
    from flax import nnx

    strangers = [type(m).__name__ for m in layers if not isinstance(m, nnx.Module)]
    if strangers:
        rule = "must be Flax NNX modules"
        raise TypeError(requirement(f"{call}(modules)", rule, f"a {strangers[0]}"))


def _check_keys(call: str, known: Any, given: Mapping[Any, Any]) -> None:
    strange = [key for key in given if key not in known]
    if strange:
        rule = f"must be for some of the layers {list(known)}"
        raise ValueError(requirement(call, rule, repr(strange[0])))
    texts = [key for key, names in given.items() if isinstance(names, str)]
    if texts:
        rule = f"must be a tuple of names for {texts[0]!r}"
        raise ValueError(requirement(call, rule, repr(given[texts[0]])))


def _tied(
    call: str,
    layers: "Mapping[Key, nnx.Module]",
    given: Mapping[str, Mapping[Key, str]],
) -> dict[Key, dict[str, str]]:
    """For each layer the names of shared parameters by path: those given, and found."""
    found: dict[Key, dict[str, str]] = {key: {} for key in layers}
    for name, copies in given.items():
        _check_keys(f"{call}(tied=...)", layers, dict.fromkeys(copies, ()))
        for key, path in copies.items():
            found[key][path] = name
    holders: dict[int, list[tuple[Key, str]]] = {}
    for key, layer in layers.items():
        for path, number in _parameters(call, layer, holders, key):
            holders.setdefault(number, []).append((key, path))
    for places in holders.values():
        named = [_name_of(found[key], path) for key, path in places]
        own = {name for name in named if name is not None}
        if len(places) == 1 or (len(own) == 1 and None not in named):
            continue  # One layer alone has it, or all of them name it alike.
        name, below = own.pop() if own else ("/".join(map(str, places[0])), "")
        if own or below:
            rule = f"must tie {places[0][1]!r} of {places[0][0]!r} alike in all layers "
            rule += "that hold it"
            got = f"{[key for key, _ in places]} hold it"
            raise ValueError(requirement(f"{call}(tied=...)", rule, got))
        for key, path in places:
            found[key].setdefault(path, name)
    return found


def _name_of(tied: Mapping[str, str], path: str) -> tuple[str, str] | None:
    """Under which name a path is tied, and what of it lies below the tied one."""
    for top, name in tied.items():
        if path == top or path.startswith(f"{top}/"):
            return name, path.removeprefix(top)
    return None


def _parameters(
    call: str, layer: Any, holders: Mapping[int, Any], key: Any
) -> list[tuple[str, int]]:
    """Path and identity of a layer's variables, but for its random streams.

    Raises:
      ValueError: It shares one that is no parameter with a layer before it.
    """
    from flax import nnx

    found = []
    for path, variable in nnx.iter_graph(layer):
        if isinstance(variable, nnx.Variable) and not isinstance(
            variable, nnx.RngState
        ):
            shared = id(variable) in holders and not isinstance(variable, nnx.Param)
            if shared:
                rule = "must not share a state: what one layer leaves behind would be "
                rule += f"lost on the other, {key!r}"
                got = f"a {type(variable).__name__} at {'/'.join(map(str, path))}"
                raise ValueError(requirement(f"{call}(modules)", rule, got))
            found.append(("/".join(map(str, path)), id(variable)))
    return found


def _module(
    name: str,
    layer: Any,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    tied: Mapping[str, str],
) -> Module:
    graph, params, streams, state = _taken_apart(layer)
    stateful, keyed = bool(jax.tree.leaves(state)), _draws(layer)
    leaves, structure = jax.tree.flatten(streams)
    kinds = tuple([jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves])
    empty = None if stateful else jax.tree.structure(state)
    call = NnxFunction(graph, empty, structure, kinds, keyed)

    def restore(params: Any, kept: Any) -> Any:
        from flax import nnx

        rest = state if kept is None else kept
        return nnx.merge(graph, params, streams, rest, copy=True)

    return Module(
        name,
        call,
        params,
        inputs,
        outputs,
        state=state if stateful else None,
        keyed=keyed,
        in_evaluation=replace(call, evaluation=True),
        tied=tied,
        restore=restore,
    )


def _draws(layer: Any) -> bool:
    """Whether it has random streams beside those of dropouts that drop nothing."""
    from flax import nnx

    nodes = list(nnx.iter_graph(layer))
    idle = [
        path
        for path, node in nodes
        if isinstance(node, nnx.Dropout) and (node.rate == 0 or node.deterministic)
    ]
    return any(
        isinstance(node, nnx.RngState)
        and not any(path[: len(above)] == above for above in idle)
        for path, node in nodes
    )


def _taken_apart(module: Any) -> tuple[Any, Any, Any, Any]:
    """Structure, parameters, random streams, and what else a module keeps."""
    from flax import nnx

    # Variables of its own: what becomes of the module later is not seen here.
    graph, *states = nnx.split(module, nnx.Param, nnx.RngState, ...)
    params, streams, rest = (jax.tree.map(lambda x: x, state) for state in states)
    return graph, params, streams, rest


@dataclass(frozen=True, slots=True, weakref_slot=True)
class NnxFunction:
    """A stage's function that calls a Flax module: `(params, [state,] *inputs[, key])`.

    Equal ones compute the same, so that what is compiled for one serves the other.

    Attributes:
      graph: The module's structure.
      empty: The structure of its state, if there is nothing in it; None for a stateful
        module.
      streams: The structure of its random streams.
      kinds: Of each leaf of the streams, whether it is a key.
      keyed: Whether it draws from them.
      evaluation: Whether the module is in evaluation mode, where dropout lets
        everything pass and batch normalisation uses its averages; it then takes no key
        and returns no state.
    """

    graph: Any
    empty: Any
    streams: Any
    kinds: tuple[bool, ...]
    keyed: bool
    evaluation: bool = False

    def __call__(self, params: Any, *given: Any) -> Any:
        """Calls the module, made anew."""
        from flax import nnx

        arguments = list(given)
        drawing = self.keyed and not self.evaluation
        key = arguments.pop() if drawing else jax.random.key(0)
        # The structure has streams even where nothing is drawn from them.
        streams = _streams(self.streams, self.kinds, key)
        stateful = self.empty is None
        state = arguments.pop(0) if stateful else self.empty.unflatten([])
        module = nnx.merge(self.graph, params, streams, state, copy=True)
        if self.evaluation:
            module.eval()
        output = module(*arguments)
        *_, after, state = _taken_apart(module)
        if not drawing:
            _check_undrawn(module, streams, after, self.evaluation)
        return (output, state) if stateful and not self.evaluation else output


def _check_undrawn(module: Any, before: Any, after: Any, evaluation: bool) -> None:
    """Refuses draws from streams that begin alike for all micro-batches.

    Raises:
      ValueError: There were some: a stream counts what is drawn from it.
    """
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    if any(one is not another for one, another in pairs):
        why = (
            "in evaluation it has no key" if evaluation else "its dropouts drop nothing"
        )
        rule = f"must draw no random numbers: {why}"
        got = f"a {type(module).__name__} that draws"
        raise ValueError(requirement("stages_from_nnx(modules)", rule, got))


def _streams(structure: Any, kinds: Sequence[bool], key: Any) -> Any:
    """Every stream from its beginning, with a key of its own."""
    leaves = [
        jax.random.fold_in(key, number) if is_key else jnp.uint32(0)
        for number, is_key in enumerate(kinds)
    ]
    return jax.tree.unflatten(structure, leaves)
