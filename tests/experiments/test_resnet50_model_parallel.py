"""The network that the experiment cuts, and what its claims rest on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import resnet50_model_parallel as job
from experiments._resnet import RESNET50, Network
from experiments._resnet_pictures import pictures
from experiments._resnet_runs import DEALT, JUDGED, ONE, PARALLEL, Found
from jdist.verify.report import LeafReport, Report

SMALL = Network((2, 1, 1, 1), 4, 7)


@pytest.fixture(autouse=True)
def _as_experiments_run():
    """With JAX's own defaults."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def test_parameters_of_the_original():
    """As many as everybody's; the cut puts most of them on the second device."""
    counts = [
        sum(leaf.size for leaf in jax.tree.leaves(params))
        for params in RESNET50.shapes().params
    ]
    assert sum(counts) == 25_557_032
    assert counts[0] == 1_444_928
    assert (str(RESNET50), str(SMALL)) == ("ResNet-50", "ResNet-17 of width 4")


def test_a_halved_image_at_each_group_and_twice_in_the_stem():
    made = RESNET50.shapes()
    x = jax.ShapeDtypeStruct((2, 128, 128, 3), jnp.float32)
    h, _ = jax.eval_shape(made.stages[0].fn, made.params[0], made.states[0], x)
    y, _ = jax.eval_shape(made.stages[1].fn, made.params[1], made.states[1], h)
    assert (h.shape, y.shape) == ((2, 16, 16, 512), (2, 1000))


def test_the_stages_in_turn_are_the_network(rng):
    """Outputs and statistics, of the stages as of the modules in one piece."""
    made = SMALL.stages(5)
    x = rng.normal(size=(3, 24, 24, 3)).astype(np.float32)

    @jax.jit
    def in_turn(params, states, x):
        h, front = made.stages[0].fn(params[0], states[0], x)
        y, back = made.stages[1].fn(params[1], states[1], h)
        return y, [front, back]

    @jax.jit
    def in_one_piece(params, states, x):
        both = nnx.eval_shape(lambda: nnx.List(SMALL.halves(nnx.Rngs(0))))
        for half, *given in zip(both, params, states, strict=True):
            for tree in given:
                nnx.update(half, tree)
        network = nnx.Sequential(*both)
        y = network(x)
        return y, [nnx.state(half, nnx.BatchStat) for half in both]

    given = made.params, made.states, x
    found, wanted = (jax.tree.leaves(run(*given)) for run in (in_turn, in_one_piece))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert found[0].shape == (3, 7)
    before = jax.tree.leaves(made.states)
    moved = [np.ptp(a - b) > 0 for a, b in zip(found[1:], before, strict=True)]
    assert all(moved)


def test_first_numbers_are_the_same_everywhere_and_of_the_right_size():
    first, second = (SMALL.stages(3).params for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.tobytes() == b.tobytes()
    kernel = np.asarray(
        first[1]["groups"]["layers"][0]["layers"][0]["middle"]["conv"]["kernel"][...]
    )
    assert kernel.shape == (3, 3, 16, 16)
    np.testing.assert_allclose(kernel.std(), np.sqrt(2 / (9 * 16)), rtol=0.05)


def test_other_parts_have_no_part_as_it_was():
    plan = job.QUICK
    first, dealt = plan.data()[0], plan.dealt()
    rows = [
        {x.tobytes() for x in part}
        for batch in (first, dealt)
        for part in np.split(batch["x"], plan.batch // plan.checked[0])
    ]
    assert set.union(*rows[:2]) == set.union(*rows[2:])
    assert all(part not in rows[2:] for part in rows[:2])


def told(seconds, best_size=True):
    claims = job.speed_claims(seconds, best_size=best_size)
    return [claim.holds for claim in claims]


def test_what_is_fast_and_what_is_not():
    seconds = {
        ONE: [3.0, 3.2], PARALLEL: [3.3, 3.5],
        "split 1": [4.0, 4.2], "split 12": [2.0, 2.2], "split 60": [2.5, 2.7],
    }  # fmt: skip
    assert told(seconds) == [True, True, True]
    assert told(seconds | {ONE: [2.0, 2.0]}) == [False, True, True]
    assert told(seconds | {PARALLEL: [2.0, 2.0]}) == [True, False, True]
    assert told(seconds | {"split 60": [1.9, 1.9]}) == [True, True, False]
    assert told(seconds | {"split 60": [1.9, 1.9]}, best_size=False) == [
        True,
        True,
        None,
    ]
    table = job.rows(seconds)
    assert table[2][3:] == ["0.91", "4.02 s, 0.93"]
    assert table[4][3:] == ["1.48", "2.43 s, 1.54"]
    made = pictures(seconds, "a network", 120)
    assert [p.name for p in made] == [
        "mp_vs_rn",
        "mp_vs_rn_vs_pp",
        "split_size_tradeoff",
    ]
    assert all(p.figure.axes for p in made)


def test_differences_are_seen():
    """A gradient beyond the bound, a control within it, a single bit of a run."""
    plan = job.QUICK
    array = np.float32([0.5, 0.25])
    off = np.nextafter(array, np.float32(1))

    def failing(ratios, trained):
        found = Found(
            {},
            {},
            {"split 4": [[array], [trained]]},
            {"split 4": [[array], [array]]},
            {},
        )
        rows = [
            LeafReport(name, "w", "float32", (2,), ratio=ratio)
            for name, ratio in zip((JUDGED, DEALT), ratios, strict=True)
        ]
        claims = list(job.equality_claims(plan, found, Report(tuple(rows)), exact=True))
        return [number for number, claim in enumerate(claims) if not claim.holds]

    assert failing((0.5, 70.0), array) == []
    assert failing((1.5, 70.0), array) == [0]
    assert failing((0.5, 0.9), array) == [1]
    assert failing((0.5, 70.0), off) == [2]
