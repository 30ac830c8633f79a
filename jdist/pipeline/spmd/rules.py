"""Checks that a pipeline's stages are equal, so that one program can run them all."""

from collections.abc import Mapping
from typing import NoReturn

import jax

from jdist._errors import value_error
from jdist._tree import PyTree, is_inexact
from jdist.pipeline.run.shapes import outputs_of
from jdist.pipeline.run.tied import leaves_at
from jdist.pipeline.schedule.schedule import Schedule
from jdist.pipeline.stages.array_spec import describe, specs_of
from jdist.pipeline.stages.chain import parts_of
from jdist.pipeline.stages.place import spec_of
from jdist.pipeline.stages.stage import Stage
from jdist.pipeline.stages.stage_program import StageProgram
from jdist.pipeline.stages.wiring import BATCH, StageWiring
from jdist.segment.internal import Contents, contents_of

_STAGES = "Pipeline(stages, .., OneProgram)"
_REMEDY = (
    "Or give a list of devices, or Workers, in place of OneProgram: there stages may "
    "differ."
)


def check_stages(wiring: StageWiring) -> None:
    """Refuse stages that one program cannot run.

    Raises:
      ValueError: Their functions or recomputation differ; some take keys and others do
        not; one has a state or shares parameters; they are no chain of one value each,
        up to the loss.
    """
    blocks = [parts_of(stage).block for stage in wiring.stages]
    first, *others = blocks
    # Compared by contents: a function made anew for each stage is another object with
    # equal code.
    contents = contents_of(first.fn, "Pipeline")
    for number, stage in enumerate(others, start=1):
        if not _alike(first, stage, contents):
            got = f"another one in stage {number}"
            if not contents.complete:
                got += f", or one that cannot be compared: {contents.unread[0]}"
            _refuse("have the same function", got)
        for name in ("recompute", "keyed"):
            own, before = getattr(stage, name), getattr(first, name)
            if own != before:
                got = f"{own!r} in stage {number}, {before!r} before"
                _refuse(f"have the same `{name}`", got)
    for number, stage in enumerate(blocks):
        if stage.stateful:
            _refuse("have no state", f"a state in stage {number}")
        if stage.tied:
            _refuse("share no parameters", f"{dict(stage.tied)} in stage {number}")
        _check_chain(wiring, number, stage)
    last = wiring.stages[-1].outputs
    if tuple(wiring.loss_inputs) != tuple(last):
        got = f"loss_inputs {wiring.loss_inputs}"
        names = ", ".join(map(repr, last))
        _refuse(f"end in the loss, which takes {names} alone", got)


def _alike(one: Stage, other: Stage, contents: Contents) -> bool:
    """Whether two stages have equal functions; `contents` is that of the first."""
    # Functions made of modules define equality themselves.
    if one.fn is other.fn or isinstance(one.fn, StageProgram):
        return bool(one.fn == other.fn)
    # Functions with contents that cannot be read may differ there.
    found = contents_of(other.fn, "Pipeline")
    return contents.complete and found.key() == contents.key()


def _check_chain(wiring: StageWiring, number: int, stage: Stage) -> None:
    # A message has one value, and all slots have one shape. The functions before the
    # first stage and after the last one send none: they are not restricted.
    if len(stage.inputs) != 1 or len(stage.outputs) != 1:
        got = f"inputs {stage.inputs} and outputs {stage.outputs} in stage {number}"
        _refuse("have one input and one output", got)
    for name, source in wiring.source[number].items():
        if source == (number - 1 if number else BATCH):
            continue
        where = "the batch" if source == BATCH else f"stage {source}"
        got = f"{name!r} from {where} in stage {number}"
        _refuse("take what the stage before outputs, the first from the batch", got)


def check_shares(schedule: Schedule) -> None:
    """Refuse a schedule that does not give all workers equally many stages.

    Raises:
      ValueError: It gives a stage several workers, or one worker more stages than
        another.
    """
    call = "Pipeline(schedule, .., OneProgram)"
    shares = [0] * schedule.workers
    for stage, workers in enumerate(schedule.placement):
        if len(workers) > 1:
            got = f"workers {workers} for stage {stage}"
            raise value_error(call, "must give each stage one worker", got, _REMEDY)
        shares[workers[0]] += 1
    # One program has the same number of parameter trees on every device.
    if len(set(shares)) > 1:
        rule = "must give each worker equally many stages"
        raise value_error(call, rule, f"{shares}", _REMEDY)


