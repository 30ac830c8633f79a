"""Taps of values that are divided over a mesh, or are the same along an axis of it.

A layer of attention of which examples, sequence and heads are divided over three axes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdist import VerificationError, verify
from jdist.verify import tap

EXAMPLES, LENGTH, WIDTH, HEADS = 6, 4, 5, 6

DECLARED = {
    "hidden": {"cp": 1, "tp": None},
    "query": {"cp": 1, "tp": -1},
    "key": {"cp": 1, "tp": 2},
    "scores": {"cp": 1, "tp": None},
    "mixed": {"cp": 1, "tp": None},
    "tokens": {"cp": 1},
}
NAMES = [*DECLARED]


def mesh(shape=(2, 2, 2), axes=("dp", "cp", "tp")):
    devices = np.array(jax.devices("cpu")[: int(np.prod(shape))])
    return Mesh(devices.reshape(shape), axes)


def parameters():
    rng = np.random.default_rng(0)
    shapes = {"embed": (3, WIDTH), "q": (WIDTH, HEADS), "k": (WIDTH, HEADS),
              "out": (WIDTH,)}  # fmt: skip
    return {n: jnp.asarray(rng.normal(size=s), "f4") for n, s in shapes.items()}


def batch():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(EXAMPLES, LENGTH, 3))
    place = np.broadcast_to(np.arange(LENGTH) / 3, (EXAMPLES, LENGTH))
    rows = {"x": x, "place": place, "y": rng.normal(size=(EXAMPLES, LENGTH))}
    return {name: jnp.asarray(row, "f4") for name, row in rows.items()}


def losses(p, b, cp=None, tp=None, plant=lambda name, x: x, declared=DECLARED):
    """One loss per example; with axes, the part of it that these devices have."""

    def seen(name, x):
        x = tap(plant(name, x), name, **declared.get(name, {}))
        return plant(f"after {name}", x)

    def gathered(x):
        return lax.all_gather(x, cp, axis=1, tiled=True) if cp else x

    hidden = seen("hidden", jnp.tanh(b["x"] @ p["embed"]))
    query = seen("query", hidden @ p["q"])
    key = seen("key", hidden @ p["k"] + b["place"][:, :, None])
    scores = jnp.einsum("bth,bsh->bts", query, gathered(key))
    scores = seen("scores", lax.psum(scores, tp) if tp else scores)
    mixed = seen("mixed", jax.nn.softmax(scores) @ gathered(hidden))
    tokens = seen("tokens", (mixed @ p["out"] - b["y"]) ** 2)
    total = plant("total", tokens.sum(1))
    return (lax.psum(total, cp) if cp else total) / LENGTH


SPECS = {"embed": P(), "q": P(None, "tp"), "k": P(None, "tp"), "out": P()}


def trainer(plant=lambda name, x: x, declared=DECLARED, own=None, check=True):
    """The gradient of the mean; `own` is another mesh."""
    rows = P("dp", "cp")

    @functools.partial(jax.shard_map, mesh=own or mesh(), in_specs=(SPECS, rows),
                       out_specs=P("dp"), check_vma=check)  # fmt: skip
    def each(p, b):
        found = losses(p, b, "cp", "tp", plant, declared)
        return found if check else lax.pmean(found, "tp")

    return jax.jit(jax.value_and_grad(lambda p, b: each(p, b).mean()))


@pytest.fixture(scope="module")
def judge():
    """The judge of the loss, measured once."""
    return verify.trace_judge(losses, parameters(), batch(), finite_differences=False)


def at(name, change):
    """A plant at one value."""
    return lambda own, x: change(x) if own == name else x


def scaled_backwards(x, factor):
    """The identity, whose cotangent is multiplied."""
    return x * factor + lax.stop_gradient(x * (1 - factor))


EVERY = [*(f"forward {n}" for n in NAMES), *(f"backward {n}" for n in reversed(NAMES))]

RIGHT = {
    "declared": {},
    "without vma": {"check": False},
    "unequal axes, found by the shapes": {
        "declared": {}, "own": lambda: mesh((1, 4, 2)),
    },
    "equal axes, found by the values": {"declared": {}},
    "some of them declared": {"declared": {"key": {"tp": 2}, "query": {"cp": 1}}},
    "the axis of the examples declared too": {
        "declared": {n: {"dp": 0, **d} for n, d in DECLARED.items()}
    },
    "one device": {"own": lambda: mesh((1, 1, 1))},
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_every_shard_of_a_right_trainer_is_compared(judge, name):
    given = dict(RIGHT[name])
    own = given.pop("own", lambda: None)()
    found = judge(trainer(own=own, **given))
    assert found.ok
    assert found.difference is None
    assert [*found.right] == EVERY
    assert found.notes == ()


def other(axis):
    """The value of the neighbour along an axis."""
    return lambda x: lax.ppermute(x, axis, [(0, 1), (1, 0)])


def on(axis, index, factor):
    """A factor on some devices."""
    return lambda x: x * jnp.where(lax.axis_index(axis) == index, factor, 1)


COPY = "one copy"

WRONG = {
    "the other heads": (
        at("query", other("tp")),
        ("forward", "query"),
        ["3 more of 4 parts", "it is the reference's query on cp="],
    ),
    "the other part of the sequence": (
        at("key", other("cp")),
        ("forward", "key"), ["3 more of 4 parts", "it is the reference's key on cp="],
    ),
    "one part of the heads": (
        at("key", on("tp", 1, 1.1)),
        ("forward", "key"), ["on cp=", "tp=1", "and 1 more of 4 parts", "1.1 times"],
    ),
    COPY: (
        at("hidden", on("tp", 1, 1.1)),
        ("forward", "hidden"), ["tp=1", "1 more of 4 parts", "1.1 times"],
    ),
    "scores of the own heads alone": (
        at("scores", lambda x: x * 0.5), ("forward", "scores"), ["0.5 times"],
    ),
    "a part of the cotangents": (
        at("after key", lambda x: scaled_backwards(
            x, jnp.where(lax.axis_index("cp") == 1, 2.0, 1.0))),
        ("backward", "key"), ["on cp=1", "and 1 more of 4 parts", "2 times"],
    ),
    "all cotangents": (
        at("after mixed", lambda x: scaled_backwards(x, 3.0)), ("backward", "mixed"),
        ["3 times"],
    ),
    "the loss of one part of the sequence": (
        at("total", lambda x: scaled_backwards(
            x, jnp.where(lax.axis_index("cp") == 1, 0.5, 1.0))),
        ("backward", "tokens"), ["on cp=1 of 2 parts", "0.5 times"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "check"),
    # With vma the program itself says that copies are equal.
    [
        (n, check)
        for n in WRONG
        for check in (False, True)
        if (n, check) != (COPY, True)
    ],
)
def test_the_first_wrong_shard_is_named(judge, name, check):
    plant, place, words = WRONG[name]
    found = judge(trainer(plant, check=check))
    assert not found.ok
    assert (found.difference.direction, found.difference.tap) == place
    for each in words:
        assert each in found.difference.words


def test_equal_axes_without_a_right_value_are_not_compared(judge):
    """Any of them may divide it: the note says so."""
    found = judge(trainer(at("hidden", lambda x: 2 * x), declared={}))
    assert not found.ok
    assert any(
        note.startswith("hidden was not compared where its shape is (3, 2, 5): it may "
                        "be divided over several axes of the mesh. Say which: ")
        for note in found.notes
    )  # fmt: skip


def test_equal_axes_are_told_apart_by_the_taps_before(judge):
    """Where the value is wrong: the query has shown what divides its dimensions."""
    found = judge(trainer(at("key", lambda x: 2 * x), declared={}))
    assert (found.difference.direction, found.difference.tap) == ("forward", "key")
    assert "it is 2 times the reference" in found.difference.words
    assert found.notes == ()


def test_no_tap_compared_comes_first(judge):
    """Sequences of another length, as where a mesh's blocks are not these."""

    short = lambda p, b: tap(jnp.tanh(b["x"] @ p["embed"]), "hidden").sum((1, 2))  # noqa: E731
    own = verify.trace_judge(short, parameters(), batch(), finite_differences=False)

    def half(p, b):
        hidden = tap(jnp.tanh(b["x"] @ p["embed"])[:, :3], "hidden")
        return 2 * hidden.sum() / EXAMPLES

    cut = jax.value_and_grad(half)
    found = own(cut)
    assert not found.ok
    note = "no tap could be compared, so that none is known to be right"
    assert found.notes[0] == note
    assert str(found).splitlines()[:2] == ["WRONG", note]
    assert str(found).count(note) == 1
    with pytest.raises(VerificationError, match=f"^{note}\nfirst difference: "):
        found.raise_if_failed()


