"""What pipelines can do on devices, on meshes: training, state, keys, checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdist import optim, pipeline
from jdist.data_parallel import zero
from tests.pipeline.epochs import asynchronous
from tests.pipeline.mesh_models import (
    SCHEDULES,
    cut,
    joined,
    judge,
    losses,
    made,
    meshes,
    placed,
    problem,
    same_places,
    specs,
    stages,
    stateful,
    stateful_problem,
)

WIDE = "PP x DP x TP"


def close(found, expected, rtol=1e-11):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-13)


def same_bits(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def on_one_device(schedule="1F1B", **options):
    """The same pipeline without places."""
    chosen = SCHEDULES[schedule]
    stage_options = options.pop("stage", {})
    return pipeline.Pipeline(
        stages(chosen.stages, **stage_options), losses, chosen, **options
    )


# --- gradients ---


@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_other_reductions(reduction):
    own, batch, weights = problem(dtype=np.float64)
    pipe, place = made(WIDE, reduction=reduction)
    found = pipe.value_and_grad(place(own), batch, weights)
    alone = on_one_device(reduction=reduction)
    close(found, alone.value_and_grad(cut(own, 2), batch, weights))


@pytest.mark.parametrize(
    "options",
    [{"recompute": True}, {"recompute": "dots"}],
    ids=["recomputed", "dots recomputed"],
)
def test_options_of_a_stage(options):
    own, batch, weights = problem(dtype=np.float64)
    pipe, place = made(WIDE, stage=options)
    params = place(own)
    found = pipe.value_and_grad(params, batch, weights)
    same_places(found[1], params)
    alone = on_one_device()
    close(found, alone.value_and_grad(cut(own, 2), batch, weights))


def test_bits_repeat_and_do_not_depend_on_the_schedule():
    """Sums over micro-batches have the same order in both."""
    own, batch, weights = problem()
    results = []
    for schedule in ("1F1B", "GPipe"):
        pipe, place = made(WIDE, schedule)
        params = place(own)
        results += [pipe.value_and_grad(params, batch, weights) for _ in range(2)]
    for result in results[1:]:
        same_bits(result, results[0])


def test_replicas_on_meshes():
    """DualPipeV: both workers run both stages, each with half of the micro-batches."""
    own, batch, weights = problem(dtype=np.float64)
    schedule = pipeline.dualpipe_v(2, 4)
    pipe = pipeline.Pipeline(stages(4), losses, schedule, meshes(WIDE))
    params = placed(pipe, WIDE, own)
    found = pipe.value_and_grad(params, batch, weights)
    same_places(found[1], params)
    alone = on_one_device("interleaved")
    close(found, alone.value_and_grad(cut(own, 4), batch, weights))


def test_a_value_of_another_mesh_and_of_a_device():
    """A mesh, a device and a mesh of another shape take each other's values."""
    own, batch, weights = problem(dtype=np.float64)
    devices = jax.devices()
    places = [
        Mesh(np.array(devices[:2]), ("data",)),
        devices[2],
        Mesh(np.array(devices[3:7]).reshape(2, 2), ("model", "data")),
        Mesh(np.array(devices[:2]), ("model",)),
    ]
    schedule = pipeline.one_f_one_b(4, 3)
    pipe = pipeline.Pipeline(stages(4), losses, schedule, places)
    expected = on_one_device("interleaved")
    found = pipe.value_and_grad(pipe.place(cut(own, 4)), batch, weights)
    close(found, expected.value_and_grad(cut(own, 4), batch, weights))


# --- training ---


def trained(pipe, state, steps, first=0):
    found = []
    for step in range(first, first + steps):
        _, batch, weights = problem(dtype=np.float64, seed=step)
        state, metrics = pipe.train_step(state, batch, weights)
        found.append((float(metrics.loss), float(metrics.grad_norm)))
    return state, found


def test_training_is_that_of_one_device(compilations):
    """Optimizer states lie like their parameters; the second step compiles nothing."""
    own, *_ = problem(dtype=np.float64)
    options = {"optimizer": optim.adam(lr=0.05), "max_norm": 0.5}
    pipe, place = made(WIDE, **options)
    params = place(own)
    state = pipe.init(params)
    state, first = trained(pipe, state, 1)
    begun = len(compilations)
    state, later = trained(pipe, state, 2, 1)
    assert len(compilations) == begun
    same_places(state.params, params)
    for tree, kept in zip(state.params, state.opt_states, strict=True):
        for name in ("expand", "attend", "head", "embed"):
            for key, leaf in tree.get(name, {}).items():
                moment = kept[name][key].exp_avg.sharding
                assert moment.is_equivalent_to(leaf.sharding, leaf.ndim)
    alone = on_one_device(**options)
    expected, found = trained(alone, alone.init(cut(own, 2)), 3)
    np.testing.assert_allclose(first + later, found, rtol=1e-11)
    close(state.params, expected.params, rtol=1e-9)


