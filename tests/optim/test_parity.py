"""Live torch beside jdist: all option combinations, fifty steps, three dtypes."""

import inspect
import itertools
import json
from itertools import pairwise

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

EVERY = pytest.mark.parametrize("algorithm", cases.ALGORITHMS, ids=lambda a: a.name)
# All but Muon, which takes matrices alone.
EACH = pytest.mark.parametrize(
    "algorithm",
    [a for a in cases.ALGORITHMS if a.shapes == cases.SHAPES],
    ids=lambda a: a.name,
)


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


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_all_options_of_muon_together(data, seed):
    """The same for matrices."""
    algorithm = cases.BY_NAME["muon"]
    options = data.draw(cases.options_of(algorithm))
    problem = algorithm.problem(seed)
    for dtype in ("float64", "float32"):
        compare(algorithm, options, problem, dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("name", "case"), RECORDED)
def test_compiled_steps(name, case, dtype):
    algorithm = cases.BY_NAME[name]
    problem = algorithm.problem(77)
    compare(algorithm, algorithm.golden[case], problem, dtype, compiled=True)


@EVERY
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
    compare(algorithm, options, algorithm.problem(5), "float64", overrides=overrides)


@pytest.mark.parametrize("algorithm", cases.ELEMENTWISE, ids=lambda a: a.name)
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


# --- what torch keeps in its default dtype ---

# torch keeps eta and mu of ASGD, and NAdam's product of momenta, in its *default*
# dtype. All other comparisons here set that to float64; a program's own is float32.
LAYOUTS = pytest.mark.parametrize("foreach", [False, True])


@EVERY
def test_other_variants_and_defaults_change_nothing(algorithm):
    """foreach or not, either default dtype: 1e-12. ASGD and NAdam: float64's alone."""
    options = list(algorithm.golden.values())[-1]
    problem = algorithm.problem(41, with_none=False)
    seen = runs.run(algorithm(**options), problem, "float64")
    for foreach in (False, True):
        found = {"float32": at_torchs_default(algorithm.torch_name, options, problem,
                                              foreach=foreach)}  # fmt: skip
        with torch_runs.default_dtype("float64"):
            found["float64"] = steps_of_torch(algorithm.torch_name, options, problem,
                                              foreach=foreach)  # fmt: skip
        if algorithm.torch_name in ("ASGD", "NAdam"):
            del found["float32"]
        for rows in found.values():
            for leaf, start in enumerate(problem.params):
                path = [start, *(row[leaf] for row in rows)]
                bound = bounds.FLOAT64 * runs.largest(path)
                np.testing.assert_allclose(
                    seen.params[-1][leaf], rows[-1][leaf], rtol=0, atol=bound
                )


def at_torchs_default(name, options, problem, *, foreach):
    """Fifty steps in float64 while torch's default dtype is float32."""
    assert torch.get_default_dtype() == torch.float32
    return steps_of_torch(name, options, problem, foreach=foreach)


def steps_of_torch(name, options, problem, *, foreach):
    params = [
        torch_runs.as_tensor(p, "float64").requires_grad_() for p in problem.params
    ]
    opt = torch_runs.make(name, params, options, foreach=foreach)
    rows = []
    for grads in problem.grads:
        for param, grad in zip(params, grads, strict=True):
            param.grad = torch_runs.as_tensor(grad, "float64")
        with torch_runs.newton_schulz():
            opt.step()
        rows.append([torch_runs.as_array(p) for p in params])
    return rows


ASGD_OPTIONS = [
    {},
    {"alpha": 0.0},
    {"t0": 1.0, "lambd": 0.05, "lr": 0.03},
    {"lr": 0.5, "lambd": 0.1, "alpha": 1.0, "t0": 0.0},
]


