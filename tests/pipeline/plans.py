"""Profiles to plan: PipeDream's own, and random ones; the published planner's times."""

from pathlib import Path
from typing import NamedTuple

from jdist.pipeline import Layer, Profile

PROFILES = Path(__file__).parent / "profiles"
"""Copied unchanged from the PipeDream repository; LICENSE.pipedream.txt beside them."""


class Published(NamedTuple):
    """One run of the published planner, unchanged: all workers, no memory limit."""

    profile: str
    workers: tuple[int, ...]
    bandwidths: tuple[float, ...]
    transfers: bool
    bottleneck_time: float
    data_parallel_time: float


def random_profile(rng, layers, chain):
    """Costs of different sizes; a graph has one first layer, skips and branches."""
    made = [
        Layer(
            f"l{i}",
            f"layer {i}",
            *(float(x) for x in rng.uniform(0.1, 2, 2)),
            tuple(float(x) for x in rng.uniform(1, 60, 1 + i % 2)),
            float(rng.uniform(0, 80)),
        )
        for i in range(layers)
    ]
    if chain:
        return Profile.chain(made)
    edges = set()
    for target in range(1, layers):
        count = int(rng.integers(1, min(target, 2) + 1))
        for source in rng.choice(target, count, replace=False):
            edges.add((f"l{source}", f"l{target}"))
    return Profile(tuple(made), tuple(sorted(edges)))


# fmt: off
PUBLISHED = [
    Published("vgg16", (4,), (1e9,), False, 0.175732624, 0.583206382),
    Published("vgg16", (4,), (1e9,), True, 0.205520896, 0.583206382),
    Published("vgg16", (4,), (1e10,), False, 0.1701790624, 0.2096410132),
    Published("vgg16", (4,), (1e10,), True, 0.1701790624, 0.2096410132),
    Published("vgg16", (16,), (1.25e9,), False, 0.0465874887309, 0.1458015955),
    Published("vgg16", (16,), (1.25e9,), True, 0.0547948908308, 0.1458015955),
    Published("vgg16", (4, 4), (1.2e10, 1.25e9), False, 0.0440084154667, 0.1336953104),
    Published("vgg16", (4, 4), (1.2e10, 1.25e9), True, 0.0668887521333, 0.1336953104),
    Published("vgg16", (8, 2), (1e11, 3.1e9), False, 0.0463709278, 0.0655597989132),
    Published("vgg16", (8, 2), (1e11, 3.1e9), True, 0.0651881827699, 0.0655597989132),
    Published("vgg16", (2, 2, 2), (9e9, 3e9, 1e9), False, 0.0929640033333, 0.422274204778),
    Published("vgg16", (2, 2, 2), (9e9, 3e9, 1e9), True, 0.162316901333, 0.422274204778),
    Published("gnmt", (4,), (1e9,), False, 0.025868, 0.603651856),
    Published("gnmt", (4,), (1e9,), True, 0.025868, 0.603651856),
    Published("gnmt", (4,), (1e10,), False, 0.025868, 0.0804837856),
    Published("gnmt", (4,), (1e10,), True, 0.025868, 0.0804837856),
    Published("gnmt", (4, 4), (1.2e10, 1.25e9), False, 0.011081, 0.1339584432),
    Published("gnmt", (4, 4), (1.2e10, 1.25e9), True, 0.011081, 0.1339584432),
    Published("gnmt", (2, 2, 2), (9e9, 3e9, 1e9), False, 0.017774, 0.484827104889),
    Published("gnmt", (2, 2, 2), (9e9, 3e9, 1e9), True, 0.017774, 0.484827104889),
    Published("resnet50", (4,), (1e9,), False, 0.111497, 0.187525846),
    Published("resnet50", (4,), (1e9,), True, 0.162880924, 0.187525846),
    Published("resnet50", (4,), (1e10,), False, 0.111497, 0.1185218596),
    Published("resnet50", (4,), (1e10,), True, 0.111497, 0.1185218596),
    Published("resnet50", (16,), (1.25e9,), False, 0.029212, 0.0468814615),
    Published("resnet50", (16,), (1.25e9,), True, 0.0438477900444, 0.0468814615),
    Published("resnet50", (4, 4), (1.2e10, 1.25e9), False, 0.028667352, 0.0446452212),
    Published("resnet50", (4, 4), (1.2e10, 1.25e9), True, 0.0432084692, 0.0446452212),
    Published("resnet50", (8, 2), (1e11, 3.1e9), False, 0.0279347421333, 0.0320594134655),
    Published("resnet50", (8, 2), (1e11, 3.1e9), True, 0.0319402810555, 0.0320594134655),
    Published("resnet50", (2, 2, 2), (9e9, 3e9, 1e9), False, 0.055915, 0.117900119889),
    Published("resnet50", (2, 2, 2), (9e9, 3e9, 1e9), True, 0.110938898667, 0.117900119889),
]
