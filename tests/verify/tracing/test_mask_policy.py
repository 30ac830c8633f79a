"""On which devices of a mesh random draws are the same, and where they differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdist import verify

AXES = {"dp": 2, "cp": 2, "tp": 2}


def mesh_of(**axes):
    sizes = tuple(axes.values())
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, tuple(axes))


def by_place(key):
    """The right keys: another for each place on dp and cp, the same over tp."""
    place = lax.axis_index("dp") * 2 + lax.axis_index("cp")
    return jax.random.fold_in(key, place)


def trainer(own=by_place, check_vma=False, draw=None):
    """A gradient with dropout in two layers of a loop, recomputed backwards."""

    def dropout(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, 0)

    def local(w, x, key):
        @jax.checkpoint
        def layer(h, k):
            with jax.named_scope("block"):
                return (draw or dropout)(jnp.tanh(h @ w), k), None

        def loss(w):
            begin = dropout(x @ w, jax.random.fold_in(own(key), 7))
            h, _ = lax.scan(layer, begin, jax.random.split(own(key), 2))
            return (h**2).sum()

        return lax.psum(jax.grad(loss)(w), ("dp", "cp"))

    specs = {"in_specs": (P(), P(("dp", "cp")), P()), "out_specs": P()}
    mesh = mesh_of(**AXES)
    return jax.jit(jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs))


def judged(train, same=("tp",), differ=("dp", "cp"), **options):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, 5), (12, 5)))
    key = jax.random.key(3)
    return verify.masks(train, w, x, key, same=same, differ=differ, **options)


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_right_policy_holds_for_every_draw(check_vma):
    report = judged(trainer(check_vma=check_vma))
    assert report.ok, str(report)
    paths = {row.path for row in report.leaves}
    # The recomputed draws of the backward pass are rows, too.
    assert any("block" in path and "other over dp, cp" in path for path in paths)
    assert any("block" not in path and "same over tp" in path for path in paths)
    assert all("test_mask_policy.py" in path for path in paths)


WRONG = {
    "one seed for the whole mesh": (lambda k: k, "other", "the same on cp=0 and cp=1"),
    "every device its own": (
        lambda k: jax.random.fold_in(by_place(k), lax.axis_index("tp")),
        "same", "differ on tp=0 and tp=1",
    ),
    "dp without cp": (
        lambda k: jax.random.fold_in(k, lax.axis_index("dp")),
        "other", "the same on cp=0 and cp=1",
    ),
    "cp without dp": (
        lambda k: jax.random.fold_in(k, lax.axis_index("cp")),
        "other", "the same on dp=0 and dp=1",
    ),
    "the sum of both": (
        lambda k: jax.random.fold_in(k, lax.axis_index("dp") + lax.axis_index("cp")),
        "other", "the same on dp=0, cp=1 and dp=1, cp=0",
    ),
    "tp in the place of dp": (
        lambda k: jax.random.fold_in(k, lax.axis_index(("tp", "cp"))),
        "other", "the same on dp=0 and dp=1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_policy_is_named(name):
    own, policy, words = WRONG[name]
    report = judged(trainer(own))
    failing = [row for row in report.failures if f": {policy} over" in row.path]
    assert failing, str(report)
    assert all(words in row.problem for row in failing)


def test_a_place_has_a_policy_of_its_own():
    """A value divided over tp has other masks there; the rest has the same."""

    def own(x, key):
        apart = jax.random.fold_in(key, lax.axis_index("tp"))
        return jnp.where(jax.random.bernoulli(apart, 0.7, x.shape), x, 0)

    train = trainer(draw=own)
    assert judged(train).failures
    assert judged(train, (), ("dp", "cp", "tp"), where="block").ok
    report = judged(train, differ=("dp", "cp"), where="dropout)")
    assert report.ok, str(report)
    assert "not compared: " in report.notes[0]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_kinds_of_draws(impl):
    """Of raw and typed keys, by vmap, and of a cond."""
    mesh = mesh_of(dp=2)

    def local(x, key):
        keys = jax.random.split(jax.random.fold_in(key, lax.axis_index("dp")), len(x))
        drawn = jax.vmap(lambda k, x: jax.random.normal(k, x.shape) + x)(keys, x)
        raw = jax.random.wrap_key_data(jax.random.key_data(keys[0]), impl=impl)
        draw = lambda k: jax.random.uniform(k, (7,))  # noqa: E731
        taken = lax.cond(x[0, 0] > 0, draw, lambda k: jnp.zeros(7), raw)
        return drawn.sum() + taken.sum() + jax.random.gumbel(key, (3,)).sum()

    train = jax.shard_map(
        local, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P(), check_vma=False
    )
    x, key = jnp.ones((4, 5)), jax.random.key(0, impl=impl)
    report = verify.masks(train, x, key, differ=("dp",))
    failing = [row.shape for row in report.failures]
    assert failing == [(3,)], str(report)
    assert sorted(row.shape for row in report.leaves) == [(2, 5), (3,), (7,)]


def test_few_bits_are_the_same_by_chance():
    train = jax.shard_map(
        lambda k: jax.random.bits(k, (), jnp.uint8), mesh=mesh_of(dp=2),
        in_specs=P(), out_specs=P(), check_vma=False,
    )  # fmt: skip
    report = verify.masks(train, jax.random.key(0), differ=("dp",))
    assert not report.failures
    assert "by chance" in report.unjudged[0].unjudged


def outside(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"same": ("dp",)},
            r"^`masks\(trainer=...\)` must draw .* over 'dp'. Got none",
        ),
        (
            {"same": ("dp",), "where": "head"},
            r"shard_map over 'dp' at 'head'\. Got none",
        ),
        ({}, r"^`masks\(same=..., differ=...\)` must name at least one mesh axis"),
        ({"same": ("a",), "differ": ("a",)}, "none of them twice. Got .*'a', 'a'"),
        ({"same": "dp"}, r'Got a string. Write \("dp",\)'),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        verify.masks(outside, jnp.ones(3), jax.random.key(0), **options)


def test_an_axis_that_is_left_to_xla_is_refused():
    train = jax.shard_map(
        outside, mesh=mesh_of(dp=2, tp=2), in_specs=(P("dp"), P()), out_specs=P("dp"),
        axis_names={"dp"}, check_vma=False,
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"all axes of its mesh. Got one over dp of dp, t"
    ):
        verify.masks(train, jnp.ones((4, 3)), jax.random.key(0), differ=("dp",))


def test_another_axis_is_named():
    with pytest.raises(
        ValueError, match=r"over 'ep'. Got draws over \['cp', 'dp', 'tp"
    ):
        judged(trainer(), differ=("ep",))
