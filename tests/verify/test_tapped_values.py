"""Values that are tapped in an update: which of them is wrong, and by which factor."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdist import optim, verify
from jdist.verify import tap
from jdist.verify.bound import Limit
from jdist.verify.steps.tapped_values import shown_values
from jdist.verify.tracing.recording import MeshAxis, TapRecord

EXAMPLES = 12


def losses(p, x):
    return jnp.tanh(x @ p["w"] + p["b"][None, :]) @ p["v"]


def problem(steps=2):
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = {"w": array(5, 7), "b": array(7), "v": array(7)}
    return params, [array(EXAMPLES, 5) for _ in range(steps)]


def as_it_is(x):
    return x


def norm_of(g):
    return jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(g)))


def update(p, g, m, **change):
    """Clipped SGD with momentum; `change` is what a wrong one does to a value."""

    def shown(name, x):
        own = change.get(name.rpartition("/")[2], as_it_is)
        return tap(jax.tree.map(own, x), name)

    rate = shown("rate", jnp.float32(0.1))
    norm = shown("clip/norm", norm_of(g))
    factor = shown("clip/factor", jnp.minimum(1.0, 0.1 / norm))
    m = shown("momentum", jax.tree.map(lambda m, g: 0.9 * m + factor * g, m, g))
    return jax.tree.map(lambda w, m: w - rate * m, p, m), m


def gradient(p, x, scale=1.0):
    return jax.grad(lambda p: scale * losses(p, x).sum() / EXAMPLES)(p)


def on_one_device(**change):
    @jax.jit
    def step(p, m, x):
        parts = [gradient(p, part) for part in jnp.split(x, 3)]
        return update(p, jax.tree.map(lambda *g: sum(g), *parts), m, **change)

    return step


def replicated(**change):
    """Over four devices, each of which shows the same values."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("dp",))

    def local(p, m, x):
        return update(p, lax.psum(gradient(p, x), "dp"), m, **change)

    specs = {"in_specs": (P(), P(), P("dp")), "out_specs": (P(), P())}
    return jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False, **specs))


@pytest.fixture(scope="module")
def judge():
    params, batches = problem()
    start = params, jax.tree.map(jnp.zeros_like, params)
    return verify.step_judge(losses, update, start, batches)


@pytest.mark.parametrize("build", [on_one_device, replicated])
def test_a_right_step_passes_with_all_its_values(judge, build):
    report = judge({"right": build()})
    assert report.ok, str(report)
    values = {row.path for row in report.leaves if row.path.startswith("values/")}
    assert values == {
        "values/rate", "values/clip/norm", "values/clip/factor",
        "values/momentum/w", "values/momentum/b", "values/momentum/v",
    }  # fmt: skip
    assert report.worst < 0.5
    assert not any("not compared" in note for note in report.notes)


@pytest.mark.parametrize("build", [on_one_device, replicated])
@pytest.mark.parametrize("name", ["rate", "clip/norm", "clip/factor", "momentum"])
def test_the_first_wrong_value_is_named_with_its_factor(judge, build, name):
    key = name.rpartition("/")[2]
    report = judge({"wrong": build(**{key: lambda x: 1.22 * x})})
    (cause,) = report.attributions
    assert cause.part.partition("/b")[0] == name
    assert "it is 1.22 times the reference" in cause.why
    before = {"clip/norm": "rate", "clip/factor": "rate, clip/norm"}.get(name)
    assert before is None or cause.why.endswith(f"Right before it: {before}")
    assert cause.step == 1


def test_one_device_alone_may_be_wrong(judge):
    """As where only the first of several ranks clips: the others are right."""
    second = lambda x: jnp.where(lax.axis_index("dp") == 1, 2 * x, x)  # noqa: E731
    (cause,) = judge({"wrong": replicated(factor=second)}).attributions
    assert cause.part == "clip/factor"
    assert "it is 2 times the reference" in cause.why


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_shard_is_compared_with_its_part(factor):
    """Of the second device alone, which is wrong by a factor."""
    params, batches = problem(1)
    params, batches = {"w": params["w"][:4]}, [x[:, :4] for x in batches]
    loss = lambda p, x: jnp.tanh(x @ p["w"]).sum(-1)  # noqa: E731

    def momentum(p, g, m):
        m = tap(jax.tree.map(lambda m, g: 0.9 * m + g, m, g), "momentum", tp=0)
        return jax.tree.map(lambda w, m: w - 0.1 * m, p, m), m

    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))

    def local(p, m, g):
        scale = jnp.where(lax.axis_index("tp") == 1, factor, 1.0)
        return momentum(p, jax.tree.map(lambda g: g * scale.astype(g.dtype), g), m)

    cut = jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    mean = lambda p, x: loss(p, x).mean()  # noqa: E731
    step = jax.jit(lambda p, m, x: cut(p, m, jax.grad(mean)(p, x)))
    start = params, jax.tree.map(jnp.zeros_like, params)
    report = verify.step(loss, momentum, start, batches, {"cut": step})
    if factor == 1:
        assert report.ok, str(report)
        assert not any("not compared" in note for note in report.notes)
    else:
        (cause,) = report.attributions
        assert cause.part == "momentum/w"
        assert "bound at [2, " in cause.why or "bound at [3, " in cause.why


