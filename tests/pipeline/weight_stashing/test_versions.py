"""What stages and losses read beside their arguments: current, and of one version."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jdist import pipeline
from jdist.pipeline import Pipeline, Stage
from jdist.pipeline.run.loss import _CACHE as LOSSES
from jdist.segment._lookup.cache import VERSIONS
from jdist.segment._segment import CACHE
from tests.segment.referents import KINDS

SCALE = None


@pytest.fixture(autouse=True)
def _nothing_is_compiled():
    """What another test has compiled would be found."""
    for cache in (CACHE, VERSIONS, LOSSES):
        cache.clear()


class Block:
    """A stage as a method, with a function for evaluation beside it."""

    k = 2.0

    def train(self, w, x):
        return jnp.tanh(w * x) * self.k

    def evaluate(self, w, x):
        return self.train(w, x)

    def loss(self, y, batch):
        return ((y - batch["t"]) ** 2).sum(-1) * self.k


def scaled(w, x):
    return jnp.tanh(w * x) * SCALE


def squares(y, batch):
    return ((y - batch["t"]) ** 2).sum(-1)


@pytest.fixture
def given(rng):
    batch = {name: rng.normal(size=(5, 3)).astype(np.float32) for name in ("x", "t")}
    return [jnp.float32(0.7)], batch


def pipe_of(fn, loss=squares, in_evaluation=None, where=None):
    stage = Stage(fn, ("x",), ("y",), in_evaluation=in_evaluation)
    return Pipeline([stage], loss, pipeline.gpipe(1, 2), where)


def trained(pipe, given):
    return float(pipe.value_and_grad(*given)[0])


def evaluated(pipe, given):
    return float(pipe.evaluate(*given).loss)


def expected(given, k, loss=1.0):
    (w,), batch = given
    y = np.tanh(w * batch["x"]) * k
    return float(((y - batch["t"]) ** 2).sum(-1).mean() * loss)


@pytest.fixture
def rng():
    return np.random.default_rng(15)


def test_training_and_evaluation_see_a_global_alike(given, monkeypatch):
    """A pipeline that is made after a change computes with the new value in both."""
    for k in (2.0, 3.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", k)
        pipe = pipe_of(scaled)
        np.testing.assert_allclose(trained(pipe, given), expected(given, k), rtol=1e-5)
        np.testing.assert_allclose(
            evaluated(pipe, given), expected(given, k), rtol=1e-5
        )


NAMES = ["attribute_of_self", "property_that_reads_a_global", "slot", "deque"]
NAMES += ["array_module", "method_replaced_in_its_class", "object_of_another_package"]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_stage_reads_is_seen(name, given):
    """The library's closure around the stage hides nothing: a sample of all kinds."""
    fn, change = KINDS[name](2.0)
    (w,), batch = given
    for k in (2.0, 3.0):
        change(k)
        pipe = pipe_of(fn)
        want = ((w * batch["x"] * k - batch["t"]) ** 2).sum(-1).mean()
        np.testing.assert_allclose(trained(pipe, given), want, rtol=1e-5)
        np.testing.assert_allclose(evaluated(pipe, given), want, rtol=1e-5)


def test_all_callables_of_a_stage_and_the_loss_count(given):
    """The stage's function, the one for evaluation, and the loss."""
    block = Block()
    for block.k in (2.0, 2.5):
        pipe = pipe_of(block.train, block.loss, block.evaluate)
        want = expected(given, block.k, loss=block.k)
        np.testing.assert_allclose(trained(pipe, given), want, rtol=1e-5)
        np.testing.assert_allclose(evaluated(pipe, given), want, rtol=1e-5)


def test_one_pipeline_is_of_one_version(given, monkeypatch):
    """What changes meanwhile is refused, also by the first evaluation, until undone."""
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    pipe = pipe_of(scaled)
    before = trained(pipe, given)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    for call in (trained, evaluated):
        with pytest.raises(ValueError, match=r"stay what it was.* `SCALE` from 2.0 to"):
            call(pipe, given)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert trained(pipe, given) == before
    np.testing.assert_allclose(evaluated(pipe, given), before, rtol=1e-6)


