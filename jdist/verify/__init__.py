"""Independent verification of gradients and training steps.

The judge imports no strategy, and no strategy imports it. `compare` judges two gradient
trees; `gradients` judges functions, by a rounding-error bound that it measures; `judge`
does so at every step of a run; `step` judges whole optimizer steps by the new
parameters; `trace` names the first value that is wrong, among those that `tap` marks;
`keyed` gives each example its own random numbers. Arrays over several processes are
compared shard by shard, without gathering. `defects` are wrong steps on which `score`
tries a test. `python -m jdist.verify` judges every strategy that is installed.
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
