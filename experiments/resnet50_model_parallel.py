"""What does model parallelism cost a ResNet-50 on two devices, and what does a batch
win that is sent through in parts?

The network is cut after its second group of blocks. Without a split one device waits
while the other works; with it both work, on different parts of the batch. Small parts
fill the pipeline sooner but are computed less efficiently, so that there is a best
size. Batches of 120 random images, 1000 one-hot classes, mean squared error, SGD with a
step of 0.001; a run is 3 batches, a figure the mean of 10 runs.

This is the form for accelerators. On CPU every stage is a process pinned to a core, and
network and images are smaller, as stated in the result. With batch normalisation a
batch in parts is another function than the whole batch, so that the gradient is judged
against the same parts, one by one on one device. The best size of a part is claimed for
two accelerators only: on CPU the larger sizes are close to each other.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.progress import Progress

from experiments._pair import can_pin
from experiments._resnet import RESNET50, Network
from experiments._resnet_pictures import SOURCE, pictures
from experiments._resnet_runs import (
    DEALT,
    JUDGED,
    ONE,
    PARALLEL,
    Found,
    Plan,
    found_by,
    joined,
    losses_of,
    over_processes,
)
from experiments._result import Claim, Result, Settings
from jdist import verify

SPLITS = (1, 3, 5, 8, 10, 12, 20, 40, 60)
FULL = Plan(RESNET50, 128, 120, SPLITS, checked=(20, 120))
ON_CPU = FULL._replace(network=Network((2, 3, 4, 2), 16, 100), image=40)
QUICK = Plan(Network((1, 1, 1), 4, 10), 16, 6, (3,), checked=(3,), runs=2)


def run(settings: Settings, progress: Progress) -> Result:
    """Trains in processes on CPU, and otherwise on one or two devices."""
    on_cpu = jax.default_backend() == "cpu"
    plan = QUICK if settings.quick else ON_CPU if on_cpu else FULL
    plan = plan._replace(seed=settings.seed)
    progress.add_task("training", total=None)
    if on_cpu:
        alone = can_pin()
        with over_processes(plan, pinned=not alone) as processes:
            if not settings.quick:
                processes.join()  # the judge would disturb the timed runs
            report = judged(plan, lambda: joined(processes))
            found = joined(processes)
        where = "a process for each stage" + ("" if alone else ", pinned to a core")
    else:
        devices = jax.devices()[: min(2, settings.devices)]
        alone = "" if len(devices) == 2 else "there is one device only"
        found = found_by(plan, [devices[0], devices[-1]])
        report = judged(plan, lambda: found)
        where = f"{len(devices)} x {devices[0].device_kind}"
    why_not = "time is judged in the full form only" if settings.quick else alone
    told = [
        *equality_claims(plan, found, report, exact=on_cpu),
        *(c.unless(why_not) for c in speed_claims(found.seconds, not on_cpu)),
    ]
    return Result(
        claims=told,
        pictures=pictures(found.seconds, f"{plan.network}\n{where}", plan.batch),
        tables={f"Seconds of a run: {plan.network}, {where}": rows(found.seconds)},
        data={
            "plan": str(plan),
            "seconds": found.seconds,
            "worst": worst_of(report, JUDGED),
        },
        notes=list(notes(plan, alone)),
    )


# --- what is right ---


def judged(plan: Plan, found: Callable[[], Found]) -> verify.Report:
    """Judges the first batch's gradients against its parts, one by one on one device.

    Args:
      plan: The parameters of the run.
      found: Returns the results; called only once the judge needs its candidates.
    """
    made, first = plan.network.stages(plan.seed), plan.data()[0]
    size = plan.checked[0]
    parts = {name: x.reshape(-1, size, *x.shape[1:]) for name, x in first.items()}

    def candidate(name: str) -> Any:
        def call(params: Any, batch: Any) -> Any:
            came_out = found()
            grads = [
                jax.tree.unflatten(jax.tree.structure(own), leaves)
                for own, leaves in zip(params, came_out.gradients[name], strict=True)
            ]
            return np.float32(came_out.losses[name]), grads

        return call

    candidates = {name: candidate(name) for name in (JUDGED, DEALT)}
    judge = verify.gradients_judge(losses_of(made.stages, made.states))
    return judge(made.params, parts, candidates, finite_differences=False)


def equality_claims(
    plan: Plan, found: Found, report: verify.Report, *, exact: bool
) -> Iterator[Claim]:
    """Claims on gradients within the bound, and on equal bits if those are possible."""
    worst, off = (worst_of(report, name) for name in (JUDGED, DEALT))
    yield Claim(
        f"the gradient of a batch in parts of {plan.checked[0]} is that of the same "
        "parts one by one on one device, within the derived bound",
        worst <= 1,
        f"error/bound {worst:.2f}",
        leads=True,
    )
    yield Claim(
        "the same examples in other parts have another gradient, because of batch "
        "normalisation, and the judge sees it",
        off > 1,
        f"error/bound {off:.3g}",
    )
    for name, trained in found.trained.items():
        same, count = same_bits(trained, found.expected[name])
        yield Claim(
            f"{name}: parameters and statistics after {plan.batches} steps are those "
            "of both stages on one device, bit for bit",
            same == count,
            f"{same} of {count} arrays",
        ).unless("" if exact else "two kernels of an accelerator may round differently")


def worst_of(report: verify.Report, candidate: str) -> float:
    """The largest error over bound of one candidate's leaves."""
    own = [leaf for leaf in report.leaves if leaf.candidate == candidate]
    return verify.Report(tuple(own)).worst