def test_values_that_are_not_tapped_are_noted(judge):
    """They are no fault; and right values are said to be right."""

    @jax.jit
    def silent(p, m, x, factor=1.0):
        g = gradient(p, x)
        factor = factor * jnp.minimum(1.0, 0.1 / tap(norm_of(g), "clip/norm"))
        m = jax.tree.map(lambda m, g: 0.9 * m + factor * g, m, g)
        return jax.tree.map(lambda w, m: w - jnp.float32(0.1) * m, p, m), m

    report = judge({"silent": silent})
    assert report.ok
    (note,) = (note for note in report.notes if "not compared" in note)
    assert note.endswith(
        "rate, clip/factor, momentum/b, momentum/v, momentum/w"
    ), note  # fmt: skip
    wrong = judge({"silent": partial(silent, factor=1.5)})
    (cause,) = wrong.attributions
    assert cause.why.startswith("its tapped values are right: clip/norm; ")


def test_names_are_not_those_of_the_loss():
    params, batches = problem(1)
    same = lambda p, x: tap(losses(p, x), "clip/norm")  # noqa: E731
    start = params, jax.tree.map(jnp.zeros_like, params)
    message = r"^`step\(update=...\)` must not have a tap's name .*Got 'clip/norm'"
    with pytest.raises(ValueError, match=message):
        verify.step_judge(same, update, start, batches)


def test_a_value_in_a_loop_is_numbered():
    """Each passage of the reference is one of the candidate's, in any order."""
    params, batches = problem(1)

    def looped(p, g, s, factors=(1.0, 1.0, 1.0)):
        def turn(x, f):
            return tap(f * x * (2 - x), "iteration"), None

        begin = jnp.tanh(norm_of(g)) / 3
        share, _ = lax.scan(turn, begin, jnp.asarray(factors, jnp.float32))
        return jax.tree.map(lambda w, g: w - 0.1 * share * g, p, g), s

    def step(factors):
        return jax.jit(lambda p, s, x: looped(p, gradient(p, x), s, factors))

    report = verify.step(
        losses, looped, (params, ()), batches,
        {"right": step((1.0, 1.0, 1.0)), "second": step((1.0, 1.5, 1.0))},
    )  # fmt: skip
    assert report.of("right").ok
    (cause,) = report.attributions
    assert cause.part == "iteration[1]"


def thrice(p, g, m, scales=(1.0, 1.0, 1.0), scan=False):
    """A momentum that is moved three times in a step, of which each value is tapped."""
    turn = lambda m, k, f: tap(  # noqa: E731
        jax.tree.map(lambda m, g: f * (0.5 * m + (3 - k) * g), m, g), "momentum"
    )
    if scan:
        given = jnp.arange(3.0, dtype="f4"), jnp.asarray(scales, jnp.float32)
        m, _ = lax.scan(lambda m, x: (turn(m, *x), None), m, given)
    else:
        for k, factor in enumerate(scales):
            m = turn(m, k, factor)
    return jax.tree.map(lambda w, m: w - 0.1 * m, p, m), m


