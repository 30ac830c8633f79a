"""Do gradients travel in buckets, one collective each, in the order in which they
become ready?

The cap is swept on the network of the source, 512-1024-10 at batch 64, and on larger
ones. For each cap the collectives are counted in the *compiled* program, after XLA has
merged them where possible, and the gradient is judged against one device's. Step times
come from two processes, each pinned to a core, that communicate through gloo. On one
core computation and communication share the time, so that buckets only save calls and
copies there; overlap pays on other hardware.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._collectives import collectives
from experiments._pair import can_pin, run_pair
from experiments._result import Claim, Picture, Result, Settings
from jdist import data_parallel, optim, verify


class Model(NamedTuple):
    """A network of dense layers."""

    widths: tuple[int, ...]
    examples: int


MODELS = {
    "512-1024-10, batch 64": Model((512, 1024, 10), 64),
    "64 layers of 64, batch 64": Model((64,) * 65, 64),
    "4 layers of 2048, batch 128": Model((2048,) * 5, 128),
    "8 layers of 1024, batch 256": Model((1024,) * 9, 256),
}
SOURCE = next(iter(MODELS))
# KiB of each of eight leaves, summed one by one and in one bucket.
SIZES = (4, 64, 256, 512, 1024, 2048, 4096)
# JSON strings, so that they can be keys; null is the default.
CAPS = ("null", "0", "0.01", "0.1", "1", "[1, 25]", "25", "1000")
QUICK = ("null", "0", "1", "25")


def run(settings: Settings, progress: Progress) -> Result:
    """Counts and judges; in the full form also times."""
    caps = QUICK if settings.quick else CAPS
    names = [SOURCE] if settings.quick else list(MODELS)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    counts = {name: count(MODELS[name], mesh, caps, progress) for name in names}
    worst = judged(MODELS[SOURCE], mesh, caps)
    missing = "the quick form does not time" if settings.quick else can_pin()
    times: Any = {}
    sizes: Any = {}
    if not missing:
        job = {"models": names, "caps": caps, "sizes": SIZES, "rounds": 15}
        measured = run_pair("experiments._buckets_worker", job)
        times, sizes = measured["models"], measured["sizes"]
    return Result(
        claims=claims(counts, worst),
        pictures=pictures(times, counts),
        tables={"Collectives and step times": rows(counts, times)}
        | ({"A call for each leaf, or a copy": size_rows(sizes)} if sizes else {}),
        data={
            "collectives": counts,
            "error_over_bound": worst,
            "seconds": times,
            "seconds by KiB": sizes,
        },
        notes=[f"No step times: {missing}."] if missing else [],
    )


# --- the models ---


def problem(model: Model) -> tuple[list[Any], Any]:
    """Parameters and a batch, equal in all processes."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    params = [
        {"b": normal(width), "w": normal(inputs, width)}
        for inputs, width in zip(model.widths, model.widths[1:], strict=False)
    ]
    x, y = normal(model.examples, model.widths[0]), normal(model.examples, 1)
    return params, (x, y)


def layer(params: Any, hidden: jax.Array) -> jax.Array:
    """Applies a dense layer."""
    return jax.nn.relu(hidden @ params["w"] + params["b"])


def losses_of(params: Sequence[Any], batch: Any) -> jax.Array:
    """The mean squared error of each example, `(examples,)`."""
    hidden, target = batch
    for own in params:
        hidden = layer(own, hidden)
    return jnp.mean((hidden - target) ** 2, axis=1)


def step_of(model: Model, mesh: Mesh, cap: str | None) -> Callable[[], None]:
    """A step of SGD that keeps its state, for repeated calls."""
    params, batch = problem(model)
    options: dict[str, Any] = {"bucket_cap_mb": json.loads(cap)} if cap else {}
    step = data_parallel.train_step(losses_of, optim.sgd(lr=1e-3), mesh, **options)
    state = [step.init(params)]
    rows = model.examples // mesh.size
    shards = data_parallel.shard_batch(own_rows(batch, mesh), mesh, rows=rows)

    def call() -> None:
        state[0], _ = step(state[0], *shards)
        jax.block_until_ready(state[0])

    return call


