"""The host-driven reducer: the same gradient, and reduced before the pass has ended."""

import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jdist import verify
from jdist._tree import is_inexact
from jdist.data_parallel import reducer, shard_batch
from jdist.data_parallel.step import reducer as reducing

SIZES = (4, 0, 3)


def dense(params, hidden):
    """One layer of two gradients."""
    return jnp.tanh(hidden @ params["w"] + params["b"][None])


LAYERS = [dense, dense, lambda params, h: h @ params]


def loss_of(outputs, batch):
    """The squared distance from the inputs."""
    return ((outputs - batch) ** 2).sum(axis=1)


def losses_of(params, batch):
    """The same model in one function, for the judge."""
    hidden = batch
    for layer, own in zip(LAYERS, params, strict=True):
        hidden = layer(own, hidden)
    return loss_of(hidden, batch)


def layer(rng, inputs, outputs, dtype="float64"):
    """Weights, biases, and a leaf that is not floating."""
    return {
        "w": jnp.asarray(rng.normal(size=(inputs, outputs)) / 2, dtype),
        "b": jnp.asarray(rng.normal(size=outputs), dtype),
        "kind": jnp.arange(2),
    }


@pytest.fixture
def problem(rng):
    """Seven examples, one of weight 0; 5-9-4-5."""
    params = [layer(rng, 5, 9), layer(rng, 9, 4), jnp.asarray(rng.normal(size=(4, 5)))]
    weights = rng.uniform(0.5, 2, size=7)
    weights[1] = 0
    return params, rng.normal(size=(7, 5)), weights


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_within_the_bound_for_every_plan(problem, mesh, reduction):
    """Uneven shards; and the plan does not change a bit."""
    params, batch, weights = problem
    caps = (None, 250 / 2**20, [["2", "0/b"], ["0/w", "1/w", "1/b"]])
    shards = shard_batch(batch, mesh(3), SIZES, weights=weights)
    candidates = {
        str(cap): lambda p, b, cap=cap: reducer(
            LAYERS, loss_of, mesh(3), reduction=reduction, bucket_cap_mb=cap
        )(p, *shards)
        for cap in caps
    }
    judge = verify.gradients_judge(losses_of, reduction=reduction)
    report = judge(params, batch, candidates, weights=weights, finite_differences=False)
    report.raise_if_failed()
    first, *others = (candidate(params, batch) for candidate in candidates.values())
    assert all(verify.compare(first, other).bit_equal for other in others)
    assert first[1][0]["kind"] is None


def test_replicas_hold_the_same_bits(problem, mesh):
    """Of loss and gradient; a second call repeats them."""
    params, batch, weights = problem
    fn = reducer(LAYERS, loss_of, mesh(3))
    shards = shard_batch(batch, mesh(3), SIZES, weights=weights)
    found = fn(params, *shards)
    for leaf in jax.tree.leaves(found):
        assert len({np.asarray(s.data).tobytes() for s in leaf.addressable_shards}) == 1
    assert verify.compare(found, fn(params, *shards)).bit_equal


def test_sixteen_bits_are_summed_in_thirty_two(rng, mesh):
    """bfloat16 parameters travel as float32 and come back as they were."""
    params = [layer(rng, 5, 9, "bfloat16"), layer(rng, 9, 5, "bfloat16")]
    batch = jnp.asarray(rng.normal(size=(6, 5)), jnp.bfloat16)
    sums = []
    fn = reducer(LAYERS[:2], loss_of, mesh(2), on_reduce=lambda k, x: sums.append(x))
    _, gradient = fn(params, *shard_batch(batch, mesh(2)))
    assert {x.dtype for x in sums} == {jnp.dtype("float32")}
    assert gradient[0]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient[1]["b"], sums[0][:5].astype(jnp.bfloat16))


def test_buckets_leave_in_order_and_are_compiled_once(problem, mesh):
    """The last layer's first; as many programs after three calls as after one."""
    params, batch, _ = problem
    seen, traces = [], 0

    def counted(own, hidden):
        nonlocal traces
        traces += 1
        return dense(own, hidden)

    fn = reducer(
        [counted, *LAYERS[1:]], loss_of, mesh(2), bucket_cap_mb=0,
        on_reduce=lambda number, buffer: seen.append((number, buffer.size)),
    )  # fmt: skip
    shards = shard_batch(batch, mesh(2))
    for _ in range(3):
        fn(params, *shards)
    once = [(0, 20), (1, 4), (2, 36), (3, 9), (4, 45)]
    assert seen == 3 * once
    assert traces == 1


