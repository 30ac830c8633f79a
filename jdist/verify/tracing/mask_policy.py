"""Random masks over a mesh: on which devices they are the same, and where they differ.

A trainer over a mesh decides in its own way which devices draw the same dropout mask,
so that no reference has its numbers. What can be judged is the policy. The trainer's
program is run with a tap behind every draw inside `shard_map`, which shows the bits and
the device's coordinates.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn
from jax.extend.source_info_util import summarize
from jax.sharding import PartitionSpec

from jdist._compat import equations_in, evaluate, with_equations, with_inner_programs
from jdist._errors import check_function, quoted, requirement
from jdist._tree import PyTree
from jdist.verify.report import LeafReport, Report
from jdist.verify.tracing.recording import TapRecording
from jdist.verify.tracing.taps import tap

NAME = "trainer"

SURE = 64
"""Bits of a draw that are not the same by chance."""

Place = tuple[tuple[str, int], ...]
"""A device's coordinate on each axis of its mesh that has several devices."""


def masks(
    trainer: Callable[..., PyTree],
    *arguments: PyTree,
    same: Sequence[str] = (),
    differ: Sequence[str] = (),
    where: str = "",
) -> Report:
    """Judges on which devices of a mesh the random draws of a trainer are the same.

    Every draw inside `shard_map`, such as a dropout mask, is compared by its bits. A
    draw outside is one for the whole array, whatever its sharding, and needs no policy.

    Args:
      trainer: A function that JAX can trace.
      *arguments: Its arguments, such as parameters, a batch and a key.
      same: Mesh axes along which devices must draw the same bits, such as "tp" where
        each has the whole of a hidden state.
      differ: Mesh axes along which they must not, such as "dp" and "cp": devices with
        other examples, or other tokens of them. Any two places on these axes together
        must differ.
      where: Only draws at a place with this text in it: the file, function and line of
        the draw, and every `jax.named_scope` around it.

    Returns:
      A `Report` with a row for each draw and policy, such as "same over tp"; a row
      that holds is called "equal".

    Raises:
      ValueError: No axis; an axis in both; the trainer draws nothing inside `shard_map`
        over one of these axes, or nothing at such a place; or it draws where the
        `shard_map` leaves an axis of its mesh to XLA.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("dp",))
      >>> def dropout(x, key):
      ...     return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)
      >>> train = jax.shard_map(dropout, mesh=mesh, in_specs=P(), out_specs=P())
      >>> report = masks(train, jnp.ones((3, 5)), jax.random.key(0), same=("dp",))
      >>> report.ok, report.leaves[0].shape
      (True, (3, 5))
    """
    check_function("masks(trainer=...)", trainer)
    _check_axes(same, differ)
    program = jax.make_jaxpr(trainer)(*arguments)
    sites: dict[str, _Site] = {}
    # Taps are made, and show, in a recording only.
    with TapRecording() as recording:
        observed = with_equations(program, _observed(sites, where, None, ()))
        _check_drawn(sites, (*same, *differ), where)
        run = jax.jit(lambda *leaves: evaluate(observed, leaves))
        jax.block_until_ready(run(*jax.tree.leaves(arguments)))
    for record in recording.records:
        if site := sites.get(record.name):
            names = [axis.name for axis in record.mesh]
            own = tuple(zip(names, record.place, strict=True))
            site.bits.setdefault(own, set()).add(record.value.tobytes())
    rows = [row for x in sites.values() for row in _rows(x, tuple(same), tuple(differ))]
    return Report(tuple(rows), notes=_outside(program, sites))


def _check_axes(same: Sequence[str], differ: Sequence[str]) -> None:
    rule = "must name at least one mesh axis, and none of them twice"
    axes = [*same, *differ]
    if isinstance(same, str) or isinstance(differ, str):
        got = "a string"
        remedy = 'Write ("dp",).'
        raise ValueError(requirement("masks(same=..., differ=...)", rule, got, remedy))
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(requirement("masks(same=..., differ=...)", rule, quoted(axes)))


class _Site(NamedTuple):
    """A draw inside `shard_map`.

    Attributes:
      place: Where it is, in words.
      equation: The draw.
      axes: The axes of the mesh.
      bits: What each device draws: in a loop, in all iterations.
    """

    place: str
    equation: JaxprEqn
    axes: tuple[str, ...]
    bits: dict[Place, set[bytes]]


def _observed(
    sites: dict[str, _Site], where: str, mesh: Any, around: tuple[JaxprEqn, ...]
) -> Callable[[JaxprEqn], Sequence[JaxprEqn]]:
    """Puts a tap behind each draw of a program.

    Args:
      sites: Becomes the draws inside `shard_map`, by the names of their taps.
      where: A text in their places.
      mesh: That of the `shard_map` around the program; None outside of any.
      around: The equations around it.
    """

    def change(equation: JaxprEqn) -> Sequence[JaxprEqn]:
        trail = *around, equation
        if equation.primitive.name in _DRAWS:
            if mesh is not None and where in (place := _place(trail)):
                name = f"draw {len(sites)}"
                sites[name] = _Site(place, equation, tuple(mesh.axis_names), {})
                return _tapped(name, equation, mesh)
            return [equation]
        mapped = equation.primitive.name == "shard_map"
        own = equation.params["mesh"] if mapped else mesh
        inside = _observed(sites, where, own, trail)
        return [with_inner_programs(equation, lambda x: with_equations(x, inside))]

    return change


