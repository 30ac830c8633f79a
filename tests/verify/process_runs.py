"""What the processes of a run do when a test tells them: they judge together."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdist import verify
from jdist.verify.__main__ import main
from jdist.verify.processes.shards import held

STACK = contextlib.ExitStack()


def losses(params, batch):
    """Of a linear model whose matrix can be divided by rows."""
    found = batch["x"] @ params["w"] + params["b"][None]
    return ((found - batch["y"]) ** 2).sum(axis=1)


def given():
    """The same parameters and batch on every process."""
    rng = np.random.default_rng(3)
    array = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    rows = 4 * jax.process_count()  # Two for each device.
    params = {"w": array(rows, 3), "b": array(3)}
    return params, {"x": array(7, rows), "y": array(7, 3)}


def mesh():
    """Two devices of each process."""
    rows = np.array(jax.devices()).reshape(jax.process_count(), -1)[:, :2]
    return Mesh(rows.reshape(-1), ("data",))


def laid_out(array, spec, change=lambda device, values: values):
    """A global array, of which this process changes what its own devices hold."""
    sharding = NamedSharding(mesh(), spec)
    pieces = [
        jax.device_put(change(device, np.asarray(array)[index]), device)
        for device, index in sharding.addressable_devices_indices_map(
            array.shape
        ).items()
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, pieces)


def trainer(change_w=None, change_b=None):
    """A gradient with rows of `w` divided over the devices, and `b` on all of them."""
    same = lambda device, values: values  # noqa: E731
    gradient = jax.value_and_grad(lambda p, b: losses(p, b).mean())

    def candidate(params, batch):
        loss, found = jax.tree.map(np.asarray, gradient(params, batch))
        w = laid_out(found["w"], P("data"), change_w or same)
        b = laid_out(found["b"], P(), change_b or same)
        return laid_out(loss, P()), {"w": w, "b": b}

    return candidate


def on(rank, change):
    """A change on one process only."""
    mine = jax.process_index() == rank
    return (lambda device, values: change(values)) if mine else None


def ulp(values):
    return np.nextafter(values, np.float32(9))


def one_wrong_entry(device, values):
    """In the rows of the second process's first device."""
    mine = device in jax.devices()[jax.local_device_count() :: jax.device_count()]
    first = np.arange(values.size).reshape(values.shape) == 1
    return np.where(first & mine, -values, values)


CANDIDATES = {
    "right": lambda: trainer(),
    "shard": lambda: trainer(one_wrong_entry),
    "replicas": lambda: trainer(change_b=on(1, ulp)),
    "everywhere": lambda: trainer(lambda _, x: 2 * x),
}


def judged(names, finite_differences=False):
    """The report, as it is printed and as its verdicts."""
    candidates = {name: CANDIDATES[name]() for name in names}
    judge = verify.gradients_judge(losses, timeout=60)
    report = judge(*given(), candidates, finite_differences=finite_differences)
    verdicts = {(row.candidate, row.path): row.verdict for row in report.leaves}
    problems = {(row.candidate, row.path): row.problem for row in report.failures}
    return str(report), report.ok, verdicts, problems


def compared():
    """Two trees, of which only the second lies on several processes."""
    params, batch = given()
    reference = jax.grad(lambda p, b: losses(p, b).mean())(params, batch)
    wrong = trainer(change_w=on(0, ulp), change_b=on(1, lambda x: -x))
    report = verify.compare(reference, wrong(params, batch)[1], timeout=60)
    try:
        verify.compare(wrong(params, batch)[1], reference, timeout=60)
    except ValueError as error:
        return str(report), str(error)


def gathered():
    """The largest number of entries of `w` that the judge brings to this host."""
    judge = verify.gradients_judge(losses, timeout=60)
    report = judge(*given(), {"right": trainer()}, finite_differences=False)

    _, found = trainer()(*given())
    seen = [shard.values.size for shard in held(found["w"]).shards]
    return report.ok, seen, given()[0]["w"].size


def raising(rank, timeout=60):
    """One process's candidate raises; then all judge again."""

    def candidate(params, batch):
        if jax.process_index() == rank:
            raise ArithmeticError("no numbers here")
        return trainer()(params, batch)

    try:
        judge = verify.gradients_judge(losses, timeout=timeout)
        judge(*given(), {"mine": candidate}, finite_differences=False)
    except (ArithmeticError, verify.PeersLost) as error:
        first = type(error).__name__, str(error)
    return first, judged(["right"])[1]


