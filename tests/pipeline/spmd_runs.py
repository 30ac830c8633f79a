"""What the processes of a group do with a pipeline in one program."""

import jax
import numpy as np
from jax.sharding import Mesh

from jdist import optim, pipeline
from tests.pipeline import language_blocks as blocks
from tests.pipeline.spmd_models import losses, noisy, problem, stage, stages

FAMILIES = {
    "1F1B": lambda: pipeline.one_f_one_b(2, 3),
    "ZBV": lambda: pipeline.zbv(2, 3),
}
EXAMPLES = 7


def made(family, reduction, fn=stage, **options):
    """A pipeline over one device of each process."""
    count = jax.local_device_count()
    mesh = Mesh(np.array(jax.devices())[::count], ("stage",))
    schedule = FAMILIES[family]()
    return pipeline.Pipeline(
        stages(schedule.stages, fn, keyed=fn is noisy),
        losses,
        schedule,
        pipeline.OneProgram(mesh),
        reduction=reduction,
        **options,
    )


def gradient(family, reduction):
    """Loss and gradients, as this process has them; and its stages."""
    return _gradient(made(family, reduction))


def noisy_gradient():
    """The same of stages with dropout."""
    return _gradient(made("1F1B", "mean", noisy), jax.random.key(2))


def _gradient(pipe, key=None):
    params, batch, weights = problem(len(pipe.stages), EXAMPLES, dtype=np.float64)
    found = pipe.value_and_grad(pipe.place(params), batch, weights, key=key)
    return pipe.own, jax.tree.map(np.asarray, found)


def trained(family, steps):
    """The metrics of each step, the norm over the stages of both processes."""
    pipe = made(family, "mean", optimizer=optim.adam(lr=1e-2), max_norm=0.5)
    params, batch, weights = problem(len(pipe.stages), EXAMPLES)
    state, found = pipe.init(params), []
    for _ in range(steps):
        state, metrics = pipe.train_step(state, batch, weights)
        found.append((float(metrics.loss), float(metrics.grad_norm)))
    return found


def disagreeing(what):
    """The second process has a larger batch, wider parameters or another key."""
    pipe = made("1F1B", "mean")
    second = jax.process_index() == 1
    more = 3 if second and what == "batch" else 0
    params, batch, weights = problem(2, EXAMPLES + more)
    if second and what == "parameters":
        params = jax.tree.map(lambda x: np.asarray(x)[None], params)
    key = None
    if what == "key":
        pipe, key = made("1F1B", "mean", noisy), jax.random.key(int(second))
    try:
        pipe.value_and_grad(pipe.place(params), batch, weights, key=key)
    except ValueError as error:
        return str(error)
    return "no error"


def disagreeing_later():
    """Three steps, in the second of which one process has more examples."""
    pipe = made("1F1B", "mean")
    found = []
    for step in range(3):
        more = 3 if step == 1 and jax.process_index() == 1 else 0
        params, batch, weights = problem(2, EXAMPLES + more)
        try:
            loss, _ = pipe.value_and_grad(pipe.place(params), batch, weights)
            found.append(float(loss))
        except ValueError as error:
            found.append(str(error))
    return found


def evaluated():
    """Evaluation reaches only the devices of this process."""
    pipe = made("1F1B", "mean")
    params, batch, _ = problem(2, EXAMPLES)
    try:
        pipe.evaluate(pipe.place(params), batch)
    except ValueError as error:
        return str(error)
    return "no error"


def elsewhere():
    """A mesh of the first process's devices."""
    mesh = Mesh(np.array(jax.devices())[:2], ("stage",))
    places = pipeline.OneProgram(mesh)
    try:
        pipeline.Pipeline(stages(2), losses, FAMILIES["1F1B"](), places)
    except ValueError as error:
        return str(error)
    return "no error"


def on_meshes_of_both():
    """A stage on the devices of each process, where neither is a worker of rpc."""
    count = jax.local_device_count()
    devices = np.array(jax.devices()).reshape(-1, count)
    places = [Mesh(own, ("data",)) for own in devices]
    try:
        pipeline.Pipeline(stages(2), losses, FAMILIES["1F1B"](), places)
    except ValueError as error:
        return str(error)
    return "no error"


def over_both(layout):
    """A language model over both processes.

    Args:
      layout: "a stage each", or "each stage on both".
    """
    count = jax.local_device_count()
    devices = np.array(jax.devices()).reshape(2, count)[:, :2]
    alone = layout == "a stage each"
    mesh = Mesh(devices if alone else devices.T, ("stage", "data"))
    options = {"optimizer": optim.adam(lr=1e-2), "max_norm": 0.5}
    places = pipeline.OneProgram(mesh)
    return blocks.pipeline_of(pipeline.gpipe(2, 3), places, **options)


def with_ends(layout):
    """The stages of this process; losses and norms of two steps."""
    pipe = over_both(layout)
    params, batch, weights = blocks.problem(2, np.float64)
    state, found = pipe.init(params), []
    for _ in range(2):
        state, metrics = pipe.train_step(state, batch, weights)
        found.append((float(metrics.loss), float(metrics.grad_norm)))
    return pipe.own, found


def saved(folder):
    """Steps that are on disk, and the loss after a step, with and without a restart."""
    pipe = over_both("each stage on both")
    params, batch, weights = blocks.problem(2, np.float64)
    state, _ = pipe.train_step(pipe.init(params), batch, weights)
    with pipeline.PipelineCheckpoints(folder, pipe) as checkpoints:
        checkpoints.save(state)
        steps = checkpoints.steps()
        again = checkpoints.restore(pipe.init(params))
    losses_of = [
        float(pipe.train_step(each, batch, weights)[1].loss) for each in (again, state)
    ]
    return steps, losses_of


def saved_from_both(folder):
    """What is refused where each process would write a stage."""
    pipe = over_both("a stage each")
    try:
        pipeline.PipelineCheckpoints(folder, pipe)
    except ValueError as error:
        return str(error)
    return "no error"


def never_told(missing):
    """The parameters of ends that processes have never seen.

    Args:
      missing: Processes that are given their own stages alone.
    """
    count = jax.local_device_count()
    mesh = Mesh(np.array(jax.devices())[::count], ("stage",))
    pipe = blocks.pipeline_of(pipeline.gpipe(2, 3), pipeline.OneProgram(mesh))
    params, batch, weights = blocks.problem(2)
    if jax.process_index() not in missing:
        pipe.place(params)
    own = [tree if j in pipe.own else None for j, tree in enumerate(params)]
    try:
        pipe.value_and_grad(own, batch, weights)
    except ValueError as error:
        return str(error)
    return "no error"


def unequal_copies():
    """A table whose copy in the other process is another one."""
    count = jax.local_device_count()
    mesh = Mesh(np.array(jax.devices())[::count], ("stage",))
    places = pipeline.OneProgram(mesh)
    pipe = blocks.pipeline_of(pipeline.gpipe(2, 3), places, optimizer=optim.adam())
    (first, (block, last)), _, _ = blocks.problem(2)
    try:
        pipe.init([first, (block, {**last, "table": last["table"] + 1})])
    except ValueError as error:
        return str(error)
    return "no error"
