"""Independent verification of gradients and training steps.

The judge imports no strategy, and no strategy imports it. `compare` judges two gradient
trees; `gradients` judges functions, by a rounding-error bound that it measures; `step`
judges whole optimizer steps by the new parameters; `trace` names the first value that
is wrong, among those that `tap` marks; `gradients_judge`, `step_judge` and
`trace_judge` are their reusable forms. `keyed` gives each example its own random
numbers, and `in_parts` is for losses of parts of the batch. `fuzz` looks for the
smallest layout in which a trainer is wrong, by a `covering_array` of them. Arrays over
several processes are compared shard by shard, without gathering. `defects` are wrong
steps on which `score` tries a test. `python -m jdist.verify` judges every installed
strategy.
"""

import jdist.verify.defects as defects
from jdist._agreement import PeersLost
from jdist.verify.comparison import compare
from jdist.verify.draws import keyed
from jdist.verify.fuzzing.coverage import covering_array
from jdist.verify.fuzzing.layout_search import fuzz
from jdist.verify.fuzzing.report import FuzzReport, WrongLayout
from jdist.verify.fuzzing.verdict import Verdict
from jdist.verify.gradient_check import gradients, gradients_judge
from jdist.verify.mutation_score import Score, score
from jdist.verify.parts import in_parts
from jdist.verify.problem import Problem
from jdist.verify.report import LeafReport, Report
from jdist.verify.steps.rounding_drift import drift
from jdist.verify.steps.step_check import Trained, step, step_judge
from jdist.verify.tracing.fault_localization import trace, trace_judge
from jdist.verify.tracing.mask_policy import masks
from jdist.verify.tracing.module_taps import tapped
from jdist.verify.tracing.recording import TapRecording, replay
from jdist.verify.tracing.report import Difference, Trace
from jdist.verify.tracing.taps import tap
from jdist.verify.tracing.torch_taps import shown

__all__ = [
    "Difference",
    "FuzzReport",
    "LeafReport",
    "PeersLost",
    "Problem",
    "Report",
    "Score",
    "TapRecording",
    "Trace",
    "Trained",
    "Verdict",
    "WrongLayout",
    "compare",
    "covering_array",
    "defects",
    "drift",
    "fuzz",
    "gradients",
    "gradients_judge",
    "in_parts",
    "keyed",
    "masks",
    "replay",
    "score",
    "shown",
    "step",
    "step_judge",
    "tap",
    "tapped",
    "trace",
    "trace_judge",
]


def __dir__() -> list[str]:
    return __all__
