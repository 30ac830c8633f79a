"""Which part of a wrong step is named, by rows that say what failed and no more.

`test_attribution` runs trainers; here each rule has the few leaves that decide it.
"""

import math
from functools import partial

import jax
import numpy as np
import pytest

from jdist._tree import named_leaves
from jdist.verify.bound import EXTRA, Limit, confidence
from jdist.verify.evaluation.piecewise import Pieces
from jdist.verify.report import Attribution, LeafReport
from jdist.verify.steps.attribution import (
    COMPOSE,
    SHOW,
    STALE,
    UNKNOWN,
    Accumulator,
    _accumulators,
    _decay,
    _factor,
    attributed,
    attributed_of_whole,
    within,
)
from jdist.verify.steps.step_check import _hidden
from jdist.verify.steps.trajectory import Composed, Moment, limits_of

W, B = np.arange(6.0).reshape(2, 3), np.array([0.5, -0.25])


def moment(wanted, limits=None, before=None, **more):
    """A step of the reference of which only this is known."""
    every = dict.fromkeys(wanted, Limit(1e-6, 1.0)) | (limits or {})
    return Moment(before or {}, wanted, every, more.pop("moves", {}),
                  more.pop("sizes", {}), **more)  # fmt: skip


def rows(found, *failing):
    """A row for each leaf; those that fail say why."""
    return [
        LeafReport("mine", path, "float64", np.shape(x), ratio=9.0 * (path in failing),
                   problem=f"{path} is off" if path in failing else "")
        for path, x in found.items()
    ]  # fmt: skip


SHOWN = {
    "gradient/b": B, "gradient/w": W,
    "params/b": B, "params/w": W,
    "state/count": np.int32(3), "state/mu/w": W,
    "states/mean": B,
}  # fmt: skip


@pytest.mark.parametrize(
    ("failing", "parts"),
    [
        (
            ["gradient/w", "params/w", "state/mu/w"],
            [("gradient", "gradient/w: gradient/w is off")],
        ),
        (
            ["params/w", "state/mu/w"],
            [(
                "optimizer update",
                "its gradient is right; params/w: params/w is off; "
                "also wrong: state/mu/w",
            )],
        ),
        (
            ["state/count"],
            [(
                "optimizer update",
                "its gradient is right; state/count: state/count is off",
            )],
        ),
        (["states/mean"], [("model state", "states/mean: states/mean is off")]),
        (
            ["gradient/b", "states/mean"],
            [
                ("model state", "states/mean: states/mean is off"),
                ("gradient", "gradient/b: gradient/b is off"),
            ],
        ),
        (
            ["params/b", "states/mean"],
            [
                ("model state", "states/mean: states/mean is off"),
                (
                    "optimizer update",
                    "its gradient is right; params/b: params/b is off",
                ),
            ],
        ),
    ],
)  # fmt: skip
def test_a_shown_gradient_divides_the_blame(failing, parts):
    """A wrong gradient explains a wrong update; a right one condemns it."""
    found = attributed(rows(SHOWN, *failing), SHOWN, moment(SHOWN), 4)
    assert found == tuple(Attribution("mine", 4, *part) for part in parts)


def test_without_a_gradient_a_leaf_that_none_can_change_condemns_the_update():
    """Such as a count, whose limit is None; elsewhere the trainer is asked for it."""
    shown = {p: x for p, x in SHOWN.items() if not within(p, "gradient")}
    wanted = moment(SHOWN, {"state/count": None})
    (cause,) = attributed(rows(shown, "params/w", "state/count"), shown, wanted, 1)
    assert (cause.part, cause.why) == (
        "optimizer update",
        "state/count, which does not depend on the gradient, is wrong",
    )
    # Nothing can be read off a state of another shape, or with a leaf that is none.
    wanted = moment(SHOWN | {"state/mu/v": None})
    for part in ({"state/mu/w": W.T}, {"state/mu/v": W}):
        other = {**shown, **part}
        (cause,) = attributed(rows(other, "state/mu/w"), other, wanted, 2)
        assert cause.part == UNKNOWN
    assert cause.why == f"state/mu/w: state/mu/w is off. {SHOW}"