@pytest.mark.parametrize("options", ASGD_OPTIONS, ids=str)
def test_asgd_is_torchs_default_but_for_the_rounding_of_eta_and_mu(options):
    """With the two rounded to float32 between steps, 1e-12 again; without, not."""
    problem = cases.problem(31, with_none=False)
    expected = at_torchs_default("ASGD", options, problem, foreach=False)
    opt, lr = optim.asgd(**options), options.get("lr", 0.01)
    decay, power = options.get("lambd", 1e-4), options.get("alpha", 0.75)
    found = {}
    for rounded in (True, False):
        params = [jnp.asarray(p) for p in problem.params]
        state = opt.init(params)
        for t, row in enumerate(problem.grads):
            # The first rate is lr itself; by torch, as a float32 tensor.
            rate = {"lr": float(np.float32(lr))} if rounded and not t else {}
            grads = [jnp.asarray(g) for g in row]
            params, state = opt.step(params, grads, state, **rate)
            if rounded:
                eta = single(lr / jnp.asarray(1 + decay * lr * (t + 1)) ** power)
                state = [s._replace(eta=eta, mu=single(s.mu)) for s in state]
        found[rounded] = params
    gaps = {
        kind: max(
            np.max(np.abs(p - q)) / runs.largest([q])
            for p, q in zip(params, expected[-1], strict=True)
        )
        for kind, params in found.items()
    }
    assert gaps[True] <= bounds.FLOAT64
    assert bounds.FLOAT64 < gaps[False] < 2e-7


def single(scalar):
    """A float64 scalar with a float32's value."""
    return scalar.astype(jnp.float32).astype(jnp.float64)


@LAYOUTS
@pytest.mark.parametrize("options", ASGD_OPTIONS, ids=str)
def test_asgd_is_near_torchs_default(options, foreach):
    """Within the rounding of the rate, of all that the parameter has moved.

    A step is -eta (g + lambd p), so that eta's relative error is the step's. foreach
    also computes eta in float32: product, product, sum, power, quotient and the cast.
    """
    problem = cases.problem(32, with_none=False)
    expected = at_torchs_default("ASGD", options, problem, foreach=foreach)
    seen = runs.run(optim.asgd(**options), problem, "float64")
    path = [problem.params, *seen.params]
    for leaf in range(len(problem.params)):
        moved = sum(np.abs(b[leaf] - a[leaf]) for a, b in pairwise(path))
        gap = np.abs(seen.params[-1][leaf] - expected[-1][leaf])
        size = runs.largest([row[leaf] for row in path])
        assert np.all(gap <= 6 * bounds.UNIT["float32"] * moved + bounds.FLOAT64 * size)


def nadam_by_hand(problem, product_dtype, *, lr, momentum_decay):
    """The formulas in float64 with the product of momenta in a dtype of its own."""
    rows = [np.array(p, float) for p in problem.params]
    averages = [(0.0 * p, 0.0 * p) for p in rows]
    product = product_dtype(1)
    for t, grads in enumerate(problem.grads, start=1):
        mu, after = (0.9 * (1 - 0.5 * 0.96 ** (k * momentum_decay)) for k in (t, t + 1))
        product = product * product_dtype(mu)
        whole = float(product)
        for i, grad in enumerate(grads):
            m, v = averages[i]
            m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
            averages[i] = m, v
            step = (1 - mu) / (1 - whole) * grad + after / (1 - whole * after) * m
            rows[i] = rows[i] - lr * step / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return rows


@LAYOUTS
@pytest.mark.parametrize("momentum_decay", [4e-3, 0.5])
def test_nadam_is_torchs_default_but_for_the_rounding_of_a_product(
    momentum_decay, foreach
):
    """In float64 the product gives ours to 1e-12, and in float32 torch's default."""
    problem = cases.problem(33, with_none=False)
    options = {"lr": 0.05, "momentum_decay": momentum_decay}
    theirs = at_torchs_default("NAdam", options, problem, foreach=foreach)[-1]
    ours = runs.run(optim.nadam(**options), problem, "float64").params[-1]
    for found, dtype in ((ours, np.float64), (theirs, np.float32)):
        expected = nadam_by_hand(problem, dtype, **options)
        for p, q, start in zip(found, expected, problem.params, strict=True):
            bound = bounds.FLOAT64 * runs.largest([q, start])
            np.testing.assert_allclose(p, q, rtol=0, atol=bound)
    gaps = [np.max(np.abs(p - q)) for p, q in zip(ours, theirs, strict=True)]
    assert bounds.FLOAT64 < max(gaps) < 1e-7


