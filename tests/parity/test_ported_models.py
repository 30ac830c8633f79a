"""A port of a torch model: the guide's page as it is, with mistakes, and in bulk."""

import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import verify

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

PAGE = Path(__file__).parents[2] / "docs" / "ported_models.md"
WHOLE = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S))
CODE, TRACED = WHOLE.split("TAPS = ")


@pytest.fixture(autouse=True)
def _as_a_user_runs_it():
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def judged(code):
    """The report of the page's program."""
    main = types.ModuleType("ported")
    exec(
        compile(code.replace("report.raise_if_failed()", ""), PAGE, "exec"), vars(main)
    )
    return main.report


def test_the_page_runs_and_its_port_is_right():
    report = judged(CODE)
    assert report.ok, str(report)
    assert len(report.leaves) == 15
    assert report.leaves[0].path == "(loss)"
    assert 1e-3 < report.worst < 1


@pytest.mark.parametrize(
    ("right", "wrong", "path"),
    [
        ("/ np.sqrt(WIDTH // HEADS)", "/ np.sqrt(WIDTH)", "attention/in/w"),
        ("+ 1e-5)", "+ 1e-3)", "norm1/scale"),
        ("jax.nn.relu", "jax.nn.gelu", "up/w"),
        ('("layer.linear1.weight", (1, 0))', '("layer.linear1.weight", (0, 1))', ""),
        ('    "head/b": "head.bias",\n', "", ""),
    ],
)
def test_mistakes_of_a_port_are_seen(right, wrong, path):
    """In the mathematics, as a wrong gradient; in the map, as an error."""
    assert CODE.count(right) >= 1
    code = CODE.replace(right, wrong)
    if not path:
        with pytest.raises((ValueError, TypeError, KeyError), match=r"\w"):
            judged(code)
        return
    assert path in {leaf.path for leaf in judged(code).failures}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_tensors_are_taken_as_torch_returns_them(dtype):
    """With gradients of their own, and in the dtypes that torch has."""
    rng = np.random.default_rng(7)
    with jax.enable_x64(True):
        w, x = (
            jnp.asarray(rng.normal(size=shape), dtype) for shape in ((5, 3), (7, 5))
        )

        def losses(params, x):
            return jnp.tanh(x @ params["w"]).sum(-1)

        def in_torch(factor):
            def candidate(params, x):
                kind = getattr(torch, dtype)
                tensors = [
                    torch.tensor(np.asarray(a, np.float64), dtype=kind).requires_grad_()
                    for a in (params["w"].T, x)
                ]
                loss = (tensors[1] @ tensors[0].T).tanh().sum(-1).mean()
                loss.backward()
                return loss, {"weight": factor * tensors[0].grad}

            return candidate

        candidates = {"right": in_torch(1), "wrong": in_torch(2)}
        names = {"w": ("weight", (1, 0))}
        report = verify.gradients(losses, {"w": w}, x, candidates, names=names)
        assert report.of("right").ok, str(report)
        assert [x.path for x in report.failures] == ["w"]
        assert report.failures[0].candidate == "wrong"
        if dtype != "bfloat16":
            assert "it is 2 times the reference" in report.failures[0].problem


def encoder(layers, seed, examples, width=64, heads=4):
    """Gradients of torch's encoder, of a whole batch and of its halves."""
    torch.manual_seed(seed)
    layer = torch.nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, batch_first=True
    )
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    head = torch.nn.Linear(width, 10)
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.xavier_uniform_(p)
    x, t = torch.randn(examples, 32, width), torch.randint(0, 10, (examples,))

    def gradient(x, t):
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(head(model(x).mean(1)), t)
        loss.backward()
        return {n: p.grad.numpy().copy() for n, p in model.named_parameters()}

    whole = gradient(x, t)
    halves = [gradient(x[i::2], t[i::2]) for i in range(2)]
    return whole, {n: (halves[0][n] + halves[1][n]) / 2 for n in whole}


@pytest.mark.parametrize("port", [(6, 2, 16), (4, 3, 32), (8, 0, 16)])
def test_right_gradients_of_deep_models_are_never_condemned(port):
    """By a bound that was not measured; a part in ten thousand is."""
    whole, parts = encoder(*port)
    report = verify.compare(whole, parts)
    assert report.unjudged, "far enough apart to be condemned, as ports were"
    assert not report.failures, str(report)
    wrong = {name: leaf * np.float32(1.0001) for name, leaf in parts.items()}
    assert verify.compare(whole, wrong).failures