WHOLE = {
    "batch_stats/mean": B,
    "opt_state/0/count": np.int32(3),
    "opt_state/0/mu/b": B,
    "opt_state/0/mu/w": W,
    "params/b": B,
    "params/w": W,
    "rng": np.uint32(7),
}
OF_BATCH = {path: path not in ("opt_state/0/count", "rng") for path in WHOLE}


@pytest.mark.parametrize(
    ("failing", "part", "why"),
    [
        (["rng"], "rng", "rng: rng is off"),
        (
            ["batch_stats/mean"],
            "model state",
            "batch_stats/mean: batch_stats/mean is off",
        ),
        (
            ["params/w", "opt_state/0/count"],
            "optimizer update",
            "opt_state/0/count, which does not depend on the batch, is wrong",
        ),
        (
            ["params/b", "params/w"],
            UNKNOWN,
            f"params/b: params/b is off; also wrong: params/w. {COMPOSE}",
        ),
        (
            ["params/w", "opt_state/0/mu/w"],
            UNKNOWN,
            f"opt_state/0/mu/w: opt_state/0/mu/w is off; also wrong: params/w. "
            f"{COMPOSE}",
        ),
    ],
)
def test_of_a_whole_state_a_leaf_that_no_batch_makes_tells(failing, part, why):
    """Not a right moment: squares do not show a gradient's sign."""
    given = (rows(WHOLE, *failing), WHOLE, moment(WHOLE), 2)
    assert attributed_of_whole(OF_BATCH, *given) == (Attribution("mine", 2, part, why),)


# --- a gradient that is read off the optimizer's state ---

RATE, HEAVY = 0.1, 0.9


@pytest.fixture(scope="module")
def composed():
    """A step with momentum, of two leaves, and the limits of what it makes."""
    rng = np.random.default_rng(5)

    def leaves():
        return {"b": rng.normal(size=3), "w": rng.normal(size=(2, 3))}

    inputs = leaves(), leaves(), leaves()
    return composed_of(momentum, inputs), inputs


def composed_of(update, inputs):
    """A step of that update, of which all is known."""
    params, gradient, buffer = inputs
    program = jax.make_jaxpr(update)(*inputs)
    after = update(*inputs)
    tree = {"gradient": gradient, "params": after[0], "state": after[1]}
    wanted = {p: np.asarray(x) for p, x in named_leaves(tree).items()}
    before = named_leaves({"params": params, "state": buffer})
    old = {f"gradient/{x}": gradient[x][::-1] / 2 for x in gradient}
    limits = dict.fromkeys(wanted, Limit(np.float64(1e-9), 1.0))
    return Moment(
        before, wanted, limits, {}, {}, Composed(inputs, Pieces(program, None, {})), old
    )


def momentum(params, gradient, buffer):
    buffer = jax.tree.map(lambda m, g: HEAVY * m + g, buffer, gradient)
    return jax.tree.map(lambda p, m: p - RATE * m, params, buffer), buffer


def shown(params, buffer):
    tree = named_leaves({"params": params, "state": buffer})
    return {path: np.asarray(x) for path, x in tree.items()}


def inferred(own, found):
    """The part and the reason, for all leaves that are not the reference's."""
    wrong = [p for p, x in found.items() if np.abs(x - own.wanted[p]).max() > 1e-9]
    (cause,) = attributed(rows(found, *wrong), found, own, 3)
    return cause.part, cause.why


