"""A substitute for a device whose products round their float32 operands.

No program shows it: what changes is how products are lowered for CPUs.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax._src.interpreters import mlir
from jax.extend.core import primitives

from jdist import verify
from jdist.verify.evaluation import products

EXAMPLES = 23


def narrow_products(bits, fewest=1):
    """From here on, products of this process keep so many bits of their operands.

    Not those of a stated precision, nor those that sum up fewer than `fewest` terms,
    for which such a device may have a kernel of full precision.
    """
    products._kept.cache_clear()
    for primitive in (primitives.dot_general_p, primitives.conv_general_dilated_p):
        rule = mlir._platform_specific_lowerings["cpu"][primitive].rule
        mlir.register_lowering(
            primitive, _narrowed(primitive, rule, bits, fewest), platform="cpu"
        )


def _narrowed(primitive, whole, bits, fewest):
    def rounded(*operands, **params):
        params["precision"] = (lax.Precision.HIGHEST,) * 2
        own = [lax.reduce_precision(x, 8, bits) for x in operands]
        return [primitive.bind(*own, **params)]

    narrowed = mlir.lower_fun(rounded, multiple_results=True)

    def lower(context, *operands, **params):
        shapes = [x.shape for x in context.avals_in]
        usual = params["precision"] in (None, (lax.Precision.DEFAULT,) * 2)
        single = all(x.dtype == jnp.float32 for x in context.avals_in)
        if primitive is primitives.dot_general_p:
            usual = usual and _terms(params, shapes) >= fewest
        rule = narrowed if usual and single else whole
        return rule(context, *operands, **params)

    return lower


def _terms(params, shapes):
    (axes, _), _ = params["dimension_numbers"]
    return int(np.prod([shapes[0][axis] for axis in axes]))


def loss(params, batch):
    """Two layers, a tied one and a convolution."""
    x = lax.conv_general_dilated(
        batch["x"][..., None], params["kernel"], (1,), "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )  # fmt: skip
    hidden = jnp.tanh(x.reshape(len(x), -1) @ params["in"])
    hidden = verify.tap(hidden, "hidden")
    hidden = jnp.tanh(hidden @ params["twice"]) @ params["twice"]
    scores = jax.nn.log_softmax(hidden @ params["out"])
    return -jnp.take_along_axis(scores, batch["y"][:, None], 1)[:, 0]


def problem():
    rng = np.random.default_rng(11)
    shapes = {"kernel": (3, 1, 2), "in": (22, 19), "twice": (19, 19), "out": (19, 5)}
    params = {
        name: rng.normal(0, 0.4, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    x = rng.normal(size=(EXAMPLES, 11)).astype(np.float32)
    return params, {"x": x, "y": rng.integers(0, 5, EXAMPLES)}


def in_parts(params, batch):
    """Right: the parts' sums are divided at the end."""
    ends = (0, 7, 18, EXAMPLES)
    found = [
        _of_sum(params, jax.tree.map(lambda x, i=i, j=j: x[i:j], batch))
        for i, j in itertools.pairwise(ends)
    ]
    return jax.tree.map(lambda *each: sum(each) / EXAMPLES, *found)


_of_sum = jax.jit(jax.value_and_grad(lambda p, b: loss(p, b).sum()))


def singly(params, batch):
    """Right: every product of it is of one example."""
    rows = [jax.tree.map(lambda x, i=i: x[i : i + 1], batch) for i in range(EXAMPLES)]
    found = [_of_sum(params, row) for row in rows]
    return jax.tree.map(lambda *each: sum(each) / EXAMPLES, *found)


def in_full_precision(params, batch):
    """Right, with products of another precision than the reference's."""
    with jax.default_matmul_precision("highest"):
        return in_parts(params, batch)


def off(factor):
    """Wrong in the leaf that is used twice."""

    def wrong(params, batch):
        value, gradient = in_parts(params, batch)
        return value, {**gradient, "twice": gradient["twice"] * np.float32(factor)}

    return wrong


RIGHT = {"in parts": in_parts, "singly": singly, "full": in_full_precision}


def verdicts(bits, fewest):
    """What the judge says on such a device: verdicts by candidate, and its notes."""
    narrow_products(bits, fewest)
    given = loss, *problem()
    wrong = {"0.1 %": off(1.001), "1 %": off(1.01), "5 %": off(1.05)}
    report = verify.gradients(*given, RIGHT | wrong)
    with jax.default_matmul_precision("highest"):
        sharp = verify.gradients(*given, {"in parts": in_parts} | wrong)
    return _read(report), _read(sharp)


def _read(report):
    by_name = {}
    for row in report.leaves:
        by_name[row.candidate] = by_name.get(row.candidate, True) and row.ok
    return by_name, report.oracle.ok, report.notes


def steps_and_traces(bits):
    """The same of a training step and of a trace: right, wrong, and notes."""
    narrow_products(bits)
    params, batch = problem()
    adam = optax.sgd(0.1, momentum=0.9)

    def update(params, gradient, state):
        moved, state = adam.update(gradient, state, params)
        return optax.apply_updates(params, moved), state

    def stepping(gradient):
        def step(params, state, batch):
            _, found = gradient(params, batch)
            return verify.Trained(*update(params, found, state), gradient=found)

        return step

    candidates = {"right": stepping(in_parts), "wrong": stepping(off(1.1))}
    state = params, adam.init(params)
    report = verify.step(loss, update, state, [batch, batch], candidates)
    judge = verify.trace_judge(loss, params, batch)
    traces = [judge(in_parts), judge(off(1.1))]
    failed = {row.candidate for row in report.failures}
    return failed, report.notes, [t.report.ok for t in traces], traces[0].report.notes
