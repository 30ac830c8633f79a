"""Who travels with whom: torch's own function, and a live DistributedDataParallel."""

import json
import subprocess
import sys
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdist import reduction
from jdist.data_parallel import assign_buckets
from jdist.data_parallel.gradient.buckets import plan_buckets
from jdist.data_parallel.gradient.gradient_order import with_gradient_order

pytestmark = pytest.mark.parity

KINDS = ("float32", "float64", "bfloat16", "float16", "complex64")
LEAVES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 12), min_size=0, max_size=3), st.sampled_from(KINDS)
    ),
    min_size=1,
    max_size=24,
)


@settings(max_examples=300, deadline=None)
@given(LEAVES, st.lists(st.integers(0, 5000), min_size=1, max_size=4))
def test_the_assignment_is_torchs(leaves, limits):
    """Random shapes, scalars and empty arrays too, dtypes and lists of limits."""
    import torch
    from torch import distributed

    ours = assign_buckets(
        [jax.ShapeDtypeStruct(tuple(s), jnp.dtype(d)) for s, d in leaves], limits
    )
    tensors = [torch.empty(s, dtype=getattr(torch, d)) for s, d in leaves]
    theirs, _ = distributed._compute_bucket_assignment_by_size(tensors, limits)
    assert ours == theirs


WORKER = """
import json, os, sys, torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
sizes, cap = json.loads(sys.argv[1])
distributed.init_process_group(
    "gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])]
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(layers)
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.layers[0](x)  # The first layer once more, at the end.
options = {} if cap is None else {"bucket_cap_mb": cap}
model = DistributedDataParallel(Tied(), **options)
for _ in range(3):
    model(torch.randn(5, sizes[0])).sum().backward()
data = model._get_ddp_logging_data()
print(json.dumps({key: str(data.get(key)) for key in (
    "rebuilt_bucket_sizes", "prev_iteration_grad_ready_order_indices")}), flush=True)
os._exit(0)  # Tearing gloo down now and then aborts, with threads still running.
"""
WIDTHS = [260, 700, 40, 900, 260]


def ours(cap):
    """Our plan for the same network: buckets of paths, and their bytes."""
    params = [
        {"b": np.zeros(b, np.float32), "w": np.zeros((a, b), np.float32)}
        for a, b in pairwise(WIDTHS)
    ]

    def losses(params, x):
        for layer in [*params, params[0]]:
            last = x @ layer["w"] + layer["b"][None]
            x = jnp.tanh(last)
        return last.sum(axis=1)

    def partial(params, x):
        weights = jnp.ones(len(x), jnp.float32)
        return reduction.partial(losses, params, x, weights, "mean")

    shapes = jax.ShapeDtypeStruct((5, WIDTHS[0]), np.float32)
    found = []

    def look(params, x):
        part, ready = with_gradient_order(partial, params, x)
        found.append((jax.tree.leaves(part.gradient), jax.tree.leaves(ready.gradient)))
        return part.value

    jax.eval_shape(look, params, shapes)
    leaves, ready = found[0]
    paths = [f"{i}{name}" for i in range(len(params)) for name in "bw"]
    plan = plan_buckets(leaves, ready, cap)
    sizes = [sum(leaves[i].size * 4 for i in bucket) for bucket in plan]
    return sorted(range(len(paths)), key=lambda i: ready[i]), paths, sizes


@pytest.mark.parametrize("cap", [None, 0.5, 1.2])
def test_the_rebuilt_buckets_of_ddp(tmp_path, cap):
    """After its first iteration DDP orders parameters as they become ready, as we do.

    The first layer is used twice and is ready last; leaves of 1 MiB would go alone
    with us by default, and there are none.
    """
    done = subprocess.run(
        [sys.executable, "-c", WORKER, json.dumps([WIDTHS, cap]), str(tmp_path / "s")],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    order, paths, sizes = ours(cap)
    theirs = [int(n) for n in found["rebuilt_bucket_sizes"].split(",")]
    assert theirs == sizes
    # torch counts weight and bias of each layer in turn; of these two, the order in
    # which a layer's backward pass makes them is each library's own.
    indices = found["prev_iteration_grad_ready_order_indices"]
    layers = [int(n) // 2 for n in indices.replace(",", " ").split()]
    assert [int(paths[i][0]) for i in order] == layers
