"""What is before the first of equal stages, and after the last one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jdist import optim, pipeline
from tests.pipeline import language_blocks as model
from tests.pipeline.spmd_models import close

SCHEDULES = {
    "1F1B": pipeline.one_f_one_b(2, 3),
    "interleaved": pipeline.interleaved(2, 4, 2),
    "ZB-H1": pipeline.zero_bubble(2, 3),
    "DualPipeV": pipeline.dualpipe_v(2, 4),
}
SEVERAL = ("stage", "data", "model")
KEYED = [(), ("first", "block", "last"), ("block",), ("first", "last")]


def line(count, **options):
    mesh = Mesh(np.array(jax.devices()[:count]), ("stage",))
    return pipeline.OneProgram(mesh, **options)


def in_one(schedule, overlap=False, **options):
    places = line(schedule.workers, overlap=overlap)
    return model.pipeline_of(schedule, places, **options)


def on_devices(schedule, **options):
    places = jax.devices()[: schedule.workers]
    return model.pipeline_of(schedule, places, **options)


def host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("keyed", KEYED, ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_one_program_is_the_other_executors(name, keyed):
    """Float64: one mask that differs would be seen; the table is at both ends."""
    schedule = SCHEDULES[name]
    params, batch, weights = model.problem(schedule.stages, np.float64)
    key = jax.random.key(3) if keyed else None
    found, expected = (
        pipe.value_and_grad(pipe.place(params), batch, weights, key=key)
        for pipe in (make(schedule, keyed=keyed) for make in (in_one, on_devices))
    )
    close(host(found), host(expected))
    (_, (first, *_)), (_, grads) = found, expected
    assert not np.asarray(first[0]["unused"]).any()
    np.testing.assert_array_equal(grads[0][0]["table"], host(grads[-1][-1]["table"]))


def test_the_gradient_is_that_of_the_whole_batch():
    """Written out; the copies of the table have the sum of both gradients."""
    params, batch, weights = model.problem(2, np.float64)

    def mean(trees):
        found, wide = model.whole_losses(trees, batch), weights.astype(np.float64)
        return (found * wide).sum() / wide.sum()

    expected, grads = jax.value_and_grad(mean, allow_int=True)(params)
    both = grads[0][0]["table"] + grads[1][1]["table"]
    loss, own = in_one(SCHEDULES["ZB-H1"]).value_and_grad(params, batch, weights)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    for copy in (own[0][0].pop("table"), own[1][1].pop("table")):
        np.testing.assert_allclose(copy, both, rtol=1e-11, atol=1e-13)
    for tree, other in zip(own, grads, strict=True):
        for part, alike in zip(tree, other, strict=True):
            for name, found in part.items():
                if found is None:
                    assert name == "steps"
                else:
                    assert found.dtype == np.float64
                    np.testing.assert_allclose(
                        found, alike[name], rtol=1e-11, atol=1e-13
                    )


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
def test_every_reduction(reduction):
    schedule = SCHEDULES["ZB-H1"]
    params, batch, weights = model.problem(2, np.float64)
    found, expected = (
        pipe.value_and_grad(pipe.place(params), batch, weights)
        for pipe in (
            make(schedule, reduction=reduction) for make in (in_one, on_devices)
        )
    )
    close(host(found), host(expected))


def test_keys_in_the_batch():
    """Each example has its own, of which the first stage's end draws."""

    def masked(w, x, keys):
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (4,)))(keys)
        return jnp.where(kept, x @ w, 0)

    blocks = [
        pipeline.Stage(lambda w, h: jnp.tanh(h @ w), (f"h{j}",), (f"h{j + 1}",))
        for j in range(2)
    ]
    first = pipeline.Stage(masked, ("x", "key"), ("h0",))
    made = pipeline.with_ends(blocks, first=first)
    rng = np.random.default_rng(3)
    table, *squares = (rng.normal(size=(n, 4)) for n in (3, 4, 4))
    params = [(table, squares[0]), squares[1]]
    batch = {
        "x": rng.normal(size=(5, 3)),
        "key": jax.random.split(jax.random.key(1), 5),
    }
    found, expected = (
        pipe.value_and_grad(pipe.place(params), batch)
        for pipe in (
            pipeline.Pipeline(made, lambda h, _: (h**2).sum(1), SCHEDULES["1F1B"], at)
            for at in (line(2), jax.devices()[:2])
        )
    )
    close(host(found), host(expected))


