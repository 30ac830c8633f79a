"""Sources and consumers of the named values of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

from jdist._errors import check_sequence, value_error
from jdist.pipeline.stages.stage import Stage

BATCH = -1
"""The source of a value that is an entry of the batch."""


@dataclass(frozen=True, slots=True)
class StageWiring:
    """The named values of a pipeline of n stages, and of the loss, which is number n.

    Attributes:
      stages: In the order of their numbers; a value is an output of one and an input of
        later ones.
      loss_inputs: Names of the inputs of the loss function.
      source: For each stage and the loss, by the name of an input, the stage whose
        output it is, or `BATCH`.
      consumers: For each stage, by the name of an output, the numbers of the stages
        that take it, the loss's among them, in order.
    """

    stages: tuple[Stage, ...]
    loss_inputs: tuple[str, ...]
    source: list[dict[str, int]]
    consumers: list[dict[str, tuple[int, ...]]]

    @property
    def named(self) -> str:
        """All names as text, which processes compare."""
        pairs = (
            f"{', '.join(stage.inputs)} -> {', '.join(stage.outputs)}"
            for stage in self.stages
        )
        return f"stages {'; '.join(pairs)}; loss of {', '.join(self.loss_inputs)}"

    def from_batch(self, number: int) -> frozenset[str]:
        """Names of the inputs of a stage, or of the loss, that come from the batch."""
        found = self.source[number].items()
        return frozenset(name for name, source in found if source == BATCH)


def wire(
    stages: Sequence[Stage], loss_inputs: Sequence[str] | None = None
) -> StageWiring:
    """Find the source and the consumers of every value.

    Args:
      stages: In order.
      loss_inputs: Names of the inputs of the loss function; by default the outputs of
        the last stage.

    Raises:
      TypeError: `loss_inputs` are no names.
      ValueError: Two stages have one output, a stage takes the output of a later one,
        or nothing takes an output.

    Example:
      >>> encode = Stage(lambda w, x: (x, x), inputs=("x",), outputs=("h", "skip"))
      >>> middle = Stage(lambda w, h: h, inputs=("h",), outputs=("m",))
      >>> decode = Stage(lambda w, m, s: m + s, inputs=("m", "skip"), outputs=("y",))
      >>> wiring = wire([encode, middle, decode])
      >>> wiring.source[2], wiring.consumers[0]
      ({'m': 1, 'skip': 0}, {'h': (1,), 'skip': (2,)})
    """
    if loss_inputs is not None:
        rule = "must be a sequence of names"
        check_sequence("Pipeline(loss_inputs=...)", loss_inputs, str, rule)
    if not stages:
        raise value_error("Pipeline(stages)", "must not be empty", "[]")
    wanted = tuple(stages[-1].outputs if loss_inputs is None else loss_inputs)
    producer = _producers(stages)
    # The loss is one more consumer, after all stages.
    taken = [*(tuple(stage.inputs) for stage in stages), wanted]
    source = [
        {name: _source(producer, name, number, len(stages)) for name in names}
        for number, names in enumerate(taken)
    ]
    consumers = [
        {
            name: tuple(number for number, names in enumerate(taken) if name in names)
            for name in stage.outputs
        }
        for stage in stages
    ]
    _check_consumed(consumers, source)
    return StageWiring(tuple(stages), wanted, source, consumers)


def _producers(stages: Sequence[Stage]) -> dict[str, int]:
    producer: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for name in stage.outputs:
            if name in producer:
                rule = f"must output each value once, {name!r} comes from stage "
                got = f"stage {number} too"
                raise value_error("Pipeline(stages)", rule + str(producer[name]), got)
            producer[name] = number
    return producer


def _source(producer: dict[str, int], name: str, number: int, stages: int) -> int:
    # A name that is no stage's output is taken for an entry of the batch. Only the
    # first batch can show that it is none.
    source = producer.get(name, BATCH)
    # The loss is number n, so that it may take from all stages; BATCH is below all.
    if source < number:
        return source
    taker = "the loss" if number == stages else f"stage {number}"
    rule = f"must output a value before it is taken: {taker} takes {name!r}"
    remedy = "Order the stages, or rename an entry of the batch of that name."
    raise value_error("Pipeline(stages)", rule, f"{name!r} from stage {source}", remedy)


def _check_consumed(
    consumers: list[dict[str, tuple[int, ...]]], source: list[dict[str, int]]
) -> None:
    for number, found in enumerate(consumers):
        for name in (name for name, takers in found.items() if not takers):
            later = [pair for each in source[number + 1 :] for pair in each.items()]
            taken = sorted({other for other, where in later if where == BATCH})
            rule = "must take every output"
            got = f"{name!r} of stage {number}, which neither a later stage takes nor "
            got += "the loss"
            remedy = "Drop it, or name it in `loss_inputs`."
            if taken:
                remedy += f" Of the batch they take {taken}, one of which may be this "
                remedy += "value, misspelt."
            raise value_error("Pipeline(stages)", rule, got, remedy)