def test_a_wrong_gradient_is_read_off_the_state_and_described(composed):
    """The reference's update of that gradient is what was found."""
    own, (params, gradient, buffer) = composed
    doubled = gradient | {"w": 2 * gradient["w"]}
    part, why = inferred(own, shown(*momentum(params, doubled, buffer)))
    assert part == "gradient"
    assert why.startswith(
        "its optimizer state is the reference's update of another gradient, of w: off "
        "by "
    )
    assert why.endswith("; it is 2 times the reference")
    # Of several leaves the one that is off by most.
    both = {"b": 3 * gradient["b"], "w": 1.001 * gradient["w"]}
    _, why = inferred(own, shown(*momentum(params, both, buffer)))
    assert "of another gradient, of b: off by" in why
    assert why.endswith("; it is 3 times the reference")


def test_one_entry_a_few_bounds_away_is_another_gradient(composed):
    own, (params, gradient, buffer) = composed
    off = gradient["w"].copy()
    off[1, 2] += 5e-9
    found = shown(*momentum(params, gradient | {"w": off}, buffer))
    assert inferred(own, found)[0] == "gradient"
    # What is left of a parameter is within its bound, and a tenth of what it is off by.
    off[1, 2] += 5e-8
    after, buffer = momentum(params, gradient | {"w": off}, buffer)
    found = shown(after | {"w": after["w"] + 0.5e-9}, buffer)
    assert inferred(own, found)[0] == "gradient"


def test_a_leaf_that_no_state_remembers_leaves_no_gradient(composed):
    _, (params, gradient, buffer) = composed

    def partly(params, gradient, buffer):
        kept = {"b": HEAVY * buffer["b"] + gradient["b"]}
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradient), kept

    inputs = params, gradient, {"b": buffer["b"]}
    assert _accumulators(composed_of(partly, inputs)) is None


def test_squares_of_a_gradient_of_equal_entries_are_not_linear_in_it():
    """All their slopes are alike too, but not at two gradients."""

    def squares(params, gradient, buffer):
        buffer = jax.tree.map(lambda v, g: HEAVY * v + g**2, buffer, gradient)
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradient), buffer

    inputs = tuple({"w": np.full(3, x)} for x in (3.0, 2.0, 1.0))
    assert _accumulators(composed_of(squares, inputs)) is None
    assert list(_accumulators(composed_of(momentum, inputs))) == ["gradient/w"]


def test_a_gradient_of_the_step_before_is_called_stale(composed):
    own, (params, gradient, buffer) = composed
    late = gradient | {"w": own.stale["gradient/w"]}
    part, why = inferred(own, shown(*momentum(params, late, buffer)))
    assert part == "gradient"
    assert why.endswith(f"; it is the reference's {STALE}")


def test_a_right_state_condemns_the_update(composed):
    """The gradient that it was made of is the reference's."""
    own, given = composed
    after, buffer = momentum(*given)
    found = shown(after | {"w": after["w"] - 0.01}, buffer)
    assert inferred(own, found) == (
        "optimizer update",
        "its optimizer state is right; params/w: params/w is off",
    )


def test_a_decay_that_was_added_to_the_gradient_is_the_updates(composed):
    """Though the update of such a gradient is what was found."""
    own, (params, gradient, buffer) = composed
    added = jax.tree.map(lambda g, p: g + 0.05 * p, gradient, params)
    assert inferred(own, shown(*momentum(params, added, buffer))) == (
        "optimizer update",
        "as if a weight decay of 0.05 were added to the gradient of b, w",
    )


@pytest.mark.parametrize("rows_of_w", [slice(None), slice(1)])
def test_a_decay_of_parameters_or_of_some_rows_is_told(composed, rows_of_w):
    """One rate for all that is wrong, whether or not the gradient is shown."""
    own, (params, gradient, buffer) = composed
    after, state = momentum(params, gradient, buffer)
    after["w"][rows_of_w] -= 0.02 * params["w"][rows_of_w]
    told = "as if -0.02 times the parameters were added there (a weight decay)"
    found = shown(after, state)
    part, why = inferred(own, found)
    assert part == "optimizer update"
    assert why == f"its optimizer state is right; {told}; params/w: params/w is off"
    found |= {f"gradient/{name}": leaf for name, leaf in gradient.items()}
    part, why = inferred(own, found)
    assert part == "optimizer update"
    assert why == f"{told}; its gradient is right; params/w: params/w is off"