def check_params(params: Mapping[int, PyTree]) -> None:
    """Refuse parameters that differ between the stages of this process.

    Args:
      params: Parameters by stage.

    Raises:
      ValueError: Their structure differs, or the shape, dtype or sharding of a leaf.
    """
    first = min(params)
    expected = describe(params[first])
    for number, tree in params.items():
        if specs_of(tree) != specs_of(params[first]):
            got = f"{describe(tree)} in stage {number}"
            _refuse(f"have parameters like those of stage {first}, {expected}", got)
        # One array holds a parameter of all stages, so it has one sharding.
        laid, other = (jax.tree.map(spec_of, params[j]) for j in (first, number))
        if laid != other:
            rule = f"have parameters sharded like those of stage {first}, {laid}"
            _refuse(rule, f"{other} in stage {number}")


def check_value(number: int, stage: Stage, params: PyTree, value: PyTree) -> None:
    """Refuse a stage whose output differs in kind from its input.

    Args:
      number: Number of the stage.
      stage: The stage, which stands for all.
      params: Its parameters.
      value: Shapes of the first stage's input, for one micro-batch.

    Raises:
      ValueError: The output is of another structure, shape or dtype; or it is not
        floating.
    """
    name = stage.inputs[0]
    found = outputs_of(number, stage, (params, None), {name: value})
    if specs_of(found) != specs_of(value):
        rule = f"output what they take, {name!r}: {describe(value)}"
        _refuse(rule, f"{describe(found)} from stage {number}")
    # Messages go both ways, and a value that is not floating has no cotangent.
    fixed = [leaf.dtype for leaf in jax.tree.leaves(value) if not is_inexact(leaf)]
    if fixed:
        _refuse("pass on floating values", f"{name!r} of {fixed[0]}")


def shared_leaves(
    first: Stage | None, last: Stage | None, params: tuple[PyTree, PyTree]
) -> tuple[tuple[int, int], ...]:
    """Pairs of leaf numbers of the parameters that both ends share.

    Args:
      first: The function before the stages.
      last: The function after them.
      params: Parameters of both, or their shapes.

    Raises:
      ValueError: A path is unknown, the copies differ in shape or dtype, or there are
        two in one end.
    """
    for end in (first, last):
        if end is not None and len({*end.tied.values()}) < len(end.tied):
            _refuse("share one copy of a parameter at each end", str(dict(end.tied)))
    if first is None or last is None:
        return ()
    paths = {name: path for path, name in last.tied.items()}
    pairs = []
    for path, name in first.tied.items():
        one, other = (
            leaves_at(jax.tree.structure(tree), which, own)
            for tree, which, own in zip(
                params, ("first", "last"), (path, paths[name]), strict=True
            )
        )
        kinds = [
            {below: specs_of(jax.tree.leaves(tree)[i]) for below, i in numbers.items()}
            for tree, numbers in zip(params, (one, other), strict=True)
        ]
        if kinds[0] != kinds[1]:
            rule = "must be copies of one shape and dtype: that before the stages is "
            rule += f"{describe(params[0])}"
            got = f"{describe(params[1])} after them"
            raise value_error("Stage(tied=...)", rule, got)
        pairs += [(one[below], other[below]) for below in one]
    return tuple(pairs)


def check_agreement(texts: Mapping[int, str]) -> None:
    """Refuse to start if processes would run different programs, which would hang.

    Args:
      texts: A digest of each process's program, by the number of the process.

    Raises:
      ValueError: They differ.
    """
    first = texts[min(texts)]
    others = [number for number in sorted(texts) if texts[number] != first]
    if others:
        rule = "must have parameters and a batch of the same shapes, and the same "
        rule += "schedule, reduction and key, in all processes"
        raise value_error("Pipeline(.., OneProgram)", rule, f"others in {others}")


def _refuse(rule: str, got: str) -> NoReturn:
    rule = f"must {rule} where one program runs all of them"
    raise value_error(_STAGES, rule, got, _REMEDY)
