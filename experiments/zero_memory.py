"""Does ZeRO divide the optimizer's memory by the number of replicas and train the same
net: in live buffers on each device, and in the compiled step?

An MLP on real digits is trained with Adam on 1 to 8 replicas, with the optimizer's
state whole on each and divided over all. The sizes of one layer divide by no number of
replicas, so that its state is padded. A run is then saved, and restored on every other
number of devices.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import Mesh
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._digits import digits
from experiments._replicas import replicas_identical
from experiments._result import Claim, Picture, Result, Settings
from jdist import data_parallel, optim

REPLICAS = (1, 2, 3, 4, 8)
QUICK = (1, 3, 8)
BATCH = 96
MIB = 2**20
# Runs whose compilers round differently drift apart by rounding.
SAME = 1e-4


class Run(NamedTuple):
    """A run with one number of replicas, with whole or divided state."""

    replicas: int
    divided: bool
    params: list[int]
    """Bytes of parameters on each device."""
    state: list[int]
    """Bytes of the optimizer's state on each device."""
    program: int
    """Bytes of all arguments of the compiled step on one device."""
    losses: list[float]
    identical: int
    """Steps after which all replicas held the same parameters, bit for bit."""
    final: Any


def run(settings: Settings, progress: Progress) -> Result:
    """Trains all pairs of replicas and state, then restores."""
    steps, width = (12, 257) if settings.quick else (100, 1025)
    task = digits(settings.seed, steps, BATCH)
    batches = [(x.reshape(len(x), -1), y) for x, y in task.batches]
    wanted = QUICK if settings.quick else REPLICAS
    counts = [k for k in wanted if k <= min(settings.devices, jax.device_count())]
    params = initial(width, settings.seed)
    runs = [
        train(params, batches, count, divided)
        for count, divided in progress.track(
            [(count, divided) for count in counts for divided in (False, True)],
            description="training",
        )
    ]
    restored = {count: restores(runs[-1].final, params, count) for count in counts}
    missing = [str(k) for k in wanted if k not in counts]
    return Result(
        claims=[*claims(runs, restored, params, steps), *left_out(missing)],
        pictures=[
            Picture(
                "memory",
                "Bytes that stay on each device between steps. The dashed line is the "
                "state by the formula, whole / K.",
                plot(runs),
            )
        ],
        tables={"Runs": rows(runs)},
        data={
            "width": width,
            "steps": steps,
            "runs": [r._replace(final=None)._asdict() for r in runs],
            "restored": restored,
        },
    )


def initial(width: int, seed: int) -> Any:
    """Random weights; some sizes divide by no number of replicas, others do."""
    rng = np.random.default_rng(seed)
    sizes = (64, 1024, width, 10)
    return {
        f"layer{i}": {
            "w": rng.normal(size=(a, b), scale=a**-0.5).astype(np.float32),
            "b": np.zeros(b, np.float32),
        }
        for i, (a, b) in enumerate(pairwise(sizes))
    }


