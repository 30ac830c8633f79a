"""What the examples compute, written in torch: one function for each of them.

Each is given arrays (initial weights, batches) and returns numbers, all in float64.
Those over RPC run on three workers, of which worker0 drives; the others on a group of
two.
"""

import tempfile
import threading
import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import DistributedOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from examples import batch_reinforcement, reinforcement


def tensors(tree, grad=False):
    """Of all arrays in dicts and lists."""
    if isinstance(tree, dict):
        return {name: tensors(each, grad) for name, each in tree.items()}
    if isinstance(tree, list | tuple):
        return [tensors(each, grad) for each in tree]
    return torch.from_numpy(np.array(tree)).requires_grad_(grad)


def leaves(tree):
    """All tensors, in order."""
    parts = tree.values() if isinstance(tree, dict) else tree
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for part in parts for leaf in leaves(part)]


# --- over RPC ---


class Served:
    """Weights of a worker, and the function that computes with them."""

    def __init__(self, name, weights):
        self.function, self.weights = FUNCTIONS[name], tensors(weights, grad=True)

    def forward(self, x):
        """Of a tensor, or of a reference to one."""
        x = x.to_here() if hasattr(x, "to_here") else x
        return self.function(self.weights, x)

    def parameter_rrefs(self):
        """One for each array."""
        return [rpc.RRef(leaf) for leaf in leaves(self.weights)]


def dense(net, x):
    """Two layers."""
    return functional.relu(x @ net["w1"] + net["b1"]) @ net["w2"] + net["b2"]


def convolution(x, kernel):
    """Of images with channels first, by a kernel with channels last."""
    return functional.conv2d(x, kernel.permute(3, 2, 0, 1), padding=1)


def block(kernels, x):
    """A residual block."""
    return x + convolution(functional.relu(convolution(x, kernels["a"])), kernels["b"])


FUNCTIONS = {
    "net": dense,
    "embedding": lambda table, tokens: functional.embedding(tokens, table),
    "bags": lambda table, x: bag_sums(table, x),
    "decoder": lambda p, h: h @ p["w"] + p["b"],
    "first": lambda p, x: block(p["block"], functional.relu(convolution(x, p["stem"]))),
    "second": lambda p, x: block(p["block"], x).mean(dim=(2, 3)) @ p["fc"],
}


def stepped(parameters, lr, loss_of, batches):
    """Losses of a DistributedOptimizer's steps."""
    opt, losses = DistributedOptimizer(torch.optim.SGD, parameters, lr=lr), []
    for batch in batches:
        with autograd.context() as context_id:
            loss = loss_of(*tensors(batch))
            autograd.backward(context_id, [loss])
            opt.step(context_id)
        losses.append(loss.item())
    return losses


def parameter_server(net, batches, lr):
    """The net on worker1, trained from here."""
    server = rpc.remote("worker1", Served, args=("net", net))

    def loss_of(x, labels):
        return functional.cross_entropy(server.rpc_sync().forward(x), labels)

    return stepped(server.rpc_sync().parameter_rrefs(), lr, loss_of, batches)


class BatchServer:
    """Steps when all trainers' gradients have come."""

    def __init__(self, net, trainers, lr, momentum):
        self.net, self.trainers = tensors(net, grad=True), trainers
        self.opt = torch.optim.SGD(leaves(self.net), lr=lr, momentum=momentum)
        self.lock, self.came = threading.Lock(), 0
        self.future = torch.futures.Future()

    def plain(self):
        """The weights as they are."""
        return {name: leaf.detach().clone() for name, leaf in self.net.items()}


@rpc.functions.async_execution
def update_and_fetch(server, gradients):
    """A future of the weights after the step."""
    self = server.local_value()
    with self.lock:
        for leaf, gradient in zip(leaves(self.net), gradients, strict=True):
            share = gradient / self.trainers
            leaf.grad = share if leaf.grad is None else leaf.grad + share
        self.came += 1
        future = self.future
        if self.came < self.trainers:
            return future
        self.opt.step()
        self.opt.zero_grad()
        self.came, self.future = 0, torch.futures.Future()
    future.set_result(self.plain())
    return future


def train_in_batches(server, batches):
    """What a trainer does."""
    net, losses = server.rpc_sync().plain(), []
    for x, y in tensors(batches):
        for leaf in net.values():
            leaf.requires_grad_()
        loss = ((torch.tanh(x @ net["w1"]) @ net["w2"] - y) ** 2).mean()
        gradients = torch.autograd.grad(loss, list(net.values()))
        net = rpc.rpc_sync(
            server.owner(), update_and_fetch, args=(server, list(gradients))
        )
        losses.append(loss.item())
    return losses


