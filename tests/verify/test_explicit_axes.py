"""Meshes with explicit axes, and `jax.set_mesh`: the judge takes what `jit` takes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdist import verify
from jdist.verify.processes.one_device import as_the_caller, brought, on_one_device

P = PartitionSpec
EXAMPLES, INPUTS, OUTPUTS = 8, 5, 6


def mesh(kind=AxisType.Explicit, start=0):
    devices = np.array(jax.devices()[start : start + 4]).reshape(2, 2)
    return Mesh(devices, ("data", "model"), axis_types=(kind,) * 2)


def on(where, tree, **specs):
    """The tree on a mesh, each array with its spec."""
    return {
        name: jax.device_put(x, NamedSharding(where, specs.get(name, P())))
        for name, x in tree.items()
    }


@pytest.fixture
def params(rng):
    w, v = rng.normal(size=(INPUTS, OUTPUTS)), rng.normal(size=(OUTPUTS, 3))
    return {"w": jnp.asarray(w, jnp.float32), "v": jnp.asarray(v, jnp.float32)}


@pytest.fixture
def batch(rng):
    x, y = rng.normal(size=(EXAMPLES, INPUTS)), rng.integers(INPUTS, size=EXAMPLES)
    return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.int32)}


def plain(p, b):
    return (jnp.tanh(b["x"] @ p["w"]) ** 2).sum(-1)


def named(p, b):
    """Contracts what is divided, which JAX does only where it is told the layout."""
    hidden = jnp.tanh(jnp.dot(b["x"], p["w"], out_sharding=P("data", "model")))
    scores = jnp.einsum("bh,ho->bo", hidden, p["v"], out_sharding=P("data", None))
    return -jax.nn.log_softmax(scores)[:, 0]


def embedded(p, b):
    """A lookup of rows, and work that is left to the compiler."""
    rows = p["w"].at[b["y"]].get(out_sharding=P("data", None))
    squares = jax.sharding.auto_axes(
        lambda rows, v: jnp.tanh(rows @ v @ v.T), out_sharding=P("data", None)
    )
    return squares(rows, p["v"]).sum(-1)


def resharded(p, b):
    x = jax.sharding.reshard(b["x"], P(None, None))
    x = jax.lax.with_sharding_constraint(x, P(None, None))
    return jax.sharding.reshard(jnp.sin(x @ p["w"]), P("data", None)).sum(-1)


def compiled(losses, factor=1.0):
    """The one-device gradient, times a factor."""

    @jax.jit
    def candidate(p, b):
        loss, gradient = jax.value_and_grad(lambda p: losses(p, b).mean())(p)
        return loss, jax.tree.map(lambda g: g * jnp.float32(factor), gradient)

    return candidate


@pytest.mark.parametrize("losses", [plain, named, embedded, resharded])
def test_losses_that_name_axes(params, batch, losses):
    """Under `jax.set_mesh`, with parameters and rows divided."""
    where = mesh()
    p = on(where, params, w=P(None, "model"), v=P("model", None))
    b = on(where, batch, x=P("data"), y=P("data"))
    both = {"right": compiled(losses), "wrong": compiled(losses, 1.001)}
    with jax.set_mesh(where):
        report = verify.gradients(losses, p, b, both)
    assert {row.candidate for row in report.failures} == {"wrong"}, report
    assert report.oracle.ok
    assert not report.notes


@pytest.mark.parametrize(
    ("kind", "under"),
    [(AxisType.Explicit, False), (AxisType.Explicit, True), (AxisType.Auto, True)],
)
def test_the_reference_is_the_same_wherever_arguments_lie(params, batch, kind, under):
    """Bit for bit, also weights; and under the mesh of other devices."""
    weights = np.arange(EXAMPLES, dtype=np.float32)
    both = {"right": verify_of(weights), "wrong": verify_of(weights, 1.001)}
    judged = verify.gradients_judge(plain)
    expected = judged(params, batch, both, weights=weights)
    where = mesh(kind)
    p, b = on(where, params, w=P(None, "model")), on(where, batch, x=P("data"))
    with jax.set_mesh(where if under else None):
        found = judged(p, b, both, weights=jax.device_put(weights, b["y"].sharding))
    told = [[row.problem for row in report.leaves] for report in (found, expected)]
    assert told[0] == told[1]
    assert any(told[0])
    with jax.set_mesh(mesh(kind, start=4) if under else None):
        elsewhere = judged(params, batch, both, weights=weights)
    assert str(elsewhere) == str(expected)


def verify_of(weights, factor=1.0):
    """A candidate on the host's own arrays, which knows its weights."""

    def candidate(p, b):
        p, b = jax.tree.map(np.asarray, (p, b))
        with jax.set_mesh(None):
            loss, gradient = jax.jit(
                jax.value_and_grad(lambda p: (plain(p, b) * weights).sum() / 28)
            )(p)
        return loss, jax.tree.map(lambda g: g * jnp.float32(factor), gradient)

    return candidate


