"""Assembly of stages from a model's modules, by a map from modules to stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist._errors import check_function, check_sequence, check_type, value_error
from jdist._tree import PyTree, named_leaves
from jdist.pipeline.plan.plan import Plan
from jdist.pipeline.stages.module import Module
from jdist.pipeline.stages.stage import Recompute, Stage
from jdist.pipeline.stages.stage_program import (
    ModuleCall,
    SharedParameter,
    StageProgram,
    leaves_below,
    with_shared,
    without_shared,
)


class StageMember(NamedTuple):
    """A module as a member of its stage.

    Attributes:
      number: Its index among all modules.
      module: The module, without parameters and state.
      alone: Whether the stage's parameters are those of the module, not a dict by name.
    """

    number: int
    module: Module
    alone: bool


class FromModules(NamedTuple):
    """Stages made from modules.

    Attributes:
      stages: The stages.
      params: For each stage the parameters of its modules by name. Parameters that
        several modules of a stage share are in the first; the others have None.
      states: For each stage the states of its modules by name; None if no module of it
        has one.
      loss_inputs: Names of the loss's inputs, for `Pipeline(loss_inputs=...)`.
      members: The modules of each stage.
      shared: For each stage, the parameters that its modules share.
    """

    stages: list[Stage]
    params: list[PyTree]
    states: list[PyTree]
    loss_inputs: tuple[str, ...]
    members: list[list[StageMember]]
    shared: list[tuple[SharedParameter, ...]]

    def modules(
        self, params: Sequence[PyTree], states: Sequence[PyTree]
    ) -> list[PyTree]:
        """The modules of trained stages, in the order in which they were given.

        Args:
          params: One tree for each stage, such as those of a training state.
          states: As `params`.

        Returns:
          New modules with these parameters and states, of the kind that was given: Flax
          modules for Flax modules. None for modules of stages that run in other
          processes, whose parameters are None here.

        Raises:
          ValueError: There is not one tree for each stage.
        """
        for name, given in (("params", params), ("states", states)):
            if len(given) != len(self.stages):
                rule = f"must have one tree for each of {len(self.stages)} stages"
                raise value_error(f"FromModules.modules({name})", rule, f"{len(given)}")
        found: dict[int, Any] = {}
        for members, shared, own, state in zip(
            self.members, self.shared, params, states, strict=True
        ):
            for number, module, alone in members:
                # The stage runs in another process.
                if own is None:
                    found[number] = None
                elif alone:
                    found[number] = module.restored(own, state)
                else:
                    whole = with_shared(own, shared)[module.name]
                    kept = (state or {}).get(module.name)
                    found[number] = module.restored(whole, kept)
        # The order of the modules, not of the stages.
        return [found[number] for number in sorted(found)]


def stages_from_modules(
    modules: Sequence[Module],
    module_to_stage_map: Sequence[int] | Plan,
    *,
    loss_inputs: Sequence[str] | None = None,
    recompute: Recompute = False,
) -> FromModules:
    """Assemble modules into stages.

    A value that modules of other stages read becomes an output of its stage and an
    input of theirs; the loss takes the outputs of the last module, or those that
    `loss_inputs` names. A name may be written again, and then means the newest value;
    between stages such a value is called "module.name", any other keeps its name.

    A stage is stateful, or takes a key, if one of its modules does. The k-th module of
    a stage draws from `fold_in(key, k)` of the stage's key. Modules that share
    parameters (`Module.tied`) may be in one stage or in several.

    Args:
      modules: In an order in which they can run, as for `profile`; `modules_from_nnx`
        makes them from Flax modules.
      module_to_stage_map: The stage of each module, such as [0, 1, 2, 3, 3]; or a plan
        for layers with the names of the modules.
      loss_inputs: Names of the loss's inputs, such as the last module's output and an
        auxiliary loss of an earlier one; the newest of each name.
      recompute: As for `Stage`, for all.

    Returns:
      The stages, and for each the parameters and the states of its modules by name.

    Raises:
      ValueError: There are no modules, or two of one name; a module has no stage, or a
        stage no module; a module reads an output of a later stage; no module computes
        an input of the loss; shared parameters differ; a module that takes a key has no
        function for evaluation while another one of its stage has.

    Example:
      >>> import numpy as np
      >>> from jdist.pipeline import Module
      >>> scale = lambda w, x: w * x
      >>> modules = [Module(name, scale, np.float32(2.0)) for name in ("a", "b", "c")]
      >>> made = stages_from_modules(modules, [0, 1, 1])
      >>> [(stage.inputs, stage.outputs) for stage in made.stages]
      [(('x',), ('a.x',)), (('a.x',), ('c.x',))]
      >>> float(made.stages[1].fn(made.params[1], np.float32(3.0)))
      12.0
    """
    _check_modules(modules)
    stage_of = _stages_by_name(modules, module_to_stage_map)
    return assembled(modules, stage_of, loss_inputs, recompute)


def assembled(
    modules: Sequence[Module],
    stage_of: Mapping[str, int],
    loss_inputs: Sequence[str] | None,
    recompute: Recompute,
    alone: frozenset[str] = frozenset(),
) -> FromModules:
    """Assemble modules whose stages are known.

    Args:
      modules: The modules, in order.
      stage_of: The stage of each, by name.
      loss_inputs: As for `stages_from_modules`.
      recompute: As for `Stage`.
      alone: Names of modules that are a stage without a dict around their parameters.
    """
    calls, newest = _calls(modules)
    writer = {name: call.module for call in calls for name in call.writes}
    _check_order(calls, writer, stage_of)
    wanted = _wanted(calls, newest, loss_inputs)
    # The numbers were checked to be without gaps.
    stages = max(stage_of.values()) + 1
    own = [[m for m in modules if stage_of[m.name] == j] for j in range(stages)]
    ties = _ties(own)
    number = {module.name: k for k, module in enumerate(modules)}
    made = FromModules([], [], [], wanted, [], [])
    for j, members in enumerate(own):
        inside = [call for call in calls if stage_of[call.module] == j]
        # Values that other stages take, besides those that the loss takes.
        read = {n for call in calls if call not in inside for n in call.reads}
        program = _program(inside, read | set(wanted), ties.within[j])
        # A module that is a stage by itself is its only member.
        single = members[0].name in alone
        _check_evaluation(members)
        made.stages.append(_stage(program, members, ties.across[j], recompute, single))
        # One copy of a shared parameter, so that its gradient is one sum.
        params = without_shared({m.name: m.params for m in members}, ties.within[j])
        states = {m.name: m.state for m in members if m.state is not None}
        # In the form that was given, so that optimizers see the module's own structure.
        made.params.append(members[0].params if single else params)
        made.states.append((members[0].state if single else states) or None)
        made.members.append(
            [
                StageMember(number[m.name], replace(m, params=None, state=None), single)
                for m in members
            ]
        )
        made.shared.append(ties.within[j])
    return made


class _Ties(NamedTuple):
    """Shared parameters.

    Attributes:
      within: For each stage, the parameters shared by several of its modules.
      across: For each stage, the paths of those of several stages, and their names.
    """

    within: list[tuple[SharedParameter, ...]]
    across: list[dict[str, str]]


def _ties(own: Sequence[Sequence[Module]]) -> _Ties:
    first: list[dict[str, tuple[Module, str]]] = []
    within: list[tuple[SharedParameter, ...]] = []
    for members in own:
        places: dict[str, tuple[Module, str]] = {}
        found = []
        for module in members:
            for path, name in module.tied.items():
                # The first module that names a shared parameter owns it.
                source, at = places.setdefault(name, (module, path))
                if source is not module:
                    _check_same(name, source, at, module, path)
                    found.append(SharedParameter(module.name, path, source.name, at))
        first.append(places)
        within.append(tuple(found))
    # Ties within a stage need no exchange of gradients: the program has one copy.
    many = Counter(name for places in first for name in places)
    across = [
        {
            module.name if path == "(root)" else f"{module.name}/{path}": name
            for name, (module, path) in places.items()
            if many[name] > 1
        }
        for places in first
    ]
    return _Ties(within, across)


def _check_same(name: str, a: Module, at: str, b: Module, path: str) -> None:
    """Refuse shared parameters that are missing or not equal."""
    call = "stages_from_modules(modules)"
    ones, others = leaves_below(a.params, at), leaves_below(b.params, path)
    for module, where, found in ((a, at, ones), (b, path, others)):
        if not found:
            rule = f"must have parameters {name!r} of {module.name!r} at {where!r}"
            raise value_error(call, rule, sorted(named_leaves(module.params)))
    alike = ones.keys() == others.keys() and all(
        x.shape == others[below].shape and x.dtype == others[below].dtype
        for below, x in ones.items()
    )
    # A model that was made abstractly has no values to compare.
    known = not any(
        isinstance(x, jax.ShapeDtypeStruct) for x in [*ones.values(), *others.values()]
    )
    if not alike or (
        known and any(not np.array_equal(x, others[k]) for k, x in ones.items())
    ):
        rule = f"must have equal parameters {name!r} in {a.name!r} and {b.name!r}"
        raise value_error(call, rule, "different ones")


def _program(
    calls: Sequence[ModuleCall], read: set[str], shared: tuple[SharedParameter, ...]
) -> StageProgram:
    """The program of a stage's calls, given the names that other stages read."""
    written = {name for call in calls for name in call.writes}
    # A dict, not a set, whose order would differ between processes.
    taken = dict.fromkeys(name for call in calls for name in call.reads)
    inputs = tuple(name for name in taken if name not in written)
    outputs = tuple(n for call in calls for n in call.writes if n in read)
    return StageProgram(tuple(calls), inputs, outputs, shared)