def test_losses_of_equal_contents_change_apart(given):
    """What one object's attribute becomes is nothing to another object's loss."""
    first, second = Block(), Block()
    pipes = [pipe_of(Block().train, block.loss) for block in (first, second)]
    trained(pipes[0], given)
    first.k = 2.75
    params, batch = given
    smaller = params, {name: rows[:2] for name, rows in batch.items()}
    want = expected(smaller, 2.0, loss=2.0)
    np.testing.assert_allclose(trained(pipes[1], smaller), want, rtol=1e-5)


@pytest.mark.parametrize("part", ["stage", "evaluation", "loss"])
def test_another_version_is_refused(part, given):
    """For other shapes the function is traced again, and must be what it was."""
    changing, block = Block(), Block()
    pipe = pipe_of(
        (changing if part == "stage" else block).train,
        (changing if part == "loss" else block).loss,
        (changing if part == "evaluation" else block).evaluate,
    )
    trained(pipe, given), evaluated(pipe, given)
    changing.k = 3.0
    changing.unrelated = "text"
    params, batch = given
    smaller = params, {name: rows[:2] for name, rows in batch.items()}
    call = evaluated if part == "evaluation" else trained
    with pytest.raises(ValueError, match=r"must stay what it was .* 2\.0 to 3\.0"):
        call(pipe, smaller)


def test_one_program_sees_a_change(given, monkeypatch):
    """So does the executor of equal stages over a mesh."""
    params, batch = given
    stages = [Stage(scaled, (a,), (b,)) for a, b in (("x", "h"), ("h", "y"))]
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    for k in (2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", k)
        pipe = Pipeline(
            stages, squares, pipeline.gpipe(2, 2), pipeline.OneProgram(mesh)
        )
        loss, _ = pipe.value_and_grad(pipe.place([params[0]] * 2), batch)
        h = np.tanh(params[0] * batch["x"]) * k
        y = np.tanh(params[0] * h) * k
        want = ((y - batch["t"]) ** 2).sum(-1).mean()
        np.testing.assert_allclose(loss, want, rtol=1e-5)


class Scale:
    """A number that compares as numbers do."""

    def __init__(self, k):
        self.k = k

    def __eq__(self, other):
        return isinstance(other, Scale) and self.k == other.k

    def __hash__(self):
        return hash(self.k)


def test_one_program_refuses_stages_that_change_apart(given):
    """The first stage stands for all: a change of another would not be seen."""
    params, batch = given
    scales = [Scale(2.0), Scale(2.0)]
    stages = [
        Stage(lambda w, x, s=s: jnp.tanh(w * x) * s.k, (a,), (b,))
        for s, (a, b) in zip(scales, (("x", "h"), ("h", "y")), strict=True)
    ]
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    pipe = Pipeline(stages, squares, pipeline.gpipe(2, 2), pipeline.OneProgram(mesh))
    params = pipe.place([params[0]] * 2)
    before, _ = pipe.value_and_grad(params, batch)
    scales[1].k = 3.0
    with pytest.raises(ValueError, match=r"same function.*another one in stage 1"):
        pipe.value_and_grad(params, batch)
    scales[1].k = 2.0
    np.testing.assert_array_equal(pipe.value_and_grad(params, batch)[0], before)


def test_stages_that_cannot_be_compared_are_no_one_program(given):
    """Two functions whose contents are not seen may differ."""
    held = types.SimpleNamespace()

    def make():
        queue = iter([1.0])
        return lambda w, x: (queue, w * x)[1]

    held.first, held.second = make(), make()
    stages = [Stage(held.first, ("x",), ("h",)), Stage(held.second, ("h",), ("y",))]
    mesh = Mesh(np.array(jax.devices()[:2]), ("stage",))
    message = r"same function.*cannot be compared: closure variable `queue`"
    with pytest.raises(ValueError, match=message):
        Pipeline(stages, squares, pipeline.gpipe(2, 2), pipeline.OneProgram(mesh))
