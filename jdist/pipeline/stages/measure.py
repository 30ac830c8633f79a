"""Measurement of a model's layers, which gives the profile for a plan."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jdist._errors import requirement
from jdist._tree import PyTree, is_inexact
from jdist.pipeline.plan.profile import Layer, Profile
from jdist.pipeline.schedule.actions import check_counts
from jdist.pipeline.stages.module import Module
from jdist.pipeline.stages.stage import Stage, outputs_by_name


def profile(
    layers: Sequence[Module],
    batch: Mapping[str, PyTree],
    *,
    repeats: int = 10,
    key: jax.Array | None = None,
) -> Profile:
    """Measures the costs of every layer by running it alone, forward and backward.

    Each layer is compiled into the two halves in which a pipeline runs it, warmed up,
    and timed until its results are computed; the median counts. It runs on the device
    of its parameters and inputs, with its state, and with a key if it takes one.

    Args:
      layers: In an order in which they can run. A value may be read by several layers
        and written again; the newest counts, so that a chain needs no names.
      batch: The inputs of the first layers: one micro-batch, of any pytrees.
      repeats: Timed runs of each half.
      key: A PRNG key for the layers that take one; by default `jax.random.key(0)`.

    Returns:
      Seconds, bytes of each output, bytes of parameters, and an edge from each layer
      (or input) to those that read its outputs.

    Raises:
      ValueError: There are no layers, two have one name, one reads a value that was
        never written, or returns another number of outputs than it names.

    Example:
      >>> import jax.numpy as jnp
      >>> dense = lambda w, x: jnp.tanh(x @ w)
      >>> first = Module("a", dense, jnp.ones((3, 4)))
      >>> second = Module("b", dense, jnp.ones((4, 2)))
      >>> found = profile([first, second], {"x": jnp.ones((5, 3))})
      >>> found["b"].activation_bytes, found["b"].parameter_bytes, found.edges
      ((40.0,), 32.0, (('input_x', 'a'), ('a', 'b')))
    """
    check_counts("profile", repeats=repeats)
    if not layers:
        raise ValueError(
            requirement("profile(layers=...)", "must not be empty", "none")
        )
    key = jax.random.key(0) if key is None else key
    # On the device, so that transfers are not timed.
    values = {name: jax.tree.map(jnp.asarray, value) for name, value in batch.items()}
    writer = {name: f"input_{name}" for name in values}
    found = [
        Layer(writer[name], f"Input: {name}", 0.0, 0.0, (0.0,), 0.0) for name in values
    ]
    edges: list[tuple[str, str]] = []
    for module in layers:
        missing = [name for name in module.inputs if name not in values]
        if missing:
            rule = f"must write {missing[0]!r} before {module.name!r} reads it"
            raise ValueError(requirement("profile(layers=...)", rule, sorted(values)))
        inputs = [values[name] for name in module.inputs]
        layer, outputs = _measured(module, inputs, key, repeats)
        # A layer that reads two values of one writer has one edge.
        sources = dict.fromkeys(writer[name] for name in module.inputs)
        edges += [(source, module.name) for source in sources]
        # The newest value of a name counts from here on.
        values |= outputs
        writer |= dict.fromkeys(module.outputs, module.name)
        found.append(layer)
    return Profile(tuple(found), tuple(edges))


def _measured(
    module: Module, inputs: Sequence[PyTree], key: jax.Array, repeats: int
) -> tuple[Layer, dict[str, PyTree]]:
    stage = Stage(
        module.fn,
        [str(number) for number in range(len(inputs))],
        stateful=module.state is not None,
        keyed=module.keyed,
    )
    # Layers of one factory share code; the label says that each is compiled on purpose.
    halves = stage.compiled(frozenset(), ("profile", module.name))
    given = (module.params, module.state, tuple(inputs), key if module.keyed else None)
    (returned, _), residuals = halves.forward(*given)
    call = f"profile(layers=...), {module.name!r}"
    outputs = outputs_by_name(call, module.outputs, returned)
    ones = jax.tree.map(lambda y: y if is_inexact(y) else None, returned)
    cotangents = (ones, None)  # none flows into the state
    forward = _seconds(lambda: halves.forward(*given), repeats)
    backward = _seconds(
        lambda: halves.backward(module.params, residuals, cotangents), repeats
    )
    return (
        Layer(
            module.name,
            getattr(module.fn, "__qualname__", type(module.fn).__name__),
            forward,
            backward,
            tuple(float(_nbytes(output)) for output in outputs.values()),
            float(_nbytes(module.params)),
        ),
        outputs,
    )


def _seconds(run: Callable[[], PyTree], repeats: int) -> float:
    """The median of `repeats` runs, after one that compiles."""
    jax.block_until_ready(run())
    # Each run is waited for: dispatch alone takes microseconds.
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _nbytes(tree: PyTree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
