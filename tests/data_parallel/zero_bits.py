"""Divided and undivided optimizers side by side: each that agrees in all bits is named.

`names` is to be called in a process without fused multiply-add.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdist import optim
from jdist.data_parallel import Sharded, zero

# Over four replicas: rows divide, columns divide, nothing divides, one number. A share
# has more than one element: XLA divides a single number, but multiplies an array by the
# reciprocal.
SHAPES = {"rows": (8, 3), "columns": (5, 12), "padded": (6, 7), "few": (5,), "one": ()}


def parameters(rng):
    """Float64, with a parameter that is no floating array."""
    tree = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()}
    return tree | {"count": jnp.arange(3)}


def gradients(rng, steps=4):
    """One tree a step; at the second a parameter has none."""
    rows = [
        {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()}
        | {"count": None}
        for _ in range(steps)
    ]
    if steps > 1:
        rows[1]["padded"] = None
    return rows


def with_masters():
    """Two algorithms, chosen by the number of dimensions, on masters in float64."""
    return optim.with_master_weights(
        optim.by_label(
            {"all": optim.adam(lr=0.1), "slow": optim.sgd(lr=0.1, momentum=0.9)},
            lambda p: jax.tree.map(lambda x: "all" if x.ndim > 1 else "slow", p),
        ),
        compute_dtype=jnp.float16,
        loss_scale=optim.DynamicLossScale(init_scale=8.0),
    )


def stepped(opt, params, grads, state=None):
    """Parameters and state after all steps, compiled."""
    step, state = jax.jit(opt.step), opt.init(params) if state is None else state
    for row in grads:
        params, state = step(params, row, state)
    return params, state


def unwrapped(state):
    """Arrays as an undivided optimizer has them."""
    return jax.tree.map(
        lambda x: x.whole() if isinstance(x, Sharded) else x,
        state,
        is_leaf=lambda x: isinstance(x, Sharded),
    )


def same_bits(found, expected):
    """Leaf by leaf, structure and dtypes included."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return jax.tree.structure(found) == jax.tree.structure(expected) and all(
        a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in pairs
    )


def names(_):
    """The algorithms that agree, by name, and masters."""
    return list(agreeing())


def agreeing():
    rng = np.random.default_rng(20261121)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    # Few leaves and one placement, for less to compile.
    everywhere = NamedSharding(mesh, PartitionSpec())
    params, *grads = jax.device_put(
        [
            {name: tree[name] for name in ("rows", "padded", "few")}
            for tree in (parameters(rng), *gradients(rng, 1), *gradients(rng, 1))
        ],
        everywhere,
    )
    for name in sorted(optim.functional_optim_map):
        opt = optim.functional_optim_map[name](lr=0.1)
        # A norm of divided arrays is summed in another order.
        if not opt.elementwise:
            continue
        expected = stepped(opt, params, grads)
        found, state = stepped(zero(opt, mesh), params, grads)
        if same_bits((found, unwrapped(state)), expected):
            yield name
    opt, copies = with_masters(), optim.compute_copies(params, jnp.float16)
    grads = jax.tree.map(lambda g: g.astype(jnp.float16), grads)
    expected = stepped(opt, copies, grads, opt.init(params))
    divided = zero(opt, mesh)
    found, state = stepped(divided, copies, grads, divided.init(params))
    if same_bits((found, unwrapped(state)), expected):
        yield "masters"
