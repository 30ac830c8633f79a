"""Random programs over several workers, as plain data, and what they compute.

A program gets values and appends to them, step by step. A step calls a pure function,
or has a whole program run, on some worker: nested calls, and calls back to the caller,
come by themselves. The same program can be run on one worker, cut into the same
segments, and as one function of arrays.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jdist import autograd, rpc
from jdist.autograd.recording.node import RecvNode
from tests.autograd.context_checks import is_valid_context
from tests.autograd.engine_cases import call


class Step(NamedTuple):
    """One call.

    Attributes:
      worker: Rank of the worker that is called; None runs a function without a call.
      mode: How it is called.
      body: Name of a pure function, or a program.
      arguments: Which values so far it is given.
    """

    worker: int | None
    mode: str
    body: "str | Program"
    arguments: tuple[int, ...]


class Program(NamedTuple):
    """Steps, and which of all values are the results."""

    steps: tuple[Step, ...]
    results: tuple[int, ...]


# --- pure functions of 3 x 3 matrices that neither grow nor vanish ---


def mean(x, y):
    return 0.5 * (x + y)


def product(x, y):
    return jnp.sin(x) * y


def matmul(x, y):
    return jnp.tanh(x @ y)


def two(x):
    """Two results, either of which may stay unused."""
    return jnp.cos(x), x - 0.25 * x * x


def first(x, y):
    """One argument gets no cotangent at all."""
    return jnp.tanh(x), jnp.argmax(y)


def three(x, y, z):
    return x * y + jnp.sin(z), y @ z


FUNCTIONS = {
    "mean": (mean, 2, (0,)),
    "product": (product, 2, (0,)),
    "matmul": (matmul, 2, (0,)),
    "two": (two, 1, (0, 1)),
    "first": (first, 2, (0,)),
    "three": (three, 3, (0, 1)),
}
"""By name: the function, its number of arguments, its differentiable results."""


def identity(x):
    return x


def calls(program):
    """How many functions it runs."""
    bodies = (step.body for step in program.steps)
    return sum(1 if isinstance(body, str) else calls(body) for body in bodies)


# --- making programs ---


@st.composite
def programs(draw, inputs, workers, depth=2, longest=6):
    """Programs of so many inputs over workers of these ranks."""
    known, steps = inputs, []
    for _ in range(draw(st.integers(1, longest))):
        worker = draw(st.sampled_from([None, *workers]))
        nests = depth > 0 and worker is not None and draw(st.integers(0, 3)) == 0
        if nests:
            count = draw(st.integers(1, 3))
            arguments = draw(_some(known, count))
            body = draw(programs(count, workers, depth - 1, longest=3))
            more = len(body.results)
        else:
            body = draw(st.sampled_from(sorted(FUNCTIONS)))
            _, count, kept = FUNCTIONS[body]
            arguments = draw(_some(known, count))
            more = len(kept)
        mode = draw(st.sampled_from(["sync", "async", "remote"]))
        steps.append(Step(worker, mode, body, arguments))
        known += more
    results = draw(_some(known, draw(st.integers(1, 3))))
    return Program(tuple(steps), results)


def _some(known, count):
    chosen = st.integers(0, known - 1)
    return st.lists(chosen, min_size=count, max_size=count).map(tuple)


# --- running them ---


@autograd.eager
def run(program, *inputs):
    """Over the workers; the results as a tuple."""
    return _run(program, inputs, _call)


def run_here(program, *inputs):
    """On this worker alone, cut into the same segments.

    Where a call crosses workers, a value that is sent counts as used once, and so does
    one that is returned: that is how cotangents are added up in groups.
    """
    return _run(program, inputs, _call_here)


def run_plain(program, *inputs):
    """As one function of arrays."""
    return _run(program, inputs, _call_plain)


def _run(program, inputs, do):
    values = list(inputs)
    for step in program.steps:
        arguments = [values[k] for k in step.arguments]
        made = do(step, arguments)
        if isinstance(step.body, str):
            kept = FUNCTIONS[step.body][2]
            made = [made[k] for k in kept] if isinstance(made, tuple) else [made]
        values += made
    return tuple(values[k] for k in program.results)


def _call(step, arguments):
    if isinstance(step.body, str):
        function = FUNCTIONS[step.body][0]
        if step.worker is None:
            return autograd.apply(function, *arguments)
        return call(step.mode, step.worker, function, *arguments)
    return call(step.mode, step.worker, run, step.body, *arguments)


def _call_here(step, arguments):
    if step.worker is not None:
        arguments = once(arguments)
    if isinstance(step.body, str):
        made = autograd.apply(FUNCTIONS[step.body][0], *arguments)
    else:
        made = run_here(step.body, *arguments)
    if step.worker is None:
        return made
    return tuple(once(made)) if isinstance(made, tuple) else made


def once(values):
    """Each recorded value through a function of its own, however often it occurs."""
    through = {}
    for value in values:
        if isinstance(value, autograd.Variable | autograd.Recorded):
            key = edge(value)
            if key not in through:
                through[key] = autograd.apply(identity, value)
    return [
        through[edge(value)]
        if isinstance(value, autograd.Variable | autograd.Recorded)
        else value
        for value in values
    ]


def edge(value):
    return (value.node, 0) if isinstance(value, autograd.Variable) else value.edge


def _call_plain(step, arguments):
    if isinstance(step.body, str):
        return FUNCTIONS[step.body][0](*arguments)
    return run_plain(step.body, *arguments)


# --- what takes part ---


def sends_of(context_id):
    """The ids of this worker's send functions in a context."""
    if not is_valid_context(context_id):
        return []
    return list(autograd.retrieve_context(context_id).send_functions())


def marked_from(roots):
    """The ids of the send functions that roots reach, found by walking the graph.

    Only on one process, where the graphs of all workers can be walked.
    """
    found, rest, seen = set(), [root.edge.node for root in roots], set()
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, RecvNode):
            found.add(node.message_id)
            with rpc.use_worker(node.worker):
                context = autograd.retrieve_context(node.context_id)
                rest.append(context.send_functions()[node.message_id])
        else:
            rest += [to.node for to in node.inputs if to is not None]
    return found


def numbers(seed, count):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=(3, 3)) for _ in range(count)]
