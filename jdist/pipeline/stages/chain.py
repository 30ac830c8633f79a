"""Chains of stages: what is before and after equal stages, joined to them.

A stage and the functions at its ends are one stage: a chain of parts. Executors that
run stages one by one see only the chain; one program for equal stages takes it apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from jdist._errors import check_sequence, check_type, value_error
from jdist._tree import PyTree, type_name
from jdist.pipeline.stages.stage import Stage
from jdist.pipeline.stages.stage_program import StageProgram


class Parts(NamedTuple):
    """A value for each part of a stage; None for an end that does not exist."""

    first: Any
    block: Any
    last: Any


# With `weakref_slot`, because JAX keeps weak references to functions that it traces.
@dataclass(frozen=True, slots=True, weakref_slot=True)
class Chain:
    """The composition of several stages, as the function of one stage.

    Its parameters are a tuple, one tree for each part. A part that takes a key gets
    `fold_in(key, number of the part)`, or the key itself if no other part takes one.

    Attributes:
      parts: Each takes the only output of the one before.
      block: Index of the part that is one of the equal stages.
      in_evaluation: Whether parts use their functions for evaluation.
    """

    parts: tuple[Stage, ...]
    block: int
    in_evaluation: bool = False

    def __call__(self, params: PyTree, *given: PyTree) -> PyTree:
        """The outputs of the last part."""
        _check_trees(len(self.parts), params)
        values, key = given, None
        if self.keyed:
            values, key = given[:-1], given[-1]
        for number, (part, own) in enumerate(zip(self.parts, params, strict=True)):
            fn = part.fn
            if self.in_evaluation and part.in_evaluation is not None:
                fn = part.in_evaluation
            elif part.keyed:
                values = *values, self.key_of(number, key)
            values = (fn(own, *values),)
        return values[0]

    @property
    def keyed(self) -> bool:
        """Whether it takes a key."""
        return any(
            part.keyed and not (self.in_evaluation and part.in_evaluation)
            for part in self.parts
        )

    def key_of(self, number: int, key: PyTree) -> PyTree:
        """The key of a part, derived from that of the stage."""
        # Not folded where one part takes a key: a stage draws the same with an end.
        alone = sum(part.keyed for part in self.parts) == 1
        return key if alone else jax.random.fold_in(key, number)


def with_ends(
    stages: Sequence[Stage], *, first: Stage | None = None, last: Stage | None = None
) -> list[Stage]:
    """Join layers before equal stages to the first one, and layers after to the last.

    One program (`OneProgram`) runs equal stages, and takes the ends apart again.
    Everywhere else a stage and its end are one stage.

    Args:
      stages: The stages, in order.
      first: A stage before the first one, such as an embedding: its output is the only
        input of the first stage, and it is on that stage's device or mesh. The
        parameters of that stage are then a tuple: those of `first`, its own.
      last: Likewise a stage after the last one, such as a head: its input is the only
        output of the last stage, and its parameters come after those of that stage.

    Returns:
      As many stages as given.

    Raises:
      TypeError: A stage or an end is not a `Stage`.
      ValueError: There is no stage; an end has a state; the only output of `first` is
        not the only input of the first stage, or the only input of `last` not the only
        output of the last stage; one part has a function for evaluation, and another
        one has none and takes a key.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import pipeline
      >>> blocks = [
      ...     pipeline.Stage(lambda w, x: jnp.tanh(x @ w), ("x",), ("h",)),
      ...     pipeline.Stage(lambda w, h: jnp.tanh(h @ w), ("h",), ("y",)),
      ... ]
      >>> embed = pipeline.Stage(lambda w, tokens: w[tokens], ("tokens",), ("x",))
      >>> stages = pipeline.with_ends(blocks, first=embed)
      >>> pipe = pipeline.Pipeline(
      ...     stages, lambda y, batch: y.sum(-1), pipeline.gpipe(2, 2)
      ... )
      >>> table, square = jnp.ones((5, 3)), jnp.eye(3)
      >>> batch = {"tokens": jnp.array([0, 4, 2, 2])}
      >>> loss, grads = pipe.value_and_grad([(table, square), square], batch)
      >>> [grad.shape for grad in grads[0]]
      [(5, 3), (3, 3)]
    """
    call, rule = "with_ends(stages)", "must be a sequence of Stage"
    check_sequence(call, stages, Stage, rule)
    if not stages:
        raise value_error(call, "must not be empty", "[]")
    made = list(stages)
    if first is not None:
        _check_end("first", first)
        if len(first.outputs) != 1 or first.outputs != made[0].inputs:
            rule = f"must output what the first stage takes, {made[0].inputs}, as its "
            rule += "only input"
            raise value_error("with_ends(first=...)", rule, first.outputs)
        made[0] = _chained((first, made[0]), 1)
    if last is not None:
        _check_end("last", last)
        before = stages[-1].outputs
        if len(before) != 1 or last.inputs != before:
            rule = f"must take what the last stage outputs, {before}, as its only "
            rule += "input"
            raise value_error("with_ends(last=...)", rule, last.inputs)
        # With a single stage it may have become a chain above: it is then extended.
        known = made[-1].fn
        chain = known if isinstance(known, Chain) else Chain((made[-1],), 0)
        made[-1] = _chained((*chain.parts, last), chain.block)
    return made


def parts_of(stage: Stage) -> Parts:
    """The parts of a stage: the one that is among equal stages, and its ends."""
    found = Parts(None, stage, None)
    if isinstance(stage.fn, Chain):
        found = _parted(stage.fn, stage.fn.parts)
    block: Stage = found.block
    # Numbers for the names of modules: with names no two stages would be equal.
    if isinstance(block.fn, StageProgram):
        block = replace(block, fn=block.fn.renumbered())
    return found._replace(block=block)


def taken_apart(stage: Stage, params: PyTree) -> Parts:
    """Split the parameters of a stage into those of its parts.

    Raises:
      ValueError: There is not one tree for each part.
    """
    found = Parts(None, params, None)
    if isinstance(stage.fn, Chain):
        _check_trees(len(stage.fn.parts), params)
        found = _parted(stage.fn, params)
    return found._replace(block=_renamed(found.block, _numbers(stage)))


def put_together(stage: Stage, trees: Parts) -> PyTree:
    """Join the trees of a stage's parts; the inverse of `taken_apart`."""
    names = {number: name for name, number in _numbers(stage).items()}
    trees = trees._replace(block=_renamed(trees.block, names))
    if not isinstance(stage.fn, Chain):
        return trees.block
    held = _parted(stage.fn, stage.fn.parts)
    return tuple([t for t, part in zip(trees, held, strict=True) if part is not None])