def test_buckets_are_planned_once_for_parameters_of_a_kind(
    problem, rng, mesh, monkeypatch
):
    params, batch, weights = problem
    planned, plan = [], reducing.plan_buckets
    monkeypatch.setattr(
        reducing, "plan_buckets", lambda *args: planned.append(args) or plan(*args)
    )
    fn = reducer(LAYERS, loss_of, mesh(2), bucket_cap_mb=0)
    shards = shard_batch(batch, mesh(2), weights=weights)
    first = fn(params, *shards)
    others = [layer(rng, 5, 3), layer(rng, 3, 4), params[2]]  # Other shapes alone.
    _, gradient = fn(others, *shards)
    assert gradient[0]["w"].shape == (5, 3)
    assert verify.compare(first, fn(params, *shards)).bit_equal
    fn(others, *shards)
    assert len(planned) == 2


def test_buckets_are_planned_in_the_dtypes_in_which_jax_computes(
    problem, mesh, monkeypatch
):
    """NumPy's float64 is float32 there, where 64-bit types are off."""
    dtypes, plan = [], reducing.plan_buckets

    def planning(leaves, *args):
        dtypes.append({leaf.dtype for leaf in leaves})
        return plan(leaves, *args)

    def cast(tree, dtype):
        return jax.tree.map(
            lambda x: np.asarray(x, dtype if is_inexact(x) else None), tree
        )

    monkeypatch.setattr(reducing, "plan_buckets", planning)
    params, batch, weights = cast(problem, np.float32)
    with jax.enable_x64(False):
        fn = reducer(LAYERS, loss_of, mesh(2))
        shards = shard_batch(batch, mesh(2), weights=weights)
        first = fn(params, *shards)
        wide = fn(cast(params, np.float64), *shards)
        assert verify.compare(first, wide).bit_equal
    assert dtypes == [{np.dtype(np.float32)}] * 2


def test_a_bucket_is_reduced_before_the_backward_pass_has_ended(rng, mesh):
    """The first layer's backward half waits until the last layer's sum has been read.

    If sums began only after the whole pass, neither would ever come: the wait has a
    deadline, and the layer says whether it was met.
    """
    reduced = threading.Event()
    met = []

    def wait(cotangent):
        met.append(reduced.wait(timeout=60))
        return cotangent

    @jax.custom_vjp
    def patient(x):
        return x

    def forward(x):
        return x, None

    def backward(_, cotangent):
        shape = jax.ShapeDtypeStruct(cotangent.shape, cotangent.dtype)
        return (jax.experimental.io_callback(wait, shape, cotangent),)

    patient.defvjp(forward, backward)
    layers = [lambda w, x: patient(jnp.tanh(x @ w)), lambda w, h: jnp.tanh(h @ w)]
    params = [jnp.asarray(rng.normal(size=(4, 4))) for _ in layers]
    sums = {}
    readers = []

    def read(number, buffer):
        def wait_for_it():
            sums[number] = np.asarray(buffer.addressable_shards[0].data)
            reduced.set()

        if number == 0:
            readers.append(threading.Thread(target=wait_for_it))
            readers[-1].start()

    fn = reducer(layers, loss_of, mesh(2), bucket_cap_mb=0, on_reduce=read)
    batch = rng.normal(size=(4, 4))
    _, gradient = jax.block_until_ready(fn(params, *shard_batch(batch, mesh(2))))
    readers[0].join()
    assert met == [True, True]
    # Four examples of 1 / 4 each.
    np.testing.assert_array_equal(sums[0].reshape(4, 4), gradient[1])