def test_masters_are_laid_out_like_their_parameters():
    """With a scaled loss; their first step is judged as the gradient that it took."""
    own, batch, weights = problem(dtype=jnp.bfloat16)
    master = optim.with_master_weights(optim.sgd(lr=1.0), loss_scale=1024.0)
    pipe, place = made(WIDE, optimizer=master)
    whole = jax.tree.map(lambda x: x.astype(jnp.float32), own)

    def stepped(own, batch):
        params = place(whole)
        state, metrics = pipe.train_step(pipe.init(params), batch, weights)
        masters = [kept.masters for kept in state.opt_states]
        same_places(masters, params)
        moves = jax.tree.map(lambda a, b: (a - b).astype(jnp.bfloat16), params, masters)
        return metrics.loss, joined(moves)

    report = judge()(
        own, batch, {"masters": stepped}, weights=weights, finite_differences=False
    )
    report.raise_if_failed()


@pytest.mark.parametrize("layout", ["PP", "PP x TP"])
def test_a_checkpoint_is_restored_on_other_meshes(layout, tmp_path):
    """Bit for bit; and the run goes on with the same losses."""
    own, *_ = problem(dtype=np.float64)
    options = {"optimizer": optim.adam(lr=0.05), "max_norm": 0.5}
    pipe, place = made(WIDE, **options)
    state, _ = trained(pipe, pipe.init(place(own)), 2)
    with pipeline.PipelineCheckpoints(tmp_path, pipe) as saved:
        saved.save(state)
    other, place_there = made(layout, **options)
    like = other.init(place_there(problem(dtype=np.float64, seed=5)[0]))
    with pipeline.PipelineCheckpoints(tmp_path, other) as saved:
        again = saved.restore(like)
    same_bits(again, state)
    same_places(again.params, like.params)
    _, expected = trained(pipe, state, 1, 2)
    _, found = trained(other, again, 1, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-11)


def test_evaluation():
    """Of fewer examples than a data axis has parts, too; with outputs."""
    own, batch, weights = problem(dtype=np.float64)
    pipe, place = made(WIDE)
    alone, params = on_one_device(), place(own)
    for examples in (11, 4, 1):
        some = jax.tree.map(lambda x, n=examples: x[:n], batch)
        found = pipe.evaluate(params, some, weights[:examples], outputs=True)
        expected = alone.evaluate(cut(own, 2), some, weights[:examples], outputs=True)
        close((found.loss, found.outputs), (expected.loss, expected.outputs))


# --- states, keys, auxiliary outputs ---


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_states_keys_and_auxiliary_outputs(kind):
    params, states, batch, weights = stateful_problem()
    pipe, alone = stateful(meshes(WIDE)), stateful()
    given = pipe.place(params, [{"w": P(None, "model")}, {"w": P("model")}])
    kept = pipe.place(states, [{"mean": P("model"), "square": None}, None])
    key = jax.random.key(7, impl=kind)
    found = pipe.value_and_grad(given, batch, weights, states=kept, key=key)
    same_places(found[1], given)
    same_places(found[2], kept)
    # Micro-batches have the same sizes there.
    close(found, alone.value_and_grad(params, batch, weights, states=states, key=key))


def test_a_state_keeps_its_layout_and_compiles_nothing(compilations):
    params, states, batch, weights = stateful_problem()
    pipe = stateful(meshes(WIDE), optimizer=optim.sgd(lr=0.1))
    kept = pipe.place(states, [{"mean": P("model"), "square": None}, None])
    state = pipe.init(params, kept, jax.random.key(1))
    state, _ = pipe.train_step(state, batch, weights)
    begun = len(compilations)
    state, _ = pipe.train_step(state, batch, weights)
    assert len(compilations) == begun
    same_places(state.states, kept)


# --- measures ---


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_in_flight(schedule):
    """As many as the schedule says; on each device the share of its mesh."""
    own, batch, weights = problem(24)
    held = {}
    for layout in ("PP", "PP x DP", "PP x TP", WIDE):
        pipe, place = made(layout, schedule)
        params = place(own)
        _, timeline = pipeline.timed(
            pipe, lambda p=pipe, q=params: p.value_and_grad(q, batch, weights)
        )
        assert timeline.peak_activations == pipe.schedule.peak_activations
        held[layout] = timeline.activation_bytes
    # All that is kept of a micro-batch has its rows.
    for whole, divided in (("PP", "PP x DP"), ("PP x TP", WIDE)):
        assert held[divided] == tuple(size / 2 for size in held[whole])
    # The model axis divides what comes of divided parameters, and no rows.
    pairs = list(zip(held["PP"], held["PP x TP"], strict=True))
    assert all(size / 2 <= part <= size for size, part in pairs)
    assert any(part < size for size, part in pairs)


def test_programs_are_lowered_for_the_meshes():
    own, batch, weights = problem(12)
    pipe, place = made(WIDE)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        place(own),
    )
    found = pipe.lower(shapes, batch, weights)
    text = found["stage 1: forward"].compile().as_text()
    assert "all-reduce" in text
    assert "num_partitions=4" in text


