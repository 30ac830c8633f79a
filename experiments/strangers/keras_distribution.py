"""`keras.distribution.DataParallel`: `Model.fit` on several JAX devices."""

from dataclasses import replace
from typing import Any

import keras

from experiments.strangers import keras_fit
from experiments.strangers.problem import OPTIONS, Step
from experiments.strangers.stranger import Refused, Use

REPLICAS = 4

# --- the trainer, as its documentation has it ---


def fitted(step: Step, reduction: str) -> Any:
    """The weights after one batch over all devices."""
    devices = keras.distribution.list_devices()
    if len(devices) < REPLICAS:
        raise Refused(f"needs {REPLICAS} devices, there is {len(devices)}")
    layout = keras.distribution.DataParallel(devices=devices[:REPLICAS])
    with layout.scope():
        try:
            return keras_fit.weighted(step, reduction, None)
        # JAX raises it for a batch that the number of devices does not divide.
        except ValueError as error:
            raise Refused(str(error).partition(" (full")[0]) from error


# --- what the judge needs ---

NAMES = keras_fit.NAMES

# --- what is on trial ---


def shards(step: Step) -> Step:
    """Parts for the devices, as equal as possible."""
    count = len(step.whole.inputs)
    sizes = tuple((count + i) // REPLICAS for i in range(REPLICAS))
    return replace(step, sizes=sizes, count=REPLICAS)


GUIDE = "https://keras.io/guides/distribution/"

TOKENS = Use(
    "keras.distribution",
    f"DataParallel on {REPLICAS} devices, mean_with_sample_weight",
    "the mean over the counted tokens of the whole batch",
    lambda step: fitted(step, "mean_with_sample_weight"),
    "parameters",
    "The batch is split over the devices and gradients are aggregated; nothing on a "
    "batch that the devices do not divide.",
    GUIDE,
    names=NAMES,
    parts=shards,
    offers=tuple(OPTIONS),
)

USES = (
    TOKENS,
    replace(
        TOKENS,
        way=f"DataParallel on {REPLICAS} devices, weights as sample_weight",
        claim="the mean over all positions of the whole batch, padding included",
        show=lambda step: fitted(step, "sum_over_batch_size"),
        documented="As with `mean_with_sample_weight`.",
        divisor="positions",
    ),
)
