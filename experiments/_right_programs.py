"""The ways in which right programs compute one gradient, each with its own roundings.

Every way returns the loss and its gradient. Parts are summed in at least float32, as
jdist and XLA do, and rounded once at the end.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments._gradient_problems import GradientProblem, Losses
from experiments._planted_faults import Trainer

Gradient = tuple[np.ndarray, dict[str, np.ndarray]]
"""The loss, and the gradient by leaf."""

SIZES = (1, 8)
ORDERS = 3


def right_programs(
    trainer: Trainer, few: bool = False
) -> Iterator[tuple[str, Gradient]]:
    """Yields name and result of every way that applies, or of those that compile soon.

    The first is the gradient of the mean by one compiled program.
    """
    problem = trainer.problem
    mean = _reduced(problem, problem.losses)
    given = (problem.params, problem.batch)
    yield "compiled", jax.jit(jax.value_and_grad(mean))(*given)
    yield "sum, then divided", _combined(trainer, [(np.arange(problem.examples), 1)])
    for name, order in orders(trainer):
        yield name, _combined(trainer, [(order, 1)])
    if not problem.coupled:
        yield from in_parts(trainer, SIZES[-1:] if few else SIZES)
    if few:
        return
    yield "operation by operation", jax.value_and_grad(mean)(*given)
    again = _reduced(problem, jax.checkpoint(problem.losses))
    yield "rematerialized", jax.jit(jax.value_and_grad(again))(*given)
    yield from forward_mode(problem)
    for name, losses in problem.alike.items():
        yield name, jax.jit(jax.value_and_grad(_reduced(problem, losses)))(*given)
    if not problem.random:
        yield "float64, rounded once", in_float64(problem)
    if not problem.coupled:
        yield "shards by vmap", _mapped(trainer)
        yield "pairwise sums", _pairwise(trainer)


def forward_mode(problem: GradientProblem) -> Iterator[tuple[str, Gradient]]:
    """Derivatives by `jacfwd`, which come in the loss's dtype."""
    mean = _reduced(problem, problem.losses)
    forward = jax.jit(lambda p, b: (mean(p, b), jax.jacfwd(mean)(p, b)))
    loss, gradient = forward(problem.params, problem.batch)
    dtype = problem.params["readout"].dtype
    # A loss of a narrower dtype would round the gradient.
    if jnp.finfo(loss.dtype).bits >= jnp.finfo(dtype).bits:
        yield "forward mode", (loss, {k: v.astype(dtype) for k, v in gradient.items()})


def orders(trainer: Trainer) -> Iterator[tuple[str, np.ndarray]]:
    """The examples in other orders."""
    yield "reversed", np.arange(trainer.problem.examples)[::-1]
    for i in range(ORDERS):
        yield f"permuted {i}", trainer.rng.permutation(trainer.problem.examples)


def in_parts(trainer: Trainer, sizes: Sequence[int]) -> Iterator[tuple[str, Gradient]]:
    """The batch divided into equal micro-batches and into unequal shards."""
    count = trainer.problem.examples
    for size in sizes:
        parts = [
            _padded(np.arange(i, min(i + size, count)), size)
            for i in range(0, count, size)
        ]
        yield f"micro-batches of {size}", _combined(trainer, parts)
    parts = _shards(trainer)
    yield "unequal shards", _combined(trainer, parts)
    yield "unequal shards, last first", _combined(trainer, parts[::-1])


def in_float64(problem: GradientProblem) -> Gradient:
    """The gradient in double precision, rounded to the problem's dtype."""
    dtypes = {name: leaf.dtype for name, leaf in problem.params.items()}
    with jax.enable_x64(True):
        wide = [
            {
                name: jnp.asarray(np.asarray(leaf, np.float64))
                if jnp.issubdtype(leaf.dtype, jnp.floating)
                else leaf
                for name, leaf in tree.items()
            }
            for tree in (problem.params, problem.batch)
        ]
        mean = _reduced(problem, problem.losses)
        loss, gradient = jax.jit(jax.value_and_grad(mean))(*wide)
    found = {k: np.asarray(v).astype(dtypes[k]) for k, v in gradient.items()}
    return np.asarray(loss).astype(_loss_dtype(problem)), found