def _stage(
    program: StageProgram,
    members: Sequence[Module],
    tied: Mapping[str, str],
    recompute: Recompute,
    single: bool,
) -> Stage:
    """The stage of a program; a single module stands for itself."""
    in_evaluation: Callable[..., PyTree] | None = None
    if any(call.in_evaluation is not None for call in program.calls):
        in_evaluation = replace(program, evaluation=True)
        # Stages that are trained by equal functions share a program, however they are
        # evaluated.
        calls = [replace(call, in_evaluation=None) for call in program.calls]
        program = replace(program, calls=tuple(calls))
    fn: Callable[..., PyTree] = program
    outputs = program.outputs
    if single:
        (module,) = members
        # The inputs of a stage have different names, and this module's function is the
        # stage's: without a program around it an input cannot be passed twice.
        if len(program.inputs) < len(module.inputs):
            rule = f"must name each value once for {module.name!r}, a stage by itself"
            remedy = "Give that stage as a list of one module."
            call = "stages_from_nnx(inputs=...)"
            raise value_error(call, rule, module.inputs, remedy)
        fn, in_evaluation = module.fn, module.in_evaluation
        outputs = program.calls[0].writes
        tied = {p.removeprefix(f"{module.name}/"): name for p, name in tied.items()}
    return Stage(
        fn,
        program.inputs,
        outputs,
        stateful=program.stateful,
        keyed=program.keyed,
        recompute=recompute,
        tied=tied,
        in_evaluation=in_evaluation,
    )