def _tapped(name: str, equation: JaxprEqn, mesh: Any) -> list[JaxprEqn]:
    # The bits are the last result: a generator returns its new state as well.
    bits: Any = equation.outvars[-1]
    manual = bits.aval.sharding.mesh.manual_axes
    if not set(mesh.axis_names) <= set(manual):
        # XLA knows no coordinates of a device where it divides arrays itself.
        rule = "must draw inside a `shard_map` over all axes of its mesh"
        got = f"one over {', '.join(manual)} of {', '.join(mesh.axis_names)}"
        raise ValueError(requirement("masks(trainer=...)", rule, got))
    # Traced in a `shard_map` of its own, which knows the axes, and taken out of it.
    alone = jax.shard_map(
        lambda bits: tap(bits, name), mesh=mesh, in_specs=PartitionSpec(),
        out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    like = jax.ShapeDtypeStruct(bits.aval.shape, bits.aval.dtype)
    (mapped,) = jax.make_jaxpr(alone)(like).jaxpr.eqns
    inner = mapped.params["jaxpr"]
    body = getattr(inner, "jaxpr", inner)
    (given,), (shown,) = body.invars, body.outvars
    *others, last = body.eqns
    assert last.outvars == [shown]
    drawn = equation.replace(outvars=[*equation.outvars[:-1], given])
    return [drawn, *others, last.replace(outvars=[bits])]


_DRAWS = ("random_bits", "rng_bit_generator", "threefry2x32")


def _place(trail: Sequence[JaxprEqn]) -> str:
    """Where a draw is: named scopes, then file, line and function.

    What JAX compiles once, as `jax.random.bernoulli`, has the places of its calls.
    """
    scopes = [str(each.source_info.name_stack) for each in trail]
    files = [summarize(each.source_info).rpartition("/")[2] for each in trail]
    file = next(filter(None, reversed(files)), "unknown")
    return "/".join([*filter(None, scopes), file])


def _check_drawn(sites: Mapping[str, _Site], axes: Sequence[str], where: str) -> None:
    known = {axis for site in sites.values() for axis in site.axes}
    lost = [axis for axis in axes if axis not in known]
    if lost:
        rule = f"must draw random numbers inside shard_map over {lost[0]!r}"
        rule += f" at {where!r}" if where else ""
        got = f"draws over {sorted(known)}" if known else "none"
        remedy = "A draw outside is one for the whole array, and right as it is."
        raise ValueError(requirement("masks(trainer=...)", rule, got, remedy))


def _outside(program: Any, sites: Mapping[str, _Site]) -> tuple[str, ...]:
    every = sum(x.primitive.name in _DRAWS for x in equations_in(program))
    other = every - len(sites)
    if not other:
        return ()
    return (f"not compared: {other} draws outside of shard_map, or at other places",)


def _rows(
    site: _Site, same: tuple[str, ...], differ: tuple[str, ...]
) -> Iterator[LeafReport]:
    """A row for each policy."""
    place, equation, known, bits = site
    # A draw that nothing is made of is not drawn.
    if not bits:
        return
    kind: Any = equation.outvars[-1].aval
    for axes, policy in ((same, "same"), (differ, "other")):
        # Another `shard_map` may be over other axes.
        if not axes or not set(axes).issubset(known):
            continue
        path = f"{place}: {policy} over {', '.join(axes)}"
        row = LeafReport(NAME, path, str(kind.dtype), kind.shape)
        problem = _fault(bits, axes, policy == "same")
        if problem and policy == "other" and kind.size * kind.dtype.itemsize * 8 < SURE:
            yield replace(row, unjudged=f"{problem}, which so few bits may by chance")
        else:
            yield replace(row, problem=problem)


def _fault(bits: Mapping[Place, set[bytes]], axes: tuple[str, ...], equal: bool) -> str:
    """The first two devices that break a policy, in words; empty if none do."""
    for (a, first), (b, second) in combinations(sorted(bits.items()), 2):
        apart = [axis for (axis, i), (_, j) in zip(a, b, strict=True) if i != j]
        # Along other axes there may be other draws.
        if not set(apart) <= set(axes):
            continue
        if equal and first != second:
            return f"must be the same, and differ on {_told(a, b, apart)}"
        if not equal and first & second:
            return f"must differ, and are the same on {_told(a, b, apart)}"
    return ""


def _told(first: Place, second: Place, axes: Sequence[str]) -> str:
    """Two devices by the axes on which they are apart."""
    each = (
        ", ".join(f"{axis}={i}" for axis, i in place if axis in axes)
        for place in (first, second)
    )
    return " and ".join(each)
