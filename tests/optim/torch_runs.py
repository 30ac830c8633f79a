"""Runs torch's optimizers over a problem: the oracle of `make parity`.

`python -m tests.optim.torch_runs` writes the golden files from it.
"""

import inspect
import json
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from tests.optim.cases import ALGORITHMS, MATRICES, problem
from tests.optim.runs import Run

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_SEED = 11


@contextmanager
def default_dtype(dtype):
    """torch keeps scalar state (mu_product, eta) in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(
        torch.float64 if dtype in ("float64", "complex128") else torch.float32
    )
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def run(torch_name, options, problem, dtype, overrides=None):
    """All steps of torch's single-tensor path; see `runs.run`."""
    with default_dtype(dtype), newton_schulz():
        params = [as_tensor(p, dtype).requires_grad_() for p in problem.params]
        opt = make(torch_name, params, options)
        seen = Run([], [])
        for t, row in enumerate(problem.grads):
            if overrides is not None:
                opt.param_groups[0].update(overrides[t])
            for param, grad in zip(params, row, strict=True):
                param.grad = None if grad is None else as_tensor(grad, dtype)
            opt.step()
            seen.params.append([as_array(p) for p in params])
            seen.states.append([state_of(opt, p) for p in params])
    return seen


def make(torch_name, params, options, *, foreach=False):
    """The optimizer on its single-tensor path; Muon has no other."""
    constructor = getattr(torch.optim, torch_name)
    if "foreach" in inspect.signature(constructor).parameters:
        options = options | {"foreach": foreach}
    return constructor(params, **options)


@contextmanager
def newton_schulz():
    """torch's Muon without its rounding of matrices to bfloat16."""
    module = torch.optim._muon
    shipped = module._zeropower_via_newtonschulz
    module._zeropower_via_newtonschulz = lambda grad, *rest: shipped(
        _NotRounded(grad), *rest
    )
    try:
        yield
    finally:
        module._zeropower_via_newtonschulz = shipped


class _NotRounded:
    """A matrix whose `bfloat16` is a copy of its own dtype; all else is torch's."""

    def __init__(self, matrix):
        self.matrix = matrix

    def bfloat16(self):
        return self.matrix.clone()

    def __getattr__(self, name):
        return getattr(self.matrix, name)


def state_of(opt, param):
    """A leaf's state by name; empty before its first gradient."""
    return {
        name: as_array(value)
        for name, value in opt.state.get(param, {}).items()
        if value is not None
    }


def as_tensor(array, dtype):
    return torch.tensor(np.asarray(array)).to(getattr(torch, dtype))


def as_array(tensor):
    """A copy; bfloat16, which NumPy lacks, as float32."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.to(torch.float32)
    return tensor.numpy().copy()


def functional():
    """torch.distributed.optim; its import warns that torch.jit.script is deprecated."""
    with warnings.catch_warnings(action="ignore"):
        import torch.distributed.optim

        return torch.distributed.optim


def made_functional(name, params):
    """A functional optimizer with its defaults; the constructor warns likewise."""
    module = functional()
    with warnings.catch_warnings(action="ignore"):
        return getattr(module, f"_Functional{name}")(params)


def golden(algorithm):
    """The expected content of an algorithm's golden file."""
    data = algorithm.problem(GOLDEN_SEED)
    return {
        case: {
            "options": options,
            "float64": _kept(run(algorithm.torch_name, options, data, "float64")),
            "float32": _kept(run(algorithm.torch_name, options, data, "float32")),
        }
        for case, options in algorithm.golden.items()
    }


KEPT = (0, 3, 9, 49)
"""The steps whose results a golden file holds: the first, and some later."""


def _kept(seen):
    return {
        str(t): {
            "params": [p.tolist() for p in seen.params[t]],
            "state": [
                {name: value.tolist() for name, value in leaf.items()}
                for leaf in seen.states[t]
            ],
        }
        for t in KEPT
    }


def inputs():
    """The problems themselves, so that no golden file hangs on NumPy's generator."""
    return {"inputs": _content(), "matrices": _content(shapes=MATRICES)}


def _content(**options):
    data = problem(GOLDEN_SEED, **options)
    return {
        "params": [p.tolist() for p in data.params],
        "grads": [
            [None if g is None else g.tolist() for g in row] for row in data.grads
        ],
    }


def write():
    """Writes all golden files."""
    GOLDEN.mkdir(exist_ok=True)
    contents = {algorithm.name: golden(algorithm) for algorithm in ALGORITHMS}
    for name, content in {**inputs(), **contents}.items():
        (GOLDEN / f"{name}.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    write()
