"""Torch trainers whose values are shown: beside live torch, and over gloo."""

import contextlib
import multiprocessing
from datetime import timedelta

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify
from tests.parity.test_ported_models import TRACED, WHOLE, judged

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

SIZES = 5, 7, 3
NAMES = {"hidden": "hidden", "out": "out"}


@pytest.fixture(autouse=True)
def _as_a_user_runs_it():
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def losses(p, batch):
    h = verify.tap(jnp.tanh(batch["x"] @ p["hidden"].T), "hidden")
    h = verify.tap(h + jnp.tanh(h @ p["inner"].T), "residual")
    return ((verify.tap(h @ p["out"].T, "out") - batch["y"]) ** 2).mean(-1)


def problem(examples=8):
    rng = np.random.default_rng(3)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32) / 2

    x, h, y = SIZES
    params = {"hidden": normal(h, x), "inner": normal(h, h), "out": normal(y, h)}
    return params, {"x": normal(examples, x), "y": normal(examples, y)}


class Model(torch.nn.Module):
    """The model in torch; wrong, its branch passes no gradient to its input."""

    def __init__(self, params, wrong):
        super().__init__()
        x, h, y = SIZES
        linear = {"hidden": (x, h), "inner": (h, h), "out": (h, y)}
        modules = {k: torch.nn.Linear(*v, bias=False) for k, v in linear.items()}
        modules["hidden"] = torch.nn.Sequential(modules["hidden"], torch.nn.Tanh())
        for name, module in modules.items():
            self.add_module(name, module)
            (weight,) = module.parameters()
            weight.data = torch.tensor(np.asarray(params[name]))
        self.wrong = wrong

    def forward(self, x, show):
        h = self.hidden(x)
        inner = self.inner(h.detach() if self.wrong else h)
        return self.out(show(h + torch.tanh(inner), "residual"))

    def gradient(self):
        return {
            name.partition(".")[0]: p.grad.numpy()
            for name, p in self.named_parameters()
        }


def trained(params, batch, wrong, shares=(0.5, 0.5)):
    """Two micro-batches, with shares of the mean."""
    model = Model(params, wrong)
    parts = [torch.tensor(np.asarray(batch[k])).chunk(2) for k in "xy"]
    with verify.shown(model, NAMES) as show:
        loss = 0.0
        for x, y, share in zip(*parts, shares, strict=True):
            mean = share * ((model(x, show) - y) ** 2).mean()
            mean.backward()
            loss += mean.item()
    return jnp.float32(loss), model.gradient()


@pytest.fixture(scope="module")
def judge():
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        return verify.trace_judge(losses, *problem())


def test_a_right_trainer_passes_and_all_its_taps_are_right(judge):
    trace = judge(lambda p, b: trained(p, b, wrong=False))
    assert trace.ok, str(trace)
    assert trace.right == (
        "forward hidden", "forward residual", "forward out",
        "backward out", "backward residual", "backward hidden",
    )  # fmt: skip
    assert trace.difference is None


def test_the_first_wrong_cotangent_is_named(judge):
    """What a detached branch loses is lost between the taps around it."""
    found = judge(lambda p, b: trained(p, b, wrong=True)).difference
    assert (found.direction, found.tap) == ("backward", "hidden")


def test_examples_that_count_too_often_are_named(judge):
    trace = judge(lambda p, b: trained(p, b, wrong=False, shares=(0.25, 0.75)))
    assert "examples 0-3 count 0.5 times" in trace.difference.words


def test_the_page_on_ports_traces_a_trainer_in_torch():
    assert "verify.shown(model, TAPS)" in TRACED
    found = judged(f"{WHOLE}\nreport = trace.difference")
    assert found.direction == "gradient"
    assert "examples 0-1 count 1.25 times" in found.words
    assert "examples 2-4 count 0.8333 times" in found.words


def recorded(function, *arguments):
    with verify.TapRecording() as recording:
        function(*arguments)
    return recording.records