def _check_evaluation(members: Sequence[Module]) -> None:
    """Refuse a stage of which only some modules can be evaluated."""
    evaluated = [m.name for m in members if m.in_evaluation]
    drawing = [m.name for m in members if m.keyed and not m.in_evaluation]
    # The evaluation of a stage takes no key, which these modules would need.
    if evaluated and drawing:
        rule = f"must have in_evaluation for {drawing[0]!r}, which takes a key, as for "
        rule += f"{evaluated[0]!r} of the same stage"
        raise value_error("stages_from_modules(modules)", rule, "None")


def _wanted(
    calls: Sequence[ModuleCall],
    newest: Mapping[str, str],
    loss_inputs: Sequence[str] | None,
) -> tuple[str, ...]:
    """The inputs of the loss, by the names that values have between stages."""
    if loss_inputs is None:
        return calls[-1].writes
    rule = f"must be names of values, which are {sorted(newest)}"
    call = "stages_from_modules(loss_inputs=...)"
    check_sequence(call, loss_inputs, str, rule)
    if not loss_inputs or any(name not in newest for name in loss_inputs):
        raise value_error(call, rule, loss_inputs)
    return tuple(newest[name] for name in loss_inputs)


def _calls(modules: Sequence[Module]) -> tuple[list[ModuleCall], dict[str, str]]:
    """Calls of the modules, with unique names of values; the newest of each name."""
    written = Counter(name for module in modules for name in module.outputs)
    newest: dict[str, str] = {}
    calls = []
    for module in modules:
        # A name not yet written is that of an entry of the batch, which keeps its name.
        reads = tuple(newest.setdefault(name, name) for name in module.inputs)
        writes = tuple(
            f"{module.name}.{name}" if written[name] > 1 or name in newest else name
            for name in module.outputs
        )
        newest |= dict(zip(module.outputs, writes, strict=True))
        own = (module.state is not None, module.keyed, module.in_evaluation)
        calls.append(ModuleCall(module.name, module.fn, reads, writes, *own))
    return calls, newest


