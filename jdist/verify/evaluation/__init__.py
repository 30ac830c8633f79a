"""Evaluation of a program in its own precision, in float64, and as rounding may go."""

from jdist.verify.evaluation.compilation import is_tiny, quick_to_compile
from jdist.verify.evaluation.decisions import (
    NATURAL,
    Changes,
    Choice,
    OtherChoices,
    chosen,
)
from jdist.verify.evaluation.lockstep import (
    Observer,
    Perturbation,
    Position,
    PrecisionPair,
    RoundedSideNeeded,
    Value,
    bind,
    called,
    run,
    summed,
)
from jdist.verify.evaluation.piecewise import (
    BOTH,
    EXACT,
    LARGE,
    Abandoned,
    CompiledPiece,
    Form,
    Pieces,
    Recording,
    drawn_form,
    rounds_as_drawn,
)
from jdist.verify.evaluation.products import rounding_note

__all__ = [
    "BOTH",
    "EXACT",
    "LARGE",
    "NATURAL",
    "Abandoned",
    "Changes",
    "Choice",
    "CompiledPiece",
    "Form",
    "Observer",
    "OtherChoices",
    "Perturbation",
    "Pieces",
    "Position",
    "PrecisionPair",
    "Recording",
    "RoundedSideNeeded",
    "Value",
    "bind",
    "called",
    "chosen",
    "drawn_form",
    "is_tiny",
    "quick_to_compile",
    "rounding_note",
    "rounds_as_drawn",
    "run",
    "summed",
]
