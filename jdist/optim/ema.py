"""An exponential moving average of the parameters, in the optimizer's state.

    p  <- a step of the optimizer
    a  <- p                               at the first step
    a  <- decay * a + (1 - decay) * p     at every other

It is evaluated in place of the parameters, which continue to train. In the optimizer's
state it is sharded, saved and restored wherever that state is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist._errors import value_error
from jdist._tree import PyTree, is_none, map_some, type_name
from jdist.optim._hyperparameters import (
    UP_TO_1,
    Hyperparameter,
    Number,
    check_overrides,
    resolved,
)
from jdist.optim._optimizer import Optimizer, check_optimizer, count_zero
from jdist.optim.algorithms.terms import average
from jdist.optim.master_weights import full_precision_copy


class EMAState(NamedTuple):
    """State of `with_ema`."""

    n_averaged: jax.Array
    """Steps taken, int32 scalar."""

    average: Any
    """Tree like the parameters: float32 or wider for floating leaves, else None."""

    inner: Any
    """State of the inner optimizer."""

    def params(self, params: PyTree) -> PyTree:
        """The parameters to evaluate.

        Args:
          params: The current parameters.

        Returns:
          The average, each leaf in its parameter's dtype; and what is not averaged.
        """
        return jax.tree.map(
            lambda a, p: p if a is None else a.astype(jnp.result_type(p)),
            self.average,
            params,
            is_leaf=is_none,
        )


def with_ema(optimizer: Optimizer, decay: Number = 0.999) -> Optimizer:
    """An optimizer whose state holds an exponential moving average of the parameters.

    It averages the parameters after each step, including those without a gradient. With
    mixed precision put `with_master_weights` around it: the average is then that of the
    masters, and a step that is skipped leaves it as it was.

    Args:
      optimizer: Any optimizer of jdist without masters.
      decay: In [0, 1]. Like any hyperparameter it may be a schedule, and a step may
        override it: `optimizer.step(..., decay=0.99)`.

    Returns:
      An optimizer whose `init` and `step` return an `EMAState`.

    Raises:
      ValueError: `decay` is out of range, or `optimizer` has masters.
      TypeError: `decay` is no number, or `optimizer` no optimizer.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import optim
      >>> opt, params = with_ema(optim.sgd(lr=1.0), decay=0.75), jnp.array([8.0])
      >>> state = opt.init(params)
      >>> for _ in range(3):
      ...     params, state = opt.step(params, jnp.ones(1), state)
      ...     print(params, state.average)
      [7.] [7.]
      [6.] [6.75]
      [5.] [6.3125]

    References:
      `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`; Polyak and
      Juditsky, Acceleration of stochastic approximation by averaging, 1992.
    """
    check_optimizer("with_ema(optimizer=...)", optimizer)
    if optimizer.precision is not None:
        rule = "must have no masters, whose rounded copies would be averaged"
        remedy = (
            "Put `with_master_weights` around it: with_master_weights(with_ema(..))."
        )
        raise value_error("with_ema(optimizer=...)", rule, optimizer.name, remedy)
    own = {"decay": Hyperparameter("decay", decay, (UP_TO_1,))}
    own["decay"].check("with_ema", decay)

    def init_tree(params: PyTree) -> EMAState:
        return EMAState(
            count_zero(),
            jax.tree.map(full_precision_copy, params),
            optimizer.init_tree(params),
        )

    def step_tree(
        params: PyTree,
        grads: PyTree,
        state: PyTree,
        overrides: Mapping[str, Any],
        **form: bool,
    ) -> tuple[PyTree, EMAState]:
        if not isinstance(state, EMAState):
            rule = "must be what `init` or the last step returned"
            raise value_error("with_ema.step(state=...)", rule, type_name(state))
        rest = dict(overrides)
        mine = {"decay": rest.pop("decay")} if "decay" in rest else {}
        check_overrides("with_ema.step", own, mine)
        moved, inner = optimizer.step_tree(params, grads, state.inner, rest, **form)

        def averaged(old: jax.Array, param: Any, new: Any) -> jax.Array:
            new = jnp.add(param, new) if form.get("updates") else jnp.asarray(new)
            wide, real = new.astype(old.dtype), jnp.finfo(old.dtype).dtype
            h = resolved("with_ema.step", own, mine, state.n_averaged, real)
            # As in torch, so that the average does not remember where training began.
            first = state.n_averaged == 0
            return jnp.where(first, wide, average(old, wide, h.decay))

        means = map_some(averaged, state.average, params, moved)
        return moved, EMAState(state.n_averaged + 1, means, inner)

    factor = optimizer.loss_factor
    return Optimizer(
        "with_ema",
        init_tree,
        step_tree,
        {**optimizer.hyperparameters, **own},
        None if factor is None else lambda state: factor(state.inner),
        elementwise=optimizer.elementwise,
    )
