"""The rules of asynchronous pipelines, compiled, beside serial float64 programs."""

import functools
import math
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments._asynchronous import compiled, rotation, rules
from jdist import optim, pipeline
from tests.experiments import async_formulas
from tests.experiments.async_formulas import Chain, serial
from tests.pipeline.epochs import asynchronous, epoch_schedule, paired
from tests.pipeline.pipedream_rules import OPTIMIZERS, layer, losses

CASES = 200
MUON = optim.by_label(
    {"matrix": optim.muon(lr=0.1, weight_decay=0.0), "other": optim.adam(lr=0.1)},
    {"w": "matrix", "b": "other"},
)
OPTIMIZER = {
    "momentum": optim.sgd(lr=0.1, momentum=0.9),
    "adam": optim.adam(lr=0.1),
    "nadam": optim.nadam(lr=0.1, betas=(0.99, 0.999)),
    "muon": MUON,
}
DIRECTION = {
    ("momentum", False): rules.momentum_direction,
    ("momentum", True): rules.repeated_direction(0.9),
    ("adam", False): rules.adam_direction,
    ("adam", True): rules.adam_direction,
}


def stages(n):
    names = ["x", *(f"h{j}" for j in range(1, n)), "y"]
    return [pipeline.Stage(layer, (a,), (b,)) for a, b in pairwise(names)]


def versions(policy, n, m, every, replicas=None):
    schedule = epoch_schedule(policy, n, m, replicas, every)
    return schedule.versions_used()


PREDICTED = "own update", "after own update", "round trip"


def rotated(options):
    matrix = rotation.rotated_adam(
        lr=0.1,
        eps=options["eps"],
        every=options["renewal"],
        source=options["source"],
        form=options["form"],
    )
    return optim.by_label(
        {"matrix": matrix, "other": optim.adam(lr=0.1)}, {"w": "matrix", "b": "other"}
    )


def made(name, options):
    """The rule, by the names of the formulas."""
    optimizer = OPTIMIZER[options["optimizer"]]
    if name in PREDICTED:
        repeats = options["repeats"]
        direction = DIRECTION[options["optimizer"], repeats]
        return rules.predicted(optimizer, direction, aim=name, keeps_gradient=repeats)
    given = {
        "stashed": lambda: rules.stashed(optimizer),
        "unstashed": lambda: rules.unstashed(optimizer),
        "pipemare": lambda: rules.pipemare(
            optimizer, anneal=options["anneal"], first=options["first"]
        ),
        "rotated": lambda: rules.stashed(rotated(options)),
        "look ahead": lambda: rules.look_ahead(momentum=options["gamma"]),
        "compensated": lambda: rules.compensated(
            optimizer, strength=options["strength"], adaptive=options["adaptive"]
        ),
        "feedback": lambda: rules.error_feedback(
            optimizer, strength=options["strength"]
        ),
    }
    return given[name]()


LATE = {"stashing": 1, "vertical_sync": 1, "2bw": None}
"""Micro-batches of an update; None: as many as stages, or one more."""
POLICIES = {
    "stashed": [*LATE, "every 2", "flush"],
    "compensated": list(LATE),
    "feedback": list(LATE),
    "look ahead": list(LATE),
    "rotated": ["stashing", "2bw"],
}
KINDS = {
    "stashed": ["momentum", "adam", "nadam", "muon"],
    "feedback": ["momentum", "adam", "muon"],
}


