"""The function of a stage that is made of modules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from jdist._tree import PyTree, is_none, named_leaves, path_of
from jdist.pipeline.stages.stage import outputs_by_name


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One module's call in a program in single-assignment form.

    Attributes:
      module: Name of the module.
      fn: Its function.
      reads: Names of its inputs.
      writes: Names of its outputs.
      stateful: Whether it takes its state.
      keyed: Whether it takes a key.
      in_evaluation: The function that evaluation calls instead, as for `Stage`.
    """

    module: str
    fn: Callable[..., PyTree]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    stateful: bool = False
    keyed: bool = False
    in_evaluation: Callable[..., PyTree] | None = None


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """Parameters that a module shares with an earlier one of its stage.

    The stage keeps them once, in the earlier module.

    Attributes:
      module: Name of the module.
      path: Path of the parameters in this module.
      source: Name of the earlier module.
      source_path: Path of the parameters in that module.
    """

    module: str
    path: str
    source: str
    source_path: str


@dataclass(frozen=True, slots=True, weakref_slot=True)
class StageProgram:
    """A stage's function: `program(params, [state,] *inputs[, key])`.

    Equal programs compute the same, so that they share a compiled one.

    Attributes:
      calls: The calls of the stage's modules, in order.
      inputs: Names of its inputs.
      outputs: Names of its outputs; a single one is returned alone.
      shared: Parameters that modules of the stage share.
      evaluation: Whether modules use their functions for evaluation, and the state is
        not returned.
    """

    calls: tuple[ModuleCall, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shared: tuple[SharedParameter, ...] = ()
    evaluation: bool = False

    @property
    def stateful(self) -> bool:
        """Whether a module has a state."""
        return any(call.stateful for call in self.calls)

    @property
    def keyed(self) -> bool:
        """Whether a module takes a key."""
        return any(call.keyed and not self._evaluates(call) for call in self.calls)

    def _evaluates(self, call: ModuleCall) -> bool:
        return self.evaluation and call.in_evaluation is not None

    @property
    def numbers(self) -> dict[str, str]:
        """The number of each module, by name, in the order of the calls."""
        names = dict.fromkeys(call.module for call in self.calls)
        return {name: str(number) for number, name in enumerate(names)}

    def renumbered(self) -> "StageProgram":
        """The program with numbers in place of names, equal for equal modules."""
        modules, values = self.numbers, dict[str, str]()

        def numbered(names: Sequence[str]) -> tuple[str, ...]:
            return tuple([values.setdefault(name, str(len(values))) for name in names])

        inputs = numbered(self.inputs)
        calls = [
            replace(
                call,
                module=modules[call.module],
                reads=numbered(call.reads),
                writes=numbered(call.writes),
            )
            for call in self.calls
        ]
        shared = [
            replace(each, module=modules[each.module], source=modules[each.source])
            for each in self.shared
        ]
        return replace(
            self,
            calls=tuple(calls),
            inputs=inputs,
            outputs=numbered(self.outputs),
            shared=tuple(shared),
        )

    def __call__(self, params: Mapping[str, PyTree], *given: PyTree) -> PyTree:
        """Run the modules; parameters and states are dicts by module name."""
        arguments = list(given)
        key: PyTree = arguments.pop() if self.keyed else None
        state = arguments.pop(0) if self.stateful else {}
        # Filled in within the traced function, so that autodiff adds up the gradients
        # of all uses of a shared parameter.
        whole, after = with_shared(params, self.shared), dict(state)
        values = dict(zip(self.inputs, arguments, strict=True))
        for number, call in enumerate(self.calls):
            fn, evaluates = call.fn, self._evaluates(call)
            taken = [state[call.module]] if call.stateful else []
            taken += [values[name] for name in call.reads]
            if evaluates:
                assert call.in_evaluation is not None
                fn = call.in_evaluation
            elif call.keyed:
                # By position, so that a module draws the same whatever the others draw.
                taken.append(jax.random.fold_in(key, number))
            try:
                returned = fn(whole[call.module], *taken)
            except Exception as error:
                # A note, unlike a new exception, keeps the type of the user's error.
                error.add_note(f"It was raised by the module {call.module!r}.")
                raise
            if call.stateful and not evaluates:
                returned, after[call.module] = returned
            function = f"Module({call.module!r}).fn"
            values |= outputs_by_name(function, call.writes, returned)
        found = tuple(values[name] for name in self.outputs)
        outputs = found[0] if len(found) == 1 else found
        return (outputs, after) if self.stateful and not self.evaluation else outputs


def with_shared(
    params: Mapping[str, PyTree], shared: Sequence[SharedParameter]
) -> dict[str, PyTree]:
    """Insert shared parameters into every module that has them."""
    whole = dict(params)
    for each in shared:
        source = leaves_below(whole[each.source], each.source_path)
        tree = whole[each.module]
        whole[each.module] = _replaced(tree, each.path, source.__getitem__)
    return whole


def without_shared(
    params: Mapping[str, PyTree], shared: Sequence[SharedParameter]
) -> dict[str, PyTree]:
    """Remove shared parameters from all their modules but the first."""
    kept = dict(params)
    for each in shared:
        tree = kept[each.module]
        kept[each.module] = _replaced(tree, each.path, lambda below: None)
    return kept


def _replaced(tree: PyTree, top: str, new: Callable[[str], PyTree]) -> PyTree:
    """The tree with new leaves at a path or below it, by the rest of their path."""

    def leaf_at(keys: tuple[object, ...], leaf: PyTree) -> PyTree:
        below = _suffix(path_of(keys), top)
        return leaf if below is None else new(below)

    # None stands for a parameter that was taken out.
    return jax.tree.map_with_path(leaf_at, tree, is_leaf=is_none)


def leaves_below(tree: PyTree, top: str) -> dict[str, PyTree]:
    """The leaves at a path or below it, by the rest of their path."""
    pairs = ((_suffix(path, top), leaf) for path, leaf in named_leaves(tree).items())
    return {below: leaf for below, leaf in pairs if below is not None}


def _suffix(path: str, top: str) -> str | None:
    """The rest of a path after `top`; None if the path is not below it."""
    # With the slash, because "ab" is not below "a".
    inside = path == top or path.startswith(f"{top}/")
    return path.removeprefix(top) if inside else None
