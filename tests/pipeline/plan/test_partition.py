"""The planner beside the published one, beside brute force, and what it refuses."""

import itertools
import math

import numpy as np
import pytest

from jdist.pipeline import Layer, Profile, load_profile, partition
from tests.pipeline.plans import PROFILES, PUBLISHED, random_profile


@pytest.mark.parametrize(
    "case", PUBLISHED, ids=lambda c: f"{c.profile}-{c.workers}-{c.transfers}"
)
def test_the_published_planners_times(case):
    """To 1e-9, on its own profiles."""
    profile = load_profile(PROFILES / f"{case.profile}.txt")
    plan = partition(profile, case.workers, case.bandwidths, transfers=case.transfers)
    assert plan.bottleneck_time == pytest.approx(case.bottleneck_time, rel=1e-9)
    assert plan.data_parallel_time == pytest.approx(case.data_parallel_time, rel=1e-9)
    ranks = sorted(rank for stage in plan.stages for rank in stage.ranks)
    assert ranks == list(range(math.prod(case.workers)))
    layers = [name for stage in plan.stages for name in stage.layers]
    assert len(set(layers)) == len(layers)
    left_out = {layer.name for layer in profile.layers} - set(layers)
    assert all(
        profile[name].description.startswith(("Input", "__getitem__"))
        for name in left_out
    )
    for source, target in profile.edges:
        if source in layers and target in layers:
            assert layers.index(source) < layers.index(target)


# --- brute force ---


def closed_sets(profile):
    """All sets of layers that hold what each member needs, from the formula."""
    names = [layer.name for layer in profile.layers]
    needs = {n: {a for a, b in profile.edges if b == n} for n in names}
    return [
        frozenset(subset)
        for size in range(len(names) + 1)
        for subset in itertools.combinations(names, size)
        if all(needs[n] <= set(subset) for n in subset)
    ]


class BruteForce:
    """The cost model of the module's docstring, by trying everything."""

    def __init__(self, profile, workers, bandwidths, **rules):
        self.profile, self.workers, self.bandwidths = profile, workers, bandwidths
        self.transfers = rules.get("transfers", True)
        self.replicate = rules.get("replicate", True)
        self.known = {}
        self.sets = closed_sets(profile)
        self.all = max(self.sets, key=len)

    def sum(self, cost, layers):
        return sum(getattr(self.profile[name], cost) for name in layers)

    def crossing(self, cut):
        """Bytes of a cut's antichain as PipeDream has it."""
        before = {}
        for name in self.profile.order:
            direct = {a for a, b in self.profile.edges if b == name}
            before[name] = direct.union(*(before[a] for a in direct))
        edges = self.profile.edges
        last = [n for n in cut if not any(a == n and b in cut for a, b in edges)]
        through = {
            p
            for n in last
            for p in before[n]
            if any(a == p and b != n and b not in before[n] for a, b in edges)
        }
        return self.sum("output_bytes", through | set(last))

    def best(self):
        return self.span(len(self.workers) - 1, frozenset(), self.all)

    def span(self, level, begin, end):
        """Seconds of a span on one machine of the level outside `level`."""
        if level < 0:
            return self.sum("seconds", end - begin)
        key = (level, begin, end)
        if key not in self.known:
            self.known[key] = self.shortest(*key)
        return self.known[key]

    def shortest(self, level, begin, end):
        return min(
            (
                self.pipeline(level, list(itertools.pairwise(cuts)), counts)
                for cuts in self.chains(begin, end)
                for counts in compositions(self.workers[level], len(cuts) - 1)
            ),
            default=math.inf,
        )

    def chains(self, begin, end):
        yield [begin, end]
        for middle in self.sets:
            if begin < middle < end:
                yield from ([*head, end] for head in self.chains(begin, middle))

    def pipeline(self, level, stages, counts):
        inside = [self.span(level - 1, *stage) for stage in stages]
        return self.slowest(level, stages, counts, inside)

    def slowest(self, level, stages, counts, seconds):
        """Of one level's pipeline, from what each stage takes on one of its workers."""
        speed, found = self.bandwidths[level], 0.0
        inside = self.workers[level - 1] if level else 1
        if not self.replicate and max(counts) > 1:
            return math.inf
        for place, ((begin, end), r) in enumerate(zip(stages, counts, strict=True)):
            reduce = 4 * (r - 1) * self.sum("parameter_bytes", end - begin)
            reduce /= speed * r * (inside if place == 0 else 1)
            found = max(found, (seconds[place] + reduce) / r)
            if self.transfers and place:
                found = max(found, 2 * self.crossing(begin) / (speed * r))
                if end != self.all:
                    found = max(found, 2 * self.crossing(end) / (speed * r))
        return found

    def best_within(self, memory):
        """Of all plans written out, those whose every worker has memory enough."""
        top = len(self.workers) - 1
        return min(
            (
                seconds
                for seconds, stages in self.written_out(top, frozenset(), self.all)
                if all(
                    held * math.ceil(sum(r for _, r in stages[j:]) / own) <= memory
                    for j, (held, own) in enumerate(stages)
                )
            ),
            default=math.inf,
        )

    def written_out(self, level, begin, end):
        """Every plan of a span: its seconds, and bytes and workers of each stage."""
        if level < 0:
            held = self.sum("output_bytes", end - begin)
            held += self.sum("parameter_bytes", end - begin)
            held += self.crossing(begin) if begin else 0.0
            yield self.sum("seconds", end - begin), [(held, 1)]
            return
        for cuts in self.chains(begin, end):
            stages = list(itertools.pairwise(cuts))
            for counts in compositions(self.workers[level], len(stages)):
                inside = [list(self.written_out(level - 1, *s)) for s in stages]
                for chosen in itertools.product(*inside):
                    seconds = [time for time, _ in chosen]
                    flat = [
                        (held, own * r)
                        for (_, inner), r in zip(chosen, counts, strict=True)
                        for held, own in inner
                    ]
                    yield self.slowest(level, stages, counts, seconds), flat