def draw(seed):
    """A random configuration; the rules take turns."""
    rng = np.random.default_rng((seed, 43))
    name = list(async_formulas.RULES)[seed % len(async_formulas.RULES)]
    n = int(rng.integers(2, 9))
    policy = str(rng.choice(POLICIES.get(name, ["stashing"])))
    every = {"2bw": n + int(rng.integers(2)), "every 2": 2, "flush": 3}.get(policy, 1)
    policy = policy.replace("every 2", "stashing")
    updates = int(rng.integers(3, 13)) if every == 1 else int(rng.integers(3, 6))
    options = {
        "optimizer": str(rng.choice(KINDS.get(name, ["momentum", "adam"]))),
        "rate": float(10 ** rng.uniform(-3, -1.5)),
        "anneal": int(rng.integers(1, 9)),
        "first": int(rng.integers(2)),
        "gamma": float(rng.uniform(0, 0.99)),
        "strength": float(rng.uniform(0.1, 2)),
        "adaptive": [None, 0.0, 0.9][int(rng.integers(3))],
        "repeats": bool(rng.integers(2)),
        "renewal": int(rng.integers(1, 4)),
        "source": ["second", "first"][int(rng.integers(2))],
        # The first bases make a diagonal matrix of the gradient: a small one would make
        # numbers of the rounding of its zeros.
        "eps": float(10 ** rng.uniform(-4, -2)),
        "form": ["code", "algorithm"][int(rng.integers(2))],
        "replicas": (1,) * n,
    }
    # A round trip is counted in stages of one worker; the policies ask for one, too.
    if policy == "stashing" and name != "round trip" and rng.integers(2):
        options["replicas"] = tuple(int(r) for r in rng.choice([1, 1, 2, 3], n))
    whole = every * math.lcm(*options["replicas"])
    return name, n, policy, every, max(1, updates // (whole // every)) * whole, options


def problem(seed, n, m, name=""):
    """Widths that differ, micro-batches of unequal sizes, unequal weights, zeros."""
    rng = np.random.default_rng((seed, 44))
    widths, least = (2, 8), 1
    if name == "rotated":
        # Matrices with at most one eigenvalue of 0, so that formulas fix the bases.
        widths, least = (2, 4), 4
    chain = Chain(rng.integers(*widths, n + 1).tolist())
    params = [
        np.concatenate([rng.normal(size=a * b) / np.sqrt(a), 0.1 * rng.normal(size=b)])
        for a, b in chain.shapes
    ]
    batches, weights = [], []
    for _ in range(m):
        rows = int(rng.integers(least, 6))
        batches.append(
            {
                "x": rng.normal(size=(rows, chain.widths[0])),
                "target": np.tanh(rng.normal(size=(rows, chain.widths[-1]))),
            }
        )
        own = rng.uniform(0.1, 2, rows)
        own[least:][rng.random(rows - least) < 0.2] = 0
        weights.append(own)
    return chain, params, batches, weights


def tree(chain, j, vector):
    return {
        "w": jnp.asarray(chain.matrix(j, vector)),
        "b": jnp.asarray(chain.bias(j, vector)),
    }


def run(name, chain, params, batches, weights, policy, every, options):
    n, counts = len(params), options["replicas"]
    matrix = versions(policy, n, len(batches), every, counts)
    rule, whole = made(name, options), [every * count for count in counts]
    program = compiled.Program(stages(n), losses, rule, matrix, whole)
    trees = [tree(chain, j, own) for j, own in enumerate(params)]
    data = compiled.stacked(batches, weights)
    return jax.jit(program)(trees, data, options["rate"])


def close(chain, found, expected, tolerance=1e-12):
    for j, (own, vector) in enumerate(zip(found, expected, strict=True)):
        for key, x in tree(chain, j, vector).items():
            np.testing.assert_allclose(own[key], x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(CASES))
def test_rules_are_their_formulas(seed):
    name, n, policy, every, m, options = draw(seed)
    chain, params, batches, weights = problem(seed, n, m, name)
    given = chain, params, batches, weights, policy, every, options
    found = run(name, *given)
    expected, means = serial(name, *given)
    np.testing.assert_allclose(found.losses, means, rtol=1e-12)
    close(chain, found.params, expected)


@functools.cache
def differences(name, n=5):
    """How far a rule's weights end from those of weight stashing."""
    options = {
        "optimizer": "momentum", "rate": 0.02, "anneal": 4, "first": 0, "gamma": 0.5,
        "strength": 1.0, "adaptive": None, "repeats": False, "renewal": 3,
        "source": "second", "form": "code", "eps": 1e-3, "replicas": (1,) * n,
    }  # fmt: skip
    chain, params, batches, weights = problem(7, n, 2 * n)
    given = chain, params, batches, weights, "stashing", 1, options
    plain, other = (run(each, *given).params for each in ("stashed", name))
    pairs = zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True)
    return max(float(jnp.abs(a - b).max()) for a, b in pairs)


@pytest.mark.parametrize("name", list(async_formulas.RULES))
def test_rules_differ(name):
    """By far more than the tolerance: equal formulas would prove nothing."""
    assert (differences(name) < 1e-12) == (name == "stashed")
    assert differences(name) == 0 or differences(name) > 1e-5


# --- the executor ---