def losses_of(params: Mapping[str, Any], batch: Any) -> jax.Array:
    """The cross-entropy of an MLP for each example, `(examples,)`."""
    hidden, labels = batch
    *inner, last = params.values()
    for layer in inner:
        hidden = jax.nn.relu(hidden @ layer["w"] + layer["b"])
    scores = hidden @ last["w"] + last["b"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


def mesh_of(count: int) -> Mesh:
    """A mesh of the first `count` devices."""
    return Mesh(np.array(jax.devices()[:count]), ("data",))


def training(count: int, divided: bool) -> data_parallel.TrainStep:
    """The training step with Adam."""
    opt, mesh = optim.adam(lr=1e-3), mesh_of(count)
    opt = data_parallel.zero(opt, mesh) if divided else opt
    return data_parallel.train_step(losses_of, opt, mesh)


def train(params: Any, batches: Sequence[Any], count: int, divided: bool) -> Run:
    """Trains; counts bytes on each device."""
    step, mesh = training(count, divided), mesh_of(count)
    state = step.init(params)
    bytes_of_params = by_device(state.params, mesh)
    first, _ = data_parallel.shard_batch(batches[0], mesh)
    memory: Any = step.lower(state, first).compile().memory_analysis()
    losses, identical = [], 0
    for batch in batches:
        shards, _ = data_parallel.shard_batch(batch, mesh)
        state, metrics = step(state, shards)
        losses.append(float(metrics.loss))
        identical += replicas_identical(state.params)
    return Run(
        count,
        divided,
        bytes_of_params,
        by_device(state.opt_state, mesh),
        int(memory.argument_size_in_bytes),
        losses,
        identical,
        state,
    )


def by_device(tree: Any, mesh: Mesh) -> list[int]:
    """Bytes of a tree's live buffers on each device of the mesh."""
    held = dict.fromkeys(mesh.devices.flat, 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return list(held.values())


def restores(state: Any, params: Any, count: int) -> bool:
    """Whether a saved state has the same bits on another number of devices."""
    # Other values, so that equal bits can only come from the checkpoint.
    other = jax.tree.map(np.zeros_like, params)
    with (
        tempfile.TemporaryDirectory() as folder,
        data_parallel.TrainCheckpoints(folder) as saved,
    ):
        saved.save(state)
        found = saved.restore(training(count, True).init(other))
    pairs = zip(*(jax.tree.leaves(undivided(s)) for s in (found, state)), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def undivided(state: Any) -> Any:
    """The state without padding, in host memory."""
    return jax.tree.map(
        lambda x: np.asarray(x.whole() if isinstance(x, data_parallel.Sharded) else x),
        state,
        is_leaf=lambda x: isinstance(x, data_parallel.Sharded),
    )


# --- what is claimed, and shown ---


def share(params: Any, count: int) -> int:
    """Bytes of Adam's state on each device, by the formula: two moments and a count.

    The divided dimension is the first that `count` divides, or the largest, rounded up.
    """
    total = 0
    for leaf in jax.tree.leaves(params):
        even = [size for size in leaf.shape if size % count == 0]
        size = even[0] if even else max(leaf.shape)
        total += 2 * 4 * leaf.size // size * -(-size // count) + 4
    return total


def left_out(missing: Sequence[str]) -> Iterator[Claim]:
    """Claims on numbers of replicas for which there are no devices."""
    for count in missing:
        text = f"the same holds on {count} replicas"
        yield Claim(text, None, "", "there are too few devices")


def claims(
    runs: Sequence[Run], restored: Mapping[int, bool], params: Any, steps: int
) -> list[Claim]:
    """Claims on every number of replicas."""
    divided = [r for r in runs if r.divided]
    whole = [r for r in runs if not r.divided]
    state, k = share(params, 1), divided[-1].replicas
    saved = [w.program - d.program for w, d in zip(whole, divided, strict=True)]
    kept = [w.state[0] - d.state[0] for w, d in zip(whole, divided, strict=True)]
    drift = max(
        float(np.max(np.abs(np.subtract(w.losses, d.losses)) / np.abs(w.losses)))
        for w, d in zip(whole, divided, strict=True)
    )
    return [
        Claim(
            "divided, every device holds its share and no more, to the byte",
            all(set(r.state) == {share(params, r.replicas)} for r in divided),
            ", ".join(f"{r.replicas}: {r.state[0]}" for r in divided),
            leads=True,
        ),
        Claim(
            f"on {k} devices that is 1/{k} of the state, but for padding and counts",
            divided[-1].state[0] * k < 1.02 * state,
            f"{divided[-1].state[0] * k / state:.4f} of it on all together",
        ),
        Claim(
            "whole, every device holds all of it",
            all(set(r.state) == {state} for r in whole),
            f"{state} bytes on each",
        ),
        Claim(
            "the compiled step is given that much less",
            saved == kept,
            ", ".join(f"{b / MIB:.2f} MiB" for b in saved),
        ),
        Claim(
            "the loss curves are the same",
            drift < SAME,
            f"{steps} steps, relative difference at most {drift:.1e}",
        ),
        Claim(
            "all replicas hold the same parameters after every step, bit for bit",
            all(r.identical == steps for r in runs),
            f"{sum(r.identical for r in runs)} of {steps * len(runs)}",
        ),
        Claim(
            f"saved on {k} devices, it is restored on any other number, bit for bit",
            all(restored.values()),
            ", ".join(map(str, restored)),
        ),
    ]


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """A table with a row for each run."""
    header = [
        "replicas",
        "state",
        "parameters",
        "Adam's state",
        "arguments of the step",
    ]
    return [header] + [
        [
            str(r.replicas),
            "divided" if r.divided else "whole",
            *(f"{b / MIB:.2f} MiB" for b in (r.params[0], r.state[0], r.program)),
        ]
        for r in runs
    ]


def plot(runs: Sequence[Run]) -> Figure:
    """Bars for each run; parameters below, state above."""
    figure, axes = plt.subplots(figsize=(9, 4.5))
    at = np.arange(len(runs))
    kept, state = (
        np.array([getattr(r, name)[0] for r in runs]) / MIB
        for name in ("params", "state")
    )
    axes.bar(at, kept, color="0.75", label="parameters")
    axes.bar(at, state, bottom=kept, color="tab:blue", label="Adam's state")
    whole, named = state[0], False
    for i, r in enumerate(runs):
        if r.divided:
            level = kept[i] + whole / r.replicas
            (line,) = axes.plot([i - 0.45, i + 0.45], [level] * 2, "k--", linewidth=1)
            line.set_label("" if named else "state divided by replicas")
            named = True
    names = [f"{r.replicas}\n{'ZeRO' if r.divided else 'whole'}" for r in runs]
    axes.set_xticks(at, names)
    axes.set(xlabel="replicas", ylabel="MiB on each device")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