def test_capturable_variants_need_an_accelerator():
    """Why they are not compared here."""
    for name in ("ASGD", "NAdam"):
        param = torch.ones(2, requires_grad=True)
        param.grad = torch.ones(2)
        opt = getattr(torch.optim, name)([param], capturable=True, foreach=False)
        with pytest.raises(AssertionError, match="capturable=True"):
            opt.step()


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
    problem = algorithm.problem(9, steps=30, with_none=False)
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
        with torch_runs.newton_schulz():  # in bfloat16, and of a copy
            reference.step()
        states = [
            kept(torch_runs.state_of(reference, p), ours)
            for p, ours in zip(params, new, strict=True)
        ]
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


def kept(theirs, ours):
    """torch's state, without the count where ours keeps none."""
    return {k: x for k, x in theirs.items() if k != "step" or ours.step is not None}


def adopted(ours, theirs):
    """torch's state in our form."""
    return ours._replace(
        **{
            name: jnp.asarray(value, getattr(ours, name).dtype)
            for name, value in theirs.items()
        }
    )


def test_adafactor_takes_eps_of_each_parameters_own_dtype():
    """torch takes the first one's for a group; alone they are ours."""
    dtypes = (torch.bfloat16, torch.float32)
    steps = []
    for groups in ([dtypes], [[dtype] for dtype in dtypes]):
        seen = []
        for group in groups:
            leaves = [torch.ones(3, dtype=dtype, requires_grad=True) for dtype in group]
            for leaf in leaves:
                leaf.grad = torch.full_like(leaf, 1e-5)
            torch_runs.make("Adafactor", leaves, {"lr": 0.1}).step()
            seen += [torch_runs.as_array(leaf) for leaf in leaves]
        steps.append(seen[1])
    together, alone = steps
    opt, start = optim.adafactor(lr=0.1), jnp.ones(3, jnp.float32)
    found, _ = opt.step(start, start * jnp.float32(1e-5), opt.init(start))
    np.testing.assert_allclose(found, alone, rtol=1e-6)
    assert np.abs(together - alone).min() > 0.05


# torch's Muon rounds a matrix to bfloat16 at the beginning and after its division, and
# then three products in each of five iterations.
NEWTON_SCHULZ_ROUNDINGS = 17


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (24, 31), (64, 11)])
def test_muon_is_torchs_as_shipped_but_for_its_rounding_to_bfloat16(
    shape, adjust_lr_fn, rng
):
    """An update is within 17 roundings of its norm, 6.6 %; float64's is off by less.

    Of matrices whose singular values are within a factor of 100: the iteration makes
    the smallest larger, up to 485 times, and their errors with them.
    """
    options = {"lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": adjust_lr_fn}
    opt = optim.muon(**options)
    for _ in range(5):
        gradient = rng.standard_normal(shape)
        assert np.linalg.cond(gradient) < 100
        param = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        param.grad = torch.tensor(gradient)
        torch_runs.make("Muon", [param], options).step()
        start = jnp.zeros(shape)
        found, _ = opt.step(start, jnp.asarray(gradient), opt.init(start))
        gap = np.linalg.norm(found - torch_runs.as_array(param))
        unit = bounds.UNIT["bfloat16"]
        assert 0 < gap <= NEWTON_SCHULZ_ROUNDINGS * unit * np.linalg.norm(found)


