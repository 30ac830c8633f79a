"""Programs that run piece by piece, beside the same programs run as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify
from jdist._compat import double_precision
from jdist.verify import tap
from jdist.verify.evaluation.lockstep import PrecisionPair, RoundedSideNeeded
from jdist.verify.evaluation.piecewise import (
    BOTH,
    EXACT,
    Pieces,
    drawn_form,
    rounds_as_drawn,
)


def blocks(params, x):
    """Several equal blocks, a residual, a leaf used twice and one that is not used."""
    for w in params["blocks"]:
        x = x + jnp.tanh(x @ w) * params["scale"][None, :]
    return jnp.sum(jax.nn.log_softmax(x @ params["blocks"][0])[:, 0])


def routed(params, x):
    """The largest of three experts, chosen by numbers."""
    best = jnp.argmax(x @ params["router"], axis=-1)
    return jnp.sum(jnp.sin(x * params["experts"][best]))


def looped(params, x):
    """A scan of a layer, and a branch that the numbers choose."""
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["stack"])
    return jax.lax.cond(x.sum() > 0, lambda: jnp.sum(x**2), lambda: -jnp.sum(x))


def ordered(params, x):
    """Sorted numbers, of which those at the ends count."""
    found = jnp.sort(x @ params["router"], axis=-1)
    return jnp.sum(jnp.cos(found) * jnp.float32([[3.0, 0.5, -1.0]]))


@pytest.fixture
def given(rng):
    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {
        "blocks": [normal(5, 5) / 3 for _ in range(4)],
        "experts": normal(3, 5),
        "router": normal(5, 3),
        "scale": normal(5),
        "stack": normal(4, 5, 5) / 3,
    }
    return params, normal(7, 5)


def traced(fn, given):
    program = jax.jit(jax.value_and_grad(fn)).trace(*given).jaxpr
    return program, Pieces(program, None, {}), jax.tree.leaves(given)


@pytest.mark.parametrize("fn", [blocks, routed, looped, ordered])
def test_pieces_compute_what_the_whole_computes(fn, given):
    """On both sides; on one side too, with the decisions of both."""
    _, pieces, leaves = traced(fn, given)
    rounded = jax.tree.leaves(jax.jit(jax.value_and_grad(fn))(*given))
    with double_precision(), jax.numpy_dtype_promotion("standard"):
        exactly = jax.tree.map(lambda x: x.astype(jnp.float64), given)
        wide = jax.tree.leaves(jax.jit(jax.value_and_grad(fn))(*exactly))
        recording = {}
        both = pieces.run(leaves, BOTH, recording=recording)
        alone = pieces.run(leaves, EXACT, replay=recording)
    for own, one, known, exact in zip(both, alone, rounded, wide, strict=True):
        np.testing.assert_allclose(own.wide, exact, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(own.rounded, known, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(one.wide, own.wide)
        assert one.rounded is None


@pytest.mark.parametrize("fn", [blocks, routed, looped, ordered])
def test_runs_together_are_each_of_them_alone(fn, given):
    """With one rounded side, which decides for all, and the first's sizes."""
    _, pieces, leaves = traced(fn, given)
    form = BOTH._replace(drawn=True, sized=True)
    numbers = np.arange(3)
    with double_precision(), jax.numpy_dtype_promotion("standard"):
        moved = [
            np.asarray(x, float) * (1 + numbers / 64).reshape(-1, *[1] * x.ndim)
            for x in leaves
        ]
        options = {"amplitude": numbers * 1.0, "seed": numbers + 5}
        pairs = list(map(PrecisionPair, leaves, moved))
        together = pieces.run(pairs, form._replace(together=True), **options)
        for number in numbers:
            own = map(PrecisionPair, leaves, (x[number] for x in moved))
            each = {"amplitude": 1.0 * number, "seed": 5 + int(number)}
            alone = pieces.run(list(own), form, **each)
            for one, found in zip(alone, together, strict=True):
                np.testing.assert_array_equal(found.rounded, one.rounded)
                # What depends on no input has one wide side for all.
                wide = np.broadcast_to(found.wide, (3, *one.wide.shape))[number]
                np.testing.assert_allclose(wide, one.wide, rtol=1e-11, atol=1e-14)
                if number == 0 and one.size is not None:
                    np.testing.assert_allclose(found.size, one.size, rtol=1e-5)


def test_equal_blocks_are_compiled_once(given):
    """A program of 4 blocks has no more compiled pieces than one of 3."""
    params, x = given
    compiled = []
    for count in (3, 4):
        own = {**params, "blocks": params["blocks"][:count]}
        program = jax.jit(jax.value_and_grad(blocks)).trace(own, x).jaxpr
        found = {}
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            Pieces(program, None, found).run(jax.tree.leaves((own, x)), EXACT)
        compiled.append(len(found))
    assert compiled[0] == compiled[1]


