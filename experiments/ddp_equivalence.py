"""Does equation 13, dL/dW = sum_i (B_i / B) dL_i/dW, hold: over 1 to 8 replicas, shards
of any sizes, all reductions and methods, in one process and in two?

For every way to split the batch, the gradient is judged against that of the whole batch
on one device, within the derived bound. The formula itself is judged too, with each
replica's gradient computed by plain `jax.grad` and summed by hand, and so is the
classic mistake, the mean of the replicas' means, which must be caught wherever shards
differ. Then each number of replicas trains 50 steps on shards that change at every
step, and all copies of the parameters must hold the same bits.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import Mesh
from matplotlib.figure import Figure
from rich.progress import Progress

from experiments._replicas import over
from experiments._result import Claim, Picture, Result, Settings
from jdist import data_parallel, optim, verify
from jdist.rpc import spawn

EXAMPLES = 37
REDUCTIONS = ("mean", "sum", "max", "min")
METHODS = ("all_reduce", "all_gather")
STEPS = 50
FORMULA, MISTAKE = "by hand: ", "mean of means: "

Way = tuple[str, str, tuple[int, ...]]
"""Reduction, method, and the sizes of the shards."""


@dataclass(frozen=True)
class Place:
    """The placement of replicas: on the devices of a mesh, or on one by `vmap`."""

    where: Mesh | int
    name: str

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.where if isinstance(self.where, int) else self.where.size


@dataclass
class Findings:
    """The results of the replicas of one place.

    Attributes:
      place: The name of the place.
      gradients: Loss and gradient by way.
      copies: Digests of all copies of the final training state, by method.
    """

    place: str
    gradients: dict[Way, Any]
    copies: dict[str, list[str]]


def run(settings: Settings, progress: Progress) -> Result:
    """Computes everywhere, judges and compares."""
    counts = (1, 3) if settings.quick else range(1, 9)
    devices_each = (1,) if settings.quick else (1, 2)
    devices = np.array(jax.devices()[: settings.devices])
    places = [_place(count, devices) for count in counts]
    found = [
        findings(place, settings)
        for place in progress.track(places, description="one process")
    ]
    pairs = [
        spawn(in_group, args=(each, settings), nprocs=2, timeout=600)
        for each in progress.track(devices_each, description="two processes")
    ]
    found += [each for pair in pairs for each in pair]
    right: dict[str, float] = {}
    for reduction in progress.track(REDUCTIONS, description="judging"):
        right |= judged(reduction, found, settings)
    hand, mistake = (
        {name: right.pop(name) for name in list(right) if name.startswith(start)}
        for start in (FORMULA, MISTAKE)
    )
    return Result(
        claims=claims(found, pairs, right, hand, mistake),
        pictures=[
            Picture(
                "ratios",
                "How far each gradient is from one device's, relative to what rounding "
                "explains. In black the formula by hand, in red the mean of means.",
                plot(found, right, hand, mistake),
            )
        ],
        tables={"Largest error/bound": _rows(found, right)},
        data={"error_over_bound": right, "by_hand": hand, "mean_of_means": mistake},
        notes=_notes(places),
    )


# --- the problem ---


def problem(seed: int) -> tuple[Any, Any, np.ndarray]:
    """Parameters, a batch, and weights of the examples, such as 1 to 9 tokens."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    params = {"in": normal(11, 13) / 3, "bias": normal(13), "out": normal(13, 5) / 3}
    batch = normal(EXAMPLES, 11), normal(EXAMPLES, 5)
    return params, batch, rng.integers(1, 10, EXAMPLES).astype(np.float32)


def losses(params: Any, batch: Any) -> jax.Array:
    """The squared error of a small net for each example, `(examples,)`."""
    x, y = batch
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.sum((hidden @ params["out"] - y) ** 2, axis=1)