def same_bits(one: Any, other: Any) -> tuple[int, int]:
    """The number of equal arrays, and of all."""
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    return sum(x.tobytes() == y.tobytes() for x, y in pairs), len(pairs)


# --- what is fast ---


def speed_claims(
    seconds: Mapping[str, Sequence[float]], best_size: bool
) -> Iterator[Claim]:
    """Claims on the speed of two devices and, if asked, on the best size of a part.

    Args:
      seconds: Seconds of each run, by arrangement.
      best_size: Whether the sizes of parts are compared.
    """
    means = {name: statistics.mean(taken) for name, taken in seconds.items()}
    best = best_of(means)
    gain = means[ONE] / means[best]
    yield Claim(
        "sent in parts, a batch takes less time on two devices than on one",
        gain > 1,
        f"{best}: {gain:.2f} times as fast; two devices could be 2 times",
        leads=True,
    )
    yield Claim(
        "and less than without parts",
        means[best] < means[PARALLEL],
        f"model parallel {means[PARALLEL]:.3f} s, {best} {means[best]:.3f} s",
        leads=True,
    )
    sizes = {int(name.split()[1]): name for name in means if name.startswith("split")}
    ends = [means[sizes[end]] for end in (min(sizes), max(sizes))]
    yield Claim(
        "the best size of a part is neither the smallest nor the largest",
        means[best] < min(ends),
        f"{best}; {min(sizes)}: {ends[0]:.3f} s, {max(sizes)}: {ends[1]:.3f} s",
    ).unless("" if best_size else "sizes are compared on two accelerators only")


def best_of(means: Mapping[str, float]) -> str:
    """The name of the fastest split."""
    splits = [name for name in means if name.startswith("split")]
    return min(splits, key=means.__getitem__)


# --- what is told ---


def rows(seconds: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """A table with a row for each arrangement, beside the source's."""
    one = statistics.mean(seconds[ONE])
    found = [["", "seconds", "deviation", "as fast as one device", "source, 2 GPUs"]]
    for name, taken in seconds.items():
        mean = statistics.mean(taken)
        theirs = SOURCE.get(name)
        found.append(
            [
                name,
                f"{mean:.3f}",
                f"{statistics.stdev(taken):.3f}",
                f"{one / mean:.2f}",
                "" if theirs is None else f"{theirs} s, {SOURCE[ONE] / theirs:.2f}",
            ]
        )
    return found


def notes(plan: Plan, alone: str) -> Iterator[str]:
    """Notes on what was run."""
    if plan.network != RESNET50:
        channels = f"{plan.image} x {plan.image} images, {plan.network.classes} classes"
        yield (
            f"The network is {plan.network}, {plan.network.blocks} blocks in its "
            f"groups, with {channels}; ResNet-50 with 128 x 128 images is for "
            "accelerators."
        )
    if alone:
        yield f"Both stages share what computes: {alone}."
