"""The examples and torch: the same numbers from the same weights and data.

Both sides run in processes of their own: three workers of rpc and of torch's RPC, and
groups of two, gloo on both sides. All is float64, where a wrong formula shows at 1e-3
and rounding at 1e-13; 1e-9 leaves room for the growth over the steps. The transformer
is float32 as Flax makes it (parts of its attention stay so): 1e-5.
"""

import importlib

import jax
import numpy as np
import pytest
from flax import nnx

from examples import (
    batch_parameter_server,
    batch_reinforcement,
    communication_hooks,
    divided_optimizer,
    model_parallel,
    parameter_server,
    recurrent_network,
    reinforcement,
    replicas,
    replicas_and_server,
    rpc_pipeline,
    snapshots,
    transformer_pipeline,
    uneven_inputs,
)
from jdist import data_parallel, rpc
from tests.newcomer import own_promotions

pytestmark = pytest.mark.parity

STEPS, EPOCHS, EPISODES = 6, 3, 6
SPLITS = 4


def arrays(tree):
    """With NumPy arrays in place of JAX's, for torch's processes."""
    return jax.tree.map(
        lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, tree
    )


@pytest.fixture(scope="module", autouse=True)
def as_a_newcomer_writes():
    """Examples add a bias as one does."""
    with own_promotions():
        yield


# --- over RPC ---

RUNS = {
    "parameter_server": lambda: parameter_server.run(("trainer1",), STEPS)[0][0],
    "batch_parameter_server": lambda: batch_parameter_server.run(
        batch_parameter_server.WORKERS[1:], STEPS
    ),
    "recurrent_network": lambda: recurrent_network.train(epochs=EPOCHS),
    "rpc_pipeline": lambda: rpc_pipeline.train(SPLITS, rpc_pipeline.WORKERS[1:]),
    "replicas_and_server": lambda: replicas_and_server.run(STEPS),
    "reinforcement": lambda: reinforcement.train(reinforcement.WORKERS[1:], EPISODES),
    "batch_reinforcement": lambda: batch_reinforcement.train(
        batch_reinforcement.WORKERS[1:], EPISODES
    ),
}


def ours_over_rpc(rank):
    """Each example in a group of workers of its own, one after the other."""
    found = {}
    with own_promotions():
        for name, run in RUNS.items():
            workers = [*importlib.import_module(f"examples.{name}").WORKERS, "idle"]
            rpc.init_rpc(workers[rank], allow=["examples"])
            if rank == 0:
                found[name] = run()
            rpc.shutdown()
    return found


def torchs_over_rpc(rank, store, given):
    """torch is imported where it runs."""
    theirs = importlib.import_module("tests.parity.examples_in_torch")
    return theirs.over_rpc(rank, store, given)


def given_over_rpc():
    """What torch's functions take."""
    batched, recurrent = batch_parameter_server, recurrent_network
    with rpc.local_cluster(["trainer", "server"], allow=["examples"]):
        model = recurrent.RNNModel("server")
        parts = {
            "table": model.embedding.rpc_sync().parameter_rrefs()[0].to_here(),
            "layers": model.lstm.value,
            "decoder": model.decoder.rpc_sync().parameter_rrefs()[0].to_here(),
        }
    return arrays(
        {
            "parameter_server": {
                "net": parameter_server.initial_net(),
                "batches": list(parameter_server.batches(0, STEPS)),
                "lr": parameter_server.LR,
            },
            "batch_parameter_server": {
                "net": batched.initial_net(),
                "batches": [list(batched.batches(i, STEPS)) for i in range(2)],
                "lr": 0.2,
                "momentum": 0.9,
            },
            "recurrent_network": {
                **parts,
                "batches": EPOCHS * recurrent.batches(),
                "lr": recurrent.LR,
            },
            "rpc_pipeline": {
                "halves": [rpc_pipeline.initial_weights(half) for half in (0, 1)],
                "batches": rpc_pipeline.batches(3),
                "lr": rpc_pipeline.LR,
                "splits": SPLITS,
            },
            "replicas_and_server": {
                "table": replicas_and_server.EmbeddingBag().table[...],
                "dense": replicas_and_server.initial_dense(),
                "batches": [
                    list(replicas_and_server.batches(i, STEPS)) for i in range(2)
                ],
                "lr": replicas_and_server.LR,
            },
            "reinforcement": {
                "policy": reinforcement.initial_policy(),
                "episodes": EPISODES,
                "lr": 3e-2,
                "gamma": reinforcement.GAMMA,
            },
            "batch_reinforcement": {
                "policy": batch_reinforcement.initial_policy(),
                "episodes": EPISODES,
                "lr": 3e-2,
            },
        }
    )


@pytest.fixture(scope="module")
def over_rpc(tmp_path_factory):
    """The numbers of both sides."""
    store = tmp_path_factory.mktemp("rpc") / "store"
    ours = rpc.spawn(ours_over_rpc, nprocs=3, timeout=300)[0]
    arguments = (str(store), given_over_rpc())
    theirs = rpc.spawn(torchs_over_rpc, arguments, nprocs=3, timeout=300)[0]
    return ours, theirs