def test_a_parameter_that_is_missing_does_not_hide_a_decay(composed):
    """It is reported as missing; what is known of the others is still told."""
    own, (params, gradient, buffer) = composed
    after, state = momentum(params, gradient, buffer)
    after["w"] -= 0.02 * params["w"]
    found = shown(after, state)
    found |= {f"gradient/{name}": leaf for name, leaf in gradient.items()}
    failing = rows(found, "params/b", "params/w")
    del found["params/b"]
    (cause,) = attributed(failing, found, own, 3)
    assert cause.part == "optimizer update"
    assert cause.why.startswith("as if -0.02 times the parameters were added there")


def averages_of(share, params, gradient, averages):
    """Gradient descent, and an average that has this share of the new parameters."""
    params = jax.tree.map(lambda p, g: p - RATE * g, params, gradient)
    moved = jax.tree.map(lambda a, p: a + share * (p - a), averages, params)
    return params, moved


@pytest.mark.parametrize("share", [1.0, 0.3, 1e-4])
def test_averages_and_copies_of_the_parameters_are_no_accumulators(composed, share):
    """Also as single numbers, of which each is a multiple of any other."""
    _, given = composed
    one = jax.tree.map(lambda x: x.ravel()[:1], given)
    for inputs in (given, one):
        assert _accumulators(composed_of(partial(averages_of, share), inputs)) is None


def test_a_velocity_that_is_added_to_the_parameters_is_an_accumulator(composed):
    """As Keras keeps its momentum; its tangent is that of the parameters."""

    def update(params, gradient, velocity):
        step = lambda v, g: HEAVY * v - RATE * g  # noqa: E731
        velocity = jax.tree.map(step, velocity, gradient)
        return jax.tree.map(lambda p, v: p + v, params, velocity), velocity

    found = _accumulators(composed_of(update, composed[1]))
    assert {own.name for own in found.values()} == {"state/b", "state/w"}
    assert {own.factor for own in found.values()} == {-RATE}


def test_a_state_that_no_gradient_explains_leaves_it_open(composed):
    """Another gradient in the state, and parameters that it did not make."""
    own, (params, gradient, buffer) = composed
    after, state = momentum(params, gradient | {"w": 2 * gradient["w"]}, buffer)
    found = shown(after | {"w": after["w"] + 0.3 * after["w"][::-1]}, state)
    part, why = inferred(own, found)
    told = f"params/w: params/w is off; also wrong: state/w. {SHOW}"
    assert (part, why) == (UNKNOWN, told)
    # To a hundredth of what is to be explained it is rounding of the trainer.
    nearly = shown(after | {"w": after["w"] + 1e-5 * after["w"][::-1]}, state)
    assert inferred(own, nearly)[0] == "gradient"


def test_several_wrong_parts_are_named_in_the_order_of_the_state():
    found = rows(WHOLE, "rng", "batch_stats/mean", "params/w")
    causes = attributed_of_whole(OF_BATCH, found, WHOLE, moment(WHOLE), 1)
    assert [cause.part for cause in causes] == [
        "model state", "rng", UNKNOWN,
    ]  # fmt: skip


def test_a_leaf_is_in_a_part_by_whole_names():
    paths = ("state", "state/mu", "states/mean", "own/state")
    assert [within(path, "state") for path in paths] == [True, True, False, False]


# --- the numbers behind it ---