def test_equal_stages_are_compiled_once_to_find_where_results_lie(compilations):
    """For what is lowered: each stage has a mesh of its own."""

    def body(own, h):
        return jnp.tanh(h @ own["up"]) @ own["down"]

    def lowered(n, width):
        stages = [pipeline.Stage(body, (f"h{j}",), (f"h{j + 1}",)) for j in range(n)]
        places = [Mesh(jax.devices()[2 * j : 2 * j + 2], ("model",)) for j in range(n)]
        schedule = pipeline.one_f_one_b(n, n)
        pipe = pipeline.Pipeline(stages, lambda y, _: y.sum(1), schedule, places)
        up, down = (
            jax.ShapeDtypeStruct(shape, np.float32)
            for shape in ((8, width), (width, 8))
        )
        specs = [{"up": P(None, "model"), "down": P("model")}] * n
        params = pipe.place([{"up": up, "down": down}] * n, specs)
        begun = len(compilations)
        batch = {"h0": jax.ShapeDtypeStruct((2 * n, 8), np.float32)}
        found = pipe.lower(params, batch)
        return found, places, len(compilations) - begun

    found, places, count = lowered(4, 16)
    assert count == lowered(3, 24)[2] > 0
    for j in (1, 2):
        (given, _) = found[f"stage {j}: backward"].compile().input_shardings
        devices = {
            device for each in jax.tree.leaves(given) for device in each.device_set
        }
        assert devices == set(places[j].devices.flat)


# --- asynchronous schedules ---


@pytest.mark.parametrize("policy", ["stashing", "2bw"])
def test_epochs_with_weight_stashing(policy):
    """Updates while micro-batches are under way; of odd sizes, too."""
    options = {"policy": policy, "optimizer": optim.adam(lr=0.05)}
    batches = [problem(n, np.float64, seed=n)[1:] for n in (4, 3, 4, 6)]
    own = problem(dtype=np.float64)[0]

    def plain():
        # Tied parameters do not go with stashing.
        made = [pipeline.Stage(s.fn, s.inputs, s.outputs) for s in stages(2)]
        return made, losses

    alone = asynchronous(*plain(), **options)
    expected, metrics = alone.train_epoch(alone.init(cut(own, 2)), batches)
    pipe = asynchronous(*plain(), meshes(WIDE), **options)
    params = placed(pipe, WIDE, own)
    state, found = pipe.train_epoch(pipe.init(params), batches)
    same_places(state.params, params)
    np.testing.assert_allclose(found.losses, metrics.losses, rtol=1e-11)
    close(state.params, expected.params, rtol=1e-9)


# --- ZeRO ---


@pytest.mark.parametrize("layout", ["PP x DP", WIDE])
def test_optimizer_states_divided_over_the_data_axis(layout):
    """An optimizer for each stage, over the stage's own mesh; the table is tied."""
    own, *_ = problem(dtype=np.float64)
    adam = optim.adam(lr=0.05)
    each = [
        zero(adam, mesh, specs=own) if layout == WIDE else zero(adam, mesh)
        for mesh, own in zip(meshes(layout), specs(layout, 2), strict=True)
    ]
    options = {"max_norm": 0.5}
    pipe, place = made(layout, optimizer=each, **options)
    params = place(own)
    state, found = trained(pipe, pipe.init(params), 2)
    same_places(state.params, params)
    alone = on_one_device(optimizer=adam, **options)
    expected, wanted = trained(alone, alone.init(cut(own, 2)), 2)
    np.testing.assert_allclose(found, wanted, rtol=1e-11)
    close(state.params, expected.params, rtol=1e-9)
    joined([jax.tree.map(np.asarray, tree) for tree in state.params])  # equal copies
    moment = state.opt_states[0]["attend"]["qkv"].exp_avg.array
    assert {"data"} <= {*moment.sharding.spec}
    assert ("model" in moment.sharding.spec) == (layout == WIDE)
    numbers = moment.addressable_shards[0].data.size
    assert numbers == moment.size // meshes(layout)[0].size


def test_tied_parameters_want_one_rule():
    """The same optimizer, divided over as many replicas."""
    own, *_ = problem()
    two = meshes("PP x DP")
    each = [zero(optim.adam(lr=0.05), mesh) for mesh in two]
    pipe, place = made("PP x DP", optimizer=each)
    with pytest.raises(ValueError, match="must be one and the same object"):
        pipe.init(place(own))


def test_zero_wants_the_layouts_on_a_mesh_with_a_model_axis():
    with pytest.raises(ValueError, match="zero"):
        zero(optim.adam(lr=0.05), meshes(WIDE)[0])
    divided = zero(optim.adam(lr=0.05), meshes(WIDE)[0], specs={"w": P("model")})
    with pytest.raises(ValueError, match="must be a tree like the parameters"):
        divided.init({"v": jnp.ones(4)})