def compositions(total, parts):
    """All ways to give `total` workers to `parts` stages, at least one each."""
    for bars in itertools.combinations(range(1, total), parts - 1):
        yield [b - a for a, b in itertools.pairwise([0, *bars, total])]


MACHINES = [((1,), (1.0,)), ((2,), (40.0,)), ((4,), (300.0,)), ((5,), (1e3,))]
TOWERS = [((2, 2), (200.0, 50.0)), ((3, 2), (1e3, 1e3)), ((2, 1, 2), (9.0, 5.0, 3e3))]


def distance(profile, workers, bandwidths, **rules):
    """Relative; both infinite counts as equal, and the planner says so."""
    brute = BruteForce(profile, workers, bandwidths, **rules)
    memory = rules.get("memory")
    expected = brute.best() if memory is None else brute.best_within(memory)
    if expected == math.inf:
        with pytest.raises(ValueError, match="must allow"):
            partition(profile, workers, bandwidths, **rules)
        return 0.0
    found = partition(profile, workers, bandwidths, **rules).bottleneck_time
    return abs(found / expected - 1)


@pytest.mark.parametrize("machine", [*MACHINES, *TOWERS], ids=str)
@pytest.mark.parametrize("transfers", [True, False])
def test_as_good_as_the_best_of_all_plans(machine, transfers, rng):
    """Chains and graphs of up to six layers, random costs."""
    for number in range(12):
        profile = random_profile(rng, layers=1 + number % 6, chain=number % 2 == 0)
        assert distance(profile, *machine, transfers=transfers) < 1e-12


def test_straight_pipelines_are_the_best_of_those(rng):
    for number in range(12):
        profile = random_profile(rng, layers=6, chain=number % 2 == 0)
        for workers in (1, 2, 4, 6, 7):
            machine = ((workers,), (100.0,))
            assert distance(profile, *machine, replicate=False) < 1e-12


@pytest.mark.parametrize(
    ("layers", "machine"),
    [
        (5, ((4,), (500.0,))),
        (4, ((2, 2), (500.0, 200.0))),
        (4, ((2, 3), (900.0, 300.0))),
        (3, ((2, 2, 2), (900.0, 300.0, 100.0))),
    ],
    ids=str,
)
def test_with_little_memory_the_best_of_what_fits(layers, machine, rng):
    """Limits from hopeless to generous; what is found fits, on every level's worker."""
    outcomes = set()
    for number in range(6):
        profile = random_profile(rng, layers=layers, chain=number % 2 == 0)
        total = sum(x.output_bytes + x.parameter_bytes for x in profile.layers)
        for memory in total * np.array([0.2, 0.51, 0.77, 1.01, 1.5, 2.3, 8.0]):
            assert distance(profile, *machine, memory=memory) < 1e-12
            try:
                plan = partition(profile, *machine, memory=memory)
            except ValueError:
                outcomes.add("none")
                continue
            outcomes.add(plan.configuration)
            assert max(plan.bytes_per_worker) <= memory
    assert "none" in outcomes
    assert len(outcomes) > 3