def sum_of(kibibytes: int, mesh: Mesh, cap: str) -> Callable[[], None]:
    """A gradient of eight leaves that takes almost no computation."""
    rng = np.random.default_rng(0)
    params = [rng.normal(size=256 * kibibytes).astype(np.float32) for _ in range(8)]

    def losses(params: Sequence[jax.Array], scales: jax.Array) -> jax.Array:
        return scales * sum(jnp.vdot(leaf, leaf) for leaf in params)

    limit = json.loads(cap)
    fn = data_parallel.value_and_grad(losses, mesh, bucket_cap_mb=limit)
    scales = np.ones(len(mesh.local_devices), np.float32)
    placed = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    shards = data_parallel.shard_batch(scales, mesh, rows=1)

    def call() -> None:
        jax.block_until_ready(fn(placed, *shards))

    return call


def own_rows(batch: Any, mesh: Mesh) -> Any:
    """This process's rows of a batch; all of them if the mesh is local."""
    here = jax.process_index()
    ranks = [i for i, d in enumerate(mesh.devices.flat) if d.process_index == here]
    share = len(batch[0]) // mesh.size
    return tuple(part[ranks[0] * share : (ranks[-1] + 1) * share] for part in batch)


# --- what is measured ---


def count(
    model: Model, mesh: Mesh, caps: Sequence[str], progress: Progress
) -> dict[str, list[int]]:
    """For each cap the number of planned buckets and of compiled collectives."""
    params, batch = problem(model)
    # Without weights, whose sum would be one more collective.
    shards = data_parallel.shard_batch(batch, mesh)[:1]
    found = {}
    for cap in progress.track(caps, description=f"{len(model.widths) - 1} layers"):
        limit = json.loads(cap)
        fn = data_parallel.value_and_grad(losses_of, mesh, bucket_cap_mb=limit)
        text = jax.jit(fn).lower(params, *shards).compile().as_text()
        found[cap] = [len(planned(params, limit)), len(collectives(text or ""))]
    return found


def planned(params: Sequence[Any], limit: Any) -> list[list[int]]:
    """The buckets by torch's rule: the last layer first, its bias before its weights.

    Without a cap, leaves of at least 1 MiB are buckets of their own.
    """
    leaves = [own[name] for own in reversed(params) for name in ("b", "w")]
    if limit is not None:
        limits = limit if isinstance(limit, list) else [limit]
        return data_parallel.assign_buckets(leaves, [2**20 * x for x in limits])
    small = [leaf for leaf in leaves if leaf.nbytes < 2**20]
    alone = [[i] for i, leaf in enumerate(leaves) if leaf.nbytes >= 2**20]
    return data_parallel.assign_buckets(small, [2**20, 25 * 2**20]) + alone


def judged(model: Model, mesh: Mesh, caps: Sequence[str]) -> float:
    """The largest error of any cap's gradient, relative to its bound."""
    params, batch = problem(Model(model.widths, 8))
    shards = data_parallel.shard_batch(batch, mesh, (5, 3))
    candidates = {}
    for cap in caps:
        fn = data_parallel.value_and_grad(
            losses_of, mesh, bucket_cap_mb=json.loads(cap)
        )
        candidates[cap] = lambda p, b, fn=fn: fn(p, *shards)
    judge = verify.gradients_judge(losses_of)
    return float(judge(params, batch, candidates, finite_differences=False).worst)


# --- what is claimed, and shown ---