def _numbers(stage: Stage) -> Mapping[str, str]:
    """Numbers of the modules of the equal stage, by name; empty for a function."""
    fn = stage.fn.parts[stage.fn.block].fn if isinstance(stage.fn, Chain) else stage.fn
    return fn.numbers if isinstance(fn, StageProgram) else {}


def _renamed(params: PyTree, names: Mapping[str, str]) -> PyTree:
    """Parameters by module, with the modules renamed."""
    if not (names and isinstance(params, Mapping)):
        return params
    return {names.get(name, name): tree for name, tree in params.items()}


def _parted(chain: Chain, each: Sequence[Any]) -> Parts:
    at = chain.block
    first = each[0] if at else None
    return Parts(first, each[at], each[at + 1] if at + 1 < len(each) else None)


def _chained(parts: tuple[Stage, ...], block: int) -> Stage:
    chain, among = Chain(parts, block), parts[block]
    if among.stateful:
        rule = "must be no end of a stage that has a state"
        raise value_error("with_ends(first=.., last=..)", rule, "one")
    in_evaluation = None
    if any(part.in_evaluation is not None for part in parts):
        in_evaluation = replace(chain, in_evaluation=True)
        if in_evaluation.keyed:
            rule = "must all have a function for evaluation, or take no key, where one "
            rule += "of a stage and its ends has such a function"
            raise value_error("Stage(in_evaluation=...)", rule, "a part that draws")
    tied = {
        f"{number}/{path}" if path else f"{number}": name
        for number, part in enumerate(parts)
        for path, name in part.tied.items()
    }
    return replace(
        among,
        fn=chain,
        inputs=parts[0].inputs,
        outputs=parts[-1].outputs,
        keyed=chain.keyed,
        tied=tied,
        in_evaluation=in_evaluation,
    )


def _check_end(which: str, stage: Stage) -> None:
    call = f"with_ends({which}=...)"
    check_type(call, stage, Stage, "must be a Stage")
    if stage.stateful:
        rule = "must have no state: give it to one of the stages"
        raise value_error(call, rule, "a stateful one")


def _check_trees(count: int, params: PyTree) -> None:
    if not isinstance(params, tuple | list) or len(params) != count:
        rule = f"must be a tuple of {count} trees where a stage has an end: one for "
        rule += "each part, in order"
        got = type_name(params)
        got += f" of {len(params)}" if isinstance(params, tuple | list) else ""
        raise value_error("Pipeline(params)", rule, got)
