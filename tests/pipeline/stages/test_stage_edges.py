"""What goes from stage to stage, and errors that say where they come from."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jdist import pipeline
from jdist.pipeline import Stage
from tests.pipeline import trained, worker_cases
from tests.pipeline.places import workers


def losses(y, batch):
    return ((y - batch["target"]) ** 2).sum(-1)


def first(w, x):
    return jnp.tanh(x @ w)


def problem(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"x": (6, 3), "target": (6, 3)}
    batch = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    params = [jnp.asarray(rng.normal(size=(3, 3)), jnp.float32) for _ in range(2)]
    return params, batch


def pipe_of(stages, places=None, loss_fn=losses, **options):
    schedule = pipeline.one_f_one_b(len(stages), 3)
    return pipeline.Pipeline(stages, loss_fn, schedule, places, **options)


CHAIN = [Stage(first, ("x",), ("h",)), Stage(first, ("h",), ("y",))]


class Pair(NamedTuple):
    """Two outputs by name."""

    a: jax.Array
    b: jax.Array


def as_tuple(w, x):
    return jnp.tanh(x @ w), x @ w


def as_named_tuple(w, x):
    return Pair(*as_tuple(w, x))


def as_list(w, x):
    return list(as_tuple(w, x))


def product(w, a, b):
    return (a * b) @ w


@pytest.mark.parametrize("form", [as_named_tuple, as_list])
def test_outputs_as_a_named_tuple_or_a_list(form):
    """As those of a tuple."""
    params, batch = problem()
    expected, found = (
        pipe_of(
            [Stage(fn, ("x",), ("a", "b")), Stage(product, ("a", "b"), ("y",))]
        ).value_and_grad(params, batch)
        for fn in (as_tuple, form)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_key_between_stages(cluster):
    """A stage hands on what another one draws from; by messages too."""
    expected = worker_cases.key_between()
    loss, grads = expected
    assert np.isfinite(loss)
    found = [
        task.result()
        for task in [
            cluster.start(rank, worker_cases.key_between, workers(2))
            for rank in range(2)
        ]
    ]
    for rank, (own_loss, own) in enumerate(found):
        assert own_loss == loss
        trained.same(trained.numbers(own[rank]), trained.numbers(grads[rank]))


@pytest.mark.parametrize("kind", [RuntimeError, KeyError])
def test_an_error_of_any_type_names_its_stage(kind):
    def breaking(w, h):
        raise kind("boom")

    stages = [CHAIN[0], Stage(breaking, ("h",), ("y",))]
    params, batch = problem()
    with pytest.raises(kind, match="boom") as caught:
        pipe_of(stages).value_and_grad(params, batch)
    note = "It was raised by stage 1, which was given h: float32[2,3]."
    assert note in caught.value.__notes__


def test_an_error_of_a_pass_names_it():
    params, batch = problem()
    pipe = pipe_of(CHAIN)
    pipe.value_and_grad(params, batch)
    params[1].delete()
    with pytest.raises(RuntimeError, match="deleted") as caught:
        pipe.value_and_grad(params, batch)
    text = "".join(caught.value.__notes__)
    assert "forward pass of stage 1 for micro-batch 0, on worker 1" in text


def test_an_error_of_the_loss_says_so():
    def breaking(y, batch):
        raise ZeroDivisionError("boom")

    params, batch = problem()
    with pytest.raises(ZeroDivisionError, match="boom") as caught:
        pipe_of(CHAIN, loss_fn=breaking).value_and_grad(params, batch)
    assert "It was raised by the loss function." in caught.value.__notes__


def test_an_entry_that_the_loss_misses():
    """Of the batch, or of several outputs; an own KeyError stays what it is."""
    params, batch = problem()
    pipe = pipe_of(CHAIN, loss_fn=lambda y, b: ((y - b["label"]) ** 2).sum(-1))
    message = r"loss_fn.* only what is there: a batch of \['target', 'x'\]. Got 'label'"
    with pytest.raises(ValueError, match=message):
        pipe.value_and_grad(params, batch)
    pipe = pipe_of(CHAIN, loss_fn=lambda v, b: v["yy"].sum(-1), loss_inputs=("y", "h"))
    message = r"outputs named \['y', 'h'\] and a batch of .*Got 'yy'"
    with pytest.raises(ValueError, match=message):
        pipe.value_and_grad(params, batch)
    own = {"table": 3}
    pipe = pipe_of(CHAIN, loss_fn=lambda y, b: y.sum(-1) * own.pop("x"))
    with pytest.raises(KeyError, match="x"):
        pipe.value_and_grad(params, batch)


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        (
            [Stage(first, ("x",), ("hidden",)), Stage(first, ("hiden",), ("y",))],
            {},
            r"Got 'hidden' of stage 0.*Of the batch they take \['hiden'\], one of",
        ),
        (
            [Stage(first, ("x",), ("hh",)), Stage(first, ("h",), ("y",))],
            {},
            r"Got 'hh' of stage 0.*Of the batch they take \['h'\], one of",
        ),
        (
            [Stage(first, ("x",), ("h",)), Stage(first, ("h",), ("logits",))],
            {"loss_inputs": ("logit",)},
            r"Got 'logits' of stage 1.*Of the batch they take \['logit'\]",
        ),
        (
            [Stage(first, ("x",), ("skip",)), Stage(first, ("mask",), ("y",))],
            {},
            r"Got 'skip' of stage 0.*Of the batch they take \['mask'\]",
        ),
    ],
)
def test_a_typo_is_shown(stages, options, message):
    """Beside the value that nothing takes because of it."""
    with pytest.raises(ValueError, match=message):
        pipe_of(stages, **options)


def test_an_auxiliary_number_in_evaluation():
    """What has no examples is one number for each micro-batch."""
    stages = [
        Stage(lambda w, x: (first(w, x), (x**2).mean()), ("x",), ("h", "power")),
        CHAIN[1],
    ]
    params, batch = problem()
    pipe = pipe_of(
        stages,
        loss_fn=lambda v, b: losses(v["y"], b) + v["power"],
        loss_inputs=("y", "power"),
    )
    found = pipe.evaluate(params, batch, outputs=True).outputs
    expected = [(batch["x"][2 * i : 2 * i + 2] ** 2).mean() for i in range(3)]
    np.testing.assert_allclose(found["power"], expected, rtol=1e-6)
    assert found["y"].shape == (6, 3)


def test_transformations_around_a_pipeline():
    """Inside jit where it has no devices; refused where it has."""
    params, batch = problem()
    expected, _ = pipe_of(CHAIN).value_and_grad(params, batch)
    found, _ = jax.jit(lambda p: pipe_of(CHAIN).value_and_grad(p, batch))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    for places, call in (
        (pipeline.OneProgram(mesh), "OneProgram"),
        (jax.devices()[:2], "devices"),
    ):
        pipe = pipe_of(CHAIN, places)
        placed = pipe.place(params)
        loss, _ = pipe.value_and_grad(placed, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        message = rf"Pipeline\(\.\., {call}\)` must be called outside of jax.jit"
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda b, p=placed, pipe=pipe: pipe.value_and_grad(p, b))(batch)
        with pytest.raises(ValueError, match=message):
            jax.grad(lambda p, pipe=pipe: pipe.value_and_grad(p, batch)[0])(placed)
        with pytest.raises(ValueError, match=r"Pipeline.place\(params\)` must be call"):
            jax.jit(pipe.place)(params)
