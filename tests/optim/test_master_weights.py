"""Masters in the state, compute copies outside, and the loss scale."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jdist import optim
from jdist.optim import DynamicLossScale, compute_copies, with_master_weights


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def start(rng, dtype):
    full = {
        "w": jnp.asarray(rng.standard_normal((3, 5)), jnp.float32),
        "b": jnp.asarray(rng.standard_normal(7), jnp.float32),
        "n": jnp.array(4),
    }
    grads = {
        "w": jnp.asarray(rng.standard_normal((3, 5)) * 1e-2, dtype),
        "b": jnp.asarray(rng.standard_normal(7), dtype),
        "n": None,
    }
    return full, grads


INNER = {
    "adamw": optim.adamw(lr=1e-3),
    "sgd": optim.sgd(lr=1e-3, momentum=0.9),
    "optax": optim.from_optax(optax.lion(1e-3)),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_masters_take_the_inner_optimizers_own_steps(inner, dtype, rng):
    """Bit for bit those in float32; the copies are the masters, rounded."""
    full, grads = start(rng, dtype)
    opt = with_master_weights(inner, compute_dtype=dtype)
    state, params = opt.init(full), compute_copies(full, dtype)
    assert bits((state.masters["w"], state.masters["b"])) == bits(
        (full["w"], full["b"])
    )
    masters, inner_state = full, inner.init(full)
    wide = {k: None if g is None else g.astype(jnp.float32) for k, g in grads.items()}
    for _ in range(5):
        params, state = opt.step(params, grads, state)
        masters, inner_state = inner.step(masters, wide, inner_state)
        assert bits(state.inner) == bits(inner_state)
        for k in ("w", "b"):
            assert bits(state.masters[k]) == bits(masters[k])
            assert bits(params[k]) == bits(masters[k].astype(dtype))
    assert params["n"] == 4
    assert state.loss_scale is None


def test_shapes_have_shapes_of_copies():
    like = jax.eval_shape(lambda: {"w": jnp.ones((3, 2)), "n": jnp.arange(2)})
    found = compute_copies(like, jnp.bfloat16)
    assert (found["w"].dtype, found["w"].shape) == (jnp.bfloat16, (3, 2))
    assert found["n"] == like["n"]


def test_small_updates_add_up():
    """A thousand updates of 1e-3 on 1.0: bfloat16 alone never moves."""
    opt = with_master_weights(optim.sgd(lr=1e-3), compute_dtype=jnp.bfloat16)
    full = jnp.ones(3, jnp.float32)
    params, state = compute_copies(full, jnp.bfloat16), opt.init(full)
    alone, bare = params, optim.sgd(lr=1e-3)
    alone_state, grads = bare.init(alone), jnp.ones(3, jnp.bfloat16)
    step, bare_step = jax.jit(opt.step), jax.jit(bare.step)
    for _ in range(250):
        params, state = step(params, grads, state)
        alone, alone_state = bare_step(alone, grads, alone_state)
    np.testing.assert_array_equal(np.float32(alone), 1.0)
    # 250 roundings of a number up to 1.
    np.testing.assert_allclose(state.masters, 0.75, atol=250 * 2.0**-24)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_overflow_skips_the_step_and_is_counted(bad, compiled, rng):
    """Parameters, masters and inner state stay, bit for bit; the scale halves."""
    full, grads = start(rng, jnp.float16)
    opt = with_master_weights(
        optim.adam(), compute_dtype=jnp.float16, loss_scale=DynamicLossScale(2.0**10)
    )
    step = jax.jit(opt.step) if compiled else opt.step
    params, state = compute_copies(full, jnp.float16), opt.init(full)
    params, state = step(params, grads, state)
    overflow = grads | {"b": grads["b"].at[3].set(bad)}
    new, new_state = step(params, overflow, state)
    assert bits(new) == bits(params)
    assert bits(new_state[:2]) == bits(state[:2])
    assert (state.loss_scale.skipped, new_state.loss_scale.skipped) == (0, 1)
    assert (state.loss_scale.good_steps, new_state.loss_scale.good_steps) == (1, 0)
    assert (state.loss_scale.scale, new_state.loss_scale.scale) == (1024, 512)
    after, last = step(new, grads, new_state)
    assert bits(after) != bits(new)
    assert last.loss_scale.skipped == 1
    assert last.inner["w"].step == 2


def test_the_scale_grows_after_enough_good_steps_but_not_to_infinity():
    scaling = DynamicLossScale(2.0**126, growth_interval=3)
    opt = with_master_weights(optim.sgd(), loss_scale=scaling)
    params = jnp.zeros(2, jnp.bfloat16)
    state, scales = opt.init(params), []
    for _ in range(8):
        params, state = opt.step(params, params, state)
        scales.append(float(np.log2(state.loss_scale.scale)))
    assert scales == [126, 126, 127, 127, 127, 127, 127, 127]


def test_a_static_scale_stays_and_skips(rng):
    full, grads = start(rng, jnp.float16)
    opt = with_master_weights(
        optim.sgd(), compute_dtype=jnp.float16, loss_scale=2.0**15
    )
    params, state = compute_copies(full, jnp.float16), opt.init(full)
    bad = grads | {"w": grads["w"] * jnp.float16(np.inf)}
    for given, skipped in ((grads, 0), (bad, 1), (bad, 2), (grads, 2)):
        params, state = opt.step(params, given, state)
        assert state.loss_scale.scale == 2**15
        assert state.loss_scale.skipped == skipped


def test_scaling_saves_gradients_that_float16_cannot_hold():
    """1e-9 is 0 in float16; times 2**15 it is not, and `step` divides again."""
    full = jnp.array([0.5, -2.0], jnp.float32)

    def losses(p, tiny):
        return jnp.sum(p * p) * jnp.asarray(tiny, p.dtype)

    found = {}
    for scale in (None, 2.0**15):
        opt = with_master_weights(
            optim.sgd(lr=1e6), compute_dtype=jnp.float16, loss_scale=scale
        )
        params, state = compute_copies(full, jnp.float16), opt.init(full)

        def scaled(p, opt=opt, state=state):
            wide = jnp.sum(p.astype(jnp.float32) ** 2) * 1e-9
            return opt.scale_loss(wide, state)

        grads = jax.grad(scaled)(params)
        _, state = opt.step(params, grads, state)
        found[scale] = np.asarray(state.masters - full)
    assert np.all(found[None] == 0)
    # The gradient 2 p 1e-9 times 1e6, of float16's precision.
    np.testing.assert_allclose(found[2.0**15], -np.array([1e-3, -4e-3]), rtol=2.0**-10)


def test_scale_loss_widens_and_is_the_loss_itself_without_a_scale():
    scaled = with_master_weights(optim.sgd(), loss_scale=2.0**17)
    losses = jnp.array([2.0, 3.0], jnp.float16)
    found = scaled.scale_loss(losses, scaled.init(jnp.zeros(1)))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, [2.0**18, 3 * 2.0**17])
    for opt in (optim.sgd(), optim.from_optax(optax.sgd(0.1))):
        assert opt.scale_loss(losses, opt.init(jnp.zeros(1))) is losses
    unscaled = with_master_weights(optim.sgd())
    assert unscaled.scale_loss(losses, unscaled.init(jnp.zeros(1))).tolist() == [2, 3]


def test_none_leaves_master_and_copy_as_they_are(rng):
    full, grads = start(rng, jnp.bfloat16)
    opt = with_master_weights(optim.adam(lr=0.1), loss_scale=4.0)
    params, state = compute_copies(full, jnp.bfloat16), opt.init(full)
    new, new_state = jax.jit(opt.step)(params, grads | {"w": None}, state)
    assert bits(new["w"]) == bits(params["w"])
    assert bits(new_state.masters["w"]) == bits(full["w"])
    assert new_state.inner["w"].step == 0
    assert bits(new["b"]) != bits(params["b"])


def test_all_members_of_an_axis_skip_together(mesh):
    """One shard overflows: the others must not step either."""
    opt = with_master_weights(optim.sgd(lr=1.0), loss_scale=2.0, axis_name="data")
    params = jnp.arange(8.0, dtype=jnp.bfloat16)
    rows, same = PartitionSpec("data"), PartitionSpec()
    state = opt.init(params)
    specs = jax.tree.map(lambda x: rows if x.ndim else same, state)
    step = jax.shard_map(
        opt.step, mesh=mesh(4), in_specs=(rows, rows, specs), out_specs=(rows, specs)
    )
    new, new_state = step(params, params.at[5].set(jnp.inf), state)
    assert bits(new) == bits(params)
    assert new_state.loss_scale.skipped == 1
    new, _ = step(params, params, state)
    np.testing.assert_array_equal(np.float32(new), np.arange(8) / 2)


def test_masters_are_copies_of_their_own():
    """Parameters already in float32 may live on when the state is donated."""
    params = jnp.arange(3.0, dtype=jnp.float32)
    opt = with_master_weights(optim.sgd(), compute_dtype=jnp.float32)
    state = opt.init(params)
    step = jax.jit(opt.step, donate_argnums=(0, 2))
    kept = np.array(params)
    step(params + 0, params, state)
    np.testing.assert_array_equal(params, kept)


def test_overrides_labels_and_float64_masters():
    opt = with_master_weights(
        optim.by_label({"a": optim.sgd(lr=1.0), "b": optim.sgd(lr=2.0)}, ["a", "b"]),
        compute_dtype=jnp.bfloat16,
    )
    full = [jnp.array([1.0, 2.0]), jnp.array([3.0])]
    params, state = compute_copies(full, jnp.bfloat16), opt.init(full)
    assert state.masters[0].dtype == jnp.float64
    new, _ = opt.step(params, params, state)
    assert [p.tolist() for p in new] == [[0.0, 0.0], [-3.0]]
    new, _ = opt.step(params, params, state, lr=0.5)
    assert [p.tolist() for p in new] == [[0.5, 1.0], [1.5]]


def test_refusals():
    opt = with_master_weights(optim.sgd())
    full = {"w": jnp.zeros(3, jnp.float32)}
    state = opt.init(full)
    with pytest.raises(ValueError, match=r"copies, bfloat16. Got float32 at w."):
        opt.step(full, full, state)
    copies = compute_copies(full, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"step\(state=...\)` must be what `init` or"):
        opt.step(copies, copies, optim.sgd().init(copies))
    with pytest.raises(ValueError, match=r"must be a real floating dtype. Got int8"):
        with_master_weights(optim.sgd(), compute_dtype=jnp.int8)
    with pytest.raises(ValueError, match=r"not have masters already.*Wrap it once"):
        with_master_weights(opt)
    with pytest.raises(ValueError, match=r"loss_scale=...\)` must be above 0. Got 0"):
        with_master_weights(optim.sgd(), loss_scale=0)
    for name, value, rule in (
        ("init_scale", 0.0, "above 0"),
        ("growth_factor", 0.5, "at least 1"),
        ("backoff_factor", 1.5, "above 0 and at most 1"),
        ("growth_interval", 0, "at least 1"),
    ):
        with pytest.raises(ValueError, match=rf"\({name}=...\)` must be {rule}"):
            DynamicLossScale(**{name: value})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_wide_gradient_is_not_rounded(dtype, rng):
    """The masters step by its float32 bits, also beyond what 16 bits hold."""
    opt = with_master_weights(optim.sgd(lr=1.0), compute_dtype=dtype)
    full = {"w": jnp.zeros(5, jnp.float32), "c": jnp.zeros(2, jnp.complex64)}
    grads = {
        "w": jnp.asarray(rng.standard_normal(5) * 1e6, jnp.float32),
        "c": jnp.array([1 + 2j, 3 - 1j], jnp.complex64),
    }
    _, state = opt.step(compute_copies(full, dtype), grads, opt.init(full))
    assert bits(state.masters) == bits({k: -g for k, g in grads.items()})


def test_gradients_that_are_no_wider_copies_are_refused(rng):
    """Another 16-bit dtype, a narrower one, an integer; any wider without masters."""
    full = {"w": jnp.zeros(3, jnp.float32)}
    opt = with_master_weights(optim.sgd(lr=1.0), compute_dtype=jnp.bfloat16)
    copies, state = compute_copies(full, jnp.bfloat16), opt.init(full)
    for wrong in (jnp.float16, jnp.int32, jnp.complex64):
        match = (
            f"w, bfloat16 of shape .3,., or be of a wider dtype. Got {wrong.__name__}"
        )
        with pytest.raises(ValueError, match=match):
            opt.step(copies, {"w": jnp.zeros(3, wrong)}, state)
    with pytest.raises(ValueError, match=r"wider dtype. Got float32 of shape .4,."):
        opt.step(copies, {"w": jnp.zeros(4, jnp.float32)}, state)
    whole = with_master_weights(optim.sgd(lr=1.0), compute_dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"wider dtype\. Got bfloat16"):
        whole.step(full, {"w": jnp.zeros(3, jnp.bfloat16)}, whole.init(full))
    plain = optim.sgd(lr=1.0)
    with pytest.raises(ValueError, match=r"bfloat16 of shape .3,.\. Got float32"):
        plain.step(copies, {"w": jnp.zeros(3, jnp.float32)}, plain.init(copies))