@pytest.mark.parametrize("factor", [0.1, -3.0, 1e-9])
def test_a_tangent_of_one_factor_is_an_accumulators(rng, factor):
    """To twelve digits, in every entry, and not of another shape or none at all."""
    along = rng.uniform(1, 2, size=(3, 2))
    assert _factor(factor * along, along) == pytest.approx(factor, rel=1e-11)
    assert _factor(factor * along * (1 + 1e-14), along) == _factor(
        factor * along, along
    )
    uneven = factor * along
    uneven[2, 1] *= 1 + 1e-9
    assert _factor(uneven, along) is None
    assert _factor(0 * along, along) is None
    assert _factor(np.where(along == along[0, 0], 0, along), along) is None
    assert _factor(factor * along.T, along) is None
    assert _factor(along, np.where(along == along[0, 0], 0, along)) is None
    assert _factor(np.zeros((0, 2)), np.zeros((0, 2))) is None


def test_the_gradient_is_read_off_an_accumulator_with_its_bound(rng):
    """What was added to it, over the factor."""
    gradient, old = rng.normal(size=(2, 3, 2))
    own = Accumulator("state/mu/w", -0.1, 0.9 * old)
    state = {"state/mu/w": 0.9 * old - 0.1 * gradient}
    np.testing.assert_allclose(own.gradient(state), gradient, rtol=1e-12)
    limit = {"state/mu/w": Limit(np.full((3, 2), 2e-6), 1.0)}
    bound = own.bound(moment({"state/mu/w": gradient}, limit))
    np.testing.assert_allclose(bound, np.full((3, 2), 2e-5), rtol=1e-12)


def test_a_decay_is_one_rate_for_all_leaves(rng):
    """The same multiple of the parameters in each, and nothing beside it."""
    params = {"params/b": rng.normal(size=2), "params/w": rng.normal(size=(2, 3))}
    step = moment({}, before=params)

    def added(b, w, noise=0.0):
        return {
            "gradient/b": b * params["params/b"],
            "gradient/w": w * params["params/w"] + noise * rng.normal(size=(2, 3)),
        }

    assert _decay(added(0.25, 0.25), step) == pytest.approx(0.25, rel=1e-12)
    assert _decay(added(0.25, 0.2505), step) == pytest.approx(0.25, rel=1e-2)
    assert _decay(added(0.25, 0.26), step) is None
    assert _decay(added(0.25, 0.25, noise=0.1), step) is None
    # A part beside the multiple, at right angles to it, does not move the factor.
    other = rng.normal(size=(2, 3))
    own = params["params/w"]
    other -= np.vdot(own, other) / np.vdot(own, own) * own
    for size, rate in ((1e-5, 0.25), (0.02, None)):
        extra = {"gradient/w": 0.25 * own + size * other}
        assert _decay(extra, step) == (rate and pytest.approx(rate, rel=1e-12))
    # Of one number any other is a multiple; of zeros none is.
    single = moment({}, before={"params/b": np.array([2.0])})
    assert _decay({"gradient/b": np.array([0.5])}, single) is None
    still = moment({}, before={"params/b": np.zeros(2)})
    assert _decay({"gradient/b": np.array([0.5, 1.0])}, still) is None


# --- limits of a step ---

STEPS, START = 9, np.array([4.0, -2.0])


def limits(**parts):
    """The limit of a float32 leaf that goes from START to WANTED in STEPS steps."""
    given = {
        "wanted": np.float32([6.0, -2.0]), "exact": np.array([6.0, -2.0]),
        "others": np.zeros((3, 2)), "origin": START, "before": START,
        "sizes": np.zeros(2), "steps": STEPS,
    } | parts  # fmt: skip
    wide = np.stack([given["exact"], *(given["exact"] + given["others"])])
    found, moves = limits_of(
        {"params/w": given["wanted"], "state/count": np.int32(3), "states/none": None},
        [wide],
        ([given["origin"]], [given["before"]]),
        [given["sizes"]],
        given["steps"],
    )
    assert (found["state/count"], found["states/none"]) == (None, None)
    assert list(moves) == ["params/w"]
    return found["params/w"], moves["params/w"]