def _stages_by_name(
    modules: Sequence[Module], given: Sequence[int] | Plan
) -> dict[str, int]:
    call = "stages_from_modules(module_to_stage_map)"
    names = [module.name for module in modules]
    if isinstance(given, Plan):
        # By name, because a plan's topological order may differ from the user's.
        planned = {n: j for j, stage in enumerate(given.stages) for n in stage.layers}
        if set(planned) != set(names):
            rule = f"must be a plan for the modules {names}"
            raise value_error(call, rule, sorted(planned))
        return {name: planned[name] for name in names}
    rule = f"must be a plan, or a stage's number for each of {len(names)} modules"
    several: Any = given
    if isinstance(several, np.ndarray):
        several = several.tolist()
    check_sequence(call, several, int | np.integer, rule)
    # Numbers of NumPy become plain ones.
    numbers = [int(number) for number in several]
    if len(numbers) != len(names):
        rule = f"must have a number for each of the {len(names)} modules"
        raise value_error(call, rule, numbers)
    if set(numbers) != set(range(max(numbers) + 1)):
        rule = "must have stages from 0 on, and a module in each"
        raise value_error(call, rule, numbers)
    return dict(zip(names, numbers, strict=True))


def _check_modules(modules: Sequence[Module]) -> None:
    call = "stages_from_modules(modules)"
    check_sequence(call, modules, Module, "must be a sequence of Module")
    if not modules:
        raise value_error(call, "must not be empty", "none")
    for module in modules:
        own = f"Module({module.name!r}"
        check_type(f"{own}, name=...)", module.name, str, "must be a str")
        check_function(f"{own}, fn=...)", module.fn)
        if module.in_evaluation is not None:
            check_function(f"{own}, in_evaluation=...)", module.in_evaluation)
        for argument in ("inputs", "outputs"):
            names = getattr(module, argument)
            check_sequence(f"{own}, {argument}=...)", names, str, "must be names")
        check_type(f"{own}, tied=...)", module.tied, Mapping, "must be a mapping")
    # Parameters and states are dicts by name, in which one of two would be lost.
    twice = [n for n, many in Counter(m.name for m in modules).items() if many > 1]
    if twice:
        rule = "must have different names"
        raise value_error(call, rule, f"{twice[0]!r} more than once")


def _check_order(
    calls: Sequence[ModuleCall], writer: Mapping[str, str], stage_of: Mapping[str, int]
) -> None:
    for call in calls:
        for name in call.reads:
            source = stage_of[writer[name]] if name in writer else -1
            # Values flow from lower to higher stages only.
            if source > stage_of[call.module]:
                rule = f"must not put {call.module!r} before what it reads"
                got = f"stage {stage_of[call.module]} for it, and stage {source} for "
                argument = "stages_from_modules(module_to_stage_map)"
                got += repr(writer[name])
                raise value_error(argument, rule, got)