def stepped():
    """Two steps of descent by trainers whose parameters stay divided."""
    rate = np.float32(0.05)
    gradient = jax.grad(lambda p, b: losses(p, b).mean())

    def update(params, slope, state):
        return jax.tree.map(lambda p, g: p - rate * g, params, slope), state

    def train(change):
        whole = []

        def candidate(params, state, batch):
            whole[:] = [update(whole[0], gradient(whole[0], batch), state)[0]]
            found = jax.tree.map(np.asarray, whole[0])
            w = laid_out(found["w"], P("data"), change)
            return {"w": w, "b": laid_out(found["b"], P())}, None

        whole.append(given()[0])
        return candidate

    params, batch = given()
    batches = [batch, jax.tree.map(lambda x: x * np.float32(0.5), batch)]
    trainers = {"right": train(lambda _, x: x), "shard": train(one_wrong_entry)}
    report = verify.step(losses, update, (params, ()), batches, trainers, timeout=60)
    causes = [(x.candidate, x.step, x.part) for x in report.attributions]
    return str(report), report.of("right").ok, causes


def tapped(params, batch, tp=None, plant=lambda name, x: x):
    """Losses of a layer whose columns may be divided."""
    hidden = verify.tap(plant("hidden", jnp.tanh(batch @ params["in"])), "hidden", tp=1)
    out = plant("after hidden", hidden) @ params["out"]
    out = jax.lax.psum(out, tp) if tp else out
    return verify.tap(plant("out", out), "out", tp=None) ** 2


def on_second(name, factor, backwards=False):
    """A plant at one value: a factor on the second process's part."""

    def plant(own, x):
        if own != name:
            return x
        by = jnp.where(jax.lax.axis_index("tp") == 1, jnp.float32(factor), 1)
        return x * by + jax.lax.stop_gradient(x - x * by) if backwards else x * by

    return plant


def traced(name):
    """A trace of a layer over both processes and two devices of each."""
    plant = {
        "part": on_second("hidden", 1.1),
        "copy": on_second("out", 1.1),
        "cotangent": on_second("after hidden", 2, backwards=True),
    }.get(name, lambda name, x: x)
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)[:, :2]
    across = Mesh(devices, ("dp", "tp") if name == "examples" else ("tp", "dp"))
    specs = {"in": P(None, "tp"), "out": P("tp")}
    each = jax.shard_map(
        lambda p, b: tapped(p, b, "tp", plant), mesh=across,
        in_specs=(specs, P("dp")), out_specs=P("dp"), check_vma=name != "copy",
    )  # fmt: skip

    def candidate(params, batch):
        put = lambda x, spec: jax.make_array_from_callback(  # noqa: E731
            x.shape, NamedSharding(across, spec), lambda i: np.asarray(x)[i]
        )
        params = {name: put(x, specs[name]) for name, x in params.items()}
        rows = put(batch, P("dp"))
        loss, found = jax.jit(jax.value_and_grad(lambda p, b: each(p, b).mean()))(
            params, rows
        )
        return loss, {**found, "in": found["in"] * (3 if name == "sum" else 1)}

    rng = np.random.default_rng(5)
    array = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    params = {"in": array(3, 4), "out": array(4)}
    found = verify.trace(
        tapped, params, array(6, 3), candidate, finite_differences=False
    )
    own = found.difference
    place = own and (own.direction, own.tap, own.words, own.examples, own.ratio)
    return found.ok, place, found.right, found.notes


def command(candidate):
    """`python -m jdist.verify`: its status, and what it prints."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        status = main([f"tests.verify.process_runs:{candidate}"])
    return int(status), told.getvalue()


def right():
    params, batch = given()
    return verify.Problem(
        losses, params, batch, {"mine": trainer()}, finite_differences=False
    )


def wrong():
    params, batch = given()
    return verify.Problem(
        losses, params, batch, {"mine": CANDIDATES["shard"]()}, finite_differences=False
    )


def raising_before_a_collective(rank, timeout):
    """The others have begun what cannot end without that process."""
    summed = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "data"),
            mesh=mesh(),
            in_specs=P("data"),
            out_specs=P(),
        )
    )

    def candidate(params, batch):
        if jax.process_index() == rank:
            raise ArithmeticError("no numbers here")
        loss, found = trainer()(params, batch)
        return loss, {**found, "b": summed(found["w"])}

    try:
        judge = verify.gradients_judge(losses, timeout=timeout)
        judge(*given(), {"mine": candidate}, finite_differences=False)
    except (ArithmeticError, verify.PeersLost) as error:
        return type(error).__name__, str(error)


def absent(rank, timeout):
    """One process does not judge at all."""
    if jax.process_index() == rank:
        return None
    try:
        judge = verify.gradients_judge(losses, timeout=timeout)
        judge(*given(), {"right": trainer()}, finite_differences=False)
    except verify.PeersLost as error:
        return str(error)