def test_muon_keeps_a_buffer_that_torch_as_shipped_divides_by_its_norm():
    """In bfloat16 without nesterov, where torch's iteration works in the buffer."""
    param = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    param.grad = torch.full((2, 3), 4.0, dtype=torch.bfloat16)
    options = {"nesterov": False, "momentum": 0.5}
    reference = torch_runs.make("Muon", [param], options)
    reference.step()
    theirs = torch_runs.state_of(reference, param)["momentum_buffer"]
    assert np.abs(np.linalg.norm(theirs) - 1) < 0.02
    opt, start = optim.muon(**options), jnp.ones((2, 3), jnp.bfloat16)
    _, state = opt.step(start, 4 * start, opt.init(start))
    np.testing.assert_array_equal(np.float32(state.momentum_buffer), 2.0)


def test_muon_and_adafactor_refuse_what_torch_refuses():
    for shape in ((), (3,), (2, 3, 5)):
        leaf = torch.ones(shape, requires_grad=True)
        with pytest.raises(ValueError, match="only supports 2D"):
            torch.optim.Muon([leaf])
        with pytest.raises(ValueError, match=r"muon.init\(params\)` must have .* 2 di"):
            optim.muon().init(jnp.ones(shape))
    for name in ("Muon", "Adafactor"):
        leaf = torch.ones((2, 3), dtype=torch.complex64, requires_grad=True)
        leaf.grad = torch.ones_like(leaf)
        with pytest.raises(RuntimeError, match="does not support complex"):
            torch_runs.make(name, [leaf], {}).step()
        with pytest.raises(ValueError, match=r"must have real parameters only, as in"):
            cases.BY_NAME[name.lower()]().init(jnp.ones((2, 3), complex))


def test_adafactor_of_a_stack_of_matrices(rng):
    """Factors by the last two dimensions, norms of all; a zero gradient too."""
    shapes = ((2, 3, 5), (5, 1, 7), (1, 11), (3, 2))
    problem = cases.problem(3, shapes=shapes)
    compare(cases.BY_NAME["adafactor"], {"lr": 0.1}, problem, "float64")


# NaN, both infinities, both zeros, squares that overflow in float32, and an ordinary
# one. No subnormal numbers: XLA takes them for 0.
RARE = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e20, -1e25, 3e38, 0.7])
# Where they enter: the first step, the second, and one after the bias corrections.
TIMES = (0, 1, 7)


@EVERY
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("compiled", [False, True])
def test_entries_that_are_not_ordinary(algorithm, dtype, compiled):
    """All in one gradient, with ordinary ones in the steps before and after."""
    pairs = itertools.product(rare_options(algorithm), algorithm.shapes_of_nine)
    for options, shape in pairs:
        rare = RARE.reshape(shape)
        # A difference of infinite squares: NaN, or infinite where the product is not
        # rounded before it, as in torch's compiled loops.
        fused = bool(options.get("centered")) and dtype == "float32"
        compared = ~(fused & (np.abs(rare) > 1e20))
        for time in TIMES:
            drawn = cases.problem(17 + time, steps=12, with_none=False)
            rows = [[np.resize(row[0], shape)] for row in drawn.grads]
            rows[time] = [rare]
            problem = cases.Problem([np.resize(drawn.params[0], shape)], rows)
            expected = torch_runs.run(algorithm.torch_name, options, problem, dtype)
            seen = runs.run(algorithm(**options), problem, dtype, compiled=compiled)
            for name in ("param", *seen.states[0][0]):
                found, wanted = (history(r, name, shape) for r in (seen, expected))
                if found is not None and wanted is not None:
                    finite = np.where(np.isfinite(wanted), np.abs(wanted), 0.0)
                    bound = 200 * bounds.UNIT[dtype] * np.maximum.accumulate(finite)
                    wrong = ~np.isclose(found, wanted, 0.0, bound, equal_nan=True)
                    assert not np.any(wrong[:, compared]), (name, options, time)


def rare_options(algorithm):
    """The recorded ones, and divisions by zero: without eps, without a memory."""
    for options in algorithm.golden.values():
        yield options
        if "eps" in algorithm.options:
            pair = algorithm.name == "adafactor"
            yield options | {"eps": (0.0, 0.0) if pair else 0.0}
        if "betas" in algorithm.options:
            yield options | {"betas": (0.0, 0.5)}


