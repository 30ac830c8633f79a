"""Conversion between jdist's optimizers and optax's gradient transformations.

optax separates the update from its application, p + u. `as_optax` returns the update
that a step of jdist adds (`Optimizer.updates`), which later links of a chain may scale.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jdist._errors import Unavailable, check_sequence, type_error, value_error
from jdist._tree import PyTree, is_inexact, merge, path_of, split_inexact, wide_dtype
from jdist.optim._optimizer import Optimizer, check_optimizer, matching

if TYPE_CHECKING:
    import optax


def as_optax(optimizer: Optimizer) -> "optax.GradientTransformationExtraArgs":
    """Converts an optimizer to an optax transformation, for `optax.chain`.

    Its `update` needs `params`. Extra arguments named like hyperparameters of
    `optimizer` override them for the step; others, for other links of a chain, are
    ignored.
    The update of a None gradient, and of a leaf that is not a floating array, is 0. The
    state is the tuple of the arrays of `optimizer`'s own state, as Flax NNX requires.

    Raises:
      Unavailable: optax is not installed.
      TypeError: `optimizer` is not an optimizer of jdist.
      ValueError: In `update`: `params` is missing, or `state` is another's.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jdist import optim
      >>> tx = optax.chain(optax.clip(0.5), as_optax(optim.adam(lr=0.1)))
      >>> params = jnp.array([1.0, 2.0])
      >>> updates, _ = tx.update(jnp.array([3.0, -0.5]), tx.init(params), params)
      >>> [f"{p:.4f}" for p in optax.apply_updates(params, updates)]
      ['0.9000', '2.1000']
    """
    check_optimizer("as_optax(optimizer=...)", optimizer)
    # Here and not at the top: jdist does not depend on optax.
    try:
        import optax
    except ImportError as error:
        raise Unavailable("`as_optax` needs optax: pip install optax.") from error

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[Any, Any]:
        if params is None:
            argument = f"as_optax({optimizer.name}).update(params=...)"
            remedy = "Pass the parameters as third argument."
            raise value_error(argument, "must be given", None, remedy)
        # All links of a chain get the same arguments, so that others' are ignored here.
        mine = {k: v for k, v in extra.items() if k in optimizer.hyperparameters}
        # By abstract evaluation, which allocates nothing.
        structure: Any = jax.tree.structure(jax.eval_shape(optimizer.init, params))
        leaves = jax.tree.leaves(state)
        if len(leaves) != structure.num_leaves:
            argument = f"as_optax({optimizer.name}).update(state=...)"
            rule = f"must be the {structure.num_leaves} arrays that `init` or the last "
            rule += "update returned for these parameters"
            raise value_error(argument, rule, f"{len(leaves)}")
        own = structure.unflatten(leaves)
        moves, own = optimizer.updates(params, updates, own, **mine)
        return moves, _flat(own)

    return optax.GradientTransformationExtraArgs(
        lambda p: _flat(optimizer.init(p)), update
    )


def _flat(state: PyTree) -> tuple[PyTree, ...]:
    """The arrays of a state; the parameters determine its structure."""
    # Flax NNX calls `init` with variables for leaves and `update` with arrays, and
    # needs the same structure from both.
    return tuple(jax.tree.leaves(state))


def from_optax(
    tx: "optax.GradientTransformation", *, extra_args: Sequence[str] = ()
) -> Optimizer:
    """Converts an optax transformation to an optimizer.

    `init` returns optax's own state. optax gets the floating leaves only.

    Args:
      tx: Any gradient transformation; `optax.chain`, schedules and masks included.
      extra_args: Names of extra arguments that `tx.update` takes, such as `value`; a
        step takes them by keyword.

    Raises:
      TypeError: `tx` has no `init` and `update`, or `extra_args` are no names. In
        `step`: an override of a hyperparameter, which optax's functions close over.
      ValueError: In `step`: a gradient is None. optax keeps one count and one state for
        all parameters, so no leaf can be skipped; use `optax.masked`, or give each
        group of parameters its own transformation with `by_label`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> opt = from_optax(optax.sign_sgd(0.1))
      >>> params = jnp.array([1.0, 2.0])
      >>> opt.step(params, jnp.array([3.0, -0.5]), opt.init(params))[0]
      Array([0.9, 2.1], dtype=float32)
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        rule = "must be an optax transformation, with init and update"
        raise type_error("from_optax(tx=...)", rule, tx)
    rule = "must be a sequence of names"
    check_sequence("from_optax(extra_args=...)", extra_args, str, rule)
    call = "from_optax(tx).step"

    def init_tree(params: PyTree) -> PyTree:
        # optax would make moments of integers, and update them.
        return tx.init(split_inexact(params)[0])

    def step_tree(
        params: PyTree,
        grads: PyTree,
        state: PyTree,
        overrides: Mapping[str, Any],
        updates: bool = False,
    ) -> tuple[PyTree, PyTree]:
        for name in overrides:
            if name not in extra_args:
                rule = "takes only the arguments that were named in extra_args"
                remedy = (
                    "optax's hyperparameters are inside its functions: use an optax "
                    "schedule, or name in extra_args what `tx.update` takes."
                )
                raise type_error(call, rule, name, remedy)
        floating, rest = split_inexact(params)
        shown = _floating_gradients(call, params, grads)
        moves, state = tx.update(shown, state, floating, **overrides)
        if updates:
            return merge(moves, jax.tree.map(jnp.zeros_like, rest)), state
        return merge(jax.tree.map(_applied, floating, moves), rest), state

    return Optimizer("from_optax", init_tree, step_tree)


def _floating_gradients(call: str, params: PyTree, grads: PyTree) -> PyTree:
    """The gradients of floating leaves, and None for others.

    Raises:
      ValueError: A floating leaf has no gradient.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(params)
    kept = []
    for (keys, param), grad in zip(
        pairs, matching(call, "grads", params, grads), strict=True
    ):
        if grad is None and is_inexact(param):
            got = f"None at {path_of(keys)}"
            remedy = (
                "optax keeps one count and one state for all parameters, so no leaf "
                "can be skipped: use `optax.masked`, or `by_label` with an optimizer "
                "per group, or one of jdist's own."
            )
            rule = "must have a gradient for every parameter"
            raise value_error(f"{call}(grads=...)", rule, got, remedy)
        kept.append(grad if is_inexact(param) else None)
    return jax.tree.unflatten(structure, kept)


def _applied(param: ArrayLike, update: ArrayLike) -> jax.Array:
    """p + u as in `optax.apply_updates`: in float32 or wider, rounded once."""
    param = jnp.asarray(param)
    wide = wide_dtype(param.dtype)
    return (param.astype(wide) + jnp.asarray(update, wide)).astype(param.dtype)