def on_devices(scales):
    mesh = Mesh(np.array(jax.devices()[:2]), ("dp",))
    own = partial(thrice, scales=scales)
    same = jax.shard_map(own, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(lambda p, m, x: same(p, jax.grad(mean_loss)(p, x), m))


def mean_loss(p, x):
    return losses(p, x).mean()


def on_one(scan, scales):
    return jax.jit(
        lambda p, m, x: thrice(p, jax.grad(mean_loss)(p, x), m, scales, scan)
    )


@pytest.mark.parametrize("examples", [5, 7, 11])
def test_the_first_wrong_one_of_three_passages_is_named(examples, rng):
    """In the program's order, though each makes those after it wrong."""
    params, _ = problem(1)
    batch = jnp.asarray(rng.normal(size=(examples, 5)), jnp.float32)
    start = params, jax.tree.map(jnp.zeros_like, params)
    judge = verify.step_judge(losses, thrice, start, [batch])
    builds = {"unrolled": partial(on_one, False), "scan": partial(on_one, True),
              "devices": on_devices}  # fmt: skip
    for name, build in builds.items():
        assert judge({name: build((1.0, 1.0, 1.0))}).ok, name
        for wrong in range(3):
            scales = [1.0, 1.0, 1.0]
            scales[wrong] = 1.25
            (cause,) = judge({name: build(tuple(scales))}).attributions
            assert cause.part in (f"momentum/b[{wrong}]", f"momentum/w[{wrong}]"), name
            if wrong == 0:
                assert "it is 1.25 times the reference" in cause.why


def test_values_that_arrive_in_another_order_are_no_random_numbers(judge):
    """Micro-batches take turns as threads do; the step's results are the same."""
    turns = []

    @jax.jit
    def part(p, m, x):
        g = gradient(p, x)
        return g, tap(jax.tree.map(lambda m, g: 0.9 * m + g, m, g), "momentum")

    def step(p, m, x):
        parts = jnp.split(x, 3)
        turns.append(len(turns))
        order = [(i + len(turns)) % 3 for i in range(3)]
        found = {i: jax.block_until_ready(part(p, m, parts[i])) for i in order}
        return thrice(p, sum_of([found[i][0] for i in range(3)]), m)[0], m

    report = judge({"wrong": step})
    assert len(turns) == 2  # It is called again, to see whether its results repeat.
    assert report.failures
    assert not any(row.unjudged for row in report.leaves)
    assert {cause.part for cause in report.attributions} <= {
        "momentum/b", "momentum/v", "momentum/w"
    }  # fmt: skip


def sum_of(trees):
    return jax.tree.map(lambda *x: sum(x), *trees)


def test_the_order_of_arrival_does_not_matter():
    """Loops arrive in turn, and all else as XLA likes."""
    wanted = {f"values/n[{i}]": np.float32(10 * i) for i in (1, 2, 3)}
    limits = dict.fromkeys(wanted, Limit(0.1, 1.0))

    axes = (MeshAxis("dp", 2, None, False),)

    def found(order, *values, devices=1):
        records = [
            TapRecord("n", 0, np.float32(x), None, axes, (d,), i)
            for i, x in enumerate(values) for d in range(devices)
        ]  # fmt: skip
        own = shown_values([records[i] for i in order], wanted, limits)
        return [float(own[path]) if path in own else None for path in wanted]

    for order in itertools.permutations(range(3)):
        # The second is nearer to the first one's value than the first is.
        assert found(order, 12, 11, 7) == [12, 11, 7]
        assert found(order, 10, 17, 31) == [10, 17, 31]
        # One that is right may be in any place.
        assert found(order, 20, 13, 33) == [13, 20, 33]
        # The one that is too many may be any.
        assert found((*order, 3), 10, 20, 30, 17) == [10, 17, 30]
    for order in itertools.permutations(range(6), 6):
        assert found(order, 12, 11, 7, devices=2) == [12, 11, 7]


def test_adam_hides_a_factor_of_the_gradient():
    """Named where it is tapped; where nothing is shown it may be the rate as well."""
    params, batches = problem(1)
    opt = optim.adam(lr=0.01)

    def adam(p, g, s):
        return opt.step(p, tap(g, "gradient"), s)

    def step(scale, update):
        def run(p, s, x):
            return update(p, gradient(p, x, scale), s)[0], None

        return jax.jit(run)

    # Some entries' gradients are so small that epsilon counts: the step is another one.
    batches = [x.at[:, 2].multiply(1e-6) for x in batches]
    judge = verify.step_judge(losses, adam, (params, opt.init(params)), batches)
    report = judge({
        "right": step(1.0, adam), "tapped": step(4.0, adam),
        "silent": step(4.0, opt.step), "rate": step(1.0, optim.adam(lr=0.04).step),
    })  # fmt: skip
    assert report.of("right").ok
    parts = {x.candidate: (x.part, x.why) for x in report.attributions}
    assert parts["tapped"][0] == "gradient/b"
    assert "it is 4 times the reference" in parts["tapped"][1]
    for name in ("silent", "rate"):
        assert parts[name][0] == "gradient or optimizer update"
        assert "gradient=...) with the gradient that the" in parts[name][1]


def test_what_shows_most_of_a_value_is_taken():
    wanted = {f"values/n[{i}]": np.float32(i) for i in (1, 2, 3)}
    limits = dict.fromkeys(wanted, Limit(0.1, 1.0))

    def found(*values):
        records = [TapRecord("n", 0, np.float32(x), None) for x in values]
        return {
            path: float(x) for path, x in shown_values(records, wanted, limits).items()
        }

    one, two, three = wanted
    assert found(3, 1, 2, 2) == {one: 1, two: 2, three: 3}
    assert found(3, 1, 7) == {one: 1, two: 7, three: 3}
    assert found(1, 2, 3, 2.5) == {one: 1, two: 2.5, three: 3}
    assert found(2) == {two: 2}
    nan = found(np.nan, 2, 3)
    assert np.isnan(nan.pop(one))
    assert nan == {two: 2, three: 3}
    batched = TapRecord("n", 1, np.float32([1, 2]), None)
    assert shown_values([batched], wanted, limits).keys() == {one, two}
    backward = TapRecord("n", 0, np.float32(9), np.float32(9))
    assert not shown_values([backward], wanted, limits)
