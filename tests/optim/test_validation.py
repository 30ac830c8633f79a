"""Every refusal names the argument, the rule and the value that was given."""

import ast
import inspect
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim
from jdist.optim.internal import all_finite
from tests.optim.cases import ALGORITHMS, BY_NAME, MATRICES
from tests.wrong_types import FOREIGN, Tensor

EACH = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
AT_LEAST_0 = "must be at least 0"
BELOW_1 = "must be at least 0 and below 1"
UP_TO_1 = "must be at least 0 and at most 1"
# What torch.optim refuses, and for pairs each entry.
REFUSED = {
    "sgd": {
        "lr": [(-1e-3, AT_LEAST_0)],
        "momentum": [(-0.5, AT_LEAST_0)],
        "weight_decay": [(-1.0, AT_LEAST_0)],
        "dampening": [(float("nan"), "must be a number")],
    },
    "adam": {
        "lr": [(-1.0, AT_LEAST_0), (float("nan"), AT_LEAST_0)],
        "eps": [(-1e-8, AT_LEAST_0)],
        "weight_decay": [(-0.1, AT_LEAST_0)],
        "betas[0]": [(1.0, BELOW_1), (-0.1, BELOW_1)],
        "betas[1]": [(1.5, BELOW_1), (-0.1, BELOW_1)],
    },
    "adagrad": {
        "lr": [(-1.0, AT_LEAST_0)],
        "lr_decay": [(-1.0, AT_LEAST_0)],
        "weight_decay": [(-1.0, AT_LEAST_0)],
        "initial_accumulator_value": [(-1.0, AT_LEAST_0)],
        "eps": [(-1.0, AT_LEAST_0)],
    },
    "adadelta": {
        "lr": [(-1.0, AT_LEAST_0)],
        "rho": [(1.1, UP_TO_1), (-0.1, UP_TO_1)],
        "eps": [(-1.0, AT_LEAST_0)],
        "weight_decay": [(-1.0, AT_LEAST_0)],
    },
    "rmsprop": {
        "lr": [(-1.0, AT_LEAST_0)],
        "alpha": [(-1.0, AT_LEAST_0)],
        "eps": [(-1.0, AT_LEAST_0)],
        "weight_decay": [(-1.0, AT_LEAST_0)],
        "momentum": [(-1.0, AT_LEAST_0)],
    },
    "rprop": {
        "lr": [(-1.0, AT_LEAST_0)],
        "etas[0]": [(0.0, "must be above 0 and below 1"), (1.0, "below 1")],
        "etas[1]": [(1.0, "must be above 1")],
        "step_sizes[0]": [(-1.0, AT_LEAST_0)],
        "step_sizes[1]": [(-1.0, AT_LEAST_0)],
    },
    "asgd": {
        "lr": [(-1.0, AT_LEAST_0)],
        "weight_decay": [(-1.0, AT_LEAST_0)],
        "lambd": [(float("nan"), "must be a number")],
        "alpha": [(float("nan"), "must be a number")],
        "t0": [(float("nan"), "must be a number")],
    },
}
REFUSED["adafactor"] = {
    "lr": [(-1.0, AT_LEAST_0)],
    "beta2_decay": [(0.1, "must be at most 0")],
    "eps[0]": [(-1.0, "must be at least 0, or None")],
    "eps[1]": [(-1.0, AT_LEAST_0)],
    "d": [(0.9, "must be at least 1")],
    "weight_decay": [(-1.0, AT_LEAST_0)],
}
REFUSED["muon"] = {
    "lr": [(-1.0, AT_LEAST_0)],
    "weight_decay": [(-1.0, AT_LEAST_0)],
    "momentum": [(-0.1, AT_LEAST_0)],
    "eps": [(-1e-8, AT_LEAST_0)],
} | {f"ns_coefficients[{i}]": [(float("nan"), "must be a number")] for i in range(3)}
REFUSED["adamw"] = REFUSED["adamax"] = REFUSED["adam"]
REFUSED["radam"] = REFUSED["adam"]
REFUSED["nadam"] = REFUSED["adam"] | {"momentum_decay": [(-1.0, AT_LEAST_0)]}
RANGES = [
    (name, argument, value, rule)
    for name, arguments in REFUSED.items()
    for argument, cases in arguments.items()
    for value, rule in cases
]


def given(name, argument, value):
    """The keyword for `betas[1]` is the whole pair."""
    key, bracket, rest = argument.partition("[")
    if not bracket:
        return {key: value}
    several = list(
        {
            "betas": (0.9, 0.999),
            "etas": (0.5, 1.2),
            "step_sizes": (0.1, 1.0),
            "eps": (None, 1e-3),
            "ns_coefficients": (2.0, -1.5, 0.5),
        }[key]
    )
    several[int(rest[0])] = value
    return {key: tuple(several)}


def message(call, rule, value):
    return (
        re.escape(f"`{call}=...)` ")
        + f".*{re.escape(rule)}"
        + re.escape(f". Got {value!r}.")
    )


def test_every_number_of_every_optimizer_has_a_case():
    for algorithm in ALGORITHMS:
        specs = algorithm().hyperparameters.values()
        numbers = {
            spec.name if len(spec.rules) == 1 else f"{spec.name}[{index}]"
            for spec in specs
            for index in range(len(spec.rules))
        }
        assert numbers == set(REFUSED[algorithm.name])


@pytest.mark.parametrize(("name", "argument", "value", "rule"), RANGES)
def test_out_of_range_is_refused_at_construction(name, argument, value, rule):
    with pytest.raises(ValueError, match=message(f"{name}({argument}", rule, value)):
        BY_NAME[name](**given(name, argument, value))


@pytest.mark.parametrize(("name", "argument", "value", "rule"), RANGES)
def test_out_of_range_is_refused_in_a_step(name, argument, value, rule):
    """As an override and as the value of a schedule, where it can be seen."""
    keywords = given(name, argument, value)
    params = jnp.array([[1.0, 2.0]])
    # Without a momentum there is no buffer, without an lr_decay no count.
    needed = {"momentum": 0.5, "lr_decay": 0.1}
    opt = BY_NAME[name](**{k: v for k, v in needed.items() if k == argument})
    call = f"{name}.step({argument}"
    if opt.hyperparameters[next(iter(keywords))].fixed:
        call, rule = f"{name}.step({argument}", "cannot be overridden in a step: only"
        with pytest.raises(ValueError, match=re.escape(f"`{call}=...)` {rule}")):
            opt.step(params, params, opt.init(params), **keywords)
        return
    with pytest.raises(ValueError, match=message(call, rule, value)):
        opt.step(params, params, opt.init(params), **keywords)
    scheduled = jax.tree.map(lambda v: lambda count: v, keywords)  # None stays None
    opt = BY_NAME[name](**scheduled)
    with pytest.raises(ValueError, match=message(call, rule, value)):
        opt.step(params, params, opt.init(params))


def test_a_traced_hyperparameter_cannot_be_refused():
    """It has no value yet; the step is made with it."""
    params = jnp.array([1.0, 2.0])
    opt = optim.sgd()
    new, _ = jax.jit(opt.step)(params, params, opt.init(params), lr=-1.0)
    np.testing.assert_array_equal(new, params * 2)


@pytest.mark.parametrize("value", ["0.1", None, True, [0.1], 1j])
@EACH
def test_the_wrong_kind_is_refused(algorithm, value):
    call = f"`{algorithm.name}(lr=...)` must be a number, a scalar array or a schedule"
    with pytest.raises(TypeError, match=re.escape(call)):
        algorithm(lr=value)


def test_a_text_is_shown_as_one():
    """`lr="0.1"` looks like a number without its quotes."""
    with pytest.raises(
        TypeError, match=r"Got '0\.1'\. `float` converts it to a number"
    ):
        optim.sgd(lr="0.1")
    with pytest.raises(TypeError, match=r"betas\[0\]=.*Got '0\.9'\. `float` converts"):
        optim.adam(betas=("0.9", 0.99))
    with pytest.raises(TypeError, match=r"betas=.*must be a sequence.*Got '0\.9'\."):
        optim.adam(betas="0.9")


@EACH
def test_flags_are_bools_and_no_numbers(algorithm):
    opt, params = algorithm(), jnp.array([[1.0, 2.0]])
    name = "nesterov" if algorithm.name == "muon" else "maximize"
    with pytest.raises(TypeError, match=rf"\({name}=...\)` must be True or False"):
        algorithm(**{name: 1})
    with pytest.raises(TypeError, match=r"must be True or False\. Got 'False'\."):
        algorithm(**{name: "False"})
    with pytest.raises(ValueError, match=rf"\({name}=...\)` cannot be overridden"):
        opt.step(params, params, opt.init(params), **{name: True})


@pytest.mark.parametrize("value", [0.9, (0.9,), (0.9, 0.99, 0.999), None])
@pytest.mark.parametrize("name", ["adam", "adamw", "adamax", "nadam", "radam"])
def test_pairs_are_pairs(name, value):
    with pytest.raises(TypeError, match=r"\(betas=...\)` must be a sequence of 2"):
        BY_NAME[name](betas=value)


def test_hyperparameters_are_scalars():
    remedy = r"must be a scalar. Got an array of shape \(2,\). .* use `by_label`"
    with pytest.raises(ValueError, match=remedy):
        optim.adam(lr=jnp.array([0.1, 0.2]))


def test_nesterov_needs_momentum_and_no_dampening():
    with pytest.raises(ValueError, match=r"momentum=...\)` must be above 0 with nest"):
        optim.sgd(nesterov=True)
    with pytest.raises(ValueError, match=r"dampening=...\)` must be 0 with nesterov"):
        optim.sgd(nesterov=True, momentum=0.9, dampening=0.1)
    opt, params = optim.sgd(nesterov=True, momentum=0.9), jnp.array([1.0])
    with pytest.raises(ValueError, match=r"step\(dampening=...\)` must be 0 with nes"):
        opt.step(params, params, opt.init(params), dampening=0.5)


@pytest.mark.parametrize("name", ["sgd", "rmsprop"])
def test_momentum_needs_its_buffer(name):
    opt, params = BY_NAME[name](), jnp.array([1.0])
    with pytest.raises(ValueError, match="built with momentum 0, it keeps no buffer"):
        opt.step(params, params, opt.init(params), momentum=0.9)


@pytest.mark.parametrize("value", [None, 1e-3, (1e-3,), (None, None), ("1", 1e-3)])
def test_the_eps_of_adafactor_are_two_of_which_one_may_be_none(value):
    with pytest.raises(TypeError, match=r"adafactor\(eps(\[.\])?=...\)` must be a "):
        optim.adafactor(eps=value)


def test_what_chooses_the_program_of_muon():
    for value in (-1, 100):
        rule = rf"muon\(ns_steps=...\)` must be a number of it.*than 100\. Got {value}"
        with pytest.raises(ValueError, match=rule):
            optim.muon(ns_steps=value)
    with pytest.raises(TypeError, match=r"ns_steps=.*fewer than 100, an integer"):
        optim.muon(ns_steps=5.0)
    with pytest.raises(
        ValueError, match=r"adjust_lr_fn=.* one of None, 'original', 'm"
    ):
        optim.muon(adjust_lr_fn="adamw")
    with pytest.raises(TypeError, match=r"ns_coefficients=.* a sequence of 3 numbers"):
        optim.muon(ns_coefficients=(2.0, -1.5))
    opt, params = optim.muon(), jnp.ones((2, 3))
    with pytest.raises(TypeError, match="has no hyperparameter 'ns_steps' to override"):
        opt.step(params, params, opt.init(params), ns_steps=3)


