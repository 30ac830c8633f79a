"""Evaluation of a program in its own precision, in float64, and as rounding may go."""

from jdist.verify.evaluation.decisions import (
    NATURAL,
    Changes,
    Choice,
    OtherChoices,
    chosen,
)
from jdist.verify.evaluation.lockstep import (
    Observer,
    Position,
    PrecisionPair,
    RoundedSideNeeded,
    Value,
    bind,
    called,
    paired,
    summed,
)
from jdist.verify.evaluation.piecewise import (
    BOTH,
    DRAWN,
    EXACT,
    LARGE,
    Abandoned,
    Form,
    Pieces,
    PiecesOf,
    Recording,
    drawn_form,
    rounds_as_drawn,
)
from jdist.verify.evaluation.products import rounding_note

__all__ = [
    "BOTH",
    "DRAWN",
    "EXACT",
    "LARGE",
    "NATURAL",
    "Abandoned",
    "Changes",
    "Choice",
    "Form",
    "Observer",
    "OtherChoices",
    "Pieces",
    "PiecesOf",
    "Position",
    "PrecisionPair",
    "Recording",
    "RoundedSideNeeded",
    "Value",
    "bind",
    "called",
    "chosen",
    "drawn_form",
    "paired",
    "rounding_note",
    "rounds_as_drawn",
    "summed",
]
