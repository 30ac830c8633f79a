"""The model on which pipelines are timed: a stack of equal layers, squared error."""

import numpy as np

WIDTH = 1024
LAYERS = 12
SMALL, LARGE = 512, 2048
"""Examples in a batch."""

MICRO_BATCHES = (2, 4, 8, 16)
WHOLE = "whole batch, one core"


ONE_F_ONE_B, ZERO_BUBBLE, GPIPE = "1F1B", "ZB-H1", "GPipe"
SPLIT_DRAIN = "1F1B, split drain"
FOUND, LOOPED_ZERO, ZBV = "found", "interleaved zero bubble", "ZBV"
OWN = (ONE_F_ONE_B, SPLIT_DRAIN, ZERO_BUBBLE)
"""The schedules that are timed beside torch's."""


def unsplit(micro_batches: int) -> str:
    """The name of one process's job that runs all micro-batches by itself."""
    return f"unsplit, m = {micro_batches}"


def piped(kind: str, micro_batches: int) -> str:
    """The name of the job of both processes under a schedule."""
    return f"{kind}, m = {micro_batches}"


def predicted(micro_batches: int) -> str:
    """The name of the job that simulates 1F1B with the costs of its own run."""
    return f"simulated, m = {micro_batches}"


EMPTY, EMPTY_PIPED = "an action of nothing", "an action of nothing, two processes"
"""Host time of one action of stages that compute nothing."""


UNEQUAL = 4, 8
"""Layers of two stages of which one works twice as long."""

UNEQUAL_STEP = 8
"""Micro-batches of a step of unequal stages."""

HEADED = "attention and head"
"""The job in which the last stage has attention layers and a large head."""


def weights() -> list[tuple[np.ndarray, np.ndarray]]:
    """For each layer its matrix, `(inputs, outputs)`, and its bias."""
    rng = np.random.default_rng(0)
    return [
        (
            rng.normal(size=(WIDTH, WIDTH), scale=WIDTH**-0.5).astype(np.float32),
            rng.normal(size=WIDTH, scale=0.1).astype(np.float32),
        )
        for _ in range(LAYERS)
    ]


def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, `(count, WIDTH)`."""
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(count, WIDTH)).astype(np.float32) for _ in range(2))
    return x, y
