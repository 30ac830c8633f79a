"""Stages of Flax modules: any wiring, groups, ties, keys, and the way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdist import optim, pipeline
from jdist.pipeline import modules_from_nnx, stages_from_modules, stages_from_nnx


class Attention(nnx.Module):
    """Of a sequence and a mask; a skip connection is given from outside."""

    def __init__(self, width, rngs):
        self.proj = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, h, mask, skip):
        scores = jnp.where(mask[:, None, :], h @ h.mT, -1e9)
        return self.proj(jax.nn.softmax(scores) @ h) + skip


class Split(nnx.Module):
    """Puts out two values."""

    def __init__(self, width, out, rngs):
        self.dense = nnx.Linear(width, out, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dense(x)), jnp.abs(x).sum((1, 2))


class Tokens(nnx.Module):
    """Scores of each token, by the embedding that the first layer has too."""

    def __init__(self, embed, rngs):
        self.embed = embed
        self.scale = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, h):
        return self.embed.attend(self.scale(h))


def example(rng):
    return {
        "x": rng.normal(size=(6, 5, 3)).astype(np.float32),
        "mask": rng.random((6, 5)) < 0.7,
        "target": rng.normal(size=(6, 5, 4)).astype(np.float32),
    }


def losses(y, batch):
    return ((y - batch["target"]) ** 2).sum((1, 2))


def wired(rngs):
    return [
        nnx.Linear(3, 4, rngs=rngs),
        Attention(4, rngs),
        Attention(4, rngs),
        nnx.Linear(4, 4, rngs=rngs),
    ]


def whole(layers, batch):
    first, second, third, last = layers
    h = first(batch["x"])
    return losses(
        last(third(second(h, batch["mask"], h), batch["mask"], h)), batch
    ).mean()


def close(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_masks_and_skips_from_the_batch_and_earlier_stages(rng):
    """The mask is an entry of the batch; h1 skips a stage."""
    layers, batch = wired(nnx.Rngs(0)), example(rng)
    inputs = {1: ("h1", "mask", "h1"), 2: ("h2", "mask", "h1")}
    with pytest.raises(
        ValueError, match=r"each value once for 'layer1'.*a list of one"
    ):
        stages_from_nnx(layers, inputs=inputs)
    given = [layers[0], [layers[1]], *layers[2:]]
    made = stages_from_nnx(given, inputs=inputs)
    assert made.stages[1].inputs == ("h1", "mask")
    assert made.stages[2].inputs == ("h2", "mask", "h1")
    pipe = pipeline.Pipeline(made.stages, losses, pipeline.one_f_one_b(4, 3))
    loss, grads = pipe.value_and_grad(made.params, batch)
    expected, wanted = nnx.jit(nnx.value_and_grad(whole))(layers, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    grads[1] = grads[1]["layer1"]
    close(grads, [wanted[i] for i in range(4)])


def test_layers_in_groups(rng):
    """A layer may read a value twice, and one of an earlier layer of its own stage."""
    layers, batch, cut = wired(nnx.Rngs(1)), example(rng), [0, 1, 1, 1]
    groups = [[m for m, j in zip(layers, cut, strict=True) if j == k]
              for k in range(max(cut) + 1)]  # fmt: skip
    names = {j: (f"v{j}",) for j in range(4)}
    inputs = {1: ("v0", "mask", "v0"), 2: ("v1", "mask", "v0"), 3: ("v2",)}
    made = stages_from_nnx(groups, inputs=inputs, outputs=names)
    schedule = pipeline.gpipe(len(groups), 2)
    pipe = pipeline.Pipeline(made.stages, losses, schedule)
    loss, grads = pipe.value_and_grad(made.params, batch)
    expected, wanted = nnx.jit(nnx.value_and_grad(whole))(layers, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    by_layer = {name: tree for stage in grads for name, tree in stage.items()}
    close([by_layer[f"layer{i}"] for i in range(4)], [wanted[i] for i in range(4)])


def tied_layers(seed):
    rngs = nnx.Rngs(seed)
    embed = nnx.Embed(7, 4, rngs=rngs)
    return [embed, nnx.Linear(4, 4, rngs=rngs), Tokens(embed, rngs)]


def token_losses(y, batch):
    picked = jnp.take_along_axis(jax.nn.log_softmax(y), batch["next"][..., None], -1)
    return -picked[..., 0].sum(-1)


def token_batch(rng):
    return {k: rng.integers(0, 7, (6, 5)) for k in ("tokens", "next")}


@pytest.mark.parametrize("cut", [[0, 1, 2], [0, 0, 0]])
def test_what_layers_share_stays_one_parameter(cut, rng):
    """Within a stage and over stages, three steps long."""
    layers, batch = tied_layers(3), token_batch(rng)
    named = dict(zip(("embed", "middle", "head"), layers, strict=True))
    made = stages_from_modules(
        modules_from_nnx(named, inputs={"embed": ("tokens",)}), cut
    )
    ties = [name for stage in made.stages for name in stage.tied.values()]
    across = cut[0] != cut[2]
    assert ties == ["embed/embedding"] * 2 * across
    leaves = jax.tree.leaves(made.params)
    assert len(leaves) == 5 + across  # the embedding, and two of two others

    opt = optim.adam(lr=0.05)
    schedule = pipeline.one_f_one_b(len(made.stages), 2)
    pipe = pipeline.Pipeline(made.stages, token_losses, schedule, optimizer=opt)
    state = pipe.init(made.params)
    graph, params = nnx.split(nnx.List(layers))
    kept = opt.init(params)

    def loss_of(params):
        embed, middle, head = nnx.merge(graph, params)
        return token_losses(head(middle(embed(batch["tokens"]))), batch).mean()

    gradient = jax.jit(jax.value_and_grad(loss_of))
    for _ in range(3):
        state, metrics = pipe.train_step(state, batch)
        expected, grads = gradient(params)
        params, kept = opt.step(params, grads, kept)
        np.testing.assert_allclose(metrics.loss, expected, rtol=1e-4)
    embed, middle, head = made.modules(state.params, state.states)
    wanted = nnx.merge(graph, params)
    close(nnx.state(embed), nnx.state(wanted[0]))
    close(nnx.state(middle), nnx.state(wanted[1]))
    np.testing.assert_array_equal(head.embed.embedding[...], embed.embedding[...])
    close(nnx.state(head), nnx.state(wanted[2]))


def test_copies_that_are_tied_by_name(rng):
    """Different variables with equal values; and with other ones."""
    rngs = nnx.Rngs(0)
    first, second = (nnx.Linear(3, 3, rngs=rngs) for _ in range(2))
    tied = {"w": {0: "kernel", 1: "kernel"}}
    second.kernel[...] = first.kernel[...]
    made = stages_from_nnx([first, second], tied=tied)
    assert [dict(stage.tied) for stage in made.stages] == [{"kernel": "w"}] * 2
    group = stages_from_nnx([[first, second]], tied=tied)
    assert group.params[0]["layer1"]["kernel"].get_raw_value() is None
    second.kernel[...] = 2 * first.kernel[...]
    with pytest.raises(ValueError, match="equal parameters 'w' in 'layer0' and 'laye"):
        stages_from_nnx([[first, second]], tied=tied)
    with pytest.raises(ValueError, match=r"parameters 'w' of 'layer0' at 'weight'"):
        stages_from_nnx([[first, second]], tied={"w": {0: "weight", 1: "kernel"}})


def test_a_shared_parameter_that_is_tied_to_another_one_too():
    """Three copies of one name; or a refusal, where the names do not say so."""
    rngs = nnx.Rngs(0)
    first, other = (nnx.Linear(3, 3, rngs=rngs) for _ in range(2))
    holder = nnx.Sequential(first, jnp.tanh)
    tied = {"w": {0: "kernel", 2: "kernel"}}
    made = stages_from_nnx([first, holder, other], tied=tied)
    assert [dict(stage.tied) for stage in made.stages] == [
        {"kernel": "w", "bias": "0/bias"},
        {"layers/0/kernel": "w", "layers/0/bias": "0/bias"},
        {"kernel": "w"},
    ]
    message = r"must tie 'kernel' of 0 alike in all layers.*\[0, 1\] hold it"
    pairs = {"w": {0: "kernel", 2: "kernel"}, "v": {1: "layers/0/kernel", 3: "kernel"}}
    with pytest.raises(ValueError, match=message):
        stages_from_nnx([first, holder, other, other], tied=pairs)


def test_what_is_done_to_the_modules_later_is_not_seen():
    """Nor do modules that came back change the state that they came from."""
    layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    made = stages_from_nnx([layer])
    before = np.array(made.params[0]["kernel"][...])
    (back,) = made.modules(made.params, made.states)
    layer.kernel[...] = 2 * layer.kernel[...]
    back.kernel[...] = 3 * back.kernel[...]
    np.testing.assert_array_equal(made.params[0]["kernel"][...], before)


def test_an_output_that_nothing_takes():
    """It is named, and does not become a part of the other one."""
    layers = [Split(3, 4, nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(0))]
    made = stages_from_nnx(layers, inputs={1: ("h1",)}, outputs={0: ("h1", "load")})
    with pytest.raises(ValueError, match="Got 'load' of stage 0, which neither"):
        pipeline.Pipeline(made.stages, losses, pipeline.gpipe(2, 2))


def test_a_state_cannot_be_shared():
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"must not share a state.*BatchStat at mean"):
        stages_from_nnx([norm, nnx.Linear(3, 3, rngs=nnx.Rngs(0)), norm])


class Noisy(nnx.Module):
    """Draws whatever its dropout says."""

    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        return x + jax.random.normal(self.drop.rngs(), x.shape)


def test_a_key_only_where_something_is_drawn():
    rngs = nnx.Rngs(0)

    def keyed(layer):
        return stages_from_nnx([layer]).stages[0].keyed

    assert keyed(nnx.Dropout(0.5, rngs=rngs))
    assert keyed(nnx.List([nnx.Dropout(0.0, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)]))
    assert not keyed(nnx.Dropout(0.0, rngs=rngs))
    assert not keyed(nnx.Dropout(0.5, deterministic=True, rngs=rngs))
    assert not keyed(nnx.Linear(2, 2, rngs=rngs))
    block = nnx.Sequential(nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.0, rngs=rngs))
    made = stages_from_nnx([block])
    pipe = pipeline.Pipeline(
        made.stages, lambda y, batch: y.sum(-1), pipeline.gpipe(1, 2)
    )
    assert np.isfinite(
        pipe.value_and_grad(made.params, {"x": np.ones((4, 3), np.float32)})[0]
    )


def test_draws_without_a_key_are_refused():
    """They would be the same for all micro-batches."""
    made = stages_from_nnx([Noisy(nnx.Rngs(0))])
    message = "draw no random numbers: its dropouts drop nothing. Got a Noisy"
    with pytest.raises(ValueError, match=message):
        made.stages[0].fn(made.params[0], jnp.ones(3))
    with pytest.raises(ValueError, match=r"in evaluation it has no key. Got a Noisy"):
        made.stages[0].in_evaluation(made.params[0], jnp.ones(3))


class Remat(nnx.Module):
    """A module under a lifted transformation, which returns new arrays of counts."""

    def __init__(self, inner):
        self.inner = inner

    @nnx.remat
    def __call__(self, x):
        return self.inner(x)


def test_a_lifted_call_that_draws_nothing_is_no_draw():
    rngs = nnx.Rngs(0)
    idle = Remat(
        nnx.Sequential(nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.0, rngs=rngs))
    )
    made = stages_from_nnx([idle])
    pipe = pipeline.Pipeline(
        made.stages, lambda y, batch: y.sum(-1), pipeline.gpipe(1, 2)
    )
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    loss, (gradient,) = pipe.value_and_grad(made.params, {"x": x})
    plain = jax.value_and_grad(
        lambda p: made.modules([p], made.states)[0](x).sum(-1).mean()
    )
    expected = plain(made.params[0])
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6),
        gradient,
        expected[1],
    )
    drawing = stages_from_nnx([Remat(Noisy(nnx.Rngs(0)))])
    with pytest.raises(ValueError, match=r"drop nothing\. Got a Remat that draws"):
        drawing.stages[0].fn(drawing.params[0], jnp.ones(3))


def test_a_mask_of_dropout_per_micro_batch(rng):
    """Keys of a group: each layer its own, each micro-batch its own."""
    rngs = nnx.Rngs(0)
    group = [nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)]
    made = stages_from_nnx([group])
    run = made.stages[0].fn
    keys = [jax.random.fold_in(jax.random.key(1), micro) for micro in range(2)]
    kept = [np.asarray(run(made.params[0], jnp.ones(400), key)) for key in keys]
    assert set(np.unique(kept)) == {0.0, 4.0}
    assert not np.array_equal(*kept)
    assert 0.15 < np.mean(kept[0] > 0) < 0.35  # a quarter: the two masks are others


def test_the_way_back(rng):
    """Parameters and statistics of a trained run, in new modules, streams and all."""
    rngs = nnx.Rngs(5)
    layers = [
        nnx.Sequential(nnx.Linear(3, 5, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)),
        nnx.BatchNorm(5, rngs=rngs),
        nnx.Linear(5, 4, rngs=rngs),
    ]
    before = [jax.tree.map(jnp.copy, nnx.state(layer, nnx.Param)) for layer in layers]
    made = stages_from_nnx([layers[0], layers[1:]])
    assert [stage.stateful for stage in made.stages] == [False, True]
    opt = optim.sgd(lr=0.1)
    pipe = pipeline.Pipeline(made.stages, losses, pipeline.gpipe(2, 2), optimizer=opt)
    state = pipe.init(made.params, made.states, jax.random.key(0))
    batch = example(rng)
    state, _ = pipe.train_step(state, batch)
    first, norm, last = made.modules(state.params, state.states)
    assert isinstance(norm, nnx.BatchNorm)
    close(nnx.state(first, nnx.Param), state.params[0])
    close(nnx.state(last), state.params[1]["layer2"])
    close(nnx.state(norm, nnx.BatchStat), state.states[1]["layer1"])
    assert not np.allclose(norm.mean[...], 0)
    found = pipe.evaluate(state, batch, outputs=True)
    for layer in (first, norm, last):
        layer.eval()
    close(found.outputs, last(norm(first(batch["x"]))))
    for layer, start in zip(layers, before, strict=True):
        close(nnx.state(layer, nnx.Param), start)  # what was given is as it was
    absent = made.modules([None, state.params[1]], [None, state.states[1]])
    assert absent[0] is None
    assert isinstance(absent[2], nnx.Linear)
    with pytest.raises(ValueError, match="one tree for each of 2 stages"):
        made.modules(state.params[:1], state.states)


def test_an_auxiliary_value_for_the_loss(rng):
    """A load that an early layer puts out is weighed by the loss."""
    rngs = nnx.Rngs(2)
    layers = [Split(3, 4, rngs), nnx.Linear(4, 4, rngs=rngs)]
    made = stages_from_nnx(
        layers,
        inputs={1: ("h1",)},
        outputs={0: ("h1", "load")},
        loss_inputs=("y", "load"),
    )

    def loss_fn(values, batch):
        return losses(values["y"], batch) + 0.1 * values["load"] ** 2

    pipe = pipeline.Pipeline(
        made.stages, loss_fn, pipeline.gpipe(2, 3), loss_inputs=made.loss_inputs
    )
    batch = example(rng)
    loss, grads = pipe.value_and_grad(made.params, batch)

    def reference(layers, batch):
        h, load = layers[0](batch["x"])
        return loss_fn({"y": layers[1](h), "load": load}, batch).mean()

    expected, wanted = nnx.jit(nnx.value_and_grad(reference))(layers, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    close(grads, [wanted[0], wanted[1]])
    named = {"split": layers[0], "last": layers[1]}
    modules = modules_from_nnx(named, outputs={"split": ("x", "load")})
    found = stages_from_modules(modules, [0, 1], loss_inputs=("x", "load"))
    assert found.loss_inputs == ("last.x", "load")
    assert found.stages[0].outputs == ("split.x", "load")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modules": []}, "a module for each stage"),
        ({"modules": [[]]}, "a module for each stage"),
        ({"names": ["x"]}, "must be 2 names"),
        ({"inputs": {3: ("x",)}}, r"inputs=.*some of the layers \[0\]. Got 3"),
        ({"outputs": {0: "yy"}}, r"outputs=.*a tuple of names for 0. Got 'yy'"),
        ({"tied": {"w": {1: "kernel"}}}, r"tied=.*some of the layers \[0\]. Got 1"),
        ({"loss_inputs": ("z",)}, r"loss_inputs=.*values, which are \['x', 'y'\]"),
    ],
)
def test_what_is_refused(arguments, message):
    given = {"modules": [nnx.Linear(2, 2, rngs=nnx.Rngs(0))], **arguments}
    with pytest.raises(ValueError, match=message):
        stages_from_nnx(given.pop("modules"), **given)


def test_what_is_no_module():
    with pytest.raises(TypeError, match=r"must be a Flax NNX module. Got a function"):
        stages_from_nnx([[losses]])


class Residual(nnx.Module):
    """A block with statistics and, if asked, dropout."""

    def __init__(self, width, rate, rngs):
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.conv = nnx.Conv(width, width, (3,), rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(nnx.relu(self.conv(self.norm(x))))


def test_a_profiled_net_with_statistics_runs_as_planned(rng, tmp_path):
    """Measured, planned, written, read, trained; against the layers one by one."""
    rngs = nnx.Rngs(7)
    layers = {
        "stem": nnx.Linear(3, 4, rngs=rngs),
        "block1": Residual(4, 0.0, rngs),
        "block2": Residual(4, 0.5, rngs),
    }
    modules = modules_from_nnx(layers)
    assert [m.keyed for m in modules] == [False, False, True]
    batch = example(rng)
    profile = pipeline.profile(modules, {"x": batch["x"][:3]}, repeats=1)
    assert profile["block1"].parameter_bytes == 4 * (4 + 4 + 3 * 4 * 4 + 4)
    assert profile["block1"].activation_bytes == (3 * 5 * 4 * 4,)
    even = [
        pipeline.Layer(m.name, "", 1e-3, 2e-3, (1.0,), 1.0) for m in modules
    ]  # so that the plan does not depend on this machine
    plan = pipeline.partition(
        pipeline.Profile.chain(even), workers=2, bandwidths=1e9, replicate=False
    )
    plan.write(tmp_path / "plan.json")
    made = stages_from_modules(modules, pipeline.load_plan(tmp_path / "plan.json"))
    assert len(made.stages) == 2
    assert [stage.stateful for stage in made.stages] == [True, True]
    assert [stage.keyed for stage in made.stages] == [False, True]

    schedule = pipeline.one_f_one_b(2, 2)
    pipe = pipeline.Pipeline(made.stages, losses, schedule)
    key = jax.random.key(11)
    loss, grads, states = pipe.value_and_grad(
        made.params, batch, states=made.states, key=key
    )

    stage_of = {n: j for j, stage in enumerate(plan.stages) for n in stage.layers}

    def reference(params, batch, kept, micro):
        """Layer by layer, with the key that each has in its stage."""
        x, after = batch["x"], {}
        for module in modules:
            own = plan.stages[stage_of[module.name]].layers
            given = [kept[module.name]] if module.state is not None else []
            given.append(x)
            if module.keyed:
                folded = jax.random.fold_in(key, stage_of[module.name])
                folded = jax.random.fold_in(folded, micro)
                given.append(jax.random.fold_in(folded, own.index(module.name)))
            x = module.fn(params[module.name], *given)
            if module.state is not None:
                x, after[module.name] = x
        return losses(x, batch).mean(), after

    params = {m.name: m.params for m in modules}
    kept = {m.name: m.state for m in modules if m.state is not None}
    run = jax.jit(jax.value_and_grad(reference, has_aux=True))
    wanted, total = None, 0.0
    for micro in range(2):
        part = {name: rows[3 * micro : 3 * micro + 3] for name, rows in batch.items()}
        (value, kept), g = run(params, part, kept, micro)
        wanted = g if wanted is None else jax.tree.map(jnp.add, wanted, g)
        total += value / 2
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    found = {name: tree for stage in grads for name, tree in stage.items()}
    close(found, jax.tree.map(lambda g: g / 2, wanted))
    close({name: s for stage in states for name, s in stage.items()}, kept)
    back = made.modules(made.params, states)
    close(nnx.state(back[2], nnx.BatchStat), kept["block2"])
