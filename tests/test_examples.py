"""The examples: one device's numbers, no more lines than torch's, nothing left over."""

import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import (
    batch_parameter_server,
    batch_reinforcement,
    communication_hooks,
    divided_optimizer,
    language_model,
    model_parallel,
    parameter_server,
    recurrent_network,
    reinforcement,
    replicas,
    replicas_and_server,
    restart_in_place,
    rpc_pipeline,
    snapshots,
    transformer_pipeline,
    uneven_inputs,
)
from jdist import data_parallel, optim, pipeline, rpc
from jdist.data_parallel import hooks
from tests.newcomer import own_promotions
from tests.rpc.process_watch import leftovers

ROOT = Path(__file__).parents[1]
TIGHT = {"rtol": 1e-9, "atol": 1e-12}  # float64; programs add up in another order

# Lines of code of torch's program for each example: without blank lines, comments and
# docstrings. Paths are of pytorch/examples at 77f55b9; what is named by a title is the
# code in that page of pytorch/tutorials or of torch's documentation, without what we
# leave out (said in brackets).
TORCHS_LINES = {
    "parameter_server": (222, "distributed/rpc/parameter_server"),
    "batch_parameter_server": (123, "distributed/rpc/batch/parameter_server.py"),
    "recurrent_network": (112, "distributed/rpc/rnn, main.py and rnn.py"),
    "reinforcement": (147, "distributed/rpc/rl"),
    "batch_reinforcement": (168, "distributed/rpc/batch/reinforce.py"),
    "rpc_pipeline": (190, "distributed/rpc/pipeline"),
    "replicas_and_server": (119, "distributed/rpc/ddp_rpc"),
    "snapshots": (102, "ddp-tutorial-series: multigpu_torchrun.py, datautils.py"),
    "restart_in_place": (107, "torchft: train_ddp.py (its network and profiler)"),
    "replicas": (69, "ddp_tutorial (DDP with model parallelism)"),
    "uneven_inputs": (30, "generic_join, with DDP and ZeRO (the counter)"),
    "divided_optimizer": (51, "zero_redundancy_optimizer"),
    "communication_hooks": (61, "ddp_comm_hooks, checkpointing"),
    "language_model": (
        319,
        "distributed/tensor_parallelism: fsdp_tp_example.py, llama2_model.py",
    ),
    "transformer_pipeline": (80, "pipelining_tutorial (the tracer)"),
    "model_parallel": (79, "model_parallel_tutorial (timing and plots)"),
}


@pytest.fixture(autouse=True)
def as_a_newcomer_writes():
    """Examples add a bias as one does."""
    with own_promotions():
        yield


@pytest.fixture
def workers():
    """`workers(names)`: these in one process, the first is the caller."""

    def make(names):
        options = rpc.RpcOptions(leaks="error")
        return rpc.local_cluster(names, options=options, allow=["examples"])

    return make


# --- lines ---