def test_a_limit_that_binds_changes_the_plan():
    profile = load_profile(PROFILES / "vgg16.txt")
    free = partition(profile, 4, 1e9)
    held = partition(profile, 4, 1e9, memory=max(free.bytes_per_worker) * 0.9)
    assert held.bottleneck_time > free.bottleneck_time
    assert max(held.bytes_per_worker) <= max(free.bytes_per_worker) * 0.9


def test_of_plans_that_take_equally_long_one_that_fits_is_read_back():
    """Of whose stages each holds what is in flight there; a worker may be full."""
    costs = [(3, 2, 1, 4), (3, 2, 11, 1), (2, 1, 1, 1), (3, 2, 8, 4)]
    layers = [
        Layer(f"l{i}", "", forward, backward, (float(output),), float(parameters))
        for i, (forward, backward, output, parameters) in enumerate(costs)
    ]
    plan = partition(Profile.chain(layers), 5, 1e9, memory=26.0)
    # As 2-1-1-1 takes as long, but 39 bytes.
    assert plan.configuration == "1-2-1-1"
    assert max(plan.bytes_per_worker) == 26
    last = [costs[int(stage.layers[-1][1:])] for stage in plan.stages]
    assert [stage.output_bytes for stage in plan.stages] == [
        sent for _, _, sent, _ in last
    ]


# --- what the figures mean ---


def test_without_communication_the_work_is_shared_evenly():
    """Free links and no weights: nothing is slower than its share."""
    layers = [Layer(f"l{i}", "", 1.0, 2.0, (0.0,), 0.0) for i in range(8)]
    plan = partition(Profile.chain(layers), (4, 2), (1e9, 1e9))
    assert plan.bottleneck_time == pytest.approx(3.0)
    assert plan.data_parallel_time == pytest.approx(3.0)


def test_heavy_weights_are_not_replicated_and_light_ones_are():
    """VGG's lesson: replicate convolutions, keep the classifier on one worker."""
    convolutions = [Layer(f"c{i}", "", 3.0, 6.0, (1.0,), 1.0) for i in range(3)]
    classifier = Layer("fc", "", 2.0, 4.0, (1.0,), 1e6)
    plan = partition(Profile.chain([*convolutions, classifier]), 6, 1e4)
    assert plan.configuration == "5-1"
    assert plan.stages[1].layers == ("fc",)


def test_paper_configurations_on_its_own_cluster():
    """ResNet-50 on 4 x 4: every server has all layers; VGG-16: three servers to one."""
    machine = ((4, 4), (12e9, 1.25e9))
    vgg = partition(load_profile(PROFILES / "vgg16.txt"), *machine)
    assert [len(stage.ranks) for stage in vgg.stages][:1] == [12]
    resnet = partition(load_profile(PROFILES / "resnet50.txt"), *machine)
    assert {len(stage.ranks) for stage in resnet.stages} == {4}
    assert [stage.ranks for stage in resnet.stages] == [
        (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    ]  # fmt: skip


# --- refusals ---


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"workers": (2, 2)}, r"a bandwidth for each level.*\(2, 2\) and \(1000"),
        ({"workers": (), "bandwidths": ()}, "at least one"),
        ({"workers": 0}, r"workers=...\).*at least 1. Got 0"),
        ({"workers": (2, 1.5), "bandwidths": (1.0, 1.0)}, r"integer.*Got 1.5"),
        ({"bandwidths": 0.0}, r"bandwidths=...\).*above 0"),
        ({"bandwidths": float("nan")}, r"bandwidths=...\).*above 0"),
        ({"memory": 0.0}, r"memory=...\).*above 0 bytes"),
        ({"memory": float("nan")}, r"memory=...\).*above 0 bytes"),
        ({"memory": 1.0}, r"all 2 workers.*3 layers, memory=1.0"),
        ({"workers": 4, "replicate": False}, r"all 4 workers.*replicate=False"),
    ],
)
def test_what_cannot_be_planned(arguments, match, rng):
    profile = random_profile(rng, layers=3, chain=True)
    with pytest.raises(ValueError, match=match):
        partition(profile, **{"workers": 2, "bandwidths": 1e3, **arguments})