def bits(n, policy, every, change, dtype=np.float32, replicas=None):
    """Whether the compiled form and the pipeline end with the same bits."""
    whole = [every * count for count in replicas or (1,) * n]
    m = math.lcm(*whole) * (2 * n + 1)
    rng = np.random.default_rng((n, every))
    chain = Chain(rng.integers(3, 12, n + 1).tolist())
    params = [
        {
            "w": (rng.normal(size=shape) / np.sqrt(shape[0])).astype(dtype),
            "b": 0.1 * rng.normal(size=shape[1]).astype(dtype),
        }
        for shape in chain.shapes
    ]
    sizes = (5, chain.widths[0]), (5, chain.widths[-1])
    batches = [
        {
            name: rng.normal(size=size).astype(dtype)
            for name, size in zip(("x", "target"), sizes, strict=True)
        }
        for _ in range(m)
    ]
    weights = [rng.uniform(0.1, 2, 5).astype(dtype) for _ in range(m)]
    for i, own in enumerate(weights):
        own[i % 5] = 0
    optimizer = OPTIMIZERS[change]
    given = {
        "optimizer": optimizer, "policy": policy, "update_every": every,
        "replicas": replicas,
    }  # fmt: skip
    pipe = asynchronous(stages(n), losses, **given)
    state, metrics = pipe.train_epoch(pipe.init(params), paired(batches, weights))
    matrix = versions(policy, n, m, every, replicas)
    rule = rules.stashed(optimizer)
    program = compiled.Program(stages(n), losses, rule, matrix, whole)
    found = jax.jit(program)(params, compiled.stacked(batches, weights))
    np.testing.assert_allclose(found.losses, metrics.losses, rtol=1e-6)
    held = [max(p.held for p in pipe.passes if p.stage == j) for j in range(n)]
    assert list(program.kept) == held
    leaves = jax.tree.leaves(found.params), jax.tree.leaves(state.params)
    pairs = zip(*leaves, strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize(
    ("policy", "every"),
    [("stashing", 1), ("vertical_sync", 1), ("stashing", 3), ("2bw", None)],
)
def test_the_bits_of_the_executor(policy, every, n):
    """And as many versions as its stages keep."""
    every = n if every is None else every
    assert bits(n, policy, every, list(OPTIMIZERS)[n % 2])


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_bits_of_the_executor_with_flushes(n):
    assert bits(n, "flush", 2, list(OPTIMIZERS)[n % 2])


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2, 1), (3, 2, 1)])
def test_the_bits_of_the_executor_with_replicas(replicas):
    """Each worker has one micro-batch of an update: of more, it adds its own first."""
    assert bits(len(replicas), "stashing", 1, next(iter(OPTIMIZERS)), replicas=replicas)


def test_a_program_goes_on_with_its_states():
    """Two epochs after each other are those of a pipeline, with its momentum."""
    chain, params, batches, weights = problem(4, 3, 6)
    trees = [tree(chain, j, own) for j, own in enumerate(params)]
    optimizer = OPTIMIZER["momentum"]
    program = compiled.Program(
        stages(3), losses, rules.stashed(optimizer), versions("stashing", 3, 6, 1)
    )
    pipe = asynchronous(stages(3), losses, optimizer=optimizer)
    state, data = pipe.init(trees), compiled.stacked(batches, weights)
    found = jax.jit(program)(trees, data)
    found = jax.jit(program)(found.params, data, states=found.states)
    for _ in range(2):
        state, _ = pipe.train_epoch(state, paired(batches, weights))
    pairs = zip(found.params, state.params, strict=True)
    for own, other in pairs:
        for key in own:
            np.testing.assert_allclose(own[key], other[key], rtol=1e-12)


def test_a_program_may_be_mapped():
    """Over learning rates: each as alone."""
    chain, params, batches, weights = problem(3, 3, 7)
    matrix = versions("stashing", 3, 7, 1)
    rule = rules.stashed(OPTIMIZER["adam"])
    program = compiled.Program(stages(3), losses, rule, matrix)
    trees = [tree(chain, j, own) for j, own in enumerate(params)]
    data, rates = compiled.stacked(batches, weights), jnp.array([0.01, 0.1])
    both = jax.jit(jax.vmap(program, (None, None, 0)))(trees, data, rates)
    for k in range(2):
        alone = jax.jit(program)(trees, data, rates[k])
        np.testing.assert_allclose(both.losses[k], alone.losses, rtol=1e-11)


# --- memory, as the publications say ---


def held(rule, policy, n, every=1):
    """Versions of each stage; and its state, in copies of its weights."""
    params = {"w": jnp.zeros((3, 4), np.float32), "b": jnp.zeros(4, np.float32)}
    matrix = versions(policy, n, 4 * n * every, every)
    program = compiled.Program(stages(n), losses, rule, matrix, every)
    found = [rules.memory(rule, place, params) for place in program.places]
    size = 4 * (12 + 4)
    assert all(own.weights == own.versions * size for own in found)
    return [own.versions for own in found], [own.state / size for own in found]


