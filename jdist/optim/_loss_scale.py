"""Loss scaling: a factor that keeps float16 gradients from vanishing or overflowing.

A dynamic scale shrinks at an overflow and grows after `growth_interval` good steps:

    overflow:    scale <- scale * backoff_factor,  good <- 0
    else:        good  <- good + 1;  at growth_interval: scale <- scale * growth_factor
                 (unless that is infinite),  good <- 0
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._errors import check_number


@dataclass(frozen=True, slots=True)
class DynamicLossScale:
    """The parameters of a dynamic loss scale, with the defaults of torch's GradScaler.

    Raises:
      TypeError: A value is no number.
      ValueError: A value is out of range.

    References:
      `torch.amp.GradScaler`; Micikevicius et al., Mixed precision training, ICLR 2018.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        """Checks the ranges."""
        rules: dict[str, Any] = {
            "init_scale": ("must be above 0", lambda x: x > 0),
            "growth_factor": ("must be at least 1", lambda x: x >= 1),
            "backoff_factor": ("must be above 0 and at most 1", lambda x: 0 < x <= 1),
            "growth_interval": ("must be at least 1", lambda x: x >= 1),
        }
        for name, rule in rules.items():
            check_number(f"DynamicLossScale({name}=...)", getattr(self, name), *rule)


class Precision(NamedTuple):
    """The arguments of `with_master_weights` that an optimizer carries."""

    compute_dtype: Any
    """The dtype of the compute copies."""

    loss_scale: DynamicLossScale | None
    """A static scale has factors of 1; None without a loss scale."""


class LossScaleState(NamedTuple):
    """The loss scale and counts of good and skipped steps."""

    # Not float16, in which the default, 65536, is infinite.
    scale: jax.Array
    """The factor of the loss, float32 scalar."""

    good_steps: jax.Array
    """Steps without overflow since the scale last changed, int32 scalar."""

    skipped: jax.Array
    """Total number of skipped steps, int32 scalar."""


def scaling_of(
    call: str, loss_scale: float | DynamicLossScale | None
) -> DynamicLossScale | None:
    """Turns a `loss_scale=` argument into a scaling; a static one has factors of 1."""
    if loss_scale is None or isinstance(loss_scale, DynamicLossScale):
        return loss_scale
    argument = f"{call}(loss_scale=...)"
    check_number(argument, loss_scale, "must be above 0", lambda x: x > 0)
    # One mechanism for both: a step that overflows is skipped under a static scale too.
    return DynamicLossScale(loss_scale, growth_factor=1.0, backoff_factor=1.0)


def first_scale(scaling: DynamicLossScale) -> LossScaleState:
    """The scale before the first step."""
    counts = (jnp.zeros((), jnp.int32) for _ in range(2))
    return LossScaleState(jnp.asarray(scaling.init_scale, jnp.float32), *counts)


def next_scale(
    scaling: DynamicLossScale, state: LossScaleState, finite: jax.Array
) -> LossScaleState:
    """The state after a step with finite or with other gradients."""
    # Selected on the device: a branch on the host would wait for the flag.
    good = jnp.where(finite, state.good_steps + 1, 0)
    full = good >= scaling.growth_interval
    grown = state.scale * scaling.growth_factor
    # An infinite scale times a backoff_factor is infinite: it could not shrink again.
    grown = jnp.where(full & jnp.isfinite(grown), grown, state.scale)
    return LossScaleState(
        scale=jnp.where(finite, grown, state.scale * scaling.backoff_factor),
        good_steps=jnp.where(full, 0, good),
        skipped=state.skipped + jnp.where(finite, 0, 1),
    )
