"""An optimizer that averages gradients over replicas before its step, as in Horovod.

It is for existing training loops inside `jax.shard_map`, `jax.pmap` or
`jax.vmap`: the wrapped optimizer steps by the mean of the replicas' gradients.
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace

import jax

from jdist._tree import PyTree, wide_dtype
from jdist.optim import Optimizer
from jdist.optim.internal import check_optimizer, copies_over
from jdist.reduction import weighted_mean


def averaged(optimizer: Optimizer, axis_name: Hashable) -> Optimizer:
    """An optimizer whose step averages the replicas' gradients first.

    Args:
      optimizer: Any optimizer of jdist.
      axis_name: The mapped axis, or a tuple of names.

    Returns:
      An optimizer for use where the axis is bound. Its step takes one more override,
      `weight`: this replica's number of examples (or of tokens), by which its gradient
      counts; without it all count the same, as in Horovod.

    Raises:
      TypeError: `optimizer` is not one of jdist.optim.
      ValueError: In `step`: what `weighted_mean` refuses, such as gradients that
        shard_map has summed already.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jdist import optim
      >>> opt = averaged(optim.sgd(lr=0.1), "data")
      >>> def step(gradient, examples):
      ...     w = jnp.array(1.0)
      ...     return opt.step(w, gradient, opt.init(w), weight=examples)[0]
      >>> jax.vmap(step, axis_name="data")(jnp.array([1.0, 5.0]), jnp.array([3.0, 1.0]))
      Array([0.8, 0.8], dtype=float32)

    References:
      Sergeev and Del Balso, Horovod, 2018; `horovod.torch.DistributedOptimizer`, which
      divides by the number of replicas.
    """
    check_optimizer("averaged(optimizer=...)", optimizer)

    def step_tree(
        params: PyTree,
        grads: PyTree,
        state: PyTree,
        overrides: Mapping[str, PyTree],
        **form: bool,
    ) -> tuple[PyTree, PyTree]:
        rest = dict(overrides)
        if optimizer.precision is not None:
            # Master weights take the mean in float32, not rounded to 16 bits.
            grads = jax.tree.map(lambda g: g.astype(wide_dtype(g.dtype)), grads)
        # `weight` is taken out: the wrapped optimizer has no such hyperparameter.
        whole = weighted_mean(grads, rest.pop("weight", 1.0), axis_name)
        # The members of the axis are replicas: each has whole parameters.
        with copies_over(axis_name):
            return optimizer.step_tree(params, whole, state, rest, **form)

    return replace(optimizer, step_tree=step_tree)
