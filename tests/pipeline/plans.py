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
    Published("vgg16", (16,), (1.25e9,), False, 0.04658748873, 0.1458015955),
    Published("vgg16", (16,), (1.25e9,), True, 0.05479489083, 0.1458015955),
    Published("vgg16", (4, 4), (1.2e10, 1.25e9), False, 0.04400841547, 0.1336953104),
    Published("vgg16", (4, 4), (1.2e10, 1.25e9), True, 0.06688875213, 0.1336953104),
    Published("vgg16", (8, 2), (1e11, 3.1e9), False, 0.0463709278, 0.06555979891),
    Published("vgg16", (8, 2), (1e11, 3.1e9), True, 0.06518818277, 0.06555979891),
    Published("vgg16", (2,) * 3, (9e9, 3e9, 1e9), False, 0.09296400333, 0.4222742048),
    Published("vgg16", (2,) * 3, (9e9, 3e9, 1e9), True, 0.1623169013, 0.4222742048),
    Published("gnmt", (4,), (1e9,), False, 0.025868, 0.603651856),
    Published("gnmt", (4,), (1e9,), True, 0.025868, 0.603651856),
    Published("gnmt", (4,), (1e10,), False, 0.025868, 0.0804837856),
    Published("gnmt", (4,), (1e10,), True, 0.025868, 0.0804837856),
    Published("gnmt", (4, 4), (1.2e10, 1.25e9), False, 0.011081, 0.1339584432),
    Published("gnmt", (4, 4), (1.2e10, 1.25e9), True, 0.011081, 0.1339584432),
    Published("gnmt", (2,) * 3, (9e9, 3e9, 1e9), False, 0.017774, 0.4848271049),
    Published("gnmt", (2,) * 3, (9e9, 3e9, 1e9), True, 0.017774, 0.4848271049),
    Published("resnet50", (4,), (1e9,), False, 0.111497, 0.187525846),
    Published("resnet50", (4,), (1e9,), True, 0.162880924, 0.187525846),
    Published("resnet50", (4,), (1e10,), False, 0.111497, 0.1185218596),
    Published("resnet50", (4,), (1e10,), True, 0.111497, 0.1185218596),
    Published("resnet50", (16,), (1.25e9,), False, 0.029212, 0.0468814615),
    Published("resnet50", (16,), (1.25e9,), True, 0.04384779004, 0.0468814615),
    Published("resnet50", (4, 4), (1.2e10, 1.25e9), False, 0.028667352, 0.0446452212),
    Published("resnet50", (4, 4), (1.2e10, 1.25e9), True, 0.0432084692, 0.0446452212),
    Published("resnet50", (8, 2), (1e11, 3.1e9), False, 0.02793474213, 0.03205941347),
    Published("resnet50", (8, 2), (1e11, 3.1e9), True, 0.03194028106, 0.03205941347),
    Published("resnet50", (2,) * 3, (9e9, 3e9, 1e9), False, 0.055915, 0.1179001199),
    Published("resnet50", (2,) * 3, (9e9, 3e9, 1e9), True, 0.1109388987, 0.1179001199),
]
