"""Stages made of a model's modules and a map that says which stage each is in."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jdist._errors import requirement
from jdist.pipeline.nnx_stages import FromModules
from jdist.pipeline.plan import Plan
from jdist.pipeline.profile import Module
from jdist.pipeline.stage import Stage


@dataclass(frozen=True, slots=True)
class Line:
    """A module as a line of a program in which no name is written twice.

    Attributes:
      module: Name of the module.
      fn: Its function.
      reads: Names of the values that it takes.
      writes: Names of the values that it puts out.
    """

    module: str
    fn: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Program:
    """What a stage computes: `program(params, *inputs)`, line by line.

    Attributes:
      lines: In order.
      inputs: Names of what it is given.
      outputs: Names of what it returns; alone if there is one.
    """

    lines: tuple[Line, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __call__(self, params: Mapping[str, Any], *inputs: Any) -> Any:
        """Runs it; `params` are those of its modules by name."""
        values = dict(zip(self.inputs, inputs, strict=True))
        for line in self.lines:
            given = [values[name] for name in line.reads]
            returned = line.fn(params[line.module], *given)
            found = (returned,) if len(line.writes) == 1 else returned
            values |= dict(zip(line.writes, found, strict=True))
        returned = tuple(values[name] for name in self.outputs)
        return returned[0] if len(returned) == 1 else returned


def stages_from_modules(
    modules: Sequence[Module], module_to_stage_map: Sequence[int] | Plan
) -> FromModules:
    """Puts modules together into stages.

    A value that modules of other stages read becomes an output of its stage, and an
    input of theirs; what the last module puts out goes to the loss. A name may be
    written again, and then means the newest; between stages such a value is called
    "module.name", any other has its own name.

    Args:
      modules: In an order in which they can run, as for `profile`.
      module_to_stage_map: The stage of each module, such as [0, 1, 2, 3, 3]; or a plan,
        which `load_plan` reads, for modules that have the names of its layers.

    Returns:
      The stages, and for each the parameters of its modules by name.

    Raises:
      ValueError: There are no modules, or two of one name; a module has no stage, or a
        stage no module; a module reads what a later stage puts out.

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
    lines = _lines(modules)
    writer = {name: line.module for line in lines for name in line.writes}
    _check_order(lines, writer, stage_of)
    made = FromModules([], [], [])
    for j in range(max(stage_of.values()) + 1):
        own = tuple(line for line in lines if stage_of[line.module] == j)
        inside = {name for line in own for name in line.writes}
        elsewhere = {name for line in lines if line not in own for name in line.reads}
        elsewhere |= set(lines[-1].writes)
        reads = dict.fromkeys(name for line in own for name in line.reads)
        inputs = tuple(name for name in reads if name not in inside)
        outputs = tuple(n for line in own for n in line.writes if n in elsewhere)
        program = Program(own, inputs, outputs)
        made.stages.append(Stage(program, inputs, outputs))
        made.params.append({m.name: m.params for m in modules if stage_of[m.name] == j})
        made.states.append(None)
    return made


def _lines(modules: Sequence[Module]) -> list[Line]:
    """The modules, with a name of its own for each value."""
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
        lines.append(Line(module.name, module.fn, reads, writes))
    return lines


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
    lines: Sequence[Line], writer: Mapping[str, str], stage_of: Mapping[str, int]
) -> None:
    for line in lines:
        for name in line.reads:
            source = stage_of[writer[name]] if name in writer else -1
            if source > stage_of[line.module]:
                rule = f"must not put {line.module!r} before what it reads"
                got = f"stage {stage_of[line.module]} for it, and stage {source} for "
                call = "stages_from_modules(module_to_stage_map)"
                raise ValueError(requirement(call, rule, got + repr(writer[name])))