def batch_parameter_server(net, batches, lr, momentum):
    """The server here, a trainer on each of the others."""
    server = rpc.RRef(BatchServer(net, len(batches), lr, momentum))
    futures = [
        rpc.rpc_async(f"worker{i + 1}", train_in_batches, args=(server, own))
        for i, own in enumerate(batches)
    ]
    return torch.futures.wait_all(futures)


def recurrent_network(table, layers, decoder, batches, lr):
    """Embedding and decoder on worker1, torch's own LSTM here."""
    embedding = rpc.remote("worker1", Served, args=("embedding", table))
    linear = rpc.remote("worker1", Served, args=("decoder", decoder))
    width = layers[0]["hidden"].shape[0]
    lstm = nn.LSTM(table.shape[1], width, len(layers), dtype=torch.float64)
    trained = []
    for i, layer in enumerate(layers):
        names = {
            "weight_ih": layer["input"].T,
            "weight_hh": layer["hidden"].T,
            "bias_ih": layer["bias"],
        }
        for name, value in names.items():
            leaf = getattr(lstm, f"{name}_l{i}")
            leaf.data = tensors(value)
            trained.append(leaf)
        getattr(lstm, f"bias_hh_l{i}").requires_grad_(False).zero_()  # torch has two
    zeros = torch.zeros(len(layers), batches[0][0].shape[1], width, dtype=torch.float64)
    hidden = (zeros, zeros)

    def loss_of(tokens, targets):
        nonlocal hidden
        found, hidden = lstm(embedding.rpc_sync().forward(tokens), hidden)
        hidden = tuple(h.detach() for h in hidden)
        scores = linear.rpc_sync().forward(found)
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    remote = [p for s in (embedding, linear) for p in s.rpc_sync().parameter_rrefs()]
    here = [rpc.RRef(p) for p in trained]
    return stepped(remote + here, lr, loss_of, batches)


def rpc_pipeline(halves, batches, lr, splits):
    """The halves on worker1 and worker2."""
    first = rpc.remote("worker1", Served, args=("first", halves[0]))
    second = rpc.remote("worker2", Served, args=("second", halves[1]))

    def loss_of(images, labels):
        futures = [
            second.rpc_async().forward(first.remote().forward(rpc.RRef(part)))
            for part in images.permute(0, 3, 1, 2).chunk(splits)
        ]
        scores = torch.cat(torch.futures.wait_all(futures))
        return ((scores - labels) ** 2).mean()

    parameters = [p for s in (first, second) for p in s.rpc_sync().parameter_rrefs()]
    return stepped(parameters, lr, loss_of, batches)


def bag_sums(table, x):
    """By torch's embedding bags, of words and lengths."""
    words, lengths = x
    counting = torch.arange(words.shape[1]) < lengths[:, None]
    offsets = torch.cumsum(lengths, 0) - lengths
    return functional.embedding_bag(words[counting], table, offsets, mode="sum")


def train_with_replica(embedding, number, store, dense, batches, lr):
    """A trainer; DDP's mean of the losses given is the mean over all examples."""
    group = f"file://{store}-group"
    dist.init_process_group("gloo", init_method=group, rank=number, world_size=2)
    model = DistributedDataParallel(
        Net(lambda p, x: x @ p[0] + p[1], [dense["w"], dense["b"]])
    )
    rows = embedding.rpc_sync().parameter_rrefs()
    here = [rpc.RRef(p) for p in model.parameters()]
    opts = [
        DistributedOptimizer(torch.optim.SGD, rows, lr=lr / 2),  # each trainer's add up
        DistributedOptimizer(torch.optim.SGD, here, lr=lr),
    ]
    losses = []
    for words, lengths, labels in tensors(batches[number]):
        share = len(labels) / sum(len(own[0][0]) for own in batches)
        with autograd.context() as context_id:
            bags = embedding.rpc_sync().forward((words, lengths))
            loss = functional.cross_entropy(model(bags), labels)
            autograd.backward(context_id, [2 * share * loss])
            for opt in opts:
                opt.step(context_id)
        dist.barrier()
        losses.append(loss.item())
    dist.destroy_process_group()
    return losses


def replicas_and_server(table, dense, batches, lr):
    """The table here, a trainer on each of the others."""
    embedding = rpc.RRef(Served("bags", table))
    store = f"{tempfile.mkdtemp()}/store"
    futures = [
        rpc.rpc_async(
            f"worker{i + 1}",
            train_with_replica,
            args=(embedding, i, store, dense, batches, lr),
        )
        for i in range(2)
    ]
    return torch.futures.wait_all(futures)