def test_an_axis_of_vmap_may_stand_for_the_mesh(judge):
    """Its rows are devices: their coordinates are those of the axis."""

    def run(p, b):
        parts = jax.tree.map(lambda x: jnp.stack(jnp.split(x, 2, 1)), b)
        each = jax.vmap(
            lambda b: losses(p, b, cp="cp", declared={n: {"cp": 1} for n in NAMES}),
            axis_name="cp",
        )
        return each(parts)[0].mean()

    found = judge(jax.jit(jax.value_and_grad(run)))
    assert found.ok
    assert [*found.right] == EVERY
    assert found.notes == ()


def test_axes_of_one_device_are_ignored():
    """Outside of a mesh, and of those that XLA divides."""
    x = jnp.ones((2, 3))
    with verify.TapRecording() as recording:
        jax.block_until_ready(jax.jit(lambda x: tap(x, "x", cp=0, tp=1))(x))
        jax.block_until_ready(
            jax.jit(lambda x: tap(x, "x", cp=0, tp=1),
                    out_shardings=jax.NamedSharding(mesh(), P(None)))(x)
        )  # fmt: skip
    assert {record.mesh for record in recording.records} == {()}


@pytest.mark.parametrize(
    ("dim", "error", "words"),
    [
        (3, ValueError, "must be a dimension of a value with 3. Got 3."),
        (-4, ValueError, "must be a dimension of a value with 3. Got -4."),
        ("1", TypeError, "must be a dimension of the value, or None for copies"),
        (True, TypeError, "must be a dimension of the value, or None for copies"),
    ],
)
def test_a_dimension_is_one_of_the_value(judge, dim, error, words):
    with pytest.raises(error, match=r"tap\(cp=\.\.\.\)` " + words.replace(".", r"\.")):
        judge(trainer(declared={"key": {"cp": dim}}))
