"""Programs as XLA writes them, cut to what the tests are about."""

from pathlib import Path

RECORDED = Path(__file__).parent / "recorded"

TPU = (RECORDED / "tpu.hlo").read_text()
"""A loop of five turns with a scattered sum; a gather in three parts behind it."""

GPU = (RECORDED / "gpu.hlo").read_text()
"""Two collectives in two parts, one of them waiting; a product, an update, a branch."""


def by_name(computation):
    """Its instructions."""
    return {each.name: each for each in computation.instructions}
