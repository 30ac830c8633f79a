"""The independent judge: compares any two ways to a gradient.

It imports no strategy, and no strategy imports it. `compare` judges two gradient trees;
`gradients` judges functions, and measures for itself how far apart right answers may
be; `judge` does so at every step of a run; `step` judges whole optimizer steps by the
new parameters; `trace` names the first value that is wrong, among those that `tap`
marks; `keyed` gives each example its own random numbers. Arrays over several processes
are compared where they lie. `defects` are wrong steps to try a test on, and `score`
does so. `python -m jdist.verify` judges every strategy that is installed.
"""

import jdist.verify.defects as defects
from jdist.verify.comparison import compare
from jdist.verify.draws import keyed
from jdist.verify.gradient_check import gradients, judge
from jdist.verify.mutation_score import Score, Trial, score
from jdist.verify.problem import Problem
from jdist.verify.processes import PeersLost
from jdist.verify.report import Attribution, LeafReport, OracleCheck, Report
from jdist.verify.steps import Trained, step
from jdist.verify.tracing import (
    Difference,
    TapRecord,
    TapRecording,
    Trace,
    replay,
    tap,
    tapped,
    trace,
    tracer,
)

__all__ = [
    "Attribution",
    "Difference",
    "LeafReport",
    "OracleCheck",
    "PeersLost",
    "Problem",
    "Report",
    "Score",
    "TapRecord",
    "TapRecording",
    "Trace",
    "Trained",
    "Trial",
    "compare",
    "defects",
    "gradients",
    "judge",
    "keyed",
    "replay",
    "score",
    "step",
    "tap",
    "tapped",
    "trace",
    "tracer",
]


def __dir__() -> list[str]:
    return __all__