def claims(counts: Mapping[str, Mapping[str, list[int]]], worst: float) -> list[Claim]:
    """The claims of the experiment."""
    pairs = [pair for by_cap in counts.values() for pair in by_cap.values()]
    source = counts[SOURCE]
    return [
        Claim(
            "the compiled program has one collective for each bucket, and at most one "
            "more, for the loss, where no bucket is copied",
            all(found - buckets in (0, 1) for buckets, found in pairs),
            f"{len(pairs)} programs, {min(f for _, f in pairs)} to "
            f"{max(f for _, f in pairs)} collectives",
            leads=True,
        ),
        Claim(
            "a cap of 0 sends each of the source's 4 gradients by itself, one of 25 "
            "MiB all together",
            (source["0"][1], source["25"][1]) in ((4, 1), (5, 1)),
            f"{source['0'][1]} and {source['25'][1]} collectives",
        ),
        Claim(
            "every cap's gradient is one device's to rounding",
            worst <= 1,
            f"error/bound at most {worst:.2f}",
        ),
    ]


def rows(
    counts: Mapping[str, Mapping[str, list[int]]], times: Mapping[str, Any]
) -> list[list[str]]:
    """A table with a row for each model and cap."""
    found = [["model", "cap, MiB", "collectives", "step, ms"]]
    for name, by_cap in counts.items():
        for cap, (_, number) in by_cap.items():
            seconds = times.get(name, {}).get(cap)
            shown = "" if seconds is None else f"{1e3 * seconds:.2f}"
            label = "default" if cap == "null" else cap
            found.append([name, label, str(number), shown])
        if name in times:
            found.append(
                [name, "compute alone", "0", f"{1e3 * times[name]['compute']:.2f}"]
            )
    return found


def size_rows(sizes: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """A table with a row for each size of leaf."""
    found = [["8 leaves of, KiB", "8 collectives, ms", "1 bucket, ms"]]
    for size, seconds in sizes.items():
        found.append([size, *(f"{1e3 * seconds[cap]:.2f}" for cap in ("0", "1000"))])
    return found


def pictures(
    times: Mapping[str, Any], counts: Mapping[str, Mapping[str, list[int]]]
) -> list[Picture]:
    """The number of collectives and, if steps were timed, the sweep."""
    caption = "Collectives of a step by cap, as XLA compiles it."
    counted = Picture("collectives", caption, plot_counts(counts))
    if not times:
        return [counted]
    caption = "Step time on two pinned processes by cap; beside each point the number "
    caption += "of collectives, dashed the computation alone."
    return [counted, Picture("caps", caption, plot_caps(times, counts))]


def plot_counts(counts: Mapping[str, Mapping[str, list[int]]]) -> Figure:
    """The number of collectives over caps, a line for each model."""
    figure, axes = plt.subplots(figsize=(5, 3.4))
    for name, by_cap in counts.items():
        axes.plot([pair[1] for pair in by_cap.values()], "o-", label=name)
    caps = list(next(iter(counts.values())))
    shown = ["default" if cap == "null" else cap for cap in caps]
    axes.set_xticks(range(len(caps)), shown, rotation=45)
    axes.set_xlabel("cap, MiB")
    axes.set_ylabel("collectives")
    axes.legend(fontsize=8)
    figure.tight_layout()
    return figure


def plot_caps(
    times: Mapping[str, Any], counts: Mapping[str, Mapping[str, list[int]]]
) -> Figure:
    """Step times over caps, in a panel for each model."""
    figure, panels = plt.subplots(1, len(times), figsize=(4 * len(times), 3.4))
    for axes, (name, seconds) in zip(np.atleast_1d(panels), times.items(), strict=True):
        caps = list(counts[name])
        values = [1e3 * seconds[cap] for cap in caps]
        axes.plot(range(len(caps)), values, "o-", color="tab:blue")
        for place, (cap, value) in enumerate(zip(caps, values, strict=True)):
            note = str(counts[name][cap][1])
            axes.annotate(note, (place, value), (0, 6), textcoords="offset points")
        axes.axhline(1e3 * seconds["compute"], color="0.5", linestyle="--")
        shown = ["default" if cap == "null" else cap for cap in caps]
        axes.set_xticks(range(len(caps)), shown, rotation=45)
        axes.set(title=name, xlabel="cap, MiB", ylabel="ms per step")
        axes.set_ylim(0, 1.15 * max(values))
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure
