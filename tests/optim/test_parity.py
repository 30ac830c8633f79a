"""Live torch beside jdist: all option combinations, fifty steps, three dtypes."""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import optim
from tests.optim import bounds, cases, runs, torch_runs
from tests.optim.test_golden import RECORDED, compare_states, load

pytestmark = pytest.mark.parity

EACH = pytest.mark.parametrize("algorithm", cases.ALGORITHMS, ids=lambda a: a.name)


def compare(algorithm, options, problem, dtype, *, overrides=None, compiled=False):
    """Parameters after every step, and state after the last, within the bound."""
    torch_overrides = overrides
    expected = torch_runs.run(
        algorithm.torch_name, options, problem, dtype, torch_overrides
    )
    seen = runs.run(algorithm(**options), problem, dtype, overrides, compiled=compiled)
    for leaf, start in enumerate(problem.params):
        bound = bounds.of_param(expected, leaf, dtype, start)
        for found, wanted in zip(seen.params, expected.params, strict=True):
            if np.isfinite(bound):
                np.testing.assert_allclose(
                    found[leaf], wanted[leaf], rtol=0, atol=bound
                )
        compare_states(seen, -1, leaf, expected.states[-1][leaf], dtype)


@EACH
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_all_options_together(algorithm, data, seed):
    """Random options, parameters, gradients and None: fifty steps in two dtypes."""
    options = data.draw(cases.options_of(algorithm))
    problem = cases.problem(seed)
    for dtype in ("float64", "float32"):
        compare(algorithm, options, problem, dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("name", "case"), RECORDED)
def test_compiled_steps(name, case, dtype):
    algorithm = cases.BY_NAME[name]
    problem = cases.problem(77)
    compare(algorithm, algorithm.golden[case], problem, dtype, compiled=True)


@EACH
def test_hyperparameters_that_change_between_steps(algorithm):
    """As torch's `param_groups[0]["lr"] = ...`: a schedule by hand, None included.

    A leaf's first step comes late where its gradients are None at first; the state that
    lr enters (Rprop, ASGD) is then made with the rate of that step, in both.
    """
    options = list(algorithm.golden.values())[-1]
    overrides = [
        jax.tree.map(lambda v, t=t: v * (1 - 0.004 * t), algorithm.overridable)
        for t in range(cases.STEPS)
    ]
    compare(algorithm, options, cases.problem(5), "float64", overrides=overrides)


@EACH
def test_complex_parameters(algorithm):
    """Two reals each, in moments, roots and signs alike."""
    real, imaginary = cases.problem(21, steps=20), cases.problem(22, steps=20)

    def joined(a, b):
        return None if a is None else a + 1j * (0 * a if b is None else b)

    problem = cases.Problem(
        [joined(a, b) for a, b in zip(real.params, imaginary.params, strict=True)],
        [
            [joined(a, b) for a, b in zip(*rows, strict=True)]
            for rows in zip(real.grads, imaginary.grads, strict=True)
        ],
    )
    for options in algorithm.golden.values():
        with torch_runs.default_dtype("float64"):
            expected = torch_runs.run(
                algorithm.torch_name, options, problem, "complex128"
            )
        seen = runs.run(algorithm(**options), problem, jnp.complex128)
        for leaf in range(len(problem.params)):
            size = runs.largest([row[leaf] for row in expected.params])
            np.testing.assert_allclose(
                seen.params[-1][leaf],
                expected.params[-1][leaf],
                rtol=0,
                atol=bounds.FLOAT64 * size,
            )


# torch rounds a bfloat16 update after each of its operations, at most 14 in any of
# these algorithms, each by one unit; a state by at most 4, relative to its old value or
# its new one. Ours rounds once. A root or a quotient passes relative errors on, and two
# numbers that differ so much round apart by one unit more each.
UPDATE_ROUNDINGS = 16
STATE_ROUNDINGS = 6


@pytest.mark.parametrize(("name", "case"), RECORDED)
def test_bfloat16_step_by_step(name, case):
    """One step from each of torch's own states differs by single roundings.

    Starting from torch's state every time, because bfloat16 runs drift apart: torch
    loses updates below 1/256 of a parameter bit by bit, and so do we, elsewhere.
    """
    algorithm = cases.BY_NAME[name]
    options = algorithm.golden[case]
    problem = cases.problem(9, steps=30, with_none=False)
    unit = bounds.UNIT["bfloat16"]
    params = [
        torch_runs.as_tensor(p, "bfloat16").requires_grad_() for p in problem.params
    ]
    reference = torch_runs.make(algorithm.torch_name, params, options)
    opt = algorithm(**options)
    state = opt.init([jnp.asarray(p, jnp.bfloat16) for p in problem.params])
    for row in problem.grads:
        before = [jnp.asarray(torch_runs.as_array(p), jnp.bfloat16) for p in params]
        grads = [jnp.asarray(g, jnp.bfloat16) for g in row]
        for param, grad in zip(params, row, strict=True):
            param.grad = torch_runs.as_tensor(grad, "bfloat16")
        after, new = opt.step(before, grads, state)
        reference.step()
        states = [torch_runs.state_of(reference, p) for p in params]
        for leaf, param in enumerate(params):
            wanted = torch_runs.as_array(param)
            moved = np.max(np.abs(wanted - np.float32(before[leaf])))
            moved = max(moved, np.max(np.abs(np.float32(after[leaf] - before[leaf]))))
            amplified = bounds.amplification([states[leaf]], "bfloat16")
            bound = unit * (2 * runs.largest([wanted]) + UPDATE_ROUNDINGS * moved)
            error = np.abs(np.float32(after[leaf]) - wanted)
            assert np.all(error <= amplified * bound), (leaf, error.max() / bound)
            for key, value in states[leaf].items():
                found, old = (np.float32(getattr(s[leaf], key)) for s in (new, state))
                size = STATE_ROUNDINGS * unit * runs.largest([value, found, old])
                assert np.all(np.abs(found - value) <= amplified * size), key
        state = [adopted(s, theirs) for s, theirs in zip(new, states, strict=True)]


def adopted(ours, theirs):
    """torch's state in our form."""
    return ours._replace(
        **{
            name: jnp.asarray(value, getattr(ours, name).dtype)
            for name, value in theirs.items()
        }
    )


# --- golden files, defaults, messages, clipping, loss scale ---


@EACH
def test_golden_files_are_what_torch_computes(algorithm):
    """Regenerated here; not bit for bit: another processor may round otherwise."""
    recorded, fresh = load(algorithm.name), torch_runs.golden(algorithm)
    assert json.loads(json.dumps(fresh)).keys() == recorded.keys()
    for case, content in fresh.items():
        assert json.loads(json.dumps(content["options"])) == recorded[case]["options"]
        for dtype, rtol in (("float64", 2.0**-51), ("float32", 2.0**-22)):
            old, new = (jax.tree.leaves(c[dtype]) for c in (recorded[case], content))
            # Relative to a leaf's size, because sums of both signs cancel.
            np.testing.assert_allclose(new, old, rtol=50 * rtol, atol=1e-30)


def test_golden_inputs_are_the_problem():
    assert json.loads(json.dumps(torch_runs.inputs())) == load("inputs")


@EACH
def test_defaults_are_torchs(algorithm):
    """Those of torch.optim; lr of SGD and Adamax as in torch's functional classes."""
    ours = inspect.signature(getattr(optim, algorithm.name)).parameters
    theirs = inspect.signature(getattr(torch.optim, algorithm.torch_name)).parameters
    for name, parameter in ours.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if name == "lr" and not algorithm.has_lr_default_of_torch_optim:
            made = torch_runs.made_functional(algorithm.torch_name, [torch.zeros(1)])
            assert parameter.default == made.defaults["lr"] != theirs["lr"].default
        else:
            assert parameter.default == theirs[name].default, name
    performance = {"params", "foreach", "fused", "capturable", "differentiable"}
    assert set(theirs) - set(ours) == performance & set(theirs)


def test_the_map_has_torchs_names():
    """All of torch's, under the class's name, and three it lacks."""
    theirs = {
        cls.__name__ for cls in torch_runs.functional().utils.functional_optim_map
    }
    assert theirs <= set(optim.functional_optim_map)
    extra = {"NAdam", "RAdam", "ASGD"}
    assert {a.torch_name for a in cases.ALGORITHMS} == theirs | extra


def test_adagrad_skips_none_where_torchs_functional_class_fails():
    theirs = torch_runs.made_functional("Adagrad", [torch.ones(2), torch.ones(3)])
    with pytest.raises(RuntimeError, match="size"):
        theirs.step([None, torch.ones(3)])
    opt, ours = optim.adagrad(), [jnp.ones(2), jnp.ones(3)]
    new, state = opt.step(ours, [None, jnp.ones(3)], opt.init(ours))
    assert (state[0].step, state[1].step) == (0, 1)
    np.testing.assert_array_equal(new[0], 1.0)


@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1.0, 1e6])
def test_clipping_is_torchs(max_norm, rng):
    grads = [rng.standard_normal(s) * 10.0**k for k, s in enumerate([(3, 5), (7,), ()])]
    params = [torch.zeros(g.shape, dtype=torch.float64) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = torch.tensor(grad)
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    ours, our_norm = optim.clip_by_global_norm(
        [jnp.asarray(g) for g in grads], max_norm
    )
    # A sum of 23 squares, a root, a quotient and a product.
    np.testing.assert_allclose(our_norm, norm.numpy(), rtol=30 * 2.0**-53)
    for found, param in zip(ours, params, strict=True):
        np.testing.assert_allclose(found, param.grad.numpy(), rtol=60 * 2.0**-53)


def test_the_loss_scale_follows_torchs_grad_scaler(rng):
    """Overflows at random: the same scales, the same steps skipped, bit for bit."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    reference = torch.optim.SGD([weight], lr=0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scaling = optim.DynamicLossScale(init_scale=1024.0, growth_interval=3)
    opt = optim.with_master_weights(
        optim.sgd(lr=0.25), compute_dtype=jnp.float32, loss_scale=scaling
    )
    params = jnp.array([1.0, 2.0], jnp.float32)
    state, skipped = opt.init(params), 0
    for overflow in rng.random(40) < 0.25:
        value = np.inf if overflow else 0.125
        scale = scaler.get_scale()
        assert float(state.loss_scale.scale) == scale
        grad = np.array([value, 0.5], np.float32) * np.float32(scale)
        reference.zero_grad()
        scaler.scale(weight.sum() * 0).backward()
        weight.grad = torch.tensor(grad)
        scaler.step(reference)
        scaler.update()
        params, state = opt.step(params, jnp.asarray(grad), state)
        np.testing.assert_array_equal(params, weight.detach().numpy())
        skipped += overflow
    assert int(state.loss_scale.skipped) == skipped > 5