def test_lowered_from_shapes_it_is_what_a_call_runs(problem, mesh, rng, compilations):
    """By name; when all are compiled, a call compiles the second device's own alone."""
    _, _, weights = problem
    # A size of its own, or programs of other tests would be found.
    sizes = (6, 8, 3, 6)
    params = [layer(rng, *sizes[:2]), layer(rng, *sizes[1:3])]
    params.append(jnp.asarray(rng.normal(size=sizes[2:])))
    batch = rng.normal(size=(7, 6))
    fn = reducer(LAYERS, loss_of, mesh(2), bucket_cap_mb=250 / 2**20)
    given = params, *shard_batch(batch, mesh(2), weights=weights)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    lowered = fn.lower(*shapes)
    halves = [f"layer {n}: forward" for n in (0, 1, 2)]
    halves += ["loss", "sum of losses"]
    halves += [f"layer {n}: backward" for n in (2, 1, 0)]
    buckets = [f"bucket {n}: {part}" for n in (0, 1) for part in ("fill", "reduce")]
    assert list(lowered) == ["weights", *halves, *buckets, "gradient"]
    own = {*halves, "bucket 0: fill", "bucket 1: fill"} - {"sum of losses"}
    from_arrays = fn.lower(*given)
    for name, each in lowered.items():
        assert each.as_text() == from_arrays[name].as_text()
        each.compile()
    compilations.clear()
    _, gradient = fn(*given)
    assert len(compilations) == len(own)
    expected = jax.grad(
        lambda p: (losses_of(p, batch) * weights).sum() / weights.sum(),
        allow_int=True,
    )(params)
    np.testing.assert_allclose(gradient[2], expected[2], rtol=1e-12)


def test_a_program_of_several_devices_has_a_row_of_each(problem, mesh):
    """Sums are over all devices; halves have one device's rows."""
    params, batch, _ = problem
    fn = reducer(LAYERS, loss_of, mesh(3))
    shapes = jax.ShapeDtypeStruct((9, batch.shape[1]), batch.dtype)
    lowered = fn.lower(params, shapes)
    sizes = {
        name: {x.shape for x in jax.tree.leaves(lowered[name].in_avals)}
        for name in ("layer 0: forward", "bucket 0: reduce")
    }
    numbers = 9 * 5 + 9 + 9 * 4 + 4 + 4 * 5
    assert (3, 5) in sizes["layer 0: forward"]
    assert sizes["bucket 0: reduce"] == {(3, numbers)}
    with pytest.raises(ValueError, match=r"`lower\(params=...\)` must have the param"):
        fn.lower(params[:1], shapes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": []}, r"reducer\(layers\)` must have a layer"),
        ({"reduction": "max"}, "must be one of 'mean', 'sum'. Got 'max'"),
        ({"bucket_cap_mb": -2}, "must be at least 0 each. Got -2"),
        ({"data_axis": "batch"}, "must have the axis 'batch'"),
    ],
)
def test_wrong_options_are_refused(mesh, options, message):
    """Before anything is compiled."""
    given = {"layers": LAYERS, "loss_fn": loss_of, "mesh": mesh(2)} | options
    with pytest.raises(ValueError, match=message):
        reducer(**given)


def test_other_meshes_are_refused():
    """Two axes, or a number of replicas on one device."""
    grid = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "model"))
    for where in (grid, 2):
        with pytest.raises(ValueError, match="must be a mesh with one axis"):
            reducer(LAYERS, loss_of, where)


def test_wrong_calls_are_refused(problem, mesh):
    """Another number of layers, rows that do not divide, paths that do not exist."""
    params, batch, _ = problem
    fn = reducer(LAYERS, loss_of, mesh(2))
    with pytest.raises(ValueError, match=r"each of the 3 layers. Got 2 trees"):
        fn(params[:2], batch[:6])
    with pytest.raises(ValueError, match=r"divide evenly over 2 replicas. Got 7"):
        fn(params, batch)
    listed = reducer(LAYERS, loss_of, mesh(2), bucket_cap_mb=[["0/w", "9/w"]])
    with pytest.raises(ValueError, match=r"missing: 0/b, 1/b, 1/w, 2; unknown.*9/w"):
        listed(params, batch[:6])


def test_what_a_layer_reads_is_seen(mesh, rng):
    """A reducer that is made after a change computes with it, in all layers."""
    batch = rng.uniform(0.5, 2, size=(4, 5)).astype(np.float32)
    params = [jnp.float32(0.5), jnp.float32(1.5)]
    scales = SimpleNamespace(first=2.0, second=3.0)
    layers = [
        lambda w, x: x * w * scales.first,
        lambda w, h: h * w * scales.second,
    ]
    for scales.first, scales.second in ((2.0, 3.0), (5.0, 3.0), (5.0, 7.0)):
        three = mesh(3)
        fn = reducer(layers, lambda y, x: y.sum(axis=1), three)
        loss, (first, _) = fn(params, *shard_batch(batch, three, sizes=(2, 1, 1)))
        want = batch.sum(axis=1).mean() * 1.5 * scales.first * scales.second
        np.testing.assert_allclose(loss, want * 0.5, rtol=1e-5)
        np.testing.assert_allclose(first, want, rtol=1e-5)