def test_candidates_are_left_alone(params, batch):
    """They get arrays where the caller has them, under the caller's mesh."""
    where, seen = mesh(), []
    p, b = on(where, params, w=P(None, "model")), on(where, batch, x=P("data", None))

    def candidate(p, b):
        seen.append((p["w"].sharding, b["x"].sharding, jax.sharding.get_mesh()))
        return compiled(plain)(p, b)

    for own in (None, where):
        with jax.set_mesh(own):
            assert verify.gradients(
                plain, p, b, {"mine": candidate}, finite_differences=False
            ).ok
            assert jax.sharding.get_mesh() == (own or jax.sharding.get_mesh())
    places = p["w"].sharding, b["x"].sharding
    assert [x[:2] for x in seen] == [places] * 2
    assert seen[0][2].empty
    assert seen[1][2] == where


def test_a_candidate_that_raises_leaves_the_mesh_as_it_was(params, batch):
    where = mesh()

    def broken(p, b):
        raise KeyError("mine")

    with jax.set_mesh(where):
        with pytest.raises(KeyError, match="mine"):
            verify.gradients(plain, on(where, params), batch, {"broken": broken})
        assert jax.sharding.get_mesh() == where
    assert jax.sharding.get_mesh().empty


def test_random_numbers_of_a_candidate_are_seen(params, batch):
    """It is traced under the caller's mesh, whose axes it names."""
    where = mesh()
    p, b = on(where, params), on(where, batch, x=P("data"))

    @jax.jit
    def noisy(p, b):
        noise = jax.random.normal(jax.random.key(3), b["x"].shape, jnp.float32)
        noisy = b | {"x": b["x"] + jax.sharding.reshard(noise, P("data"))}
        return jax.value_and_grad(lambda p: plain(p, noisy).mean())(p)

    with jax.set_mesh(where):
        report = verify.gradients(
            plain, p, b, {"noisy": noisy}, finite_differences=False
        )
    assert "it draws random numbers and the loss draws none" in str(report)