def test_taps_stand_between_pieces_that_are_shared(given):
    """And show every value, also one without a use: at the top, and in a loop."""

    def tapped(params, x):
        for number, w in enumerate(params["blocks"]):
            x = x + jnp.tanh(tap(x @ w, f"block{number}"))
        tap(jnp.sin(x), "aside")
        x, _ = jax.lax.scan(
            lambda h, w: (tap(jnp.tanh(h @ w), "loop"), None), x, params["stack"]
        )
        return jnp.sum(x**2)

    params, x = given
    seen, compiled = [], []
    for count in (3, 4):
        own = {**params, "blocks": params["blocks"][:count]}
        with verify.TapRecording():
            program = jax.make_jaxpr(jax.value_and_grad(tapped))(own, x)
        seen, found = [], {}

        def observe(name, position, values, seen=seen):
            if name != "loop":  # There positions are traced.
                assert len(position) == 3
                seen.append((*position, name, values[0].wide))
            return values[0]

        with double_precision(), jax.numpy_dtype_promotion("standard"):
            pieces = Pieces(program, None, found, observe)
            pieces.run(jax.tree.leaves((own, x)), EXACT, seed=7)
        compiled.append(sum(hasattr(x.run, "lower") for x in found.values()))
    assert compiled[0] == compiled[1]
    names = [f"block{number}" for number in range(4)]
    assert [name for *_, name, _ in seen] == [*names, "aside", *names[::-1]]
    assert {run for run, *_ in seen} == {7}
    numbers = [number for _, number, *_ in seen]
    assert numbers == sorted(set(numbers))
    np.testing.assert_allclose(seen[0][-1], x @ params["blocks"][0], rtol=1e-5)


def test_a_long_program_is_cut_where_pieces_are_alike(given):
    """And left whole where they differ: nothing is compiled less often then."""
    unlike = [jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.square, jnp.arctan]

    def long(params, x, alike):
        for number in range(600):
            w = params["blocks"][0]
            if alike and number % 20 == 0:
                x = x @ w
            elif number % 20 == 0:
                # A new shape, so that no piece is like another.
                x = jnp.concatenate([x, x[:1]]) @ w
            x = unlike[number % 6](x) / 7
        return jnp.sum(x)

    counts = {}
    for alike in (False, True):
        program = jax.make_jaxpr(lambda p, x, a=alike: long(p, x, a))(*given)
        counts[alike] = len(Pieces(program, None, {})._pieces)
    assert counts[False] == 1
    assert counts[True] > 30


def updated(params, gradients, moments, count):
    """Momenta of clipped gradients, with a count and a rate that all leaves share.

    The count is 6, so that the rate is 1 / 8, exactly, on both sides.
    """
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
    scale, count = jnp.minimum(1, 3 / norm), count + 1
    rate = 1 / (1 + count.astype(norm.dtype))
    each = zip(moments, gradients, strict=True)
    moments = [0.5 * m + scale * g for m, g in each]
    steps = [rate * jnp.tanh(m) / (jnp.abs(m) + rate) for m in moments]
    new = [p - step for p, step in zip(params, steps, strict=True)]
    return new, moments, norm, count


