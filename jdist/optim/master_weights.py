"""Mixed-precision training: 16-bit compute copies, float32 masters, loss scaling.

The forward and backward pass read parameters in `compute_dtype`. The optimizer steps
*masters* in float32 (float64 for float64 parameters), which its state holds, and each
step returns new compute copies, rounded from the masters. Updates smaller than the
spacing of 16-bit numbers therefore add up instead of being lost.

float16 gradients below 6e-8 vanish. The loss is therefore multiplied by a scale before
it is differentiated, and the gradients are divided by it in float32. If a gradient
overflows, the step is skipped: parameters and state do not change, and the skip is
counted.

    opt = with_master_weights(adam(), compute_dtype=jnp.float16,
                              loss_scale=DynamicLossScale())
    state = opt.init(params)                                   # float32
    params = compute_copies(params, jnp.float16)
    loss, grads = jax.value_and_grad(
        lambda p: opt.scale_loss(loss_fn(p), state))(params)
    params, state = opt.step(params, grads, state)

The trainers of `data_parallel`, `pipeline` and `autograd` take parameters in full
precision, and make the compute copies themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jdist._errors import quoted, type_error, value_error
from jdist._tree import (
    PyTree,
    check_arrays,
    is_inexact,
    is_shape,
    named_leaves,
    owned,
    type_name,
    wide_dtype,
)
from jdist.optim._loss_scale import (
    DynamicLossScale,
    LossScaleState,
    Precision,
    first_scale,
    next_scale,
    scaling_of,
)
from jdist.optim._optimizer import Optimizer, check_optimizer, matching


class MasterState(NamedTuple):
    """State of `with_master_weights`."""

    masters: Any
    """Tree like the parameters: float32 or wider for floating leaves, else None."""

    inner: Any
    """State of the inner optimizer for the masters."""

    loss_scale: LossScaleState | None
    """None without a loss scale."""


def compute_copies(params: PyTree, dtype: DTypeLike) -> PyTree:
    """Rounds real floating leaves to the dtype of the computation.

    Args:
      params: Any pytree. Other leaves, complex ones among them, do not change. Shapes
        (`jax.ShapeDtypeStruct`) become shapes.
      dtype: Such as `jnp.bfloat16`.

    Raises:
      TypeError: `dtype` is no dtype, or an array of another framework.
      ValueError: It is not a real floating one.

    Example:
      >>> import jax.numpy as jnp
      >>> compute_copies({"w": jnp.array([1.001]), "n": 3}, jnp.bfloat16)
      {'n': 3, 'w': Array([1], dtype=bfloat16)}
    """
    dtype = _floating("compute_copies(dtype)", dtype)
    check_arrays("compute_copies(params)", params, others=True)

    def rounded(param: Any) -> Any:
        if not _is_real(param):
            return param
        if is_shape(param):
            return param.update(dtype=dtype)
        return jnp.asarray(param).astype(dtype)

    return jax.tree.map(rounded, params)


def with_master_weights(
    optimizer: Optimizer,
    *,
    compute_dtype: DTypeLike = jnp.bfloat16,
    loss_scale: float | DynamicLossScale | None = None,
    axis_name: Hashable | None = None,
) -> Optimizer:
    """An optimizer over compute copies, with masters and the loss scale in its state.

    `init` takes the parameters in full precision and returns a `MasterState`; `step`
    takes and returns compute copies. Gradients have the copies' dtype or a wider one,
    and are not rounded: a float32 sum over micro-batches reaches the masters unchanged.
    A None gradient leaves its master and its copy unchanged. Where a model is in
    several places, each with its own optimizer, pass `finite=flag` to each step, False
    where gradients of one place are not finite, so that all of them skip together.

    Args:
      optimizer: Steps the masters; any optimizer of jdist, `by_label` and `from_optax`
        too.
      compute_dtype: A real floating dtype. Complex parameters have no compute copies.
      loss_scale: A number is a static scale. With a scale, a step whose gradients hold
        an infinity or NaN is skipped. None means no scale and no check, for bfloat16,
        which has float32's range.
      axis_name: An axis of shard_map, pmap or vmap over which parameters are divided:
        all its members skip a step together.

    Raises:
      ValueError: `compute_dtype` is not real floating, the static scale is not above
        0, or `optimizer` has masters already. In `step`: a parameter is not of
        `compute_dtype`.
      TypeError: `optimizer` is not an optimizer, or `compute_dtype` not a dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import optim
      >>> opt = with_master_weights(optim.sgd(lr=1e-3), compute_dtype=jnp.bfloat16)
      >>> full = jnp.array([1.0, 2.0])
      >>> state, params = opt.init(full), compute_copies(full, jnp.bfloat16)
      >>> params, state = opt.step(params, jnp.ones(2, jnp.bfloat16), state)
      >>> state.masters                         # in bfloat16 nothing would have moved
      Array([0.999, 1.999], dtype=float32)

    References:
      Micikevicius et al., Mixed precision training, ICLR 2018; `torch.amp.GradScaler`.
    """
    call = "with_master_weights"
    _check_inner(call, optimizer)
    compute_dtype = _floating(f"{call}(compute_dtype=...)", compute_dtype)
    scaling = scaling_of(call, loss_scale)

    def init_tree(params: PyTree) -> MasterState:
        masters = jax.tree.map(full_precision_copy, params)
        scale = None if scaling is None else first_scale(scaling)
        return MasterState(masters, optimizer.init_tree(masters), scale)

    def step_tree(
        params: PyTree,
        grads: PyTree,
        state: MasterState,
        overrides: Mapping[str, Any],
        updates: bool = False,
    ) -> tuple[PyTree, MasterState]:
        _checked(f"{call}.step(state=...)", state)
        _check_copies(call, params, compute_dtype)
        scale, elsewhere = state.loss_scale, True
        if scaling is not None:
            overrides = dict(overrides)
            # Not a hyperparameter: the inner optimizer would refuse it.
            elsewhere = overrides.pop("finite", True)
        wide = _wide_gradients(params, grads, state)
        masters, inner = optimizer.step_tree(
            state.masters, wide, state.inner, overrides
        )
        if scaling is not None and scale is not None:
            finite = _all_finite(wide, axis_name) & elsewhere
            # Selected on the device: a branch on the host would wait for the flag.
            masters, inner = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old),
                (masters, inner),
                (state.masters, state.inner),
            )
            scale = next_scale(scaling, scale, finite)
        moved = _moved(params, grads, masters, updates)
        return moved, MasterState(masters, inner, scale)

    def loss_factor(state: MasterState) -> jax.Array:
        scale = _checked(f"{call}.scale_loss(state)", state).loss_scale
        return jnp.ones((), jnp.float32) if scale is None else scale.scale

    return Optimizer(
        call,
        init_tree,
        step_tree,
        optimizer.hyperparameters,
        loss_factor,
        Precision(compute_dtype, scaling),
        optimizer.elementwise,
    )


def computed_in(optimizer: Optimizer, params: PyTree) -> PyTree:
    """The parameters that forward and backward passes read: compute copies, if any."""
    precision = optimizer.precision
    return (
        params if precision is None else compute_copies(params, precision.compute_dtype)
    )


def loss_scaling(optimizer: Optimizer) -> DynamicLossScale | None:
    """The loss scale of an optimizer, or None."""
    return None if optimizer.precision is None else optimizer.precision.loss_scale


def started(optimizer: Optimizer, params: PyTree) -> tuple[PyTree, PyTree]:
    """The parameters and the optimizer's state with which a training run begins.

    All trainers of jdist take parameters in full precision and begin like this.

    Args:
      optimizer: The optimizer, with or without masters.
      params: In full precision. 16-bit ones are taken too: the masters have no more
        digits than these.
    """
    # A stage of a pipeline, such as an activation, may have no parameters.
    init = optimizer.init if jax.tree.leaves(params) else optimizer.init_tree
    # The state first: masters are the parameters before they are rounded.
    state = init(params)
    return computed_in(optimizer, params), state


def all_finite(params: PyTree, grads: PyTree, state: MasterState) -> jax.Array:
    """Whether all gradients are finite after division by the loss scale.

    Args:
      params: As for `step`.
      grads: As for `step`.
      state: As for `step`.

    Raises:
      ValueError: The trees do not match, or the state has no masters.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import optim
      >>> opt = with_master_weights(optim.sgd(), loss_scale=8.0)
      >>> params = jnp.ones(2, jnp.bfloat16)
      >>> all_finite(params, jnp.array([1, jnp.inf], jnp.bfloat16), opt.init(params))
      Array(False, dtype=bool)
    """
    call = "all_finite"
    _checked(f"{call}(state)", state)
    matching(call, "grads", params, grads)
    matching(call, "state", params, state.masters)
    return _all_finite(_wide_gradients(params, grads, state), None)


def _check_inner(call: str, optimizer: Optimizer) -> None:
    check_optimizer(f"{call}(optimizer=...)", optimizer)
    if optimizer.name == call:
        rule, remedy = "must not have masters already", "Wrap it once."
        raise value_error(f"{call}(optimizer=...)", rule, optimizer.name, remedy)


def _floating(argument: str, given: DTypeLike) -> np.dtype:
    """A dtype that 16-bit copies may have: real and floating."""
    rule = "must be a real floating dtype"
    try:
        # None is float64 to NumPy; a dict would be the fields of a structure.
        if given is None or isinstance(given, dict):
            raise TypeError
        dtype = jnp.dtype(given)
    except TypeError:
        raise type_error(argument, rule, quoted(given)) from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise value_error(argument, rule, dtype.name)
    return dtype


def _is_real(leaf: object) -> bool:
    # There is no complex dtype of 16-bit parts.
    return is_inexact(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def full_precision_copy(param: ArrayLike) -> jax.Array | None:
    """A copy of a floating parameter in float32 or wider; None for other leaves."""
    if not is_inexact(param):
        return None
    # Also of a float32 parameter: the state may be donated and the parameter not.
    dtype = wide_dtype(jnp.result_type(param))
    return jnp.array(owned(param), dtype=dtype, copy=True)


def _checked(argument: str, state: PyTree) -> MasterState:
    if isinstance(state, MasterState):
        return state
    rule = "must be what `init` or the last step returned"
    raise value_error(argument, rule, type_name(state))


def _check_copies(call: str, params: PyTree, dtype: DTypeLike) -> None:
    for path, leaf in named_leaves(params).items():
        # Full-precision parameters would train too, at full cost and without an error.
        if _is_real(leaf) and jnp.result_type(leaf) != dtype:
            got = f"{jnp.result_type(leaf)} at {path}"
            rule = f"must be compute copies, {dtype}"
            remedy = (
                "Keep `init(params)` of the parameters in full precision, and step "
                f"`compute_copies(params, jnp.{dtype})`. A trainer's `init` takes them "
                "in full precision, and does both."
            )
            raise value_error(f"{call}.step(params=...)", rule, got, remedy)


def _wide_gradients(params: PyTree, grads: PyTree, state: MasterState) -> PyTree:
    """Gradients of the masters: widened, then divided by the loss scale."""
    masters, scale = state.masters, state.loss_scale

    def widened(
        _: object, grad: ArrayLike | None, master: jax.Array | None
    ) -> jax.Array | None:
        if grad is None or master is None:
            return None
        # Widened first: small gradients would vanish when unscaled in float16.
        wide = jnp.asarray(grad).astype(master.dtype)
        # Times the reciprocal, as torch's GradScaler: exact for powers of two.
        return wide if scale is None else wide * (1 / scale.scale.astype(wide.dtype))

    return jax.tree.map(widened, params, grads, masters)


def _moved(params: PyTree, grads: PyTree, masters: PyTree, updates: bool) -> PyTree:
    """New compute copies, or with `updates` the differences of masters and old copies.

    A copy whose gradient is None is returned unchanged.
    """

    def one(
        param: jax.Array, grad: ArrayLike | None, master: jax.Array | None
    ) -> jax.Array:
        if grad is None or master is None:
            return jnp.zeros_like(param) if updates else param
        if updates:
            # From the rounded copy, because copy + update must be the master.
            return master - jnp.asarray(param).astype(master.dtype)
        return master.astype(param.dtype)

    return jax.tree.map(one, params, grads, masters)


def _all_finite(grads: PyTree, axis_name: Hashable | None) -> jax.Array:
    finite = jnp.array(True)
    for leaf in jax.tree.leaves(grads):
        finite &= jnp.all(jnp.isfinite(leaf))
    if axis_name is None:
        return finite
    return jax.lax.pmin(finite.astype(jnp.int32), axis_name) > 0