def test_no_positional_hyperparameters():
    """torch's positions differ between its two families; names cannot be confused."""
    for algorithm in ALGORITHMS:
        make, name = getattr(optim, algorithm.name), algorithm.name
        for lr in (0.1, np.float32(0.3), jnp.ones(()), lambda count: 0.1 / (1 + count)):
            match = (
                rf"^`{name}\(\.\.\.\)` takes .* by name\. Got .*`{name}\(lr=\.\.\.\)`"
            )
            with pytest.raises(TypeError, match=match):
                make(lr)
        match = rf"by name\. Got a list\. Parameters .* `{name}\(\.\.\.\)\.init\(params"
        with pytest.raises(TypeError, match=match):
            make([jnp.ones(3)], lr=0.1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"learning_rate": 0.1},
            r"'learning_rate'\. Got learning_rate=0\.1\. Say `lr=`\.$",
        ),
        ({"weight_decy": 0.1}, r"'weight_decy'\. .* Say `weight_decay=`\.$"),
        ({"fused": True}, r"'fused'\. Got fused=True\. It has lr, .*weight_decay"),
        ({"lr": 0.1, "foo": 2}, r"'foo'\. Got foo=2\. It has lr, "),
    ],
)
def test_names_of_other_packages_are_answered_with_torchs(given, said):
    # Those that have a weight decay, which is all but one.
    for algorithm in ALGORITHMS:
        if algorithm.name == "rprop" and "weight" in said:
            continue
        with pytest.raises(TypeError, match=f"^`{algorithm.name}` has no .*{said}"):
            getattr(optim, algorithm.name)(**given)
    for name in ("b1", "b2", "beta1"):
        with pytest.raises(
            TypeError, match=rf"hyperparameter '{name}'\..*Say `betas=`"
        ):
            optim.adamw(**{name: 0.9})


def test_an_override_by_another_packages_name():
    opt, w = optim.sgd(lr=0.1), jnp.ones(3)
    match = r"^`sgd\.step` has no .*'learning_rate' to override\. .* Say `lr=`\.$"
    with pytest.raises(TypeError, match=match):
        opt.step(w, w, opt.init(w), learning_rate=0.2)


def test_a_constructor_keeps_its_signature():
    """For `help`, editors and the reference."""
    for algorithm in ALGORITHMS:
        make = getattr(optim, algorithm.name)
        assert next(iter(inspect.signature(make).parameters)) == "lr"
        assert make.__module__ == f"jdist.optim.algorithms.{algorithm.name}"
        assert make.__doc__


# --- trees ---


@EACH
def test_what_does_not_fit_is_refused(algorithm):
    opt = algorithm()
    shape = (1, 1) if algorithm.shapes == MATRICES else ()
    params = {"w": jnp.array([[1.0, 2.0]]), "b": jnp.ones(shape)}
    state = opt.init(params)
    name = algorithm.name
    with pytest.raises(ValueError, match=rf"{name}.init\(params\)` must have at least"):
        opt.init({})
    with pytest.raises(ValueError, match=r"grads=...\)` must have the structure of pa"):
        opt.step(params, {"w": params["w"]}, state)
    with pytest.raises(ValueError, match=r"state=...\)` must have the structure of pa"):
        opt.step(params, params, {"w": state["w"]})
    with pytest.raises(ValueError, match=r"at w, float64 of shape \(1, 2\). Got .*\(2"):
        opt.step(params, params | {"w": jnp.zeros(2)}, state)
    rule = re.escape(f"at b, float64 of shape {shape}. Got float32 o")
    with pytest.raises(ValueError, match=rule):
        opt.step(params, params | {"b": jnp.zeros(shape, jnp.float32)}, state)
    with pytest.raises(ValueError, match=rf"what `{name}.init` or .* returned, at b"):
        opt.step(params, params, state | {"b": None})
    with pytest.raises(TypeError, match=r"no hyperparameter 'rate' .* It has .*lr"):
        opt.step(params, params, state, rate=0.1)


