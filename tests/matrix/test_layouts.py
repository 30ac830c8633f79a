"""`data_parallel.train_step` in a covering array of its options, by `verify.fuzz`.

Each pair of values of two options occurs in one of the layouts. The other files of this
folder test combinations that were chosen by hand.
"""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jdist import data_parallel, optim, verify
from jdist.data_parallel import hooks
from jdist.matrix.row import recorder
from jdist.verify.problem import standard
from tests.matrix import (
    elastic_layouts,
    local_sgd_layouts,
    pipedream_layouts,
    pipeline_layouts,
)

LIMIT = 0.25

AXES = {
    "replicas": (1, 2, 4, 8),
    "place": ("mesh", "explicit", "one device"),
    "accumulate": (1, 2, 3),
    "zero": (False, True),
    "method": ("all_reduce", "all_gather"),
    "bucket": (None, 0, 100 / 2**20),
    "hook": (False, True),
    "empty": (False, True),
    "weights": (False, True),
    "clip": (False, True),
}
MODEL = ("weights", "clip")


def valid(layout):
    # An empty shard needs another one; a hook replaces the method; ZeRO needs a mesh.
    return not (
        (layout["empty"] and layout["replicas"] == 1)
        or (layout["hook"] and layout["method"] == "all_gather")
        or (layout["zero"] and layout["place"] == "one device")
    )


def problem(layout):
    own = standard("float32")
    return own.params, own.batch, own.weights if layout["weights"] else None


def sgd():
    return optim.sgd(lr=0.1)


def claim(layout):
    def update(params, gradient, state):
        clipped, _ = optim.clip_by_global_norm(gradient, LIMIT)
        return sgd().step(params, clipped, state)

    loss_fn = standard("float32").loss_fn
    return (loss_fn, update, sgd().init) if layout["clip"] else loss_fn


def sizes(layout, examples):
    """Shards of different sizes; the last one is empty if it is to be."""
    count = layout["replicas"] - layout["empty"]
    cuts = np.sort(np.random.default_rng(7).permutation(examples - 1)[: count - 1] + 1)
    shards = np.diff([0, *cuts, examples]).tolist()
    return (*shards, 0) if layout["empty"] else tuple(shards)


def trainer(layout, fault=False):
    """`data_parallel.train_step`, and its gradient by an optimizer that keeps it."""
    count = layout["replicas"]
    kind = AxisType.Explicit if layout["place"] == "explicit" else AxisType.Auto
    mesh = Mesh(np.array(jax.devices()[:count]), ("data",), axis_types=(kind,))
    where = {"replicas": count} if layout["place"] == "one device" else {"mesh": mesh}
    options = {"accumulate": layout["accumulate"], **where}
    if layout["hook"]:
        options["hook"] = hooks.all_reduce()
    else:
        options["method"] = layout["method"]
    if layout["bucket"] is not None:
        options["bucket_cap_mb"] = layout["bucket"]
    if layout["clip"]:
        options["max_norm"] = LIMIT
    own = sgd() if layout["clip"] else recorder()
    opt = data_parallel.zero(own, **where) if layout["zero"] else own
    step = data_parallel.train_step(standard("float32").loss_fn, opt, **options)
    weights = problem(layout)[2]
    if fault and layout["zero"] and layout["accumulate"] > 1:
        weights = jnp.arange(11.0)

    def stepped(params, batch):
        parts = sizes(layout, 11)
        # Micro-batches are equal; the rows that are added have weight 0.
        rows = -(-max(parts) // layout["accumulate"]) * layout["accumulate"]
        options = {"sizes": parts, "weights": weights, "rows": rows}
        shards = data_parallel.shard_batch(batch, **options, **where)
        return step(step.init(params), *shards)

    def gradient(params, batch):
        state, metrics = stepped(params, batch)
        found = jax.tree.map(
            lambda x: x.whole() if isinstance(x, data_parallel.Sharded) else x,
            state.opt_state,
            is_leaf=lambda x: isinstance(x, data_parallel.Sharded),
        )
        return metrics.loss, found

    def clipped(params, opt_state, batch):
        return stepped(params, batch)[0].params, None

    return clipped if layout["clip"] else gradient


OPTIONS = {"axes": AXES, "model": MODEL, "valid": valid, "deadline": None}


def test_pairs_of_options_of_a_training_step_are_right():
    found = verify.fuzz(problem, claim, trainer, **OPTIONS)
    found.raise_if_failed()
    assert found.uncovered == ()


def test_a_fault_in_two_of_its_options_would_be_found():
    """Other weights, where ZeRO and accumulation meet."""
    faulty = partial(trainer, fault=True)
    kept = ("replicas", "accumulate", "zero", "weights")
    axes = {axis: AXES[axis] if axis in kept else AXES[axis][:1] for axis in AXES}
    found = verify.fuzz(problem, claim, faulty, **{**OPTIONS, "axes": axes})
    assert [set(each.axes) for each in found.findings] == [{"accumulate", "zero"}]


@pytest.mark.parametrize(
    ("own", "axis", "fixed"),
    [
        (pipeline_layouts, "micro", {}),
        (pipedream_layouts, "every", {}),
        (elastic_layouts, "dies", {"replicas": 2}),
        (local_sgd_layouts, "empty", {"replicas": 2}),
    ],
)
def test_a_fault_of_the_others_would_be_found(own, axis, fixed):
    """Other weights, or examples; `make fuzz` tries the right ones in all layouts."""
    axes = {name: (fixed.get(name, values[0]),) for name, values in own.AXES.items()}
    axes[axis] = own.AXES[axis][:2]
    options = {"axes": axes, "model": own.MODEL, "valid": own.valid, "deadline": None}
    faulty = partial(own.trainer, fault=True)
    found = verify.fuzz(own.problem, own.claim, faulty, strength=1, **options)
    assert [set(each.axes) for each in found.findings] == [{axis}]
    assert [each.outcome for each in found.verdicts] == ["right", "wrong"]


def test_the_number_of_devices_can_be_set_after_the_import():
    """As `make fuzz` does, and each process that judges for it."""
    lines = (
        "import jax, tests.matrix.fuzz",
        "jax.config.update('jax_num_cpu_devices', 8)",
    )
    code = "; ".join((*lines, "assert len(jax.devices()) == 8"))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
