"""The shapes of a stage's outputs, and what is refused of them."""

from collections.abc import Mapping

import jax

from jdist._errors import value_error
from jdist._tree import PyTree, type_name
from jdist.pipeline.stages.array_spec import describe
from jdist.pipeline.stages.stage import Stage


def outputs_of(
    number: int,
    stage: Stage,
    trees: tuple[PyTree, PyTree],
    inputs: Mapping[str, PyTree],
) -> PyTree:
    """The shapes of a stage's outputs, without its state.

    Args:
      number: Number of the stage.
      stage: The stage.
      trees: Its parameters and its state.
      inputs: Shapes, by name.

    Raises:
      ValueError: It cannot take them, or a stateful one returns no state like its own.
      Exception: Any other error of its function, with the stage in a note.
    """
    params, state = trees
    # Evaluated, because the shape of a key depends on the default generator.
    key = jax.eval_shape(lambda: jax.random.key(0))
    given = [inputs[name] for name in stage.inputs]
    given = [state] * stage.stateful + given + [key] * stage.keyed
    try:
        returned = jax.eval_shape(stage.fn, params, *given)
    except Exception as error:
        each = [f"{name}: {describe(inputs[name])}" for name in stage.inputs]
        shown = ", ".join(each)
        # JAX raises these for shapes and dtypes that do not fit: the wiring is wrong.
        if isinstance(error, TypeError | ValueError):
            rule = f"must fit together: stage {number} cannot take {shown}"
            got = f"{type(error).__name__}: {error}"
            raise value_error("Pipeline(stages)", rule, got) from error
        error.add_note(f"It was raised by stage {number}, which was given {shown}.")
        raise
    if not stage.stateful:
        return returned
    if not isinstance(returned, tuple) or len(returned) != 2:
        rule = f"must return (outputs, state) where it is stateful, as stage {number}"
        raise value_error("Stage(fn)", rule, type_name(returned))
    _check_state(number, state, returned[1])
    return returned[0]


def _check_state(number: int, before: PyTree, after: PyTree) -> None:
    # The next micro-batch takes the new state, in the same compiled program.
    if describe(before) != describe(after):
        rule = f"must return a state like the one it was given, at stage {number} "
        raise value_error(
            "Stage(stateful=True)", rule + describe(before), describe(after)
        )