def sizes_of(replicas: int, settings: Settings) -> list[tuple[int, ...]]:
    """Even sizes, sizes in proportion 1 : 2 : .., empty shards, and random sizes."""
    even = [EXAMPLES // replicas] * replicas
    even[0] += EXAMPLES - sum(even)
    steps = np.arange(1, replicas + 1) * EXAMPLES // (replicas * (replicas + 1) // 2)
    steps[-1] += EXAMPLES - steps.sum()
    found = [even, steps.tolist(), [0] * (replicas - 1) + [EXAMPLES]]
    rng = np.random.default_rng((settings.seed, replicas))
    for _ in range(0 if settings.quick else 5):
        cuts = np.sort(rng.integers(0, EXAMPLES + 1, replicas - 1))
        found.append(np.diff(cuts, prepend=0, append=EXAMPLES).tolist())
    return list(dict.fromkeys(map(tuple, found)))


# --- what replicas compute ---


def in_group(rank: int, each: int, settings: Settings) -> Findings:
    """The findings of one of two processes, with `each` devices of its own."""
    # gloo prints its connections to standard output, and no setting stops it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", each)
    with data_parallel.process_group() as mesh:
        name = f"2 processes of {each}, rank {rank}"
        return findings(Place(mesh, name), settings)


def _place(count: int, devices: np.ndarray) -> Place:
    if count > len(devices):
        return Place(count, f"{count} on one device")
    return Place(Mesh(devices[:count], ("data",)), f"{count}")


def findings(place: Place, settings: Settings) -> Findings:
    """All ways to the gradient, and a training run by each method."""
    copies = {method: train(place, method, settings) for method in METHODS}
    return Findings(place.name, dict(gradients(place, settings)), copies)


def gradients(place: Place, settings: Settings) -> Iterator[tuple[Way, Any]]:
    """Yields the gradient by every way; all sizes share one compiled program."""
    params, batch, weights = problem(settings.seed)
    for reduction in REDUCTIONS:
        for method in METHODS:
            fn = data_parallel.value_and_grad(
                losses, reduction=reduction, method=method, **over(place.where)
            )
            for sizes in sizes_of(place.replicas, settings):
                found = fn(params, *sharded(place, sizes, batch, weights))
                yield (reduction, method, sizes), jax.tree.map(np.asarray, found)


def sharded(
    place: Place, sizes: Sequence[int], batch: Any, weights: np.ndarray
) -> tuple[Any, jax.Array]:
    """The whole batch over the replicas; a process contributes its own examples."""
    each = place.replicas // jax.process_count()
    first = each * jax.process_index()
    rows = np.arange(sum(sizes[:first]), sum(sizes[: first + each]))
    own = list(sizes[first : first + each])
    weights = weights[rows]
    if not rows.size:
        # A process without examples contributes one of weight 0.
        rows, own, weights = np.arange(1), [1, *own[1:]], np.zeros(1, np.float32)
    return data_parallel.shard_batch(
        jax.tree.map(lambda x: x[rows], batch),
        sizes=own,
        weights=weights,
        rows=EXAMPLES,
        **over(place.where),
    )


def train(place: Place, method: str, settings: Settings) -> list[str]:
    """Digests of all local copies after a run with different shards at every step."""
    params, batch, weights = problem(settings.seed)
    opt = optim.sgd(lr=0.01, momentum=0.9)
    step = data_parallel.train_step(losses, opt, method=method, **over(place.where))
    state = step.init(params)
    rng = np.random.default_rng(settings.seed)  # the same in every process
    for _ in range(STEPS):
        cuts = np.sort(rng.integers(0, EXAMPLES + 1, place.replicas - 1))
        sizes = np.diff(cuts, prepend=0, append=EXAMPLES).tolist()
        state, _ = step(state, *sharded(place, sizes, batch, weights))
    shards = [leaf.addressable_shards for leaf in jax.tree.leaves(state)]
    return [
        hashlib.sha256(b"".join(np.asarray(x.data).tobytes() for x in copy)).hexdigest()
        for copy in zip(*shards, strict=True)
    ]


# --- what is judged ---


def judged(
    reduction: str, found: Sequence[Findings], settings: Settings
) -> dict[str, float]:
    """error/bound of all gradients with this reduction; for the mean also by hand."""
    params, batch, weights = problem(settings.seed)
    results = {
        f"{each.place}: {reduction}, {method}, {sizes}": result
        for each in found
        for (kind, method, sizes), result in each.gradients.items()
        if kind == reduction
    }
    if reduction == "mean":
        ways = sorted({sizes for each in found for _, _, sizes in each.gradients})
        results |= by_hand(ways, settings)
    candidates = {name: partial(_given, result) for name, result in results.items()}
    report = verify.gradients(
        losses, params, batch, candidates, weights=weights, reduction=reduction
    )
    return {name: report.of(name).worst for name in results}


def _given(result: Any, params: Any, batch: Any) -> Any:
    return result


def by_hand(ways: Sequence[tuple[int, ...]], settings: Settings) -> dict[str, Any]:
    """The formula with each replica's own gradient, and the mistake."""
    params, batch, weights = problem(settings.seed)
    results = {}
    for sizes in ways:
        parts = own_gradients(params, batch, weights, sizes)
        shares = [total / weights.sum() for total, _ in parts]
        results[f"{FORMULA}{sizes}"] = _combined(shares, parts)
        if len(parts) > 1:
            equal = [1 / len(parts)] * len(parts)
            results[f"{MISTAKE}{sizes}"] = _combined(equal, parts)
    return results


def own_gradients(
    params: Any, batch: Any, weights: np.ndarray, sizes: Sequence[int]
) -> list[tuple[float, Any]]:
    """For each replica with examples its weight, and its own mean loss and gradient."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    shares = [np.where(owner == i, weights, 0) for i in range(len(sizes)) if sizes[i]]
    return [(share.sum(), _own(params, batch, share)) for share in shares]


@jax.jit
def _own(params: Any, batch: Any, share: jax.Array) -> Any:
    def mean(params: Any) -> jax.Array:
        return jnp.sum(share * losses(params, batch)) / jnp.sum(share)

    return jax.value_and_grad(mean)(params)


def _combined(shares: Sequence[float], parts: Sequence[tuple[float, Any]]) -> Any:
    trees = [tree for _, tree in parts]
    return jax.tree.map(
        lambda *leaves: sum(
            np.float32(s) * x for s, x in zip(shares, leaves, strict=True)
        ),
        *trees,
    )


# --- what is claimed, and shown ---


def claims(
    found: Sequence[Findings],
    pairs: Sequence[Sequence[Findings]],
    right: dict[str, float],
    hand: dict[str, float],
    mistake: dict[str, float],
) -> list[Claim]:
    """The claims of the experiment."""
    copies = [x for each in found for x in each.copies.values()]
    return [
        Claim(
            "every gradient equals that of one device within the derived bound",
            max(right.values()) <= 1,
            f"{len(right)} judged, error/bound at most {max(right.values()):.3f}",
            leads=True,
        ),
        Claim(
            "so does the formula, added up by hand from each replica's own gradient",
            max(hand.values()) <= 1,
            f"{len(hand)} ways to split, error/bound at most {max(hand.values()):.3f}",
        ),
        Claim(
            "the mean of the replicas' means is caught wherever shards differ",
            min(mistake.values()) > 1,
            f"{len(mistake)} ways, error/bound at least {min(mistake.values()):.1e}",
        ),
        Claim(
            f"after {STEPS} steps all copies of the training state are the same bits",
            all(len(set(each)) == 1 for each in copies)
            and all(one.copies == other.copies for one, other in pairs),
            f"{len(copies)} runs, up to {max(map(len, copies))} copies in a process",
        ),
        Claim(
            "two processes have the same gradients to the bit",
            all(_same_bits(one.gradients, other.gradients) for one, other in pairs),
            f"{sum(len(one.gradients) for one, _ in pairs)} gradients",
        ),
    ]


def _same_bits(one: Any, other: Any) -> bool:
    leaves = [[x.tobytes() for x in jax.tree.leaves(tree)] for tree in (one, other)]
    return leaves[0] == leaves[1]


def plot(
    found: Sequence[Findings],
    right: dict[str, float],
    hand: dict[str, float],
    mistake: dict[str, float],
) -> Figure:
    """Columns of dots for each place, the formula and the mistake."""
    figure, axes = plt.subplots(figsize=(10, 5))
    places = [each.place for each in found]
    columns = [*places, "by hand", "mean of\nmeans"]
    for reduction, color in zip(
        REDUCTIONS, ("tab:blue", "tab:green", "tab:orange", "tab:purple"), strict=True
    ):
        # Side by side, because maximum and minimum often have the same error.
        beside = 0.1 * (REDUCTIONS.index(reduction) - 1.5)
        dots = [
            (places.index(place) + beside, ratio)
            for name, ratio in right.items()
            for place, _, rest in [name.partition(": ")]
            if rest.startswith(reduction)
        ]
        _scatter(axes, dots, color, reduction)
    _scatter(axes, [(len(places), x) for x in hand.values()], "black", "by hand")
    dots = [(len(places) + 1, x) for x in mistake.values()]
    _scatter(axes, dots, "firebrick", "mean of means")
    axes.axhline(1, color="black", linestyle="--", linewidth=1, label="derived bound")
    axes.set_yscale("log")
    axes.set_xticks(range(len(columns)), [c.replace(", ", "\n") for c in columns])
    axes.tick_params(axis="x", labelsize=7)
    axes.set(
        xlabel="replicas", ylabel="error / bound", title="One batch, split in many ways"
    )
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _scatter(
    axes: Any, dots: Sequence[tuple[float, float]], color: str, label: str
) -> None:
    """Draws dots; bit-equal gradients, of error 0, at the lower edge."""
    shift = np.random.default_rng(0).uniform(-0.04, 0.04, len(dots))
    x, y = np.array(dots).T
    axes.scatter(x + shift, np.maximum(y, 1e-3), s=8, color=color, label=label)


def _rows(found: Sequence[Findings], right: dict[str, float]) -> list[list[str]]:
    rows = [["replicas", *REDUCTIONS]]
    for each in found:
        row = [each.place]
        for reduction in REDUCTIONS:
            start = f"{each.place}: {reduction},"
            worst = max(x for name, x in right.items() if name.startswith(start))
            row.append(f"{worst:.3f}")
        rows.append(row)
    return rows


def _notes(places: Sequence[Place]) -> list[str]:
    return [
        f"too few devices here: {place.name} by vmap, which cannot show equal copies"
        for place in places
        if isinstance(place.where, int)
    ]