class Policy:
    """What both agents have."""

    def __init__(self, policy, seeds, lr):
        self.policy = tensors(policy, grad=True)
        self.opt = torch.optim.Adam(leaves(self.policy), lr=lr)
        self.rngs = [np.random.default_rng(seed) for seed in seeds]
        self.lock = threading.Lock()

    def log_probabilities(self, states):
        """Of the two actions."""
        hidden = functional.relu(torch.from_numpy(np.array(states)) @ self.policy["w1"])
        return functional.log_softmax(hidden @ self.policy["w2"], dim=-1)

    def descend(self, loss):
        """One step of the optimizer."""
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


class Agent(Policy):
    """Decides for one observer at a time."""

    def begin(self):
        """A new episode."""
        self.chosen, self.rewards = [[], []], [[], []]

    def select_action(self, observer, step, state):
        """Draws an action, and keeps its log-probability with its graph."""
        found = self.log_probabilities(state)
        action = int(self.rngs[observer].random() < found[1].exp().item())
        self.chosen[observer].append(found[action])
        return action

    def report_reward(self, observer, step, reward):
        """Of a step."""
        self.rewards[observer].append(reward)

    def finish(self, gamma):
        """REINFORCE over all observers."""
        returns = []
        for rewards in self.rewards:
            following, own = 0.0, []
            for reward in reversed(rewards):
                following = reward + gamma * following
                own.insert(0, following)
            returns += own
        returns = torch.tensor(returns, dtype=torch.float64)
        advantages = (returns - returns.mean()) / (returns.std(correction=0) + 1e-7)
        chosen = torch.stack(self.chosen[0] + self.chosen[1])
        self.descend(-(chosen * advantages).sum())
        return min(map(sum, self.rewards))


def watch(agent, number, episodes):
    """An observer, for one episode after another."""
    name = f"observer{number}"
    if episodes == 0:
        ENVIRONMENTS[name] = reinforcement.Environment(number)
    observer = reinforcement.Observer(number)
    observer.environment = ENVIRONMENTS[name]
    observer.run_episode(agent, reinforcement.STEPS)


ENVIRONMENTS = {}
"""Of the observers of this process."""


def played(agent, episodes, watching):
    """Has both observers play episode after episode; what they return, by episode."""
    for episode in range(episodes):
        futures = [
            rpc.rpc_async(f"worker{i + 1}", watching, args=(agent, i, episode))
            for i in range(2)
        ]
        yield torch.futures.wait_all(futures)


def reinforcement_learning(policy, episodes, lr, gamma):
    """The smallest reward of each episode."""
    agent = Agent(policy, [(0, 1), (1, 1)], lr)
    agent.begin()
    rewards = []
    for _ in played(rpc.RRef(agent), episodes, watch):
        rewards.append(agent.finish(gamma))
        agent.begin()
    return rewards


class BatchAgent(Policy):
    """Decides for both observers when both have asked."""

    def begin(self):
        """A new episode."""
        self.chosen, self.states = [], [None, None]
        self.future = torch.futures.Future()


@rpc.functions.async_execution
def select_in_batch(agent, observer, state):
    """A future of the observer's action."""
    self = agent.local_value()
    with self.lock:
        future = self.future
        mine = future.then(lambda actions: int(actions.wait()[observer]))
        self.states[observer] = state
        if any(state is None for state in self.states):
            return mine
        found = self.log_probabilities(self.states)
        drawn = self.rngs[0].random(2) < found[:, 1].exp().detach().numpy()
        actions = torch.from_numpy(drawn.astype(int))
        self.chosen.append(found.gather(1, actions[:, None])[:, 0])
        self.states, self.future = [None, None], torch.futures.Future()
    future.set_result(actions)
    return mine


class Asking:
    """Stands for a reference to an agent whose answers come in batches."""

    def __init__(self, agent):
        self.agent = agent

    def rpc_sync(self):
        """Itself."""
        return self

    def select_action(self, observer, state):
        """An asynchronous function is called by name in torch."""
        arguments = (self.agent, observer, state)
        return rpc.rpc_sync(self.agent.owner(), select_in_batch, args=arguments)


def watch_in_batch(agent, number, episodes):
    """An observer's episode: returns to come, and the length of its first play."""
    name = f"batch{number}"
    if episodes == 0:
        ENVIRONMENTS[name] = batch_reinforcement.Environment(number)
    observer = batch_reinforcement.Observer(number)
    observer.environment = ENVIRONMENTS[name]
    return observer.run_episode(Asking(agent))


