"""What workers hold between two actions: promised, simulated, and alive in a run."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import pipeline
from jdist.pipeline import Costs, Schedule, simulate
from jdist.pipeline.run.action_timer import ActionTimer
from tests.pipeline.epochs import forward_only

# --- one action at a time ---


def book(schedule, worker, activation, pending):
    """The most that a worker holds, by a list of what it has not given back."""
    kept, most = {}, 0.0
    for kind, stage, micro in schedule.actions(worker):
        if kind == "F":
            kept[stage, micro] = activation[stage][micro]
        elif kind == "B":
            del kept[stage, micro]
            if schedule.split[stage, micro]:
                kept[stage, micro] = pending[stage][micro]
        else:
            del kept[stage, micro]
        most = max(most, sum(kept.values()))
    return most


FAMILIES = {
    "1F1B": lambda: pipeline.one_f_one_b(3, 7),
    "GPipe": lambda: pipeline.gpipe(3, 5),
    "ZB-H1": lambda: pipeline.zero_bubble(4, 7),
    "ZBV": lambda: pipeline.zbv(3, 6),
    "V-Half": lambda: pipeline.v_half(3, 6),
    "DualPipeV": lambda: pipeline.dualpipe_v(2, 6),
    "interleaved": lambda: pipeline.interleaved(2, 6, 2),
    "split drain": lambda: pipeline.split_drain(pipeline.one_f_one_b(4, 6)),
    "split drain of GPipe": lambda: pipeline.split_drain(pipeline.gpipe(3, 4)),
    "forward only": lambda: forward_only(2, 3),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_a_book_kept_by_hand(family, rng):
    """Sizes that differ for every stage and micro-batch."""
    schedule = FAMILIES[family]()
    shape = (schedule.stages, schedule.micro_batches)
    activation, pending = rng.integers(1, 1000, (2, *shape)).astype(float)
    costs = Costs(activation_bytes=activation, pending_bytes=pending)
    expected = tuple(
        book(schedule, w, activation, pending) for w in range(schedule.workers)
    )
    assert simulate(schedule, costs).activation_bytes == expected


def test_two_sizes_stand_for_what_is_not_given():
    """Twice the activations."""
    costs = Costs(activation_bytes=[3.0, 5.0])
    assert costs.pending_bytes.tolist() == [6.0, 10.0]


# --- what families hold ---


def test_a_split_drain_holds_one_micro_batch_more():
    """Cotangents of the first that it splits; worker 0 splits none."""
    for n, m in itertools.product(range(2, 6), repeat=2):
        found = pipeline.split_drain(pipeline.one_f_one_b(n, m)).validate()
        before = pipeline.one_f_one_b(n, m).peak_activations
        more = [0] + [1] * (n - 1)
        assert found.peak_activations == tuple(np.add(before, more))


def test_a_pending_weight_gradient_counts_its_cotangents():
    """ZB-H1's last worker defers weight gradients one by one."""
    order = [["0F0", "0B0", "0F1", "0B1", "0W0", "0W1"]]
    schedule = Schedule.of(order)
    assert (schedule.peak_in_flight, schedule.peak_activations) == ((1,), (4,))


# --- a run ---

ROWS = 3
HIDDEN = (11, 23, 17, 31)
"""A width of its own for each stage: what is alive is known by its shape."""
WIDTHS = (4, 6, 5, 7, 3)


def block(p, x):
    """Keeps one hidden array for its backward pass, and two for its weights'."""
    return jnp.tanh(x @ p["w"]) @ p["v"]


def losses(y, batch):
    return ((y - batch["t"]) ** 2).sum(-1)


class Census(ActionTimer):
    """Counts arrays that are alive after each action, in place of timing it."""

    def __init__(self, shapes, workers):
        super().__init__()
        self.shapes, self.workers = shapes, workers
        # Other tests may have left arrays of these shapes: in a cache, in a thread that
        # is about to end. Kept, or a new array could have the identity of one of them.
        self.before = {id(x): x for x in jax.live_arrays()}
        self.most = Counter()

    def time(self, worker, action, do, runs):
        super().time(worker, action, do, runs)
        arrays = (x for x in jax.live_arrays() if id(x) not in self.before)
        alive = Counter(x.shape for x in arrays)
        for rank in range(self.workers):
            own = sum(
                alive[s] * size for (r, s), size in self.shapes.items() if r == rank
            )
            self.most[rank] = max(self.most[rank], own)


def built(schedule, **options):
    """Stages of different widths, their parameters and a batch."""
    rng = np.random.default_rng(5)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    count = schedule.stages
    stages, params = [], []
    for j in range(count):
        mine = {name: own[j] for name, own in options.items()}
        names = (f"v{j}" if j else "x",), (f"v{j + 1}",)
        stages.append(pipeline.Stage(block, *names, **mine))
        v = normal(HIDDEN[j], WIDTHS[j + 1])
        params.append({"w": normal(WIDTHS[j], HIDDEN[j]), "v": v})
    rows = ROWS * schedule.micro_batches
    batch = {"x": normal(rows, WIDTHS[0]), "t": normal(rows, WIDTHS[count])}
    pipe = pipeline.Pipeline(stages, losses, schedule)
    return pipe, pipe.place(params), batch


