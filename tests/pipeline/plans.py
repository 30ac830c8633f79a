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
    Published("vgg16", (4,), (1e9,), False, 0.17573262400000003, 0.583206382),
    Published("vgg16", (4,), (1e9,), True, 0.205520896, 0.583206382),
    Published("vgg16", (4,), (1e10,), False, 0.1701790624, 0.20964101319999998),
    Published("vgg16", (4,), (1e10,), True, 0.1701790624, 0.2096410132),
    Published("vgg16", (16,), (1.25e9,), False, 0.04658748873086419, 0.1458015955),
    Published("vgg16", (16,), (1.25e9,), True, 0.05479489083076923, 0.1458015955),
    Published("vgg16", (4, 4), (1.2e10, 1.25e9), False, 0.044008415466666666, 0.1336953104),
    Published("vgg16", (4, 4), (1.2e10, 1.25e9), True, 0.06688875213333331, 0.1336953104),
    Published("vgg16", (8, 2), (1e11, 3.1e9), False, 0.0463709278, 0.0655597989132258),
    Published("vgg16", (8, 2), (1e11, 3.1e9), True, 0.06518818276989247, 0.06555979891322582),
    Published("vgg16", (2, 2, 2), (9e9, 3e9, 1e9), False, 0.09296400333333334, 0.4222742047777778),
    Published("vgg16", (2, 2, 2), (9e9, 3e9, 1e9), True, 0.16231690133333335, 0.4222742047777778),
    Published("gnmt", (4,), (1e9,), False, 0.025868000000000002, 0.6036518559999999),
    Published("gnmt", (4,), (1e9,), True, 0.025868000000000002, 0.6036518559999999),
    Published("gnmt", (4,), (1e10,), False, 0.025868000000000002, 0.0804837856),
    Published("gnmt", (4,), (1e10,), True, 0.025868000000000016, 0.0804837856),
    Published("gnmt", (4, 4), (1.2e10, 1.25e9), False, 0.011081, 0.1339584432),
    Published("gnmt", (4, 4), (1.2e10, 1.25e9), True, 0.011081, 0.1339584432),
    Published("gnmt", (2, 2, 2), (9e9, 3e9, 1e9), False, 0.017774000000000005, 0.48482710488888886),
    Published("gnmt", (2, 2, 2), (9e9, 3e9, 1e9), True, 0.017773999999999988, 0.48482710488888886),
    Published("resnet50", (4,), (1e9,), False, 0.11149699999999999, 0.187525846),
    Published("resnet50", (4,), (1e9,), True, 0.162880924, 0.187525846),
    Published("resnet50", (4,), (1e10,), False, 0.1114969999999999, 0.11852185959999999),
    Published("resnet50", (4,), (1e10,), True, 0.11149700000000001, 0.1185218596),
    Published("resnet50", (16,), (1.25e9,), False, 0.029212000000000043, 0.0468814615),
    Published("resnet50", (16,), (1.25e9,), True, 0.04384779004444447, 0.0468814615),
    Published("resnet50", (4, 4), (1.2e10, 1.25e9), False, 0.02866735199999998, 0.04464522119999999),
    Published("resnet50", (4, 4), (1.2e10, 1.25e9), True, 0.04320846919999999, 0.0446452212),
    Published("resnet50", (8, 2), (1e11, 3.1e9), False, 0.027934742133333315, 0.032059413465483876),
    Published("resnet50", (8, 2), (1e11, 3.1e9), True, 0.03194028105548387, 0.03205941346548387),
    Published("resnet50", (2, 2, 2), (9e9, 3e9, 1e9), False, 0.055914999999999965, 0.11790011988888889),
    Published("resnet50", (2, 2, 2), (9e9, 3e9, 1e9), True, 0.11093889866666659, 0.11790011988888889),
]
