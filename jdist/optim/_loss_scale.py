"""Loss scaling: a factor that keeps float16 gradients from vanishing or overflowing.

A dynamic scale shrinks at an overflow, and grows after enough good steps:

    overflow:    scale <- scale * backoff_factor,  good <- 0
    else:        good  <- good + 1;  at growth_interval: scale <- scale * growth_factor
                 (unless that is infinite),  good <- 0
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._errors import requirement


@dataclass(frozen=True, slots=True)
class DynamicLossScale:
    """How a loss scale follows overflows; the defaults are those of torch's GradScaler.

    Raises:
      ValueError: A value is out of range.

    References:
      `torch.amp.GradScaler`; Micikevicius et al., Mixed precision training, ICLR 2018.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        """Refuses values that would not scale."""
        rules = {
            "init_scale": ("must be above 0", self.init_scale > 0),
            "growth_factor": ("must be at least 1", self.growth_factor >= 1),
            "backoff_factor": (
                "must be above 0 and at most 1",
                0 < self.backoff_factor <= 1,
            ),
            "growth_interval": ("must be at least 1", self.growth_interval >= 1),
        }
        for name, (rule, holds) in rules.items():
            if not holds:
                argument = f"DynamicLossScale({name}=...)"
                raise ValueError(requirement(argument, rule, getattr(self, name)))


class Precision(NamedTuple):
    """The arguments of `with_master_weights` that an optimizer carries."""

    compute_dtype: Any
    """Of the compute copies."""

    loss_scale: DynamicLossScale | None
    """A static scale is one whose factors are 1. None: the loss is not scaled."""


class LossScaleState(NamedTuple):
    """The loss scale and what happened to it."""

    scale: jax.Array
    """float32 scalar."""

    good_steps: jax.Array
    """Steps without overflow since the scale last changed, int32 scalar."""

    skipped: jax.Array
    """Steps skipped in all, int32 scalar."""


def scaling_of(
    call: str, loss_scale: float | DynamicLossScale | None
) -> DynamicLossScale | None:
    """The scaling by a `loss_scale=` argument; a static scale is one of factors 1."""
    if loss_scale is None or isinstance(loss_scale, DynamicLossScale):
        return loss_scale
    if not loss_scale > 0:
        argument = f"{call}(loss_scale=...)"
        raise ValueError(requirement(argument, "must be above 0", loss_scale))
    # One mechanism for both: a step that overflows is skipped under a static scale too.
    return DynamicLossScale(loss_scale, growth_factor=1.0, backoff_factor=1.0)


def next_scale(
    scaling: DynamicLossScale, state: LossScaleState, finite: jax.Array
) -> LossScaleState:
    """The state after a step whose gradients were finite, or were not."""
    # Selected on the device: to branch, the host would wait for the flag.
    good = jnp.where(finite, state.good_steps + 1, 0)
    full = good >= scaling.growth_interval
    grown = state.scale * scaling.growth_factor
    # An infinite scale would make every later gradient NaN, and never shrink again.
    grown = jnp.where(full & jnp.isfinite(grown), grown, state.scale)
    return LossScaleState(
        scale=jnp.where(finite, grown, state.scale * scaling.backoff_factor),
        good_steps=jnp.where(full, 0, good),
        skipped=state.skipped + jnp.where(finite, 0, 1),
    )