def test_every_submodule_is_shown_by_its_path_and_hooks_end_with_the_statement():
    model = Model(problem()[0], wrong=False)
    x = torch.ones(2, SIZES[0])

    def keep(tensor, name):
        return tensor

    def inside():
        with verify.shown(model):
            model(x, keep).sum().backward()

    names = [record.name for record in recorded(inside)]
    assert names[:5] == ["hidden/0", "hidden/1", "hidden", "inner", "out"]
    # The last layer's result comes first in the backward pass.
    assert names[5] == "out"
    assert recorded(lambda: model(x, keep)) == ()


def test_without_a_recording_nothing_is_copied(monkeypatch):
    model = Model(problem()[0], wrong=False)
    monkeypatch.setattr(
        "jdist.verify.tracing.torch_taps.copied", lambda leaf: pytest.fail("copied")
    )
    with verify.shown(model) as show:
        model(torch.ones(2, SIZES[0]), show).sum().backward()


def test_axes_are_brought_into_the_references_order():
    """Values and cotangents of images, whose channels come last in the reference."""
    convolution = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 1))
    order = (0, 2, 3, 1)

    def run():
        with verify.shown(convolution, {"features": ("0", order)}):
            (convolution(torch.ones(5, 3, 7, 11)) ** 2).sum().backward()

    forward, backward = recorded(run)
    assert forward.value.shape == (5, 7, 11, 2)
    np.testing.assert_allclose(backward.cotangent, 2 * forward.value, rtol=1e-6)
    with (
        pytest.raises(ValueError, match=r"must order the 4 axes of the value"),
        verify.TapRecording(),
        verify.shown(convolution, {"features": ("0", (1, 0))}),
    ):
        convolution(torch.ones(5, 3, 7, 11))


def test_trees_sixteen_bits_and_later_changes():
    """Each tensor of a tree by its path, as it was when the module returned it."""

    class Pair(torch.nn.Module):
        def forward(self, x):
            return {"sum": x + 1, "count": torch.arange(3)}

    model = torch.nn.Sequential(Pair())
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)

    def run():
        with verify.shown(model), contextlib.nullcontext():
            found = model[0](x)["sum"]
            (found * 3).sum().backward()
            found.data.zero_()

    forward, backward = recorded(run)
    assert (forward.name, backward.name) == ("0/sum", "0/sum")
    assert str(forward.value.dtype) == "bfloat16"
    assert forward.value.tolist() == [2, 2, 2]
    assert backward.cotangent.tolist() == [3, 3, 3]


def replica(rank, store, wrong, answers):
    """A process of DDP over gloo: the gradient of its half, and its records."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    params, batch = problem()
    model = Model(params, wrong)
    replicas = DistributedDataParallel(model)
    x, y = (torch.tensor(batch[k]).chunk(2)[rank] for k in "xy")
    with verify.TapRecording() as recording, verify.shown(model, NAMES) as show:
        loss = ((replicas(x, show) - y) ** 2).mean()
        loss.backward()
    distributed.all_reduce(mean := loss.detach())
    records = [tuple(record) for record in recording.records]
    answers.put((rank, mean.item() / 2, model.gradient(), records))
    distributed.destroy_process_group()


def over_gloo(tmp_path, wrong):
    """A candidate of two processes; the first one's gradient, all records."""

    def candidate(params, batch):
        spawn = multiprocessing.get_context("spawn")
        answers = spawn.Queue()
        store = str(tmp_path / f"store{wrong}")
        processes = [
            spawn.Process(target=replica, args=(rank, store, wrong, answers))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        found = {rank: rest for rank, *rest in (answers.get(timeout=200) for _ in "ab")}
        for process in processes:
            process.join(60)
        for _, _, records in found.values():
            verify.replay(records)
        loss, gradient, _ = found[0]
        return jnp.float32(loss), gradient

    return candidate


def test_two_processes_over_gloo_are_traced(judge, tmp_path):
    trace = judge(over_gloo(tmp_path, wrong=False))
    assert trace.ok, str(trace)
    assert "backward hidden" in trace.right


def test_over_gloo_the_first_wrong_cotangent_is_named(judge, monkeypatch, tmp_path):
    # A wrong candidate is called again, to see whether it repeats itself: once here.
    monkeypatch.setattr("jdist.verify.candidates.CALLS", 2)
    found = judge(over_gloo(tmp_path, wrong=True)).difference
    assert (found.direction, found.tap) == ("backward", "hidden")
