"""Defects of the inputs: examples, weights, random keys and parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._tree import PyTree, is_key, named_leaves
from jdist.verify.defects.defect import Defect, declared, distance
from jdist.verify.defects.step_call import (
    NoEffect,
    NotApplicable,
    StepCall,
    combined,
    leaf_of,
    like,
    taken,
    with_leaf,
)

BATCH_DEFECTS: list[Defect] = []
_gradient = declared(BATCH_DEFECTS, "gradient")
_any_step = declared(BATCH_DEFECTS, "gradient", "training")
_PARTS = "two micro-batches that count"
_EXAMPLES = "two examples that count"

# --- micro-batches and shards: combinations of the parts' own results ---


@_gradient("lost micro-batch", _PARTS)
def _lost_part(call: StepCall) -> PyTree:
    """The result of one micro-batch is not added, the total weight is the whole's."""
    return _counted(0, call, call.one_part())


@_gradient("doubled micro-batch", _PARTS)
def _doubled_part(call: StepCall) -> PyTree:
    """The result of one micro-batch is added twice."""
    return _counted(2, call, call.one_part())


def _counted(times: int, call: StepCall, rows: np.ndarray) -> PyTree:
    # The result is linear in the parts: the part's share is taken off or added.
    share = (times - 1) * call.share(rows)
    return combined([1.0, share], [call.right, call.over(rows)])


@_gradient("mean of means", "micro-batches of different weight")
def _mean_of_means(call: StepCall) -> PyTree:
    """The micro-batches' means are averaged, whatever they weigh."""
    if call.traits.reduction == "sum":
        raise NotApplicable("the step returns a sum")
    shares = [call.share(rows) for rows in call.parts]
    if np.ptp(shares) == 0:
        raise NoEffect("the micro-batches all have the same weight")
    factors = [1 / len(call.parts)] * len(call.parts)
    return combined(factors, [call.over(rows) for rows in call.parts])


@_gradient("one shard only", _PARTS)
def _one_shard(call: StepCall) -> PyTree:
    """The result is that of one shard, as where the sum over replicas (a psum) is
    lost."""
    return call.over(call.one_part())


@_gradient("lost example", _EXAMPLES)
def _lost_example(call: StepCall) -> PyTree:
    """One example is not added, the total weight is the whole's."""
    return _counted(0, call, call.one_example())


@_gradient("doubled example", _EXAMPLES)
def _doubled_example(call: StepCall) -> PyTree:
    """One example is added twice."""
    return _counted(2, call, call.one_example())


@_gradient("bfloat16 accumulation", _PARTS)
def _accumulated(call: StepCall) -> PyTree:
    """The micro-batches' gradients are added up in bfloat16."""

    def rounded(leaf: PyTree) -> np.ndarray:
        # In NumPy, which rounds every result; XLA may keep float32 in between.
        return np.asarray(leaf).astype(jnp.bfloat16)

    loss, gradient = call.right
    total: Any = None
    for rows in call.parts:
        part = combined([call.share(rows)], [call.over(rows)[1]])
        terms = jax.tree.map(rounded, part)
        total = terms if total is None else jax.tree.map(np.add, total, terms)
    return loss, jax.tree.map(like, gradient, total)


# --- the arguments of the step ---


@_any_step("one example for another", _EXAMPLES)
def _one_for_another(call: StepCall) -> PyTree:
    """One example is replaced by another one of the batch."""
    (lost,) = call.one_example()
    # Only examples that count: a copy of padding would be a lost example instead.
    others = np.flatnonzero(call.weights)
    others = others[others != lost]
    rows = np.arange(call.examples)
    rows[lost] = others[call.choices.integers(len(others))]
    return call.on(taken(call.batch, rows))


@_any_step("weights ignored", "Traits(weights=...) and weights that differ")
def _unweighted(call: StepCall) -> PyTree:
    """All weights (a mask) are 1."""
    # First, because a step without weights is refused here, by its own reason.
    ones = call.reweighted(lambda leaf: like(leaf, np.ones(leaf.shape)))
    # Examples may have equal sums of weights while their tokens' weights differ.
    if not np.ptp(call.weights) and not _has_zeros(call):
        raise NoEffect("every weight is the same")
    return call.on(ones)


def _has_zeros(call: StepCall) -> bool:
    """Whether a weight is 0, such as that of one token in every example."""
    leaf = leaf_of(call.batch, str(call.traits.weights), "Traits(weights=...)")
    return not np.asarray(leaf).all()


def _keys(call: StepCall) -> dict[str, Any]:
    """The leaves of random keys among the batch and what follows it, by path."""
    named = named_leaves(call.arguments[call.batch_at :])
    if call.traits.keys is not None:
        leaf_of(call.batch, call.traits.keys, "Traits(keys=...)")
        # The batch is the first of the arguments that are named here.
        path = f"0/{call.traits.keys}"
        return {path: named[path]}
    found = {path: leaf for path, leaf in named.items() if is_key(leaf)}
    if not found:
        raise NotApplicable(
            "the step is given no typed random keys: name plain ones, Traits(keys=)"
        )
    return found


def _with_keys(call: StepCall, keys: dict[str, Any]) -> PyTree:
    given: PyTree = call.arguments[call.batch_at :]
    for path, leaf in keys.items():
        given = with_leaf(given, path, leaf)
    return call.step(*call.arguments[: call.batch_at], *given)


@_any_step("other keys", "random keys in the batch or behind it")
def _other_keys(call: StepCall) -> PyTree:
    """Each random key is another one."""

    def other(leaf: PyTree) -> PyTree:
        if not is_key(leaf):
            # Plain keys, named by `Traits(keys=...)`, are integers.
            return like(leaf, np.asarray(leaf) + 1)
        bits = np.asarray(jax.random.key_data(leaf))
        # Adjacent keys have unrelated streams, so adding 1 is enough.
        other = jnp.asarray(bits + bits.dtype.type(1))
        return jax.random.wrap_key_data(other, impl=jax.random.key_impl(leaf))

    return _with_keys(call, {path: other(x) for path, x in _keys(call).items()})


@_any_step("one key for all", "a random key for each example")
def _one_key(call: StepCall) -> PyTree:
    """All examples have the first one's random key."""
    able = {
        path: leaf
        for path, leaf in _keys(call).items()
        if leaf.ndim and leaf.shape[0] == call.examples
    }
    if not able:
        raise NotApplicable("the step is given no random key for each example")
    first = np.zeros(call.examples, int)
    return _with_keys(call, taken(able, first))


@_any_step("stale parameters", "two calls with different parameters")
def _stale(call: StepCall) -> PyTree:
    """From the second call on, the parameters are those of the call before."""
    if call.previous is None:
        # Not final: only later calls have a predecessor.
        raise NoEffect("there was no call before this one", final=False)
    params, *rest = call.arguments
    old = call.previous[0]
    # Checked before the step is called: equal parameters give equal results.
    if distance(params, old) == 0:
        reason = "the parameters are those of the call before"
        raise NoEffect(reason, final=False)
    found, second = call.step(old, *rest)
    if call.traits.kind == "gradient":
        return found, second
    # The step that belongs to the old parameters is taken from the new ones.
    return combined([1.0, 1.0, -1.0], [params, found, old]), second