def rounded(way, steps=STEPS):
    """By the formula: sqrt(steps) roundings of the leaf, and of the way it went."""
    own = np.array([6.0, 2.0]) + math.sqrt(2 * EXTRA) * np.asarray(way)
    tiny = float(np.finfo(np.float32).smallest_normal)
    return confidence(2) * math.sqrt(steps) * 2.0**-24 * own + EXTRA * tiny


def test_each_part_of_a_steps_limit():
    """What right trainers reach, the reference's own error, and the roundings."""
    limit, moves = limits()
    np.testing.assert_allclose(limit.bound, rounded([2.0, 0.0]), rtol=1e-12)
    np.testing.assert_array_equal(moves, [2.0, 0.0])
    apart = np.array([[1e-3, 0.0], [-4e-3, 1e-3], [2e-3, -2e-3]])
    limit, _ = limits(others=apart)
    wanted = rounded([2.0, 0.0]) + math.sqrt(2) * np.array([4e-3, 2e-3])
    np.testing.assert_allclose(limit.bound, wanted, rtol=1e-9)
    limit, _ = limits(exact=np.array([6.0, -2.0 - 1e-3]))
    wanted = rounded([2.0, 1e-3]) + np.array([0.0, 2e-3])
    np.testing.assert_allclose(limit.bound, wanted, rtol=1e-6)


def test_the_way_is_the_longer_of_the_whole_and_the_last_step():
    """A step may lead back to the start, and has rounded all the same."""
    limit, moves = limits(before=np.array([5.0, 3.0]))
    np.testing.assert_allclose(limit.bound, rounded([2.0, 5.0]), rtol=1e-12)
    np.testing.assert_array_equal(moves, [1.0, -5.0])
    limit, _ = limits(origin=np.array([9.0, -2.5]), steps=4)
    np.testing.assert_allclose(limit.bound, rounded([3.0, 0.5], 4), rtol=1e-12)


def test_the_size_of_a_leaf_is_at_least_its_own():
    limit, _ = limits(sizes=np.array([7.0, 0.5]))
    np.testing.assert_array_equal(limit.size, [7.0, 2.0])


@pytest.mark.parametrize(
    ("move", "bound", "size", "hidden"),
    [
        ([1e-6, 0.0], 1e-5, [0.0, 0.0], True),
        ([1e-6, 0.0], 1e-5, [1e-5, 0.0], True),
        ([1e-6, 0.0], 1e-5, [8e-5, 0.0], False),
        ([1e-6, 1e-6], 1e-5, [8e-5, 7e-5], True),
        ([1e-6, 2e-5], 1e-5, [0.0, 0.0], False),
        ([1e-5, 0.0], 1e-5, [0.0, 0.0], True),
        ([0.0, 0.0], 1e-5, [0.0, 0.0], False),
    ],
)
def test_a_step_is_hidden_where_no_step_would_pass(move, bound, size, hidden):
    """Unless it does not move at all, or its terms cancel and are far above."""
    path, move = "params/w", np.array(move)
    step = moment(
        {path: START}, {path: Limit(np.full(2, bound), 1.0)},
        moves={path: move}, sizes={path: np.array(size)},
    )  # fmt: skip
    right = LeafReport("mine", path, "float64", (2,), max_ulp=1.0, ratio=0.5)
    found = _hidden(right, step)
    if hidden:
        assert found.unjudged == (
            f"its largest step is {move.max():.1e} and rounding explains {bound:.1e}: "
            "no step at all would pass too"
        )
        assert not found.ok
    else:
        assert found is right
    # What is equal bit for bit, or wrong, keeps its verdict.
    same = LeafReport("mine", path, "float64", (2,), max_ulp=0.0, ratio=0.0)
    wrong = LeafReport("mine", path, "float64", (2,), ratio=3.0, problem="off")
    assert _hidden(same, step) is same
    assert _hidden(wrong, step) is wrong
