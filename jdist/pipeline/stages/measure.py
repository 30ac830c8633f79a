"""Profiles of a model's layers for a plan, measured or estimated for a target."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jdist import targets
from jdist._compat import Ahead
from jdist._errors import check_sequence, check_type, value_error
from jdist._tree import PyTree, is_inexact, shapes_of
from jdist.pipeline.plan.profile import Layer, Profile
from jdist.pipeline.schedule.actions import check_counts
from jdist.pipeline.stages.module import Module
from jdist.pipeline.stages.stage import Stage, outputs_by_name
from jdist.segment import Segment


def profile(
    layers: Sequence[Module],
    batch: Mapping[str, PyTree],
    *,
    repeats: int = 10,
    key: jax.Array | None = None,
    target: targets.Hardware | None = None,
) -> Profile:
    """Measure or estimate the costs of each layer alone, forward and backward.

    Each layer is compiled into the two halves that a pipeline runs, warmed up, and
    timed until its results are computed; the median counts. It runs on the device of
    its parameters and inputs, with its state, and with a key if it takes one.

    With a target nothing runs: the halves are compiled for one of its chips, and
    seconds are a roofline estimate (see `targets.Estimate`) from published figures,
    without any latency. Layers alone are not fused with each other, so values between
    them count as written and read.

    Args:
      layers: In an order in which they can run. A value may be read by several layers
        and written again; the newest counts, so that a chain needs no names. With a
        target their parameters and states may be shapes (`jax.ShapeDtypeStruct`).
      batch: The inputs of the first layers: one micro-batch, of any pytrees, or shapes.
      repeats: Timed runs of each half.
      key: A PRNG key for the layers that take one; by default `jax.random.key(0)`.
      target: Hardware to compile for, from `targets.target`; None: layers run here.

    Returns:
      Seconds, bytes of each output, bytes of parameters, and an edge from each layer
      (or input) to those that read its outputs.

    Raises:
      TypeError: An argument is of another type.
      ValueError: There are no layers, two have one name, one reads a value that was
        never written, or returns another number of outputs than it names; or one alone
        does not fit the target's chip.
      Unavailable: The target's compiler is not installed; see `targets.compile`.

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
    rule = "must be a sequence of Module"
    check_sequence("profile(layers=...)", layers, Module, rule)
    rule = "must be a dict from names to values"
    check_type("profile(batch=...)", batch, Mapping, rule)
    if target is not None:
        rule = "must be hardware, from `targets.target`"
        check_type("profile(target=...)", target, targets.Hardware, rule)
    if not layers:
        raise value_error("profile(layers=...)", "must not be empty", "none")
    key = jax.random.key(0) if key is None else key
    # Put on the device first, so that transfers are not timed.
    here = partial(jax.tree.map, jnp.asarray)
    put = here if target is None else partial(_on, target)
    values = {name: put(value) for name, value in batch.items()}
    writer = {name: f"input_{name}" for name in values}
    found = [
        Layer(writer[name], f"Input: {name}", 0.0, 0.0, (0.0,), 0.0) for name in values
    ]
    edges: list[tuple[str, str]] = []
    known: dict[str, float] = {}
    for module in layers:
        missing = [name for name in module.inputs if name not in values]
        if missing:
            rule = f"must write {missing[0]!r} before {module.name!r} reads it"
            raise value_error("profile(layers=...)", rule, sorted(values))
        inputs = tuple(values[name] for name in module.inputs)
        drawn = key if module.keyed else None
        given = (module.params, module.state, inputs, drawn)
        halves = _halves(module)
        if target is None:
            costs = _measured(halves, given, repeats)
        else:
            costs = _compiled(halves, given, target, module.name, known)
        returned, forward, backward = costs
        call = f"profile(layers=...), {module.name!r}"
        outputs = outputs_by_name(call, module.outputs, returned)
        # Without duplicates: a layer that reads two values of one writer has one edge.
        sources = dict.fromkeys(writer[name] for name in module.inputs)
        edges += [(source, module.name) for source in sources]
        # The newest value of a name counts from here on.
        values |= outputs
        writer |= dict.fromkeys(module.outputs, module.name)
        kind = getattr(module.fn, "__qualname__", type(module.fn).__name__)
        sizes = tuple(map(_nbytes, outputs.values())), _nbytes(module.params)
        found.append(Layer(module.name, kind, forward, backward, *sizes))
    return Profile(tuple(found), tuple(edges))


def _halves(module: Module) -> Segment:
    stage = Stage(
        module.fn,
        [str(number) for number in range(len(module.inputs))],
        stateful=module.state is not None,
        keyed=module.keyed,
    )
    # Layers of one factory share code: the label tells `segment` that each is compiled
    # on purpose.
    return stage.compiled(frozenset(), ("profile", module.name))


def _cotangents(returned: PyTree) -> PyTree:
    """Cotangents of all floating outputs; None for the state."""
    # Outputs serve as their own cotangents: only shapes and dtypes matter for the time.
    return jax.tree.map(lambda y: y if is_inexact(y) else None, returned), None


def _compiled(
    halves: Segment,
    given: tuple[PyTree, ...],
    target: targets.Hardware,
    name: str,
    known: dict[str, float],
) -> tuple[PyTree, float, float]:
    """The outputs' shapes, and estimated seconds of both halves."""
    ahead = Ahead()
    halves, given = halves.through(ahead), _on(target, given)
    (returned, _), residuals = halves.forward(*given)
    halves.backward(given[0], residuals, _cotangents(returned))
    seconds = []
    for traced in ahead.traced:
        lowered = traced.lower()
        # Equal layers, of which a transformer has many, are compiled once.
        text = lowered.as_text()
        if text not in known:
            found = targets.compile(lowered, target=target)
            if found.seconds is None or not found.fits:
                rule = f"must fit a chip of {target.name}, also {name!r} alone"
                raise value_error("profile(layers=...)", rule, found.refused)
            known[text] = found.seconds
        seconds.append(known[text])
    forward, backward = seconds
    return returned, forward, backward


def _on(target: targets.Hardware, tree: PyTree) -> PyTree:
    place = SingleDeviceSharding(target.devices[0])
    return jax.tree.map(lambda x: x.update(sharding=place), shapes_of(tree))


def _measured(
    halves: Segment, given: tuple[PyTree, ...], repeats: int
) -> tuple[PyTree, float, float]:
    """The outputs, and the seconds of both halves."""
    (returned, _), residuals = halves.forward(*given)
    cotangents = _cotangents(returned)
    forward = _seconds(lambda: halves.forward(*given), repeats)
    backward = _seconds(
        lambda: halves.backward(given[0], residuals, cotangents), repeats
    )
    return returned, forward, backward


def _seconds(run: Callable[[], PyTree], repeats: int) -> float:
    """The median of `repeats` runs, after one that compiles."""

    def waited() -> None:
        # Dispatch returns before the computation ends.
        jax.block_until_ready(run())

    waited()
    return statistics.median(timeit.repeat(waited, number=1, repeat=repeats))


def _nbytes(tree: PyTree) -> float:
    leaves = jax.tree.leaves(tree)
    return float(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves))