def batch_reinforcement_learning(policy, episodes, lr):
    """The mean length of the first plays of each episode."""
    agent = BatchAgent(policy, [1], lr)
    agent.begin()
    lengths = []
    for told in played(rpc.RRef(agent), episodes, watch_in_batch):
        returns = torch.from_numpy(np.stack([each for each, _ in told], axis=1))
        agent.descend(-(torch.stack(agent.chosen) * returns).mean())
        agent.begin()
        lengths.append(np.mean([length for _, length in told]))
    return lengths


OVER_RPC = {
    "parameter_server": parameter_server,
    "batch_parameter_server": batch_parameter_server,
    "recurrent_network": recurrent_network,
    "rpc_pipeline": rpc_pipeline,
    "replicas_and_server": replicas_and_server,
    "reinforcement": reinforcement_learning,
    "batch_reinforcement": batch_reinforcement_learning,
}


def over_rpc(rank, store, given):
    """What each of the three processes does; worker0 returns all numbers."""
    warnings.showwarning = lambda *told, **more: None  # of its own optimizers' age
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    found = {}
    if rank == 0:
        found = {name: OVER_RPC[name](**own) for name, own in given.items()}
    rpc.shutdown()
    return found


# --- over a group ---


class Net(nn.Module):
    """Named arrays, and a function of them."""

    def __init__(self, function, weights):
        super().__init__()
        self.function = function
        items = weights.items() if isinstance(weights, dict) else enumerate(weights)
        for name, value in items:
            self.register_parameter(f"p{name}", nn.Parameter(tensors(value)))

    def forward(self, x):
        """The function of the parameters, in the order in which they were given."""
        return self.function(list(self.parameters()), x)


def relu_net(p, x):
    """Two layers without biases."""
    return functional.relu(x @ p[0]) @ p[1]


def added(number):
    """Over all ranks."""
    total = number.detach().clone()
    dist.all_reduce(total)
    return total.item()


def trained(model, opt, batches, examples):
    """Losses over all ranks, with DDP's mean made the mean over the examples."""
    losses = []
    for x, y in tensors(batches):
        loss = ((model(x) - y) ** 2).mean(dim=1).sum() / examples
        opt.zero_grad()
        (loss * dist.get_world_size()).backward()
        opt.step()
        losses.append(added(loss))
    return losses


def replicas(rank, folder, net, batches, examples, lr):
    """Half of the steps, a checkpoint by rank 0, and the others."""
    model = DistributedDataParallel(Net(relu_net, net))
    half = len(batches[rank]) // 2
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    losses = trained(model, opt, batches[rank][:half], examples)
    if rank == 0:
        torch.save(model.state_dict(), f"{folder}/torchs")
    dist.barrier()
    model = DistributedDataParallel(Net(relu_net, net))
    model.load_state_dict(torch.load(f"{folder}/torchs"))
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    return losses + trained(model, opt, batches[rank][half:], examples)


def snapshots(rank, folder, w, b, data, epochs, lr, momentum):
    """The last loss of each epoch; goes on from a snapshot after half of them."""
    model = DistributedDataParallel(Net(lambda p, x: x @ p[0] + p[1], [w, b]))
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    x, y = tensors(data)
    found = []
    for epoch, steps in enumerate(epochs):
        if epoch == len(epochs) // 2:
            if rank == 0:
                state = {"model": model.state_dict(), "opt": opt.state_dict()}
                torch.save(state, f"{folder}/snapshot")
            dist.barrier()
            state = torch.load(f"{folder}/snapshot")
            model = DistributedDataParallel(Net(lambda p, x: x @ p[0] + p[1], [w, b]))
            opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
            model.load_state_dict(state["model"])
            opt.load_state_dict(state["opt"])
        for rows in steps:
            own = np.split(rows, 2)[rank]
            loss = ((model(x[own]) - y[own]) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        found.append(added(loss) / 2)
    return found


def uneven_inputs(rank, folder, w, inputs, lr):
    """With torch's two ways to divide: the sum over the ranks of each step's losses."""
    found = {}
    for way, initial in (("initial", True), ("active", False)):
        model = DistributedDataParallel(Net(lambda p, x: x @ p[0], [w]))
        opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=lr)
        own = []
        with Join([model, opt], divide_by_initial_world_size=initial):
            for x in tensors(inputs[rank]):
                opt.zero_grad()
                loss = ((model(x) - 1) ** 2).mean()
                loss.backward()
                opt.step()
                own.append(loss.item())
        of_all = [None, None]
        dist.all_gather_object(of_all, own)
        shorter, longer = sorted(of_all, key=len)
        pairs = [list(pair) for pair in zip(shorter, longer, strict=False)]
        pairs += [[loss] for loss in longer[len(shorter) :]]
        found[way] = [sum(p) / (2 if initial else len(p)) for p in pairs]
    return found


