"""Stages made of Flax NNX modules."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._errors import requirement
from jdist.pipeline.stage import Stage

if TYPE_CHECKING:
    from flax import nnx


class FromModules(NamedTuple):
    """What `stages_from_nnx` makes of modules.

    Attributes:
      stages: One for each module.
      params: Their parameters.
      states: What else they keep, such as batch-norm statistics; None for a module that
        keeps nothing.
    """

    stages: list[Stage]
    params: list[Any]
    states: list[Any]


def stages_from_nnx(
    modules: "Sequence[nnx.Module]",
    names: Sequence[str] | None = None,
    recompute: Any = False,
) -> FromModules:
    """A chain of stages, each of which calls one Flax NNX module on what came before.

    A module's `nnx.Param`s are the stage's parameters. Its random streams, such as
    those of dropout, make the stage take a key: every micro-batch then draws from
    streams of its own. All its other variables are the stage's state. In evaluation the
    module is put into evaluation mode (`Module.eval`).

    Args:
      modules: The modules, in order; they are read, not changed.
      names: Of the values: what the first one takes, and what each puts out. By default
        "x", "h1", "h2" and so on to "y".
      recompute: As for `Stage`.

    Raises:
      TypeError: Something is no NNX module.
      ValueError: There is not one name more than modules.

    Example:
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(0)
      >>> layers = [nnx.Linear(3, 5, rngs=rngs), nnx.Linear(5, 2, rngs=rngs)]
      >>> made = stages_from_nnx(layers)
      >>> [(stage.inputs, stage.outputs) for stage in made.stages]
      [(('x',), ('h1',)), (('h1',), ('y',))]
    """
    from flax import nnx

    between = [f"h{number}" for number in range(1, len(modules))]
    names = ["x", *between, "y"] if names is None else list(names)
    if len(names) != len(modules) + 1:
        rule = f"must be {len(modules) + 1} names: one between each two modules, and "
        rule += "one at both ends"
        raise ValueError(requirement("stages_from_nnx(names=...)", rule, names))
    strangers = [type(m).__name__ for m in modules if not isinstance(m, nnx.Module)]
    if strangers:
        rule = "must be Flax NNX modules"
        got = f"a {strangers[0]}"
        raise TypeError(requirement("stages_from_nnx(modules)", rule, got))
    made = FromModules([], [], [])
    for number, module in enumerate(modules):
        graph, params, streams, state = _taken_apart(module)
        stateful, keyed = bool(jax.tree.leaves(state)), bool(jax.tree.leaves(streams))
        stage = Stage(
            _caller(graph, None if stateful else state, streams, keyed),
            inputs=(names[number],),
            outputs=(names[number + 1],),
            stateful=stateful,
            keyed=keyed,
            recompute=recompute,
            in_evaluation=_evaluator(graph, None if stateful else state, streams),
        )
        made.stages.append(stage)
        made.params.append(params)
        made.states.append(state if stateful else None)
    return made


def _taken_apart(module: Any) -> tuple[Any, Any, Any, Any]:
    """Structure, parameters, random streams, and what else a module keeps."""
    from flax import nnx

    parts: Any = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return parts[0], parts[1], parts[2], parts[3]


def _caller(graph: Any, empty: Any, streams: Any, keyed: bool) -> Callable[..., Any]:
    """The stage's function: `(params, [state,] x[, key])`.

    Args:
      graph: The module's structure.
      empty: Its state, if there is nothing in it; None for a stateful module.
      streams: Its random streams, of which only the structure is used.
      keyed: Whether it has any.
    """
    from flax import nnx

    structure = jax.tree.structure(streams)
    kinds = _kinds(streams)

    def call(params: Any, *given: Any) -> Any:
        arguments = list(given)
        key = arguments.pop() if keyed else None
        drawn = _streams(structure, kinds, key)
        state = arguments.pop(0) if empty is None else empty
        module = nnx.merge(graph, params, drawn, state, copy=True)
        output = module(*arguments)
        if empty is not None:
            return output
        return output, _taken_apart(module)[3]

    return call


def _evaluator(graph: Any, empty: Any, streams: Any) -> Callable[..., Any]:
    """The stage's function in evaluation, `(params, [state,] x)`: see `_caller`.

    `Module.eval` lets dropout pass everything and batch normalisation use its averages.
    """
    from flax import nnx

    structure = jax.tree.structure(streams)
    kinds = _kinds(streams)

    def call(params: Any, *given: Any) -> Any:
        arguments = list(given)
        # The streams are there because the structure has them; nobody draws from them.
        drawn = _streams(structure, kinds, jax.random.key(0))
        state = arguments.pop(0) if empty is None else empty
        module = nnx.merge(graph, params, drawn, state)
        module.eval()
        return module(*arguments)

    return call


def _kinds(streams: Any) -> list[bool]:
    """Of each leaf of the streams, whether it is a key."""
    return [
        bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
        for leaf in jax.tree.leaves(streams)
    ]


def _streams(structure: Any, kinds: Sequence[bool], key: Any) -> Any:
    """Every stream from its beginning, with a key of its own."""
    leaves = [
        jax.random.fold_in(key, number) if is_key else jnp.uint32(0)
        for number, is_key in enumerate(kinds)
    ]
    return jax.tree.unflatten(structure, leaves)