def test_one_stage_with_both_ends():
    schedule = pipeline.gpipe(1, 3)
    params, batch, weights = model.problem(1, np.float64)
    key = jax.random.key(3)
    keyed = ("first", "block", "last")
    found, expected = (
        make(schedule, keyed=keyed).value_and_grad(params, batch, weights, key=key)
        for make in (in_one, on_devices)
    )
    close(host(found), host(expected))


@pytest.mark.parametrize("place", ["device", "automatic", "explicit"])
def test_ends_of_one_stage_share_a_table(place):
    """Each copy has the gradient of both, and the norm counts them once."""
    params, batch, weights = model.problem(1, np.float64)
    kind = AxisType.Explicit if place == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((1,), ("stage",), axis_types=(kind,))
    opt, bound = optim.sgd(lr=0.5, momentum=0.9), 0.3
    pipe = model.pipeline_of(
        pipeline.gpipe(1, 3),
        None if place == "device" else pipeline.OneProgram(mesh),
        optimizer=opt,
        max_norm=bound,
    )
    state = pipe.init(pipe.place(params))
    first, block, last = params[0]
    own = {"first": first, "block": block, "last": dict(last)}
    del own["last"]["table"]
    kept, share = opt.init(own), weights / weights.sum(dtype=np.float64)

    def mean(own):
        last = {**own["last"], "table": own["first"]["table"]}
        trees = [(own["first"], own["block"]), (last,)]
        return (model.whole_losses(trees, batch) * share).sum()

    for _ in range(3):
        state, found = pipe.train_step(state, batch, weights)
        loss, grads = jax.value_and_grad(mean, allow_int=True)(own)
        grads = jax.tree.map(lambda p, g: g if p.dtype == float else None, own, grads)
        grads, norm = optim.clip_by_global_norm(grads, bound)
        own, kept = opt.step(own, grads, kept)
        np.testing.assert_allclose(found.loss, loss, rtol=1e-11)
        np.testing.assert_allclose(found.grad_norm, norm, rtol=1e-11)
        assert norm > bound
    first, block, last = state.params[0]
    np.testing.assert_array_equal(first["table"], last.pop("table"))
    found = {"first": first, "block": block, "last": last}
    for one, two in zip(*map(jax.tree.leaves, (found, own)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-13)


def test_copies_within_one_stage_begin_equal():
    params, *_ = model.problem(1)
    params[0][2]["table"] = params[0][2]["table"].at[4, 1].add(1e-3)
    schedule, sgd = pipeline.gpipe(1, 3), optim.sgd()
    pipe = model.pipeline_of(schedule, None, optimizer=sgd)
    message = r"the stages 0 and 0\. Got different ones at 0/table and 2/table\."
    with pytest.raises(ValueError, match=message):
        pipe.init(params)


@pytest.mark.parametrize("sizes", [(2, 1, 1), (2, 2, 1), (2, 1, 2)], ids=str)
def test_an_axis_of_size_1_divides_nothing(sizes):
    """A step may return such a layout without the axis, and the next one takes it."""
    count = int(np.prod(sizes))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(sizes), SEVERAL)
    params, batch, weights = model.problem(2)
    pipe, plain = (
        model.pipeline_of(
            SCHEDULES["1F1B"], place, optimizer=optim.adam(), max_norm=1.0
        )
        for place in (pipeline.OneProgram(mesh), None)
    )
    state = pipe.init(pipe.place(params, model.specs(pipe)))
    expected = plain.init(params)
    for _ in range(3):
        state, found = pipe.train_step(state, batch, weights)
        expected, wanted = plain.train_step(expected, batch, weights)
        np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-5)
    # Compiled for the first step alone: what it returned is laid out as what it took.
    assert len(pipe.executor._by_signature) == 1


@pytest.mark.parametrize("master", [False, True])
def test_training(master):
    """The copies stay equal, the norm counts them once, and nothing compiles twice."""
    schedule, optimizer = SCHEDULES["1F1B"], optim.adam(lr=1e-2)
    if master:
        optimizer = optim.with_master_weights(optimizer, compute_dtype=jnp.float32)
    options = {"optimizer": optimizer, "max_norm": 0.5}
    params, batch, weights = model.problem(2, np.float32)
    one, other = (make(schedule, **options) for make in (in_one, on_devices))
    state, same = one.init(params), other.init(params)
    for _ in range(3):
        state, found = one.train_step(state, batch, weights)
        same, expected = other.train_step(same, batch, weights)
        np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)
        np.testing.assert_allclose(found.grad_norm, expected.grad_norm, rtol=1e-5)
    first, last = state.params[0][0], state.params[1][1]
    np.testing.assert_array_equal(first["table"], host(last["table"]))
    assert first["table"].devices() == {jax.devices()[0]}
    assert last["table"].devices() == {jax.devices()[1]}


