"""A different optimizer, or other hyperparameters, for each group of parameters.

A tree of labels, a string for each parameter, does what `param_groups` do in torch.
Each label has its own optimizer, which sees the parameters of its label and None in
place of all others.

    labels = jax.tree.map(lambda p: "decay" if p.ndim > 1 else "plain", params)
    opt = by_label({"decay": adamw(weight_decay=0.1), "plain": adamw(weight_decay=0)},
                   labels)
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jdist._errors import check_type, type_error, value_error
from jdist._tree import PyTree, merge
from jdist.optim._hyperparameters import Hyperparameter
from jdist.optim._optimizer import Optimizer, check_optimizer, matching


def by_label(
    optimizers: Mapping[str, Optimizer], labels: Any | Callable[[Any], Any]
) -> Optimizer:
    """An optimizer that steps each parameter with the optimizer of its label.

    `init` returns a dict from label to the state of that label's optimizer. A step's
    override goes to every optimizer that has the hyperparameter; a mapping from label
    to value goes to the named ones: `opt.step(..., lr={"decay": 1e-3})`.

    Args:
      optimizers: Label to optimizer; `from_optax` ones too.
      labels: Tree of strings like the parameters, in which a string may stand for a
        whole subtree; or a function from parameters (arrays or tracers) to such a tree.
        A module of strings is a tree, also where it may be called.

    Raises:
      ValueError: `optimizers` is empty, or one has a loss scale: put
        `with_master_weights` around `by_label`. In `init` and `step`: `labels` does
        not match the parameters, has a label without optimizer, or an override names
        an unknown label.
      TypeError: A value is not an optimizer. In `step`: no optimizer has the overridden
        hyperparameter.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import optim
      >>> opt = by_label(
      ...     {"fast": optim.sgd(lr=0.5), "slow": optim.sgd(lr=0.1)},
      ...     {"w": "fast", "b": "slow"},
      ... )
      >>> params = {"w": jnp.array(1.0), "b": jnp.array(1.0)}
      >>> params, _ = opt.step(params, params, opt.init(params))
      >>> [f"{params[name]:.1f}" for name in ("w", "b")]
      ['0.5', '0.9']

    References:
      `torch.optim.Optimizer.param_groups`; `optax.multi_transform`.
    """
    _check_optimizers(optimizers)
    labels_for = _reader(labels, optimizers)

    def init_tree(params: PyTree) -> PyTree:
        found = labels_for(params)
        return {
            label: opt.init_tree(_only(label, found, params, params))
            for label, opt in optimizers.items()
        }

    def step_tree(
        params: PyTree,
        grads: PyTree,
        state: PyTree,
        overrides: Mapping[str, Any],
        **form: bool,
    ) -> tuple[PyTree, PyTree]:
        found = labels_for(params)
        if not isinstance(state, Mapping) or set(state) != set(optimizers):
            rule = "must be what `init` or the last step returned"
            got = str(jax.tree.structure(state))
            raise value_error("by_label.step(state=...)", rule, got)
        own = _by_optimizer(optimizers, overrides)
        moved = jax.tree.map(lambda _: None, params)
        states = {}
        for label, opt in optimizers.items():
            part, own_grads = (_only(label, found, params, x) for x in (params, grads))
            part, states[label] = opt.step_tree(
                part, own_grads, state[label], own[label], **form
            )
            moved = merge(moved, part)
        return moved, states

    elementwise = all(opt.elementwise for opt in optimizers.values())
    known = _union(optimizers)
    return Optimizer("by_label", init_tree, step_tree, known, elementwise=elementwise)


def _reader(
    labels: Any | Callable[[Any], Any], optimizers: Mapping[str, Optimizer]
) -> Callable[[PyTree], list[str]]:
    """A function from parameters to the label of each, which is checked."""
    # A module of labels may be callable too, and is a tree: it has texts for leaves.
    held = jax.tree.leaves(labels)
    is_function = callable(labels) and not any(isinstance(x, str) for x in held)

    def labels_for(params: PyTree) -> list[str]:
        # Called in each step, so that nothing is kept between `init` and `step`. Shapes
        # are known of tracers too.
        tree = labels(params) if is_function else labels
        found = matching("by_label", "labels", params, _spread(tree, params))
        # A label may be wrapped, as in a state of Flax beside plain arrays.
        each = [x[0] if len(x := jax.tree.leaves(y)) == 1 else y for y in found]
        for label in each:
            if not _is_known(label, optimizers):
                rule = f"must hold labels of optimizers, {', '.join(optimizers)}"
                raise value_error("by_label(labels=...)", rule, label)
        return each

    return labels_for


def _spread(labels: PyTree, params: PyTree) -> PyTree:
    """A label for each parameter, of a tree that may have one for a whole subtree."""
    try:
        return jax.tree.broadcast(labels, params)
    except ValueError:
        # Wrapped labels of plain arrays, or another tree, which `matching` refuses.
        return labels


def _is_known(label: object, optimizers: Mapping[str, Optimizer]) -> bool:
    try:
        return label in optimizers
    except TypeError:
        # No hash, as an array or a variable of Flax has none.
        return False


def _check_optimizers(optimizers: Mapping[str, Optimizer]) -> None:
    argument = "by_label(optimizers=...)"
    rule = "must be a dict from labels to optimizers"
    check_type(argument, optimizers, Mapping, rule)
    if not optimizers:
        raise value_error(argument, "must have at least one optimizer", optimizers)
    for label, opt in optimizers.items():
        check_optimizer(f"by_label(optimizers={{{label!r}: ...}})", opt)
        # Each label would check only its own gradients, so that one part of the model
        # could skip a step that another part makes.
        if opt.loss_factor is not None:
            rule = f"must have no loss scale of its own at {label!r}"
            remedy = "Put `with_master_weights` around `by_label`."
            raise value_error(argument, rule, opt.name, remedy)


def _only(label: str, found: list[str], params: PyTree, tree: PyTree) -> PyTree:
    """`tree` with None in place of every parameter of another label."""
    mine = iter(found)
    # By the parameters' leaves: a None of `tree` stays one.
    return jax.tree.map(lambda _, x: x if next(mine) == label else None, params, tree)


def _union(optimizers: Mapping[str, Optimizer]) -> dict[str, Hyperparameter]:
    return {k: v for opt in optimizers.values() for k, v in opt.hyperparameters.items()}


def _by_optimizer(
    optimizers: Mapping[str, Optimizer], overrides: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The overrides of each label."""
    own: dict[str, dict[str, Any]] = {label: {} for label in optimizers}
    for name, value in overrides.items():
        holders = [k for k, opt in optimizers.items() if name in opt.hyperparameters]
        if not holders:
            known = ", ".join(_union(optimizers))
            rule = f"has no hyperparameter {name!r} to override in any optimizer"
            remedy = f"There are {known or 'none'}."
            raise type_error("by_label.step", rule, value, remedy)
        # Only for optimizers that have it: SGD's momentum is no error in Adam's group.
        values = value if isinstance(value, Mapping) else dict.fromkeys(holders, value)
        for label, one in values.items():
            if label not in holders:
                rule = f"must name labels that have it, {', '.join(holders)}"
                raise value_error(f"by_label.step({name}=...)", rule, label)
            own[label][name] = one
    return own