def most_alive(pipe, params, batch, shapes):
    """Per worker, the most of arrays of some shapes, each counted for its size."""
    pipe.action_timer = census = Census(shapes, pipe.schedule.workers)
    pipe.value_and_grad(params, batch)
    return tuple(census.most[w] for w in range(pipe.schedule.workers))


RUNS = {
    "1F1B": lambda: pipeline.one_f_one_b(4, 6),
    "GPipe": lambda: pipeline.gpipe(3, 4),
    "ZB-H1": lambda: pipeline.zero_bubble(4, 6),
    "split drain": lambda: pipeline.split_drain(pipeline.one_f_one_b(4, 6)),
    "interleaved": lambda: pipeline.interleaved(2, 4, 2),
    "split drain of the interleaved": lambda: pipeline.split_drain(
        pipeline.interleaved(2, 4, 2)
    ),
    "looped BFS": lambda: pipeline.looped_bfs(2, 3, 2),
    "ZBV": lambda: pipeline.zbv(2, 5),
    "V-Half": lambda: pipeline.v_half(2, 5),
    "V-Min": lambda: pipeline.v_min(2, 5),
    "DualPipeV": lambda: pipeline.dualpipe_v(2, 5),
}


@pytest.mark.parametrize("family", RUNS)
def test_arrays_alive_are_those_that_the_simulator_counts(family):
    """JAX's own list of arrays; the sizes are known from the formula of the stage.

    tanh(x w) v keeps h = tanh(x w). Its weights' gradients need h and the cotangent of
    x w, as wide; the first stage, which sends none, makes that in W alone.
    """
    schedule = RUNS[family]()
    activation = np.array([ROWS * HIDDEN[j] * 4.0 for j in range(schedule.stages)])
    pending = 2 * activation
    pending[0] = activation[0]
    costs = Costs(activation_bytes=activation, pending_bytes=pending)
    found = simulate(schedule, costs)
    run = built(schedule)
    shapes = {
        (workers[0], (ROWS, HIDDEN[j])): activation[j]
        for j, workers in enumerate(schedule.placement)
    }
    assert most_alive(*run, shapes) == found.activation_bytes
    counted = most_alive(*run, dict.fromkeys(shapes, 1))
    pairs = list(zip(counted, found.peak_activations, strict=True))
    assert all(alive <= promised for alive, promised in pairs)
    assert any(alive == promised for alive, promised in pairs)


def test_outputs_are_not_kept_for_the_backward_pass():
    """The last stage's cotangents wait in GPipe, one for each micro-batch; not its
    outputs, which its backward pass does not need."""
    schedule = pipeline.gpipe(2, 5)

    assert most_alive(*built(schedule), {(1, (ROWS, WIDTHS[2])): 1}) == (0, 5)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_run_tells_what_other_schedules_hold(recompute):
    """Bytes of one run's stages, all arrays of them, foretell those of others."""
    split, whole = pipeline.zero_bubble(4, 6), pipeline.one_f_one_b(4, 6)
    kinds = {"recompute": [recompute] * 4}

    def held(schedule):
        pipe, params, batch = built(schedule, **kinds)
        return pipeline.timed(pipe, lambda: pipe.value_and_grad(params, batch))[1]

    run = held(split)
    costs = Costs.measured(run)
    assert simulate(split, costs).activation_bytes == run.activation_bytes
    for other in (whole, pipeline.split_drain(whole), pipeline.gpipe(4, 3)):
        assert simulate(other, costs).activation_bytes == held(other).activation_bytes


def test_sizes_of_a_stage_are_those_of_its_formula():
    """Input and hidden array; then these, the cotangents of both products."""
    run_of = pipeline.zero_bubble(3, 4)
    pipe, params, batch = built(run_of)
    run = pipeline.timed(pipe, lambda: pipe.value_and_grad(params, batch))[1]
    sides = [
        ROWS * 4 * np.array(x, float) for x in (WIDTHS[:3], HIDDEN[:3], WIDTHS[1:4])
    ]
    taken, hidden, put = sides
    assert run.stage_bytes.activation.tolist() == (taken + hidden).tolist()
    left = taken + 2 * hidden + put
    left[0] -= hidden[0]
    assert run.stage_bytes.pending.tolist() == left.tolist()


def test_a_pair_of_outputs_may_be_a_named_one():
    """Its cotangents come back in the same kind of tuple."""
    from typing import NamedTuple

    class Pair(NamedTuple):
        a: jax.Array
        b: jax.Array

    def two(w, x):
        return Pair(x * w, x + w)

    first = pipeline.Stage(two, ("x",), ("a", "b"))
    last = pipeline.Stage(lambda w, a, b: a * b * w, ("a", "b"), ("y",))
    pipe = pipeline.Pipeline([first, last], lambda y, batch: y, pipeline.gpipe(2, 2))
    params = [jnp.float32(2), jnp.float32(3)]
    _, grads = pipe.value_and_grad(params, {"x": np.array([1.0, 5.0], np.float32)})
    # y = 3 (2x)(x + 2): dy/dw at w = 2 is 3 (x (x + 2) + 2x).
    assert float(grads[0]) == np.mean([3 * (3 + 2), 3 * (35 + 10)])