def lines_of_code(text):
    """Without blank lines, comments and docstrings."""
    blank = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
        tokenize.DEDENT, tokenize.ENDMARKER,
    }  # fmt: skip
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    used = [t for t in tokens if t.type not in blank]
    lines = {n for t in used for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = node.body[0] if ast.get_docstring(node) else None
            lines -= set(range(first.lineno, first.end_lineno + 1)) if first else set()
    return len(lines)


def test_lines_are_counted():
    """Strings over several lines are code, docstrings and comments are not."""
    text = '"""M.\n\nN."""\n\nx = """a\nb"""  # c\n# d\n\n\ndef f():\n    """F."""\n'
    assert lines_of_code(text + "    return (\n        x\n    )\n") == 6


def test_each_example_has_its_tutorial():
    """In the table here, and in the folder's README."""
    names = {p.stem for p in (ROOT / "examples").glob("[!_]*.py")}
    assert names == set(TORCHS_LINES)
    readme = (ROOT / "examples/README.md").read_text()
    assert [name for name in names if f"[{name}.py]({name}.py)" not in readme] == []


@pytest.mark.parametrize("name", TORCHS_LINES)
def test_no_more_lines_than_torchs(name):
    """Of code."""
    count, source = TORCHS_LINES[name]
    assert lines_of_code((ROOT / f"examples/{name}.py").read_text()) <= count, source


# --- numbers ---


def descended(loss_of, params, batches, opt):
    """Losses of plain training on one device, and the last parameters."""
    state, losses = opt.init(params), []
    value_and_grad, step = jax.jit(jax.value_and_grad(loss_of)), jax.jit(opt.step)
    for batch in batches:
        loss, gradient = value_and_grad(params, batch)
        params, state = step(params, gradient, state)
        losses.append(float(loss))
    return losses, params


def together(parts):
    """The batches of all trainers or replicas, step by step, as one."""
    return [
        jax.tree.map(lambda *x: np.concatenate(x), *step)
        for step in zip(*parts, strict=True)
    ]


def test_parameter_server(workers):
    """With one trainer, that of the net itself; the second one goes on where it is."""
    example = parameter_server
    with workers(["server", "trainer"]):
        (losses,), _ = example.run(("trainer",), 6)

    def loss_of(net, batch):
        return example.cross_entropy(example.scores(net, batch[0]), batch[1])

    data = list(example.batches(0, 6))
    expected, _ = descended(
        loss_of, example.initial_net(), data, optim.sgd(lr=example.LR)
    )
    np.testing.assert_allclose(losses, expected, **TIGHT)


def test_batch_parameter_server(workers):
    """Three trainers: that of the whole batch."""
    example = batch_parameter_server
    with workers(["server", "a", "b", "c"]):
        losses = example.run(("a", "b", "c"), 5)

    def loss_of(net, batch):
        x, y = batch
        return ((jnp.tanh(x @ net["w1"]) @ net["w2"] - y) ** 2).mean()

    data = together([example.batches(i, 5) for i in range(3)])
    opt = optim.sgd(lr=0.2, momentum=0.9)
    expected, _ = descended(loss_of, example.initial_net(), data, opt)
    np.testing.assert_allclose(np.mean(losses, axis=0), expected, **TIGHT)


def test_recurrent_network(workers):
    """The three parts as one function; the hidden state goes on from batch to batch."""
    example = recurrent_network
    with workers(["trainer", "server"]):
        losses = example.train(epochs=2)
        model = example.RNNModel("server")
        table, linear = (
            part.rpc_sync().parameter_rrefs()[0].to_here()
            for part in (model.embedding, model.decoder)
        )
    params = {"table": table, "lstm": model.lstm.value, "linear": linear}
    zeros = jnp.zeros((example.BATCH, example.HIDDEN))
    hidden, expected = [(zeros, zeros)] * example.LAYERS, []

    def loss_of(params, batch, hidden):
        found, hidden = example.lstm(params["lstm"], params["table"][batch[0]], hidden)
        scores = found @ params["linear"]["w"] + params["linear"]["b"]
        return example.cross_entropy(scores, batch[1]), hidden

    value_and_grad = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
    for batch in 2 * example.batches():
        (loss, hidden), gradient = value_and_grad(params, batch, hidden)
        params = jax.tree.map(lambda p, g: p - example.LR * g, params, gradient)
        expected.append(float(loss))
    np.testing.assert_allclose(losses, expected, **TIGHT)


def test_rpc_pipeline(workers):
    """However the batch is split, that of both halves on one device."""
    example = rpc_pipeline
    with workers(example.WORKERS):
        found = [example.train(n, example.WORKERS[1:]) for n in (1, 3)]

    def loss_of(halves, batch):
        features = example.first_half(halves[0], batch[0])
        return ((example.second_half(halves[1], features) - batch[1]) ** 2).mean()

    halves = [example.initial_weights(half) for half in (0, 1)]
    opt = optim.sgd(lr=example.LR)
    expected, _ = descended(loss_of, halves, example.batches(3), opt)
    np.testing.assert_allclose(found, [expected] * 2, **TIGHT)


def test_replicas_and_server(workers):
    """Table and dense layer in one function of all 11 examples."""
    example = replicas_and_server
    with workers(example.WORKERS):
        losses = example.run(4)
        table = example.EmbeddingBag().table[...]

    def loss_of(params, batch):
        words, lengths, labels = batch
        bags = example.bag_sums(params["table"], words, lengths)
        return example.cross_entropy(params["dense"], bags, labels)

    params = {"table": table, "dense": example.initial_dense()}
    data = together([example.batches(i, 4) for i in range(2)])
    expected, _ = descended(loss_of, params, data, optim.sgd(lr=example.LR))
    mean = np.average(losses, axis=0, weights=example.SIZES)
    np.testing.assert_allclose(mean, expected, **TIGHT)


class Near:
    """Stands for a reference to an agent where there are no workers."""

    def __init__(self, agent):
        self.agent = agent

    def rpc_sync(self):
        """The agent itself."""
        return self.agent


def test_reinforcement(workers):
    """Observers that ask at the same time get what they get one after the other."""
    example = reinforcement
    with workers(example.WORKERS):
        rewards = example.train(example.WORKERS[1:], 4)
    agent, expected = example.Agent(2), []
    observers = [example.Observer(i) for i in range(2)]
    for _ in range(4):
        for observer in observers:
            observer.run_episode(Near(agent), example.STEPS)
        expected.append(agent.finish_episode())
    assert rewards == expected
    assert len(set(rewards)) > 1


def test_batch_reinforcement(workers):
    """All observers in step, as in one loop over the environments."""
    example = batch_reinforcement
    with workers(example.WORKERS):
        lengths = example.train(example.WORKERS[1:], 3)
    agent, expected = example.Agent(2), []
    environments = [example.Environment(i) for i in range(2)]
    for _ in range(3):
        states = [e.reset() for e in environments]
        rewards = np.ones((example.STEPS, 2))
        ends = np.zeros((example.STEPS, 2), bool)
        for step in range(example.STEPS):
            futures = [agent.select_action(i, state) for i, state in enumerate(states)]
            for i, (environment, future) in enumerate(
                zip(environments, futures, strict=True)
            ):
                states[i], ends[step, i] = environment.step(future.wait())
                if ends[step, i] or step == example.STEPS - 1:
                    ends[step, i], states[i] = True, environment.reset()
        for step in reversed(range(example.STEPS - 1)):
            rewards[step] += example.GAMMA * rewards[step + 1] * ~ends[step]
        agent.finish_episode(rewards)
        expected.append(float(ends.argmax(axis=0).mean() + 1))
    assert lengths == expected
    assert len(set(lengths)) > 1


def test_model_parallel():
    """Two devices and any number of micro-batches: one device's."""
    example = model_parallel
    found = [example.train(jax.devices()[:2], splits, 4) for splits in (1, 3)]

    def loss_of(weights, batch):
        y = example.net2(weights[1], example.net1(weights[0], batch["x"]))
        return ((y - batch["labels"]) ** 2).mean()

    opt = optim.sgd(lr=example.LR)
    expected, _ = descended(loss_of, example.initial_weights(), example.batches(4), opt)
    np.testing.assert_allclose(found, [expected] * 2, **TIGHT)


def mean_of(losses_of):
    """The loss of one device, of losses by example."""
    return lambda params, batch: losses_of(params, batch).mean()


def test_replicas(mesh, tmp_path):
    """Of 40 and 27 examples, with a checkpoint in the middle: that of all 67."""
    example = replicas
    data = together([example.batches(0), example.batches(1)])
    losses = example.train(mesh(2), data, example.SIZES, str(tmp_path))
    opt = optim.sgd(lr=example.LR)
    net = example.initial_weights()
    expected, _ = descended(mean_of(example.squared_errors), net, data, opt)
    np.testing.assert_allclose(losses, expected, **TIGHT)


def test_snapshots_resume_with_the_same_bits(mesh, tmp_path):
    """What was ended after 3 epochs begins again after the second."""
    straight, ended = str(tmp_path / "straight"), str(tmp_path / "ended")
    expected = snapshots.train(mesh(2), 5, 2, straight)
    first = snapshots.train(mesh(2), 3, 2, ended)
    second = snapshots.train(mesh(2), 5, 2, ended)
    assert list(first) == [0, 1, 2]
    assert list(second) == [2, 3, 4]
    assert expected == first | second
    assert first[2] == second[2]
    sampler = data_parallel.Sampler(snapshots.EXAMPLES, snapshots.BATCH)
    data = [
        jax.tree.map(lambda x, rows=shards.rows: x[rows], snapshots.dataset())
        for epoch in range(5)
        for shards in sampler.shards(1, epoch)
    ]
    opt = optim.sgd(lr=1e-2, momentum=0.9)
    start = {"w": jnp.zeros(20), "b": jnp.zeros(())}
    alone, _ = descended(mean_of(snapshots.losses_of), start, data, opt)
    lasts = alone[sampler.steps - 1 :: sampler.steps]
    np.testing.assert_allclose(list(expected.values()), lasts, **TIGHT)


def test_uneven_inputs(mesh):
    """The mean over the examples that there are at each of 6 steps."""
    streams = [uneven_inputs.inputs(rank) for rank in (0, 1)]
    losses = uneven_inputs.train(mesh(2), streams, "weight")
    data = [np.concatenate(rows) for rows in zip(*streams, strict=False)]
    data += streams[1][len(data) :]
    assert [len(rows) for rows in data] == [2, 2, 2, 2, 2, 1]
    start = jnp.asarray([0.3, -0.2, 0.1])
    expected, _ = descended(
        lambda w, x: ((x @ w - 1) ** 2).mean(), start, data, optim.adam(lr=0.01)
    )
    np.testing.assert_allclose(losses, expected, **TIGHT)


def test_divided_optimizer(mesh):
    """The same parameters, with half of the state."""
    own = together([[divided_optimizer.examples(rank)] for rank in (0, 1)])[0]
    (divided, half), (undivided, whole) = (
        divided_optimizer.train(mesh(2), own, use_zero) for use_zero in (True, False)
    )
    np.testing.assert_allclose(divided, undivided, **TIGHT)
    arrays = 2 * 8 * divided_optimizer.LAYERS * divided_optimizer.WIDTH**2
    assert half - arrays // 2 == whole - arrays < 100  # the counts of steps


def test_communication_hooks(mesh, tmp_path):
    """Exact until PowerSGD begins, and no other numbers for having been saved."""
    example = communication_hooks
    own = together([[example.examples(rank)] for rank in (0, 1)])[0]
    net = example.initial_weights()
    expected, _ = descended(
        mean_of(example.squared_errors),
        net,
        [own] * example.STEPS,
        optim.sgd(lr=example.LR),
    )
    found = {}
    for name, hook in example.HOOKS.items():
        found[name] = example.train(mesh(2), own, hook, str(tmp_path / name))
    np.testing.assert_allclose(found["none"], expected, **TIGHT)
    np.testing.assert_allclose(found["fp16"], expected, rtol=1e-4)
    assert found["fp16"] != found["none"]
    np.testing.assert_allclose(found["power_sgd"][:3], expected[:3], **TIGHT)
    assert found["power_sgd"][3] > 1.001 * expected[3]

    step = data_parallel.train_step(
        example.squared_errors,
        optim.sgd(lr=example.LR),
        mesh(2),
        hook=hooks.power_sgd(rank=2, start=2),
    )
    state, unsaved = step.init(net), []
    for _ in range(example.STEPS):
        state, metrics = step(
            state, *data_parallel.shard_batch(own, mesh(2), rows=example.ROWS)
        )
        unsaved.append(float(metrics.loss))
    assert unsaved == found["power_sgd"]


def test_transformer_pipeline():
    """Two stages and four micro-batches: the layers one after another, in float32."""
    example = transformer_pipeline
    losses = example.train(None, 3)
    graph, params = nnx.split(nnx.List([m for half in example.halves() for m in half]))

    def loss_of(params, batch):
        h = batch["tokens"]
        for layer in nnx.merge(graph, params):
            h = layer(h)
        return example.cross_entropies(h, batch).mean()

    opt = optim.sgd(lr=example.LR)
    expected, _ = descended(loss_of, params, [example.batch()] * 3, opt)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_language_model():
    """On meshes of 2 x 2 for two stages: one device's losses and layers, in float32."""
    example, steps = language_model, 3
    places = example.meshes(jax.devices(), (2, 2, 2))
    losses, made = example.train(places, pipeline.zero_bubble(2, 4), steps)
    layers = made()
    model = nnx.List(example.layers(example.Sizes()))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_with(layers, batch):
        h = batch["tokens"]
        for layer in layers:
            h = layer(h)
        weights = batch["mask"].sum(1)
        return (example.losses_of(h, batch) * weights).sum() / weights.sum()

    def loss_of(params, batch):
        return loss_with(nnx.merge(graph, params, rest), batch)

    data = example.batches(steps + 1)
    assert all(0 < batch["mask"].mean() < 1 for batch in data)
    expected, _ = descended(loss_of, params, data, optim.adam(lr=example.LR))
    np.testing.assert_allclose(losses, expected[:steps], rtol=1e-5)
    # The layers that came back have the loss of the step that would follow.
    for layer in layers:
        nnx.update(layer, jax.tree.map(np.asarray, nnx.state(layer, nnx.Param)))
    np.testing.assert_allclose(loss_with(layers, data[-1]), expected[-1], rtol=1e-5)


def test_the_language_model_over_two_processes(tmp_path):
    """Its losses are those of one process, in which it is judged above."""
    example, steps = language_model, 30
    places = example.meshes(jax.devices(), (2, 2, 2))
    schedule = pipeline.one_f_one_b(2, example.MICRO_BATCHES)
    losses, _ = example.train(places, schedule, steps)
    command = ["-m", "jdist.launch", "--nproc", "2", "examples/language_model.py"]
    output, _ = run(command, tmp_path)
    (told,) = [line for line in output.splitlines() if "losses" in line]
    found = [float(text) for text in told.split("losses ")[1].split()]
    np.testing.assert_allclose(found, losses, atol=1e-3)  # Three digits are printed.


def test_replicas_that_die_leave_the_whole_batchs_gradient(tmp_path):
    """Three processes, two of which are killed in the middle of a step."""
    output, _ = run(["examples/restart_in_place.py"], tmp_path)
    *_, told, ended = output.splitlines()
    assert ended == "ended with [0, -9, -9]"
    example = restart_in_place
    losses = list(json.loads(told).values())
    data = [example.rows_of(step) for step in range(example.STEPS)]
    params = jnp.asarray([0.3, -0.2, 0.1])
    opt = optim.adam(lr=0.05)
    expected, _ = descended(mean_of(example.losses_of), params, data, opt)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_the_language_models_parallelism_is_thirty_lines():
    """What a user writes for it, beside the model, its data and the training loop."""
    text = (ROOT / "examples/language_model.py").read_text()
    part = text.partition("# --- parallelism ---")[2].partition("# --- training ---")[0]
    assert 10 < lines_of_code(part) <= 30


# --- programs ---

PROGRAMS = {
    "parameter_server": ["examples/parameter_server.py"],
    "replicas": ["examples/replicas.py"],
    "snapshots": ["-m", "jdist.launch", "--nproc", "2", "examples/snapshots.py", "2"],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_ends_well(name, tmp_path):
    """As a newcomer starts it; no process and no file is left."""
    before = leftovers()
    output, _ = run(PROGRAMS[name], tmp_path)
    assert leftovers() == before
    assert output.count("loss") >= 2
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == []


def run(command, folder):
    """What a program prints that is started by Python, in a session of its own."""
    (folder / "tmp").mkdir()
    plain = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    settings = {"JAX_PLATFORMS": "cpu", "TMPDIR": str(folder / "tmp")}
    where = [str(ROOT / each) if each.endswith(".py") else each for each in command]
    process = subprocess.Popen(
        [sys.executable, *where],
        cwd=folder, env={**plain, **settings, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert sessions().count(process.pid) == 0
    return output, errors


def sessions():
    """The session of each process of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found.append(int(path.read_text().rpartition(")")[2].split()[3]))
        except OSError:  # It has just ended.
            continue
    return found