def divided_optimizer(rank, folder, net, batches, lr):
    """The sum of the parameters after two steps."""

    def through(p, x):
        for w in p:
            x = x @ w
        return x

    model = DistributedDataParallel(Net(through, net))
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=lr)
    own = batches[rank]
    trained(model, opt, [own, own], 2 * len(own[0]))
    return sum(p.sum().item() for p in model.parameters())


def communication_hooks(rank, folder, net, batches, steps, lr):
    """Without a hook, and with float16."""
    found = {}
    own = batches[rank]
    for name, hook in (("none", None), ("fp16", default_hooks.fp16_compress_hook)):
        model = DistributedDataParallel(Net(relu_net, net))
        if hook is not None:
            model.register_comm_hook(None, hook)
        opt = torch.optim.SGD(model.parameters(), lr=lr)
        found[name] = trained(model, opt, [own] * steps, 2 * len(own[0]))
    return found


def attention(p, h):
    """Of all heads; kernels are `(dim, heads, width)`."""
    query, key, value = (
        torch.einsum("sld,dhw->shlw", h, p[name]["kernel"]) + p[name]["bias"][:, None]
        for name in ("query", "key", "value")
    )
    found = functional.scaled_dot_product_attention(query, key, value)
    return torch.einsum("shlw,hwd->sld", found, p["out"]["kernel"]) + p["out"]["bias"]


def normalised(p, h):
    """With Flax's epsilon."""
    return functional.layer_norm(h, h.shape[-1:], p["scale"], p["bias"], eps=1e-6)


class Half(nn.Module):
    """The layers of a stage, by the names that their Flax parameters have."""

    def __init__(self, layers):
        super().__init__()
        self.layers = tensors(layers, grad=True)
        for i, leaf in enumerate(leaves(self.layers)):
            self.register_parameter(f"p{i}", nn.Parameter(leaf))
        own = iter(self.parameters())
        self.layers = [self._held(layer, own) for layer in self.layers]

    def _held(self, tree, own):
        if isinstance(tree, dict):
            return {name: self._held(each, own) for name, each in tree.items()}
        return next(own)

    def forward(self, h):
        """One layer after the other."""
        for p in self.layers:
            if "embedding" in p:
                h = functional.embedding(h, p["embedding"])
            elif "attention" in p:
                h = normalised(p["norm1"], h + attention(p["attention"], h))
                up = functional.relu(h @ p["up"]["kernel"] + p["up"]["bias"])
                down = up @ p["down"]["kernel"] + p["down"]["bias"]
                h = normalised(p["norm2"], h + down)
            else:
                h = h @ p["kernel"] + p["bias"]
        return h


def transformer_pipeline(rank, folder, halves, tokens, targets, parts, steps, lr):
    """torch's own schedule; rank 1 has the losses."""
    half = Half(halves[rank])
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))

    def loss_of(scores, targets):
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

    schedule = ScheduleGPipe(stage, parts, loss_fn=loss_of)
    opt, found = torch.optim.SGD(half.parameters(), lr=lr), []
    for _ in range(steps):
        opt.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(tensors(tokens))
        else:
            schedule.step(target=tensors(targets), losses=losses)
            found.append(float(torch.stack(losses).mean()))
        opt.step()
    told = [None, None]
    dist.all_gather_object(told, found)
    return told[1]


def model_parallel(rank, folder, weights, batches, splits, lr):
    """Micro-batch by micro-batch; on a machine without GPUs one device is two."""
    first, second = tensors(weights, grad=True)
    opt, losses = torch.optim.SGD(leaves([first, second]), lr=lr), []
    for batch in tensors(batches):
        outputs = [
            functional.relu(x @ first["w"] + first["b"]) @ second["w"] + second["b"]
            for x in batch["x"].chunk(splits)
        ]
        loss = ((torch.cat(outputs) - batch["labels"]) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


OVER_A_GROUP = {
    "replicas": replicas,
    "snapshots": snapshots,
    "uneven_inputs": uneven_inputs,
    "divided_optimizer": divided_optimizer,
    "communication_hooks": communication_hooks,
    "transformer_pipeline": transformer_pipeline,
    "model_parallel": model_parallel,
}


def over_a_group(rank, folder, given):
    """What each of the two processes does; both return all numbers."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    found = {
        name: OVER_A_GROUP[name](rank, folder, **own) for name, own in given.items()
    }
    dist.barrier()
    dist.destroy_process_group()
    return found