def test_the_state_of_another_optimizer_is_refused():
    params = jnp.array([1.0])
    state = optim.adam().init(params)
    for other in (optim.adam(amsgrad=True), optim.sgd(momentum=0.9)):
        with pytest.raises(ValueError, match=r"step\(state=...\)` must hold what"):
            other.step(params, params, state)


def test_a_rule_returns_an_update():
    """The new parameter itself would be added to the old one."""

    class Count(NamedTuple):
        step: jax.Array

    def made(step_leaf):
        return optim.leafwise(
            "mine",
            [optim.Hyperparameter("lr", 0.25)],
            lambda p: Count(jnp.zeros((), jnp.int32)),
            step_leaf,
        )

    params = jnp.array([1.0, -2.0])
    old = made(lambda p, g, s, h: (p - h.lr * g, Count(s.step + 1)))
    expected = r"`mine: step_leaf` must return an `Update` of the parameter and its new"
    with pytest.raises(TypeError, match=expected):
        old.step(params, params, old.init(params))
    new = made(lambda p, g, s, h: (optim.Update(-h.lr * g, 0.5), Count(s.step + 1)))
    found, state = new.step(params, params, new.init(params))
    updates, again = new.updates(params, params, new.init(params))
    np.testing.assert_array_equal(found, params * 0.5 - 0.25 * params)
    np.testing.assert_array_equal(updates, -0.25 * params - 0.5 * params)
    assert state.step == again.step == 1


def test_updates_refuse_what_a_step_refuses():
    opt, params = optim.sgd(), {"w": jnp.ones(2)}
    state = opt.init(params)
    with pytest.raises(ValueError, match=r"sgd.step\(grads=...\)` must match its par"):
        opt.updates(params, {"w": jnp.ones(3)}, state)
    with pytest.raises(TypeError, match="has no hyperparameter 'eps' to override"):
        opt.updates(params, params, state, eps=1.0)


def mixed():
    return optim.with_master_weights(optim.sgd(), loss_scale=8.0)


PARAMS = {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.zeros(2, jnp.bfloat16)}


@pytest.mark.parametrize("loss", [None, "1", 1, {}, jnp.arange(2)])
def test_a_loss_to_scale_is_floating(loss):
    opt = mixed()
    with pytest.raises(TypeError, match=r"scale_loss\(loss\)` must be a floating num"):
        opt.scale_loss(loss, opt.init(PARAMS))


@pytest.mark.parametrize("state", [None, {}, optim.sgd().init(PARAMS)])
def test_a_state_without_masters(state):
    with pytest.raises(ValueError, match=r"scale_loss\(state\)` must be what `init`"):
        mixed().scale_loss(jnp.float32(1), state)
    with pytest.raises(ValueError, match=r"all_finite\(state\)` must be what `init`"):
        all_finite(PARAMS, PARAMS, state)


@pytest.mark.parametrize("tree", [None, {"w": 1.0}, [1.0, 2.0]])
def test_finite_gradients_of_other_trees(tree):
    state = mixed().init(PARAMS)
    with pytest.raises(ValueError, match=r"all_finite\(grads=.* structure of params"):
        all_finite(PARAMS, tree, state)
    with pytest.raises(ValueError, match=r"all_finite\(grads=.* structure of params"):
        all_finite(tree, PARAMS, state)


@pytest.mark.parametrize("dtype", [None, 16, "float33", {"w": "f4"}, ["f4"], jnp.ones])
def test_the_dtype_of_copies(dtype):
    rule = "must be a real floating dtype. Got "
    with pytest.raises(TypeError, match=r"compute_copies\(dtype\)` " + rule):
        optim.compute_copies(PARAMS, dtype)
    with pytest.raises(TypeError, match=r"weights\(compute_dtype=...\)` " + rule):
        optim.with_master_weights(optim.sgd(), compute_dtype=dtype)
    with pytest.raises(ValueError, match=rule + "int32"):
        optim.compute_copies(PARAMS, jnp.int32)