def test_the_update_of_many_leaves_is_divided(rng):
    """Leaves of one shape share pieces, although norm and count are those of all."""
    compiled = []
    for leaves in (61, 64):
        shapes = [(5, 7) if i % 2 else (11,) for i in range(leaves)]
        given = [
            [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
            for _ in range(3)
        ]
        program = jax.make_jaxpr(updated)(*given, jnp.int32(6))
        found = {}
        pieces = Pieces(program, None, found)
        with double_precision(), jax.numpy_dtype_promotion("standard"):
            made = pieces.run([*jax.tree.leaves(given), jnp.int32(6)], BOTH)
            wide = jax.tree.map(lambda x: x.astype(float), given)
            exact = jax.tree.leaves(updated(*wide, jnp.int32(6)))
        for own, known in zip(made, exact, strict=True):
            np.testing.assert_allclose(own.wide, known, rtol=1e-12)
            np.testing.assert_allclose(own.rounded, known, rtol=1e-4, atol=1e-5)
        compiled.append(len(found))
    assert 1 < compiled[0] == compiled[1] < 20


@pytest.mark.parametrize("fn", [routed, ordered])
def test_decisions_have_to_be_told(fn, given):
    """A run on one side makes none of its own."""
    program, pieces, leaves = traced(fn, given)
    with double_precision(), jax.numpy_dtype_promotion("standard"):
        for form in (EXACT, drawn_form(program)):
            with pytest.raises(RoundedSideNeeded):  # noqa: PT011 - has no words
                pieces.run(leaves, form)
        assert all(x.rounded is not None for x in pieces.exact(leaves))


def test_a_decision_is_that_of_the_rounded_side(given):
    """A perturbation moves the numbers, and not the expert that was chosen."""
    params, _ = given
    # A tie but for the last bit: the rounded side chooses the first.
    params = {**params, "router": jnp.ones((5, 3), jnp.float32)}
    x = jnp.full((7, 5), 0.1, jnp.float32)
    program, pieces, leaves = traced(routed, (params, x))
    with double_precision(), jax.numpy_dtype_promotion("standard"):
        recording = {}
        pieces.run(leaves, BOTH, recording=recording)
        for seed in range(3):
            _, *leaves_found = pieces.run(
                leaves,
                drawn_form(program),
                amplitude=2.0**16,
                seed=seed,
                replay=recording,
            )
            (experts,) = [x.wide for x in leaves_found if x.wide.shape == (3, 5)]
            assert np.abs(experts[0]).min() > 0
            assert not np.asarray(experts[1:]).any()


def test_draws_differ_by_seed_and_are_repeated(given):
    """In float32, by some roundings of the values."""
    program, pieces, leaves = traced(blocks, given)
    form = drawn_form(program)
    with double_precision(), jax.numpy_dtype_promotion("standard"):
        exact = pieces.run(leaves, EXACT)
        first, again, other = (
            pieces.run(leaves, form, amplitude=1.0, seed=seed) for seed in (1, 1, 2)
        )
    np.testing.assert_array_equal(first[0].wide, again[0].wide)
    assert any((a.wide != b.wide).any() for a, b in zip(first, other, strict=True))
    for draw, own in zip(first, exact, strict=True):
        assert draw.wide.dtype == jnp.float32
        np.testing.assert_allclose(draw.wide, own.wide, rtol=1e-3, atol=1e-4)


def test_what_is_detached_can_be_held(given):
    """Its derivative is none: a moved run keeps its value."""

    def loss(params, x):
        return jnp.sum(
            (params["scale"] * jax.lax.stop_gradient(params["scale"]))[None] * x
        )

    params, x = given
    program = jax.jit(loss).trace(params, x).jaxpr
    pieces, leaves = Pieces(program, None, {}), jax.tree.leaves(given)
    with double_precision(), jax.numpy_dtype_promotion("standard"):
        recording = {}
        (before,) = pieces.exact(leaves, recording)
        moved = [
            PrecisionPair(x, x.astype(jnp.float64) * 2) if i < len(leaves) - 1 else x
            for i, x in enumerate(leaves)
        ]
        held = EXACT._replace(held=pieces.holds)
        (after,) = pieces.run(moved, held, replay=recording)
        (free,) = pieces.run(moved, EXACT)
    np.testing.assert_allclose(after.wide, 2 * before.wide, rtol=1e-12)
    np.testing.assert_allclose(free.wide, 4 * before.wide, rtol=1e-12)


def test_received_results_are_not_kept(given):
    """Each comes once, by its number."""
    _, pieces, leaves = traced(blocks, given)
    with double_precision(), jax.numpy_dtype_promotion("standard"):
        kept = pieces.run(leaves, EXACT)
        found = {}
        assert pieces.run(leaves, EXACT, receive=found.__setitem__) == []
    assert sorted(found) == list(range(len(kept)))
    for number, value in found.items():
        np.testing.assert_array_equal(value.wide, kept[number].wide)


@pytest.mark.parametrize("fn", [blocks, looped])
def test_a_draw_without_errors_rounds_as_the_program(fn, given):
    program, pieces, leaves = traced(fn, given)
    assert rounds_as_drawn(program)
    recording = {}
    with double_precision():
        both = pieces.run(leaves, BOTH, recording=recording)
        drawn = pieces.run(leaves, drawn_form(program), replay=recording)
    for known, found in zip(both, drawn, strict=True):
        assert found.wide.dtype == known.rounded.dtype
        apart = np.abs(np.asarray(found.wide) - np.asarray(known.rounded))
        # A few roundings of the program: their order may differ between two forms.
        assert (
            apart.max()
            <= 16 * np.finfo("float32").eps * np.abs(np.asarray(known.rounded)).max()
        )
    assert any(np.any(np.asarray(x.rounded) != np.asarray(x.wide)) for x in both)


@pytest.mark.parametrize(
    "fn",
    [
        lambda params, x: jnp.sum((x @ params["router"]).astype(jnp.bfloat16)),
        lambda params, x: jnp.sum((x @ params["router"]).astype(jnp.float64)),
        lambda params, x: jnp.sum(
            jnp.matmul(x, params["router"], precision="BF16_BF16_F32")
        ),
    ],
)
def test_other_dtypes_and_products_round_in_a_form_of_their_own(fn, given):
    assert not rounds_as_drawn(traced(fn, given)[0])
