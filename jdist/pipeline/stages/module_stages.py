"""Stages made of a model's modules and a map that says which stage each is in."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist._errors import requirement
from jdist._tree import is_none, named_leaves, path_of
from jdist.pipeline.plan.plan import Plan
from jdist.pipeline.stages.module import Module, outputs_by_name
from jdist.pipeline.stages.stage import Stage


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A module as a line of a program in which no name is written twice.

    Attributes:
      module: Name of the module.
      fn: Its function.
      reads: Names of the values that it takes.
      writes: Names of the values that it puts out.
      stateful: Whether it takes its state.
      keyed: Whether it takes a key.
      returns_state: Whether it returns its state beside the outputs.
    """

    module: str
    fn: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    stateful: bool = False
    keyed: bool = False
    returns_state: bool = False


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """Parameters that a module shares with an earlier one of its stage.

    The stage keeps them once, in the earlier module.

    Attributes:
      module: Name of the module.
      path: Where they belong in its parameters.
      source: Name of the earlier module.
      source_path: Where they are in its parameters.
    """

    module: str
    path: str
    source: str
    source_path: str


@dataclass(frozen=True, slots=True, weakref_slot=True)
class StageProgram:
    """What a stage computes, line by line: `program(params, [state,] *inputs[, key])`.

    Attributes:
      lines: In order.
      inputs: Names of what it is given.
      outputs: Names of what it returns; alone if there is one.
      copies: Parameters that modules of the stage share.
      evaluation: Whether the state is not returned.
    """

    lines: tuple[ModuleCall, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    copies: tuple[SharedParameter, ...] = ()
    evaluation: bool = False

    @property
    def stateful(self) -> bool:
        """Whether a module has a state."""
        return any(line.stateful for line in self.lines)

    @property
    def keyed(self) -> bool:
        """Whether a module takes a key."""
        return any(line.keyed for line in self.lines)

    def __call__(self, params: Mapping[str, Any], *given: Any) -> Any:
        """Runs it; parameters and states are those of its modules by name."""
        arguments = list(given)
        key: Any = arguments.pop() if self.keyed else None
        state = arguments.pop(0) if self.stateful else {}
        whole, after = with_copies(params, self.copies), dict(state)
        values = dict(zip(self.inputs, arguments, strict=True))
        for number, line in enumerate(self.lines):
            taken = [state[line.module]] if line.stateful else []
            taken += [values[name] for name in line.reads]
            if line.keyed:
                taken.append(jax.random.fold_in(key, number))
            try:
                returned = line.fn(whole[line.module], *taken)
            except Exception as error:
                error.add_note(f"It was raised by the module {line.module!r}.")
                raise
            if line.returns_state:
                returned, after[line.module] = returned
            call = f"Module({line.module!r}).fn"
            values |= outputs_by_name(call, line.writes, returned)
        found = tuple(values[name] for name in self.outputs)
        outputs = found[0] if len(found) == 1 else found
        return (outputs, after) if self.stateful and not self.evaluation else outputs


class StageMember(NamedTuple):
    """A module in its stage."""

    number: int
    """Its place among all modules."""
    module: Module
    """Without parameters and state."""
    alone: bool
    """Whether the stage's parameters are its parameters, not a dict by name."""


class FromModules(NamedTuple):
    """The stages that modules make.

    Attributes:
      stages: The stages.
      params: For each stage its parameters: those of its modules by name. Where several
        modules of a stage share some, they are there once and None in the others.
      states: For each stage the states of its modules by name; None where no module of
        it has one.
      loss_inputs: Names of what the loss takes, for `Pipeline(loss_inputs=...)`.
      members: The modules of each stage.
      copies: What the modules of each stage share.
    """

    stages: list[Stage]
    params: list[Any]
    states: list[Any]
    loss_inputs: tuple[str, ...]
    members: list[list[StageMember]]
    copies: list[tuple[SharedParameter, ...]]

    def modules(self, params: Sequence[Any], states: Sequence[Any]) -> list[Any]:
        """The way back: the modules, in the order in which they were given.

        Args:
          params: One tree for each stage, such as those of a training state.
          states: Likewise.

        Returns:
          New modules with these parameters and states, of the kind that was given: Flax
          modules of Flax modules. None for those of stages without parameters here,
          which run in other processes.

        Raises:
          ValueError: There is not one tree for each stage.
        """
        for name, given in (("params", params), ("states", states)):
            if len(given) != len(self.stages):
                rule = f"must have one tree for each of {len(self.stages)} stages"
                call = f"FromModules.modules({name})"
                raise ValueError(requirement(call, rule, f"{len(given)}"))
        found: dict[int, Any] = {}
        for members, copies, own, state in zip(
            self.members, self.copies, params, states, strict=True
        ):
            for number, module, alone in members:
                if own is None:
                    found[number] = None
                elif alone:
                    found[number] = module.restored(own, state)
                else:
                    whole = with_copies(own, copies)[module.name]
                    kept = (state or {}).get(module.name)
                    found[number] = module.restored(whole, kept)
        return [found[number] for number in sorted(found)]


def stages_from_modules(
    modules: Sequence[Module],
    module_to_stage_map: Sequence[int] | Plan,
    *,
    loss_inputs: Sequence[str] | None = None,
    recompute: Any = False,
) -> FromModules:
    """Puts modules together into stages.

    A value that modules of other stages read becomes an output of its stage, and an
    input of theirs; what the last module puts out goes to the loss, or what
    `loss_inputs` names. A name may be written again, and then means the newest; between
    stages such a value is called "module.name", any other has its own name.

    States and keys are carried: a stage is stateful, or takes a key, if a module of it
    does. The module at place k of its stage draws from `fold_in(key, k)` of the stage's
    key. Modules that share parameters (`Module.tied`) may be in one stage or several.

    Args:
      modules: In an order in which they can run, as for `profile`; `modules_from_nnx`
        makes them of Flax modules.
      module_to_stage_map: The stage of each module, such as [0, 1, 2, 3, 3]; or a plan,
        which `load_plan` reads, for modules that have the names of its layers.
      loss_inputs: Names of the values that the loss takes, such as the last module's
        output and an auxiliary loss of an earlier one; the newest of each name.
      recompute: As for `Stage`, for all.

    Returns:
      The stages, and for each the parameters and the states of its modules by name.

    Raises:
      ValueError: There are no modules, or two of one name; a module has no stage, or a
        stage no module; a module reads what a later stage puts out; no module puts out
        what the loss takes; shared parameters differ; a module that takes a key has no
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
    recompute: Any,
    alone: frozenset[str] = frozenset(),
) -> FromModules:
    """What `stages_from_modules` returns.

    Args:
      modules: In order.
      stage_of: The stage of each, by name.
      loss_inputs: As there.
      recompute: As there.
      alone: Names of modules that are a stage without a dict around their parameters.
    """
    lines, newest = _lines(modules)
    writer = {name: line.module for line in lines for name in line.writes}
    _check_order(lines, writer, stage_of)
    wanted = _wanted(lines, newest, loss_inputs)
    stages = max(stage_of.values()) + 1
    own = [[m for m in modules if stage_of[m.name] == j] for j in range(stages)]
    ties = _ties(own)
    number = {module.name: k for k, module in enumerate(modules)}
    made = FromModules([], [], [], wanted, [], [])
    for j, members in enumerate(own):
        inside = [line for line in lines if stage_of[line.module] == j]
        read = {n for line in lines if line not in inside for n in line.reads}
        program = _program(inside, read | set(wanted), ties.copies[j])
        single = members[0].name in alone
        _check_evaluation(members)
        made.stages.append(_stage(program, members, ties.across[j], recompute, single))
        params = without_copies({m.name: m.params for m in members}, ties.copies[j])
        states = {m.name: m.state for m in members if m.state is not None}
        made.params.append(members[0].params if single else params)
        made.states.append((members[0].state if single else states) or None)
        made.members.append(
            [
                StageMember(number[m.name], m._replace(params=None, state=None), single)
                for m in members
            ]
        )
        made.copies.append(ties.copies[j])
    return made


def with_copies(
    params: Mapping[str, Any], copies: Sequence[SharedParameter]
) -> dict[str, Any]:
    """Parameters by module, with what modules share in all of them."""
    whole = dict(params)
    for copy in copies:
        shared = _below(whole[copy.source], copy.source_path)

        def filled(
            keys: Any, leaf: Any, copy: SharedParameter = copy, shared: Any = shared
        ) -> Any:
            below = _suffix(path_of(keys), copy.path)
            return leaf if below is None else shared[below]

        tree = whole[copy.module]
        whole[copy.module] = jax.tree.map_with_path(filled, tree, is_leaf=is_none)
    return whole


def without_copies(
    params: Mapping[str, Any], copies: Sequence[SharedParameter]
) -> dict[str, Any]:
    """Parameters by module, with what modules share in the first of them only."""
    kept = dict(params)
    for copy in copies:

        def blanked(keys: Any, leaf: Any, copy: SharedParameter = copy) -> Any:
            return leaf if _suffix(path_of(keys), copy.path) is None else None

        kept[copy.module] = jax.tree.map_with_path(blanked, kept[copy.module])
    return kept


def _suffix(path: str, top: str) -> str | None:
    """What follows `top` in a path; None if it does not lie there."""
    inside = path == top or path.startswith(f"{top}/")
    return path.removeprefix(top) if inside else None


def _below(tree: Any, top: str) -> dict[str, Any]:
    """The leaves at a path or below it, by what follows the path."""
    pairs = ((_suffix(path, top), leaf) for path, leaf in named_leaves(tree).items())
    return {below: leaf for below, leaf in pairs if below is not None}


class _Ties(NamedTuple):
    """Shared parameters: between modules of each stage, and between stages."""

    copies: list[tuple[SharedParameter, ...]]
    across: list[dict[str, str]]


def _ties(own: Sequence[Sequence[Module]]) -> _Ties:
    first: list[dict[str, tuple[Module, str]]] = []
    copies: list[tuple[SharedParameter, ...]] = []
    for members in own:
        places: dict[str, tuple[Module, str]] = {}
        found = []
        for module in members:
            for path, name in module.tied.items():
                source, at = places.setdefault(name, (module, path))
                if source is not module:
                    _check_same(name, source, at, module, path)
                    found.append(SharedParameter(module.name, path, source.name, at))
        first.append(places)
        copies.append(tuple(found))
    many = Counter(name for places in first for name in places)
    across = [
        {
            module.name if path == "(root)" else f"{module.name}/{path}": name
            for name, (module, path) in places.items()
            if many[name] > 1
        }
        for places in first
    ]
    return _Ties(copies, across)


def _check_same(name: str, a: Module, at: str, b: Module, path: str) -> None:
    """Refuses shared parameters that are missing, or are not equal."""
    call = "stages_from_modules(modules)"
    ones, others = _below(a.params, at), _below(b.params, path)
    for module, where, found in ((a, at, ones), (b, path, others)):
        if not found:
            rule = f"must have parameters {name!r} of {module.name!r} at {where!r}"
            raise ValueError(
                requirement(call, rule, sorted(named_leaves(module.params)))
            )
    alike = ones.keys() == others.keys() and all(
        x.shape == others[below].shape and x.dtype == others[below].dtype
        for below, x in ones.items()
    )
    known = not any(
        isinstance(x, jax.ShapeDtypeStruct) for x in [*ones.values(), *others.values()]
    )
    if not alike or (
        known and any(not np.array_equal(x, others[k]) for k, x in ones.items())
    ):
        rule = f"must have equal parameters {name!r} in {a.name!r} and {b.name!r}"
        raise ValueError(requirement(call, rule, "different ones"))


def _program(
    lines: Sequence[ModuleCall], read: set[str], copies: tuple[SharedParameter, ...]
) -> StageProgram:
    """Lines of one stage, given what others read."""
    written = {name for line in lines for name in line.writes}
    taken = dict.fromkeys(name for line in lines for name in line.reads)
    inputs = tuple(name for name in taken if name not in written)
    outputs = tuple(n for line in lines for n in line.writes if n in read)
    return StageProgram(tuple(lines), inputs, outputs, copies)


def _stage(
    program: StageProgram,
    members: Sequence[Module],
    tied: Mapping[str, str],
    recompute: Any,
    single: bool,
) -> Stage:
    if single:
        (module,) = members
        if len(program.inputs) < len(module.inputs):
            rule = f"must name each value once for {module.name!r}, a stage by itself"
            remedy = "Give that stage as a list of one module."
            call = "stages_from_nnx(inputs=...)"
            raise ValueError(requirement(call, rule, module.inputs, remedy))
        return Stage(
            module.fn,
            program.inputs,
            program.lines[0].writes,
            stateful=program.stateful,
            keyed=program.keyed,
            recompute=recompute,
            tied={p.removeprefix(f"{module.name}/"): name for p, name in tied.items()},
            in_evaluation=module.in_evaluation,
        )
    evaluated = {m.name: m.in_evaluation for m in members if m.in_evaluation}
    evaluation = replace(
        program,
        lines=tuple(
            replace(
                line,
                fn=evaluated.get(line.module, line.fn),
                keyed=False,
                returns_state=line.returns_state and line.module not in evaluated,
            )
            for line in program.lines
        ),
        evaluation=True,
    )
    return Stage(
        program,
        program.inputs,
        program.outputs,
        stateful=program.stateful,
        keyed=program.keyed,
        recompute=recompute,
        tied=tied,
        in_evaluation=evaluation if evaluated else None,
    )


def _check_evaluation(members: Sequence[Module]) -> None:
    """Refuses a stage of which a part alone could be evaluated."""
    evaluated = [m.name for m in members if m.in_evaluation]
    drawing = [m.name for m in members if m.keyed and not m.in_evaluation]
    if evaluated and drawing:
        rule = f"must have in_evaluation for {drawing[0]!r}, which takes a key, as for "
        rule += f"{evaluated[0]!r} of the same stage"
        raise ValueError(requirement("stages_from_modules(modules)", rule, "None"))


def _wanted(
    lines: Sequence[ModuleCall],
    newest: Mapping[str, str],
    loss_inputs: Sequence[str] | None,
) -> tuple[str, ...]:
    """What the loss takes, by the names that values have between stages."""
    if loss_inputs is None:
        return lines[-1].writes
    unknown = [name for name in loss_inputs if name not in newest]
    if isinstance(loss_inputs, str) or unknown or not loss_inputs:
        rule = f"must be names of values, which are {sorted(newest)}"
        call = "stages_from_modules(loss_inputs=...)"
        raise ValueError(requirement(call, rule, loss_inputs))
    return tuple(newest[name] for name in loss_inputs)


def _lines(modules: Sequence[Module]) -> tuple[list[ModuleCall], dict[str, str]]:
    """The modules, with a name of its own for each value; the newest of each name."""
    written = Counter(name for module in modules for name in module.outputs)
    newest: dict[str, str] = {}
    lines = []
    for module in modules:
        reads = tuple(newest.setdefault(name, name) for name in module.inputs)
        writes = tuple(
            f"{module.name}.{name}" if written[name] > 1 or name in newest else name
            for name in module.outputs
        )
        newest |= dict(zip(module.outputs, writes, strict=True))
        stateful = module.state is not None
        own = (stateful, module.keyed, stateful)
        lines.append(ModuleCall(module.name, module.fn, reads, writes, *own))
    return lines, newest


def _stages_by_name(
    modules: Sequence[Module], given: Sequence[int] | Plan
) -> dict[str, int]:
    call = "stages_from_modules(module_to_stage_map)"
    names = [module.name for module in modules]
    if isinstance(given, Plan):
        planned = {n: j for j, stage in enumerate(given.stages) for n in stage.layers}
        if set(planned) != set(names):
            rule = f"must be a plan for the modules {names}"
            raise ValueError(requirement(call, rule, sorted(planned)))
        return {name: planned[name] for name in names}
    numbers = [int(number) for number in given]
    if len(numbers) != len(names):
        rule = f"must have a number for each of the {len(names)} modules"
        raise ValueError(requirement(call, rule, numbers))
    if set(numbers) != set(range(max(numbers) + 1)):
        rule = "must have stages from 0 on, and a module in each"
        raise ValueError(requirement(call, rule, numbers))
    return dict(zip(names, numbers, strict=True))


def _check_modules(modules: Sequence[Module]) -> None:
    call = "stages_from_modules(modules)"
    if not modules:
        raise ValueError(requirement(call, "must not be empty", "none"))
    twice = [n for n, many in Counter(m.name for m in modules).items() if many > 1]
    if twice:
        rule = "must have different names"
        raise ValueError(requirement(call, rule, f"{twice[0]!r} more than once"))


def _check_order(
    lines: Sequence[ModuleCall], writer: Mapping[str, str], stage_of: Mapping[str, int]
) -> None:
    for line in lines:
        for name in line.reads:
            source = stage_of[writer[name]] if name in writer else -1
            if source > stage_of[line.module]:
                rule = f"must not put {line.module!r} before what it reads"
                got = f"stage {stage_of[line.module]} for it, and stage {source} for "
                call = "stages_from_modules(module_to_stage_map)"
                raise ValueError(requirement(call, rule, got + repr(writer[name])))