@pytest.mark.parametrize("rule", [None, 3, "rule"])
def test_the_rules_of_a_leaf_are_functions(rule):
    for name in ("init_leaf", "step_leaf"):
        given = {"init_leaf": lambda p: (), "step_leaf": lambda p, g, s, h: None}
        with pytest.raises(TypeError, match=rf"leafwise\({name}\)` must be a function"):
            optim.leafwise("own", [], **given | {name: rule})


def test_a_flag_may_be_a_comparison_of_numpy():
    assert optim.sgd(momentum=0.9, nesterov=np.float32(2) > 1).name == "sgd"


@pytest.mark.parametrize("params", [3, np.arange(2), {"w": 1.0, "n": 3}])
def test_a_tree_is_no_gradient_of_an_integer(params):
    """As where the arguments of a step were mixed up."""
    opt, tree = optim.sgd(lr=0.1), {"a": 1.0}
    grads = {"w": 1.0, "n": tree} if isinstance(params, dict) else tree
    with pytest.raises(
        ValueError, match=r"sgd.step\(grads=.* must have a leaf or None"
    ):
        opt.step(params, grads, opt.init(params))


W = {"w": jnp.ones(2), "name": "text"}
OTHER = {"w": Tensor(2), "name": "text"}
ADAM = optim.adam()
MASTERS = optim.with_master_weights(optim.sgd())


def started():
    return ADAM.init(W)


@pytest.mark.parametrize(
    ("named", "call"),
    {
        r"adam.init\(params\)": lambda: ADAM.init(OTHER),
        r"adam.step\(params=...\)": lambda: ADAM.step(OTHER, W, started()),
        r"adam.step\(grads=...\)": lambda: ADAM.step(W, OTHER, started()),
        r"adam.step\(grads=...\) ": lambda: ADAM.updates(W, OTHER, started()),
        r"adam.step\(state=...\)": lambda: ADAM.step(
            W, W, {**started(), "w": started()["w"]._replace(exp_avg=Tensor(2))}
        ),
        r"with_master_weights.init\(params\)": lambda: MASTERS.init(OTHER),
        r"with_master_weights.scale_loss\(loss\)": lambda: MASTERS.scale_loss(
            Tensor(), MASTERS.init(W)
        ),
        r"compute_copies\(params\)": lambda: optim.compute_copies(OTHER, jnp.bfloat16),
        r"clip_by_global_norm\(grads=...\)": (
            lambda: optim.clip_by_global_norm({"w": Tensor(2)}, 1.0)
        ),
    }.items(),
)
def test_an_array_of_another_framework(named, call):
    """Beside leaves that are no arrays, which pass."""
    with pytest.raises(TypeError, match=rf"^`{named.strip()}` {FOREIGN}.*Convert it"):
        call()
    params, _ = ADAM.step(W, W, started())
    assert params["name"] == "text"


def test_the_guide_shows_every_default():
    """docs/optim.md calls each constructor with all of its arguments."""
    page = (Path(__file__).parents[2] / "docs" / "optim.md").read_text()
    shown = page.split("With all their hyperparameters, at their defaults:")[1]
    calls = ast.parse(shown.split("```")[1]).body
    found = {}
    for call in (statement.value for statement in calls):
        found[call.func.attr] = {
            k.arg: ast.literal_eval(k.value) for k in call.keywords
        }
    assert set(found) == {*BY_NAME, "DynamicLossScale"}
    for name, arguments in found.items():
        expected = inspect.signature(getattr(optim, name)).parameters.values()
        assert arguments == {p.name: p.default for p in expected}, name