def test_memory_is_that_of_the_publications():
    plain = optim.sgd(lr=0.1)
    heavy = optim.sgd(lr=0.1, momentum=0.9)
    stash = rules.stashed(plain)
    for n in (2, 5, 8):
        ahead = [n - j for j in range(n)]
        ones, none = [1] * n, [0] * n
        assert held(stash, "stashing", n) == (ahead, none)
        assert held(stash, "vertical_sync", n) == ([n] * n, none)
        assert held(stash, "2bw", n, n) == ([2] * n, none)
        assert held(stash, "flush", n, 2) == (ones, none)
        assert held(rules.unstashed(plain), "stashing", n) == (ones, none)
        mare = rules.pipemare(plain, anneal=5)
        assert held(mare, "stashing", n) == (ones, ones)  # delta
        plan = {"aim": "round trip"}
        train = rules.predicted(heavy, rules.momentum_direction, **plan)
        assert held(train, "stashing", n) == (ones, ones)  # its momentum alone
        plan["keeps_gradient"] = True
        again = rules.predicted(heavy, rules.repeated_direction(0.9), **plan)
        assert held(again, "stashing", n) == (ones, [2] * n)
        ahead_of = rules.look_ahead(momentum=0.9)
        assert held(ahead_of, "stashing", n) == (ahead, ones)  # w_{t-1}
        fixed, adaptive = (
            rules.compensated(plain, strength=1.0, adaptive=m) for m in (None, 0.9)
        )
        assert held(fixed, "stashing", n) == (ahead, none)
        assert held(adaptive, "stashing", n) == (ahead, ones)
        options = {"eps": 1e-8, "renewal": 10, "source": "second", "form": "code"}
        bases = rules.stashed(rotated(options))
        # Two averages of all, two moments and two bases of 3 x 3 and of 4 x 4 for the
        # matrix, and two counts of updates.
        state = (2 * 16 + 2 * (9 + 16) + 2) / 16
        assert held(bases, "stashing", n) == (ahead, [state] * n)
        back = rules.error_feedback(plain)
        assert held(back, "2bw", n, n) == ([2] * n, ones)


@pytest.mark.parametrize(("n", "every"), [(5, 1), (7, 2), (4, 3)])
def test_rings_are_as_long_as_the_simulator_counts(n, every):
    schedule = pipeline.pipedream(n, 6 * n, update_every=every)
    counted = pipeline.simulate(schedule, pipeline.Costs()).weight_versions
    matrix = versions("stashing", n, 6 * n, every)
    rule = rules.stashed(OPTIMIZER["momentum"])
    program = compiled.Program(stages(n), losses, rule, matrix, every)
    assert program.kept == tuple(counted)


# --- what is refused ---


def test_what_cannot_be_compiled_is_refused():
    rule = rules.stashed(OPTIMIZER["adam"])
    matrix = versions("stashing", 3, 6, 1)
    with pytest.raises(ValueError, match="6 micro-batches must be a multiple of every"):
        compiled.Program(stages(3), losses, rule, matrix, 4)
    early = matrix.copy()
    early[1, 2] = 3
    text = "versions must be made when they are met: stage 1, micro-batch 2, version 3"
    with pytest.raises(ValueError, match=text):
        compiled.Program(stages(3), losses, rule, early)
    text = "rule and every must be one, or one a stage: 2 rules, 3 numbers, 3 stages"
    with pytest.raises(ValueError, match=text):
        compiled.Program(stages(3), losses, [rule] * 2, matrix)
    with pytest.raises(ValueError, match="3 rules, 2 numbers, 3 stages, 3 rows"):
        compiled.Program(stages(3), losses, rule, matrix, [1, 2])
    with pytest.raises(ValueError, match=r"multiple of every=\[1, 1, 4\]"):
        compiled.Program(stages(3), losses, rule, matrix, [1, 1, 4])


def test_rules_that_do_not_exist_are_refused():
    adam = OPTIMIZER["adam"]
    with pytest.raises(
        ValueError, match=r"aim=.* must be one of .*'own update'.*: 'x'"
    ):
        rules.predicted(adam, rules.adam_direction, aim="x")
    with pytest.raises(ValueError, match=r"source=.* must be one of .*: 'third'"):
        rotation.rotated_adam(source="third")
    with pytest.raises(ValueError, match=r"form=.* must be one of .*: 'x'"):
        rotation.rotated_adam(form="x")
    with pytest.raises(ValueError, match=r"every=.* must be at least 1: 0"):
        rotation.rotated_adam(every=0)


@pytest.mark.parametrize("name", ["own update", "pipemare", "look ahead"])
def test_rules_that_read_the_rate_want_it(name):
    options = {
        "optimizer": "adam", "anneal": 2, "first": 0, "gamma": 0.5, "repeats": False,
    }  # fmt: skip
    chain, params, batches, weights = problem(1, 3, 5)
    rule = made(name, options)
    matrix = versions("stashing", 3, 5, 1)
    program = compiled.Program(stages(3), losses, rule, matrix)
    trees = [tree(chain, j, own) for j, own in enumerate(params)]
    with pytest.raises(ValueError, match=r"the learning rate.*rate=None"):
        program(trees, compiled.stacked(batches, weights))