def test_messages_beside_actions_change_nothing():
    params, batch, weights = model.problem(2, np.float32)
    found = [
        host(
            in_one(SCHEDULES["1F1B"], overlap=overlap).value_and_grad(
                params, batch, weights
            )
        )
        for overlap in (False, True)
    ]
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        assert a.tobytes() == b.tobytes()


def test_evaluation_runs_what_is_for_it():
    """The ends draw in training alone."""
    around = model.ends(("first",))
    quiet = dataclasses.replace(around["first"], in_evaluation=model.embed)
    schedule = SCHEDULES["1F1B"]
    params, batch, weights = model.problem(2, np.float64)
    pipe = pipeline.Pipeline(
        pipeline.with_ends(model.stages(2), first=quiet, last=around["last"]),
        model.losses,
        schedule,
        line(2),
    )
    found = pipe.evaluate(pipe.place(params), batch, weights)
    whole = np.asarray(model.whole_losses(params, batch))
    wide = weights.astype(np.float64)
    expected = (whole * wide).sum() / wide.sum()
    np.testing.assert_allclose(found.loss, expected, rtol=1e-12)


def test_they_are_lowered():
    params, batch, weights = model.problem(2)
    pipe = in_one(SCHEDULES["1F1B"], optimizer=optim.adam(), max_norm=1.0)
    found = pipe.lower(pipe.init(params), batch, weights)
    assert {*found} == {"all stages: gradient", "stage 0: update", "stage 1: update"}


# --- what is refused ---


def made_of(**changes):
    around = model.ends()
    for name, change in changes.items():
        around[name] = (
            dataclasses.replace(around[name], **change)
            if isinstance(change, dict)
            else change
        )
    stages = pipeline.with_ends(model.stages(2), **around)
    return pipeline.Pipeline(stages, model.losses, SCHEDULES["1F1B"], line(2))


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({"first": model.embed}, TypeError, r"with_ends\(first=...\)` must be a Stage"),
        (
            {"first": {"outputs": ("e",)}},
            ValueError,
            r"must output what the first stage takes, \('x',\).* Got \('e',\)",
        ),
        (
            {"last": {"inputs": ("z",)}},
            ValueError,
            r"must take what the last stage outputs, \('y',\).* Got \('z',\)",
        ),
        ({"last": {"stateful": True}}, ValueError, "must have no state: give it to"),
        (
            {"first": {"tied": {"places": "other"}}, "last": {"tied": {}}},
            ValueError,
            "must have the name 'other' at two stages or more",
        ),
        (
            {"first": {"tied": {"table": "table", "places": "table"}}},
            ValueError,
            "must share one copy of a parameter at each end where one program runs",
        ),
        (
            {"first": {"tied": {"nowhere": "table"}}},
            ValueError,
            "must name parameters of stage first, which has",
        ),
        (
            {"first": {"tied": {"places": "table"}}},
            ValueError,
            "must be copies of one shape and dtype: that before the stages is",
        ),
    ],
)
def test_ends_that_do_not_fit(changes, kind, expected):
    with pytest.raises(kind, match=expected):
        made_of(**changes).value_and_grad(*model.problem(2))


def test_an_end_that_draws_beside_one_that_does_not_in_evaluation():
    around = model.ends(("first", "last"))
    quiet = dataclasses.replace(around["first"], in_evaluation=model.embed)
    with pytest.raises(ValueError, match="must all have a function for evaluation"):
        pipeline.with_ends(model.stages(1), first=quiet, last=around["last"])


def test_a_stage_with_a_state_has_no_end():
    first, second = model.stages(2)
    stateful = dataclasses.replace(first, stateful=True)
    with pytest.raises(ValueError, match="must be no end of a stage that has a state"):
        pipeline.with_ends([stateful, second], **model.ends())


def test_parameters_of_a_stage_with_an_end_are_a_tuple():
    params, batch, weights = model.problem(2)
    expected = "must be a tuple of 2 trees where a stage has an end"
    for make in (in_one, on_devices):
        pipe = make(SCHEDULES["1F1B"])
        with pytest.raises(ValueError, match=expected):
            pipe.value_and_grad([params[0][1], params[1]], batch, weights)


def test_copies_that_begin_unequal_are_refused():
    params, _, _ = model.problem(2)
    last = {**params[1][1], "table": params[1][1]["table"] + 1}
    pipe = in_one(SCHEDULES["1F1B"], optimizer=optim.adam())
    with pytest.raises(
        ValueError, match="must begin with equal values at the stages 0"
    ):
        pipe.init([params[0], (params[1][0], last)])