@pytest.mark.parametrize("name", RUNS)
def test_over_rpc(over_rpc, name):
    """Losses or rewards of all steps."""
    ours, theirs = over_rpc
    assert len(np.unique(ours[name])) > 1
    np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9)


# --- over a group ---


def ours_over_a_group(rank, folder):
    """All examples of a group in one, then the pipeline over rpc."""
    found = {}
    with own_promotions(), data_parallel.process_group() as mesh:
        batches = replicas.batches(rank)
        found["replicas"] = replicas.train(mesh, batches, None, f"{folder}/replicas")
        found["snapshots"] = [
            loss
            for epochs in (2, 4)
            for loss in snapshots.train(mesh, epochs, 2, f"{folder}/s").values()
        ]
        found["uneven_inputs"] = {
            way: uneven_inputs.train(mesh, [uneven_inputs.inputs(rank)], way)
            for way in ("initial", "active")
        }
        own = divided_optimizer.examples(rank)
        found["divided_optimizer"] = divided_optimizer.train(mesh, own, True)[0]
        own = communication_hooks.examples(rank)
        found["communication_hooks"] = {
            name: communication_hooks.train(
                mesh, own, communication_hooks.HOOKS[name], f"{folder}/{name}"
            )
            for name in ("none", "fp16")
        }
    with own_promotions():
        found["transformer_pipeline"] = transformer_pipeline.work(rank)
    return found


def torchs_over_a_group(rank, folder, given):
    """torch is imported where it runs."""
    theirs = importlib.import_module("tests.parity.examples_in_torch")
    return theirs.over_a_group(rank, folder, given)


def given_over_a_group():
    """What torch's functions take."""
    sampler = data_parallel.Sampler(snapshots.EXAMPLES, snapshots.BATCH)
    halves = [
        [nnx.to_pure_dict(nnx.state(layer)) for layer in half]
        for half in transformer_pipeline.halves()
    ]
    batch = transformer_pipeline.batch()
    return arrays(
        {
            "replicas": {
                "net": replicas.initial_weights(),
                "batches": [replicas.batches(rank) for rank in (0, 1)],
                "examples": sum(replicas.SIZES),
                "lr": replicas.LR,
            },
            "snapshots": {
                "w": np.zeros(20),
                "b": np.zeros(()),
                "data": list(snapshots.dataset()),
                "epochs": [
                    [step.rows for step in sampler.shards(2, epoch)]
                    for epoch in range(4)
                ],
                "lr": 1e-2,
                "momentum": 0.9,
            },
            "uneven_inputs": {
                "w": np.array([0.3, -0.2, 0.1]),
                "inputs": [uneven_inputs.inputs(rank) for rank in (0, 1)],
                "lr": 0.01,
            },
            "divided_optimizer": {
                "net": divided_optimizer.initial_weights(),
                "batches": [divided_optimizer.examples(rank) for rank in (0, 1)],
                "lr": 0.01,
            },
            "communication_hooks": {
                "net": communication_hooks.initial_weights(),
                "batches": [communication_hooks.examples(rank) for rank in (0, 1)],
                "steps": communication_hooks.STEPS,
                "lr": communication_hooks.LR,
            },
            "transformer_pipeline": {
                "halves": halves,
                **batch,
                "parts": transformer_pipeline.MICRO_BATCHES,
                "steps": 10,
                "lr": transformer_pipeline.LR,
            },
            "model_parallel": {
                "weights": model_parallel.initial_weights(),
                "batches": model_parallel.batches(STEPS),
                "splits": SPLITS,
                "lr": model_parallel.LR,
            },
        }
    )


@pytest.fixture(scope="module")
def over_a_group(tmp_path_factory):
    """The numbers of both sides."""
    folder = tmp_path_factory.mktemp("group")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_NUM_CPU_DEVICES", "1")  # one for each process
        ours = rpc.spawn(ours_over_a_group, (str(folder),), nprocs=2, timeout=300)
    given = given_over_a_group()
    theirs = rpc.spawn(torchs_over_a_group, (str(folder), given), nprocs=2, timeout=300)
    assert ours[0] == ours[1]
    alone = model_parallel.train(jax.devices()[:2], SPLITS, STEPS)
    return {**ours[0], "model_parallel": alone}, theirs[0]


@pytest.mark.parametrize(
    "name",
    [
        "replicas",
        "snapshots",
        "divided_optimizer",
        "model_parallel",
    ],
)
def test_over_a_group(over_a_group, name):
    """Losses of all steps, or what became of the parameters."""
    ours, theirs = over_a_group
    np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9)


def test_transformer_pipeline(over_a_group):
    """torch's schedule on torch's stages."""
    ours, theirs = (side["transformer_pipeline"] for side in over_a_group)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("way", ["initial", "active"])
def test_uneven_inputs(over_a_group, way):
    """torch's two ways to divide; ours, by the examples, it does not have."""
    ours, theirs = (side["uneven_inputs"][way] for side in over_a_group)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_communication_hooks(over_a_group, name):
    """float16 rounds alike on both sides. PowerSGD draws its start: test_hooks.py."""
    ours, theirs = (side["communication_hooks"][name] for side in over_a_group)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)