def history(run, name, shape):
    """A parameter, or an array of its state, after every step; None without it."""
    if name == "param":
        return np.stack([row[0] for row in run.params])
    rows = [row[0].get(name) for row in run.states]
    if any(row is None for row in rows):
        return None
    return np.stack([np.broadcast_to(row, shape) for row in rows])


# --- golden files, defaults, messages, clipping, loss scale ---


@EVERY
def test_golden_files_are_what_torch_computes(algorithm):
    """Regenerated here; not bit for bit: another processor may round otherwise."""
    recorded, fresh = load(algorithm.name), torch_runs.golden(algorithm)
    assert json.loads(json.dumps(fresh)).keys() == recorded.keys()
    for case, content in fresh.items():
        assert json.loads(json.dumps(content["options"])) == recorded[case]["options"]
        for dtype, rtol in (("float64", 2.0**-51), ("float32", 2.0**-22)):
            old, new = (by_leaf(c[dtype]) for c in (recorded[case], content))
            assert old.keys() == new.keys()
            for name, steps in old.items():
                # Relative to a leaf's size, because sums of both signs cancel.
                size = max(float(np.abs(array).max()) for array in steps)
                for found, wanted in zip(new[name], steps, strict=True):
                    error = np.abs(found - wanted).max()
                    assert error <= 50 * rtol * size, (case, dtype, name)


def by_leaf(steps):
    """What a golden file holds of one run: of each leaf its value at every step."""
    found = {}
    for content in steps.values():
        for index, value in enumerate(content["params"]):
            found.setdefault(("params", index), []).append(np.asarray(value))
        for index, leaf in enumerate(content["state"]):
            for name, value in leaf.items():
                found.setdefault((name, index), []).append(np.asarray(value))
    return found


def test_golden_inputs_are_the_problem():
    for name, content in torch_runs.inputs().items():
        assert json.loads(json.dumps(content)) == load(name)


def test_torchs_own_tensors_are_refused():
    with pytest.raises(TypeError, match=r"Got a torch.Tensor at w\. Convert it, as by"):
        optim.adam().init({"w": torch.ones(2)})


@EVERY
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
    """All of torch's, under the class's name, and five it lacks."""
    theirs = {
        cls.__name__ for cls in torch_runs.functional().utils.functional_optim_map
    }
    assert theirs <= set(optim.functional_optim_map)
    extra = {"NAdam", "RAdam", "ASGD", "Adafactor", "Muon"}
    assert {a.torch_name for a in cases.ALGORITHMS} == theirs | extra


def test_adagrad_skips_none_where_torchs_functional_class_fails():
    theirs = torch_runs.made_functional("Adagrad", [torch.ones(2), torch.ones(3)])
    with pytest.raises(RuntimeError, match="size"):
        theirs.step([None, torch.ones(3)])
    opt, ours = optim.adagrad(lr_decay=0.1), [jnp.ones(2), jnp.ones(3)]
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


def test_the_average_is_torchs(rng):
    """`AveragedModel` with an exponential moving average: 1e-12 after 50 steps."""
    decay = 0.95
    model = torch.nn.Linear(5, 3).double()
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    )
    reference = torch.optim.Adam(model.parameters(), lr=0.1)
    leaves = list(model.parameters())
    params = [jnp.asarray(torch_runs.as_array(p)) for p in leaves]
    opt = optim.with_ema(optim.adam(lr=0.1), decay)
    state = opt.init(params)
    for _ in range(50):
        grads = [rng.standard_normal(p.shape) for p in params]
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = torch.tensor(grad)
        reference.step()
        averaged.update_parameters(model)
        params, state = opt.step(params, [jnp.asarray(g) for g in grads], state)
    theirs = averaged.module.parameters()
    for found, wanted in zip(state.average, theirs, strict=True):
        np.testing.assert_allclose(found, torch_runs.as_array(wanted), atol=1e-12)
    assert int(state.n_averaged) == int(averaged.n_averaged) == 50