def test_a_loss_that_only_its_own_mesh_can_trace_is_refused(params, batch):
    where = mesh()
    rows = NamedSharding(where, P("data"))

    def losses(p, b):
        return plain(p, b | {"x": jax.sharding.reshard(b["x"], rows)})

    p, b = on(where, params), on(where, batch)
    text = (
        "`gradients(loss_fn=...)` must name axes by PartitionSpec, under "
        "`jax.set_mesh`: the reference is traced with a mesh of the same axes, each of "
        "one device. Got a loss that only its own mesh can trace ("
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        verify.gradients(losses, p, b, {"mine": compiled(losses)})

    def broken(p, b):
        return p["none"]

    # What is wrong in the loss itself is raised as it is.
    with pytest.raises(KeyError, match="none"):
        verify.gradients(broken, p, b, {"mine": compiled(plain)})


def update(p, g, s):
    moved = jax.tree.map(lambda p, g: p - jnp.float32(0.1) * g, p, g)
    return moved, {**s, "count": s["count"] + 1}


@pytest.mark.parametrize("under", [False, True])
def test_steps(params, batch, under):
    """A composed reference, and one that is a function; the state has a PRNG key."""
    where = mesh()
    start = {
        "key": jax.device_put(jax.random.key(1), NamedSharding(where, P())),
        "count": jax.device_put(jnp.int32(0), NamedSharding(where, P())),
    }
    p, b = on(where, params, w=P(None, "model")), on(where, batch, x=P("data"))

    def trainer(factor):
        return jax.jit(lambda p, s, b: update(p, compiled(plain, factor)(p, b)[1], s))

    both = {"right": trainer(1.0), "wrong": trainer(1.01)}
    with jax.set_mesh(where if under else None):
        report = verify.step(plain, update, (p, start), [b, b], both)
    assert {row.candidate for row in report.failures} == {"wrong"}, report

    def whole(factor):
        def step(state, b):
            return dict(zip("ps", trainer(factor)(*state.values(), b), strict=True))

        return step

    state = {"p": p, "s": start}
    with jax.set_mesh(where if under else None):
        assert verify.step(whole(1.0), whole(1.0), state, [b]).ok
        report = verify.step(whole(1.01), whole(1.0), state, [b])
    assert not report.ok
    assert report.attributions


@pytest.mark.parametrize("under", [False, True])
def test_traces(params, batch, under):
    """Taps inside a loss that names axes, and in what the candidate runs."""
    where = mesh()

    def losses(p, b, factor=1.0):
        hidden = verify.tap(jnp.tanh(b["x"] @ p["w"]), "hidden")
        if under:
            hidden = jax.sharding.reshard(hidden, P("data", "model"))
        return verify.tap(jnp.float32(factor) * hidden, "scaled").sum(-1) ** 2

    def candidate(p, b, factor=1.5):
        return jax.jit(
            jax.value_and_grad(lambda p, b: losses(p, b, factor=factor).mean())
        )(p, b)

    p, b = on(where, params, w=P(None, "model")), on(where, batch, x=P("data"))
    with jax.set_mesh(where if under else None):
        judged = verify.trace_judge(losses, p, b, finite_differences=False)
        wrong = judged(candidate)
        right = judged(lambda p, b: candidate(p, b, factor=1.0))
    assert right.report.ok
    assert right.difference is None
    assert wrong.difference.tap == "scaled"
    assert "1.5 times" in wrong.difference.words


@pytest.mark.parametrize("under", [False, True])
def test_comparisons(params, under):
    """Of arrays on a mesh, keys among them, beside others on one device."""
    where, first = mesh(), jax.devices()[7]
    tree = {**params, "key": jax.random.split(jax.random.key(5), 4)}
    placed = on(where, tree, w=P(None, "model"), key=P("data"))
    alone = jax.device_put(tree, first)
    with jax.set_mesh(where if under else None):
        assert verify.compare(placed, alone).bit_equal
        assert verify.compare(alone, placed).bit_equal
        axes = {"w": ("w", (1, 0)), "v": "v", "key": "key"}
        turned = placed | {"w": placed["w"].T}
        assert verify.compare(alone, turned, names=axes).bit_equal
        wrong = placed | {"key": on(where, {"key": tree["key"][::-1]})["key"]}
        assert [x.path for x in verify.compare(alone, wrong).failures] == ["key"]
        wrong = placed | on(where, {"v": 1.01 * np.asarray(params["v"])})
        assert [x.path for x in verify.compare(alone, wrong).failures] == ["v"]


def test_arguments_are_brought_to_one_device(params):
    """And no further than they have to be."""
    where = mesh(start=4)
    placed = on(where, params, w=P(None, "model")) | {"n": np.arange(3), "k": 2}
    with on_one_device(placed):
        found = brought(placed)
        inside = jax.sharding.get_mesh()
        assert inside.shape == {"data": 1, "model": 1}
        assert inside.axis_types == where.axis_types
        with as_the_caller():
            assert jax.sharding.get_mesh().empty
            assert brought(placed) is placed
        assert jax.sharding.get_mesh() == inside
    assert found["w"].devices() == {jax.devices()[4]}
    assert found["k"] == 2
    assert isinstance(found["n"], np.ndarray)
    automatic = on(mesh(AxisType.Auto), params, w=P(None, "model"))
    with on_one_device(automatic):
        assert brought(automatic) is automatic
        assert jax.sharding.get_mesh().empty
