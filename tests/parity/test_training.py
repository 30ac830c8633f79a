"""torch's own training over two live processes, beside ours: join and no_sync."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim
from jdist.data_parallel import EarlyEnd, Join, shard_batch, train_step
from tests.parity.pair import outputs_of_both

pytestmark = pytest.mark.parity

LR, MOMENTUM = 0.05, 0.9
WORKER = """
import json, os, sys, torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
rank, content = int(sys.argv[1]), json.loads(open(sys.argv[2]).read())
store = f"file://{sys.argv[3]}"
distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
start = torch.tensor(content["w"], dtype=torch.float64)
streams = [[[torch.tensor(v, dtype=torch.float64) for v in b] for b in s]
           for s in content["streams"]]

def fresh():
    model = nn.Linear(*start.shape[::-1], bias=False, dtype=torch.float64)
    model.weight.data = start.clone()
    options = dict(lr=content["lr"], momentum=content["momentum"])
    model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), **options)

def loss_of(model, batch):
    x, y = batch
    return ((model(x).tanh() - y) ** 2).sum(1).mean()

found = {}
for name, initial in (("initial", True), ("active", False)):
    model, opt = fresh()
    with model.join(divide_by_initial_world_size=initial):
        for batch in streams[rank]:
            opt.zero_grad()
            loss_of(model, batch).backward()
            opt.step()
    found[name] = model.module.weight.tolist()
model, opt = fresh()
for _ in range(2):
    opt.zero_grad()
    micro = content["micro"][rank]
    with model.no_sync():
        for batch in micro[:-1]:
            batch = [torch.tensor(v, dtype=torch.float64) for v in batch]
            (loss_of(model, batch) / len(micro)).backward()
    batch = [torch.tensor(v, dtype=torch.float64) for v in micro[-1]]
    (loss_of(model, batch) / len(micro)).backward()
    opt.step()
found["no_sync"] = model.module.weight.tolist()
model, opt = fresh()
try:
    with model.join(throw_on_early_termination=True):
        for batch in streams[rank]:
            loss_of(model, batch).backward()
except RuntimeError as error:
    found["error"] = str(error)
if rank == 0:
    print(json.dumps(found), flush=True)
# A barrier by the store: gloo's own state is uncertain after an error.
distributed.distributed_c10d._get_default_store().set(f"done{rank}", "")
distributed.distributed_c10d._get_default_store().wait(["done0", "done1"])
os._exit(0)  # Tearing gloo down now and then aborts, with threads still running.
"""


def losses_of(w, batch):
    """The worker's loss, one per example."""
    x, y = batch
    return ((jnp.tanh(x @ w.T) - y) ** 2).sum(axis=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The problem, and what two processes of torch made of it."""
    rng = np.random.default_rng(20261121)
    folder = tmp_path_factory.mktemp("torch")

    def batch(n):
        return rng.normal(size=(n, 5)), rng.normal(size=(n, 3))

    content = {
        "w": rng.normal(size=(3, 5)),
        "streams": [[batch(4), batch(2), batch(3), batch(1)], [batch(3), batch(4)]],
        "micro": [[batch(2) for _ in range(3)] for _ in range(2)],
        "lr": LR,
        "momentum": MOMENTUM,
    }
    (folder / "content.json").write_text(
        json.dumps(content, default=lambda array: array.tolist())
    )
    (folder / "worker.py").write_text(WORKER)
    return content, torchs(folder)


def torchs(folder: Path):
    """Runs the two processes and reads what the first prints."""
    files = [str(folder / name) for name in ("content.json", "store")]
    outputs = outputs_of_both([str(folder / "worker.py")], files)
    return json.loads(outputs[0][0])


@pytest.mark.parametrize("divide_by", ["initial", "active"])
def test_join_divides_as_torch_does(run, divide_by):
    """Four batches on one replica and two on the other, with momentum; float64."""
    content, torch = run
    joined = Join(content["streams"], replicas=2, rows=4, divide_by=divide_by)
    opt = optim.sgd(lr=LR, momentum=MOMENTUM)
    step = train_step(losses_of, opt, replicas=2, reduction=joined.reduction)
    state = step.init(content["w"])
    for batch, weights in joined:
        state, _ = step(state, batch, weights)
    assert int(state.step) == 4
    np.testing.assert_allclose(state.params, torch[divide_by], rtol=1e-12)


def test_the_rules_differ_and_neither_is_by_weight(run):
    """Or the comparison above would show nothing."""
    content, torch = run
    joined = Join(content["streams"], replicas=2, rows=4)
    step = train_step(losses_of, optim.sgd(lr=LR, momentum=MOMENTUM), replicas=2)
    state = step.init(content["w"])
    for batch, weights in joined:
        state, _ = step(state, batch, weights)
    found = [state.params, torch["initial"], torch["active"]]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert np.abs(np.subtract(one, other)).max() > 1e-4


def test_early_ends_are_errors_in_both(run):
    """torch names the rank on that rank, and says so on the other."""
    content, torch = run
    assert "exhausted inputs" in torch["error"]
    joined = Join(content["streams"], replicas=2, rows=4, early_end="error")
    with pytest.raises(EarlyEnd, match=r"replicas 1 of 2 ran out of data after 2"):
        list(joined)


def test_accumulation_is_no_sync(run):
    """Three micro-batches of equal counts, each divided by three in torch."""
    content, torch = run
    opt = optim.sgd(lr=LR, momentum=MOMENTUM)
    step = train_step(losses_of, opt, replicas=2, accumulate=3)
    parts = [batch for micro in content["micro"] for batch in micro]
    batch = tuple(np.concatenate(leaf) for leaf in zip(*parts, strict=True))
    state = step.init(content["w"])
    for _ in range(2):
        state, _ = step(state, *shard_batch(batch, replicas=2))
    np.testing.assert_allclose(state.params, torch["no_sync"], rtol=1e-12)
