"""Modules and stages made from Flax NNX modules."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from jdist._errors import check_sequence, check_type, quoted, value_error
from jdist._flax import (
    ModuleParts,
    RandomStreams,
    check_module,
    may_draw,
    put_together,
    run,
    taken_apart,
)
from jdist._tree import PyTree, type_name
from jdist.pipeline.stages.module import Module
from jdist.pipeline.stages.module_stages import FromModules, assembled
from jdist.pipeline.stages.stage import Recompute

if TYPE_CHECKING:
    from flax import nnx


Key = TypeVar("Key", bound=Hashable)
"""The name of a layer, or its number."""
Names = Mapping[Key, Sequence[str]]
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


def modules_from_nnx(
    layers: Mapping[str, nnx.Module],
    *,
    inputs: Names[str] = _NOTHING,
    outputs: Names[str] = _NOTHING,
    tied: Mapping[str, Mapping[str, str]] = _NOTHING,
) -> list[Module]:
    """Make modules from Flax NNX modules, for `profile` and `stages_from_modules`.

    A layer's `nnx.Param`s are its parameters. It takes a key if it has random streams
    that it may draw from: those of an `nnx.Dropout` of rate 0, or a deterministic one,
    do not count. All its other variables are its state. In evaluation the layer is put
    into evaluation mode (`Module.eval`).

    A parameter that several layers hold, such as an embedding that the head uses too,
    is tied: it stays one parameter, whichever stages the layers belong to.

    Args:
      layers: The layers by name, in an order in which they can run; they are not
        changed. They may have shapes in place of arrays (`nnx.eval_shape`).
      inputs: Names of a layer's inputs, by the layer's name; by default ("x",).
      outputs: Names of its outputs; by default ("x",).
      tied: Equal parameters that must stay equal although they are different variables:
        for a name, the path of the copy in each layer that has one, such as
        `{"tokens": {"embed": "embedding", "head": "kernel"}}`.

    Raises:
      TypeError: A layer is not an NNX module.
      ValueError: A name belongs to no layer; layers share a variable that is not a
        parameter.

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
    rule = "must be a mapping from names to modules"
    check_type(f"{call}(layers)", layers, Mapping, rule)
    for name, layer in layers.items():
        check_module(f"{call}(layers[{name!r}])", layer)
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
    modules: Sequence[nnx.Module | Sequence[nnx.Module]],
    names: Sequence[str] | None = None,
    recompute: Recompute = False,
    *,
    inputs: Names[int] = _NOTHING,
    outputs: Names[int] = _NOTHING,
    tied: Mapping[str, Mapping[int, str]] = _NOTHING,
    loss_inputs: Sequence[str] | None = None,
) -> FromModules:
    """Make stages from Flax NNX modules, by default a chain.

    Parameters, keys, states and evaluation are those of `modules_from_nnx`. A stage of
    one module has the module's parameters (an `nnx.State`) and state; a stage of a list
    of modules has dicts of them, by "layer0" and so on, numbered over all stages.

    Args:
      modules: For each stage its module, or a list of its modules.
      names: Names of the values between stages: the input of the first one, and the
        output of each. By default "x", "h1", "h2" and so on to "y".
      recompute: As for `Stage`.
      inputs: Names of a module's inputs, by its number, where these are not the outputs
        of the module before: entries of the batch such as a mask, or values that skip
        modules.
      outputs: Names of a module's outputs, by its number, where they are not one value
        with its name in the chain.
      tied: As for `modules_from_nnx`, by number.
      loss_inputs: Names of the loss's inputs, if not the outputs of the last module.

    Returns:
      Stages with their parameters and states. The method `modules(params, states)` is
      the inverse: new modules, in the order given, with trained parameters. Each has
      its own copy of a shared parameter.

    Raises:
      TypeError: An entry is not an NNX module.
      ValueError: There is not one name more than stages; a stage has no module; or an
        error of `modules_from_nnx` or `stages_from_modules`.

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
    check_sequence(f"{call}(modules)", modules, object, "must be a list of modules")
    if names is not None:
        check_sequence(f"{call}(names=...)", names, str, "must be a list of names")
    groups: list[list[Any]] = [
        list(group) if isinstance(group, list | tuple) else [group] for group in modules
    ]
    if not groups or not all(groups):
        rule = "must have a module for each stage, and one stage at least"
        raise value_error(f"{call}(modules)", rule, modules)
    # Modules are numbered over all stages.
    flat = [module for group in groups for module in group]
    for layer in flat:
        check_module(f"{call}(modules)", layer)
    between = _chain(groups, names)
    numbers = range(len(flat))
    for argument, given in (("inputs", inputs), ("outputs", outputs)):
        _check_keys(f"{call}({argument}=...)", numbers, given)
    ties = _tied(call, dict(enumerate(flat)), tied)
    # In a chain a module's inputs are the outputs of the one before.
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
    # A module that was given without a list is a stage without a dict of parameters.
    alone = frozenset(
        name for name, j in stage_of.items() if not isinstance(modules[j], list | tuple)
    )
    return assembled(made, stage_of, loss_inputs, recompute, alone)


def _chain(
    groups: Sequence[Sequence[object]], names: Sequence[str] | None
) -> list[str]:
    """Names of the value before the first module and of the value after each."""
    between = [f"h{number}" for number in range(1, len(groups))]
    ends = ["x", *between, "y"] if names is None else list(names)
    if len(ends) != len(groups) + 1:
        rule = f"must be {len(groups) + 1} names: one between each two stages, and "
        rule += "one at both ends"
        raise value_error("stages_from_nnx(names=...)", rule, ends)
    found = [ends[0]]
    for group, end in zip(groups, ends[1:], strict=True):
        # Values inside a stage need names too, which no other stage sees.
        found += [f"{end}.{number}" for number in range(1, len(group))] + [end]
    return found


def _check_keys(
    call: str, known: Collection[Key], given: Mapping[Key, Sequence[str]]
) -> None:
    check_type(call, given, Mapping, "must be a mapping from layers to names")
    strange = [key for key in given if key not in known]
    if strange:
        rule = f"must be for some of the layers {list(known)}"
        raise value_error(call, rule, quoted(strange[0]))
    # A string is a sequence of strings: "xy" would pass as two names.
    texts = [key for key, names in given.items() if isinstance(names, str)]
    if texts:
        rule = f"must be a tuple of names for {texts[0]!r}"
        raise value_error(call, rule, quoted(given[texts[0]]))


def _tied(
    call: str,
    layers: Mapping[Key, nnx.Module],
    given: Mapping[str, Mapping[Key, str]],
) -> dict[Key, dict[str, str]]:
    """Names of shared parameters, given and found, for each layer by path."""
    found: dict[Key, dict[str, str]] = {key: {} for key in layers}
    rule = "must be a mapping from names to mappings from layers to paths"
    check_type(f"{call}(tied=...)", given, Mapping, rule)
    for name, copies in given.items():
        check_type(f"{call}(tied=...)", copies, Mapping, rule)
        _check_keys(f"{call}(tied=...)", layers, dict.fromkeys(copies, ()))
        for key, path in copies.items():
            found[key][path] = name
    for places in _holders(call, layers):
        # A path below a tied one is tied with it.
        named = [_name_of(found[key], path) for key, path in places]
        own = {name for name in named if name is not None}
        if len(places) == 1 or (len(own) == 1 and None not in named):
            continue  # A single layer holds it, or all of them name it alike.
        name, below = own.pop() if own else ("/".join(map(str, places[0])), "")
        if own or below:
            rule = f"must tie {places[0][1]!r} of {places[0][0]!r} alike in all layers "
            rule += "that hold it"
            got = f"{[key for key, _ in places]} hold it"
            raise value_error(f"{call}(tied=...)", rule, got)
        for key, path in places:
            # A path that the user has named keeps its name.
            found[key].setdefault(path, name)
    return found


def _name_of(tied: Mapping[str, str], path: str) -> tuple[str, str] | None:
    """The name under which a path is tied, and the rest below the tied path."""
    for top, name in tied.items():
        if path == top or path.startswith(f"{top}/"):
            return name, path.removeprefix(top)
    return None


def _holders(
    call: str, layers: Mapping[Key, nnx.Module]
) -> Collection[list[tuple[Key, str]]]:
    """The layers that hold each variable, with its path; not those of random streams.

    Raises:
      ValueError: Layers share a variable that is not a parameter.
    """
    from flax import nnx

    # By identity, because equal values may be a coincidence.
    found: dict[int, list[tuple[Key, str]]] = {}
    for key, layer in layers.items():
        for path, variable in nnx.iter_graph(layer):
            is_stream = isinstance(variable, nnx.RngState)
            if is_stream or not isinstance(variable, nnx.Variable):
                continue
            places = found.setdefault(id(variable), [])
            places.append((key, "/".join(map(str, path))))
            # All layers would return a new state, of which one would be kept.
            if len(places) > 1 and not isinstance(variable, nnx.Param):
                rule = "must not share a state: what one layer leaves behind would be "
                rule += f"lost on the other, {key!r}"
                got = f"{type_name(variable)} at {places[-1][1]}"
                raise value_error(f"{call}(modules)", rule, got)
    return found.values()


def _module(
    name: str,
    layer: nnx.Module,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    tied: Mapping[str, str],
) -> Module:
    parts = taken_apart(layer)
    stateful, keyed = bool(jax.tree.leaves(parts.rest)), may_draw(layer)
    empty = None if stateful else jax.tree.structure(parts.rest)
    fn = NnxFunction(parts.graph, empty, RandomStreams.of(parts.streams), keyed)

    return FlaxLayer(
        name,
        fn,
        parts.params,
        inputs,
        outputs,
        state=parts.rest if stateful else None,
        keyed=keyed,
        in_evaluation=replace(fn, evaluation=True),
        tied=tied,
        parts=parts,
    )


@dataclass(frozen=True, kw_only=True)
class FlaxLayer(Module):
    """A `Module` that was made of a Flax module.

    Attributes:
      parts: The parts of the Flax module.
    """

    parts: ModuleParts

    def restored(self, params: PyTree, state: PyTree) -> object:
        """The Flax module with other parameters and state."""
        rest = self.parts.rest if state is None else state
        return put_together(*self.parts._replace(params=params, rest=rest))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class NnxFunction:
    """A Flax module as a pure function: `(params, [state,] *inputs[, key])`.

    Equal functions compute the same, so that they share a compiled program.

    Attributes:
      graph: The module's structure.
      empty: The structure of its state, if it has no leaves; None for a stateful
        module.
      streams: The structure of its random streams.
      keyed: Whether it draws from them.
      evaluation: Whether the module is in evaluation mode, in which dropout is off and
        batch normalisation uses its averages; it then takes no key and returns no
        state.
    """

    graph: nnx.GraphDef[Any]
    empty: jax.tree_util.PyTreeDef | None
    streams: RandomStreams
    keyed: bool
    evaluation: bool = False

    def __call__(self, params: PyTree, *given: PyTree) -> PyTree:
        """Rebuild the module and call it.

        Raises:
          ValueError: It draws random numbers without a key for them.
        """
        arguments = list(given)
        # Evaluation is given no key; to rebuild the streams still takes one.
        drawing = self.keyed and not self.evaluation
        key = arguments.pop() if drawing else jax.random.key(0)
        # The module's structure includes streams even if nothing is drawn from them.
        streams = self.streams.begun(key)
        stateful = self.empty is None
        state = arguments.pop(0) if self.empty is None else self.empty.unflatten([])
        parts = ModuleParts(self.graph, params, streams, state)
        found = run(lambda m: m(*arguments), parts, evaluation=self.evaluation)
        if not drawing and found.drew():
            # Refused: without a key all micro-batches would draw the same numbers.
            why = "its dropouts drop nothing"
            why = "in evaluation it has no key" if self.evaluation else why
            rule = f"must draw no random numbers: {why}"
            got = f"a {type(put_together(*parts)).__name__} that draws"
            raise value_error("stages_from_nnx(modules)", rule, got)
        returns_state = stateful and not self.evaluation
        return (found.output, found.rest) if returns_state else found.output