def _reduced(problem: GradientProblem, losses: Losses) -> Callable[[Any, Any], Any]:
    weights = problem.weights
    own = np.ones(problem.examples) if weights is None else weights

    def scalar(params: Any, batch: Any) -> jax.Array:
        found = losses(params, batch)
        w = jnp.asarray(own).astype(found.dtype)
        if problem.reduction == "mean":
            return jnp.sum(w * found) / jnp.sum(w)
        if problem.reduction == "max":
            return jnp.max(found, where=w > 0, initial=-jnp.inf)
        return jnp.min(found, where=w > 0, initial=jnp.inf)

    return scalar


def _loss_dtype(problem: GradientProblem) -> Any:
    return jax.eval_shape(problem.losses, problem.params, problem.batch).dtype


def _padded(rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Pads rows by repeats of the first; returns them and a mask of real ones."""
    filled = np.concatenate([rows, np.repeat(rows[:1], size - len(rows))])
    return filled, (np.arange(size) < len(rows)).astype(float)


def _combined(trainer: Trainer, parts: list[tuple[np.ndarray, Any]]) -> Gradient:
    """The sum over parts, with one program call each, then one division."""
    problem = trainer.problem
    program = trainer.program(problem.losses)
    found = []
    for rows, counts in parts:
        batch = {name: leaf[rows] for name, leaf in problem.batch.items()}
        weights = jnp.asarray(trainer.weights[rows] * counts, jnp.float32)
        found.append(jax.tree.map(_wide, program(problem.params, batch, weights)))
    total = reduce(lambda a, b: jax.tree.map(np.add, a, b), found)
    return _finished(trainer, total)


def _shards(trainer: Trainer) -> list[tuple[np.ndarray, Any]]:
    """Unequal shards, padded to the size of the largest."""
    shards = trainer.shards()
    longest = max(map(len, shards))
    return [_padded(rows, longest) for rows in shards]


def _mapped(trainer: Trainer) -> Gradient:
    """All shards side by side in one program."""
    problem = trainer.problem
    rows, counts = (np.stack(each) for each in zip(*_shards(trainer), strict=True))
    batch = {name: leaf[rows] for name, leaf in problem.batch.items()}
    weights = jnp.asarray(trainer.weights[rows] * counts, jnp.float32)
    mapped = jax.jit(jax.vmap(trainer.program(problem.losses), in_axes=(None, 0, 0)))
    found = jax.tree.map(_wide, mapped(problem.params, batch, weights))
    return _finished(trainer, jax.tree.map(lambda x: np.add.reduce(x, 0), found))


def _pairwise(trainer: Trainer) -> Gradient:
    """Each example's gradient by `vmap`, summed in a binary tree."""
    problem = trainer.problem

    def one(params: Any, example: Any, weight: jax.Array) -> Any:
        batch = jax.tree.map(lambda x: x[None], example)
        return trainer.program(problem.losses)(params, batch, weight[None])

    weights = jnp.asarray(trainer.weights, jnp.float32)
    mapped = jax.jit(jax.vmap(one, in_axes=(None, 0, 0)))
    terms = jax.tree.map(_wide, mapped(problem.params, problem.batch, weights))

    def folded(x: np.ndarray) -> np.ndarray:
        while len(x) > 1:
            x = np.concatenate([x[:-1:2] + x[1::2], x[len(x) // 2 * 2 :]])
        return x[0]

    return _finished(trainer, jax.tree.map(folded, terms))


def _wide(leaf: jax.Array) -> np.ndarray:
    """The array in float32 or wider."""
    return np.asarray(leaf, np.promote_types(np.asarray(leaf).dtype, np.float32))


def _finished(trainer: Trainer, total: Any) -> Gradient:
    loss, gradient = total
    weight = trainer.weights.sum()
    dtype = _loss_dtype(trainer.problem)
    found = {
        name: np.asarray(leaf / leaf.dtype.type(weight)).astype(trainer.dtypes[name])
        for name, leaf in gradient.items()
    }
    return np.asarray(loss / loss.dtype.type(weight)).astype(dtype), found
