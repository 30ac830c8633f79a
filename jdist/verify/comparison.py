"""Comparing two gradient trees, leaf by leaf, on the host in float64.

Structure comes first, then dtype and shape, then every number. NaN and infinity never
pass, not even when both sides have them. NumPy only: the judge shares no code with what
it judges.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import requirement
from jdist._tree import PyTree, is_inexact, named_leaves
from jdist.verify.bound import BLIND, Limit, bound
from jdist.verify.diagnosis import diagnose
from jdist.verify.processes import (
    TIMEOUT,
    Finding,
    HeldArray,
    Peers,
    Products,
    Shard,
    held,
    joined,
    merged,
    record,
    restored,
    worst_of,
)
from jdist.verify.report import LeafReport, Report, looseness

Named = str | tuple[str, tuple[int, ...]]
"""A candidate's leaf by path, and the order in which its axes are the reference's."""

Describe = Callable[[str, Mapping[str, Any], Shard, np.ndarray], str]
"""`(path, wanted, shard, error/bound) -> words` for a shard that fails."""


def compare(
    reference: PyTree,
    candidate: PyTree,
    terms: Any = None,
    scale: Any = None,
    *,
    name: str = "candidate",
    names: Mapping[str, Named] | None = None,
    timeout: float = TIMEOUT,
) -> Report:
    """Judges one gradient tree against another.

    In a run of several processes (`jax.distributed`) every process calls it, and all
    get the same report.

    Args:
      reference: Pytree of arrays (or None leaves), whole on every process.
      candidate: Pytree that must have the same structure, dtypes and shapes, and
        entries that differ from the reference's by no more than rounding explains.
        Leaves that are not floating must be equal. Arrays over several devices are
        compared where they lie, and replicas must have the same bits.
      terms: How many terms each entry is a sum of: a number, or a tree like
        `reference` of numbers. None: 1, so that only a few roundings are forgiven.
      scale: The sum of the magnitudes of those terms: a tree like `reference` of
        arrays that broadcast to the leaves. None: the largest magnitude in each leaf of
        the reference; right unless terms cancel. `verify.gradients` measures both.
      name: What to call the candidate.
      names: For gradients of another framework, such as
        `{name: p.grad for name, p in module.named_parameters()}`: the reference's paths
        to the candidate's. Each leaf of either side has to be named once. A leaf whose
        axes are in another order is named with that order, as for `numpy.transpose`:
        `("linear.weight", (1, 0))` where torch stores `(out, in)`. None: both sides
        have the same paths.
      timeout: Seconds to wait for other processes.

    Returns:
      A `Report` with a row per leaf; see `jdist.verify.bound` for the bound.

    Raises:
      ValueError: There is no leaf to compare; a leaf of the reference is divided over
        processes; `terms` or `scale` do not have the reference's structure; `names`
        leaves out a leaf of either side, names one that is not there or one twice, or
        orders axes that the leaf does not have.
      PeersLost: Another process raised, or did not come in time.

    Example:
      >>> import jax.numpy as jnp
      >>> reference = {"b": jnp.array([0.1, 0.2]), "w": jnp.array([[0.3], [0.4]])}
      >>> report = compare(reference, {"b": reference["b"], "w": -reference["w"]})
      >>> report.ok, report.failures[0].path
      (False, 'w')
      >>> theirs = {"lin.bias": reference["b"], "lin.weight": reference["w"].T}
      >>> names = {"b": "lin.bias", "w": ("lin.weight", (1, 0))}
      >>> compare(reference, theirs, names=names).ok
      True
    """
    with joined(timeout) as peers:
        wanted = {path: _host(leaf) for path, leaf in named_leaves(reference).items()}
        if not wanted:
            raise ValueError(
                "`compare(reference=...)` must have leaves. Got an empty tree."
            )
        terms_of = _per_leaf(terms, reference, "terms", default=1)
        scale_of = _per_leaf(scale, reference, "scale", default=None)
        limits = {
            path: _assumed(leaf, terms_of[path], scale_of[path])
            for path, leaf in wanted.items()
        }
        found = renamed(reference, peers.computed(candidate), names)
        rows = compare_leaves(name, wanted, found, limits, peers)
        return Report(rows, notes=looseness(rows))


def renamed(
    reference: PyTree, candidate: PyTree, names: Mapping[str, Named] | None
) -> dict[str, Any]:
    """The candidate's leaves by the reference's paths, axes in the reference's order.

    A name that is missing is refused and not reported as a missing leaf: a map that
    leaves out a parameter would otherwise hide its gradient.

    Args:
      reference: As in `compare`.
      candidate: As in `compare`.
      names: As in `compare`.

    Raises:
      ValueError: `names` is no complete map, as in `compare`.
    """
    wanted, found = named_leaves(reference), named_leaves(candidate)
    if names is None:
        return found
    theirs = {path: x if isinstance(x, str) else x[0] for path, x in names.items()}
    named = list(theirs.values())
    needed = [path for path, leaf in wanted.items() if leaf is not None]
    faults = {
        "name every leaf of the reference": [p for p in needed if p not in theirs],
        "name leaves of the reference only": [p for p in theirs if p not in wanted],
        "name every leaf of the candidate": [p for p in found if p not in named],
        "name leaves of the candidate only": [p for p in named if p not in found],
        "name a leaf of the candidate once": [
            p for p in dict.fromkeys(named) if named.count(p) > 1
        ],
    }
    for rule, paths in faults.items():
        if paths:
            got = f"{'no ' if 'every' in rule else ''}{', '.join(paths)}"
            raise ValueError(requirement("compare(names=...)", f"must {rule}", got))
    # A leaf that the reference has as None needs no name: there is nothing to find.
    renamed: dict[str, Any] = {p: None for p, leaf in wanted.items() if leaf is None}
    for path, x in names.items():
        own = found[theirs[path]]
        renamed[path] = own if isinstance(x, str) else _ordered(path, own, x[1])
    return renamed


def _ordered(path: str, leaf: Any, axes: tuple[int, ...]) -> Any:
    """A leaf with its axes in the reference's order; None, no gradient, has none."""
    if leaf is None:
        return None
    # Of an array over several processes no host has all.
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if sorted(axes) != list(range(array.ndim)):
        rule = f"must order the {array.ndim} axes of the candidate's leaf"
        where = f"compare(names={{{path!r}: ...}})"
        raise ValueError(requirement(where, rule, repr(axes)))
    return array.transpose(axes)


def compare_leaves(
    name: str,
    wanted: Mapping[str, Any],
    found: Mapping[str, Any],
    limits: Mapping[str, Limit | None],
    peers: Peers | None = None,
    describe: Describe | None = None,
    excuse: str = "",
) -> tuple[LeafReport, ...]:
    """The rows of one candidate: the reference's leaves in order, then extra ones.

    Args:
      name: Of the candidate.
      wanted: The reference's leaves by path, whole on this host.
      found: The candidate's; of an array over several processes the shards of this one.
      limits: What each floating leaf of the reference is held against.
      peers: The processes that judge together, all of which get the same rows; None
        for this one alone.
      describe: The words for a shard that fails; None for `diagnose`.
      excuse: Why other numbers prove nothing: what they would make fail is not judged.

    Raises:
      PeersLost: A process raised, or did not come in time.
    """
    wanted = {path: _host(leaf) for path, leaf in wanted.items()}
    arrays = {path: None if x is None else held(x) for path, x in found.items()}
    told = describe or _described
    findings = [
        _structural(name, path, wanted, arrays)
        or _numeric(name, path, wanted, arrays[path], limits[path], told, excuse)
        for path in wanted
        if not (wanted[path] is None and path in arrays and arrays[path] is None)
    ]
    findings += [
        Finding(
            LeafReport(name, path, *_kind(arrays[path]), problem="not in the reference")
        )
        for path in arrays
        if path not in wanted
    ]
    if peers is None or peers.size == 1:
        return tuple(merged({0: finding}, 1) for finding in findings)
    by_path: dict[str, dict[int, Finding]] = {}
    for rank, records in enumerate(peers.exchange(list(map(record, findings)))):
        for own in map(restored, records):
            by_path.setdefault(own.row.path, {})[rank] = own
    return tuple(merged(own, peers.size) for own in by_path.values())


def _structural(
    name: str, path: str, wanted: Mapping[str, Any], found: Mapping[str, Any]
) -> Finding | None:
    """A failing row if the leaf is missing or of another kind."""
    expected = _kind(wanted[path])
    if path not in found:
        row = LeafReport(name, path, *expected, problem="missing from the candidate")
        return Finding(row)
    got = _kind(found[path])
    if got == expected:
        return None
    (dtype, shape), (got_dtype, got_shape) = expected, got
    what = "dtype" if dtype != got_dtype else "shape"
    pair = (dtype, got_dtype) if dtype != got_dtype else (shape, got_shape)
    problem = f"wrong {what}: expected {pair[0]}, got {pair[1]}"
    return Finding(LeafReport(name, path, dtype, shape, problem=problem))


def _numeric(
    name: str,
    path: str,
    wanted: Mapping[str, Any],
    found: Any,
    limit: Limit | None,
    describe: Describe,
    excuse: str,
) -> Finding:
    """The shards of one leaf, each beside the same slice of the reference."""
    if not found.shards:  # Other processes have the leaf.
        row = LeafReport(name, path, found.dtype, found.shape, 0, 0, 0, 0, 1)
        return Finding(row, replicas=found.replicas)
    own = [
        _of_shard(name, path, wanted, x, limit, describe, excuse) for x in found.shards
    ]
    first = [of for (_, of), x in zip(own, found.shards, strict=True) if x.first]
    products = Products(*map(sum, zip(Products(), *first, strict=True)))
    return Finding(worst_of([row for row, _ in own]), products, found.replicas)


def _of_shard(
    name: str,
    path: str,
    wanted: Mapping[str, Any],
    shard: Shard,
    limit: Limit | None,
    describe: Describe,
    excuse: str,
) -> tuple[LeafReport, Products]:
    whole = wanted[path]
    reference, found = whole[shard.index], shard.values
    dtype, shape = _kind(whole)
    if limit is None:
        equal = np.array_equal(reference, found)
        zeros = (0.0,) * 4 if equal else (float("nan"),) * 4
        problem = "" if equal else "values that are not floating must be equal"
        cosine = 1.0 if equal else float("nan")
        return LeafReport(name, path, dtype, shape, *zeros, cosine, problem), Products()
    expected, got = _wide(reference), _wide(found)
    allowed = np.broadcast_to(limit.bound, whole.shape)[shard.index]
    # inf - inf is NaN and fails below, as it should.
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(expected - got)
        relative = np.where(error == 0, 0, error / np.abs(expected))
        ratio = np.where(error == 0, 0, error / allowed)
        products = _products(
            whole, expected, got
        )  # For a reader; no verdict rests on it.
    worst = float(np.max(ratio, initial=0))
    furthest = float(np.max(ulp_distance(reference, found), initial=0))
    problem, unjudged = "", ""
    if excuse and 1 < worst < math.inf:
        unjudged = excuse
    elif not worst <= 1:
        problem = describe(path, wanted, shard, ratio)
    elif furthest > 0 and _blind(_wide(whole), limit):
        unjudged = _says_nothing(_wide(whole), limit)
    row = LeafReport(
        name,
        path,
        dtype,
        shape,
        float(np.max(error, initial=0)),
        float(np.max(relative, initial=0)),
        furthest,
        worst,
        products.cosine,
        problem,
        unjudged,
    )
    return row, products


def _described(
    path: str, wanted: Mapping[str, Any], shard: Shard, ratio: np.ndarray
) -> str:
    """What `diagnose` says of a shard, beside the reference's leaves of its shape."""
    if not shard.index:
        return diagnose(path, wanted, shard.values, ratio)
    shape = wanted[path].shape
    slices = {
        other: leaf[shard.index]
        for other, leaf in wanted.items()
        if leaf is not None and leaf.shape == shape
    }
    told = diagnose(path, slices, shard.values, ratio, shard.origin)
    return f"in {shard.place}, {told}"


def _assumed(leaf: np.ndarray | None, terms: Any, scale: Any) -> Limit | None:
    """The limit of a leaf of which nothing was measured."""
    if leaf is None or not is_inexact(leaf):
        return None
    if scale is None:
        scale = np.max(np.abs(_wide(leaf)), initial=0)
    return Limit(bound(leaf.dtype, leaf.size, int(terms), scale), scale)


def _blind(expected: np.ndarray, limit: Limit) -> bool:
    """Whether zero would pass, and not because the gradient is zero to rounding."""
    allowed = np.broadcast_to(limit.bound, expected.shape)
    size = np.broadcast_to(limit.size, expected.shape)
    wide = np.linalg.norm(allowed) > BLIND * np.linalg.norm(size)
    return bool(wide and size.any() and (np.abs(expected) <= allowed).all())


def _says_nothing(expected: np.ndarray, limit: Limit) -> str:
    largest = float(np.max(np.abs(expected)))
    allowed = float(np.max(limit.bound))
    return (
        f"rounding explains differences up to {allowed:.1e}, and the largest entry is "
        f"{largest:.1e}: zero would pass too"
    )


def ulp_distance(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """How many representable numbers lie between two arrays of one floating dtype.

    Adjacent numbers are 1 apart, and so are -0 and +0. Complex numbers: the larger
    distance of their parts. Meaningless where an entry is NaN.

    Example:
      >>> import numpy as np
      >>> one = np.array([1, 1, 0], np.float32)
      >>> ulp_distance(one, np.array([1, 1 + 2**-22, -1e-45], np.float32)).tolist()
      [0.0, 2.0, 2.0]
    """
    if np.iscomplexobj(first):
        real = ulp_distance(first.real, second.real)
        return np.maximum(real, ulp_distance(first.imag, second.imag))
    kind = np.dtype(f"i{first.dtype.itemsize}")
    lowest = np.iinfo(kind).min
    ordered = []
    for array in (first, second):
        bits = np.ascontiguousarray(array).view(kind)
        # Negative floats count downwards; -0 comes just below +0.
        ordered.append(np.where(bits < 0, lowest - bits - 1, bits).astype(np.int64))
    low, high = np.minimum(*ordered), np.maximum(*ordered)
    # Across zero the difference may not fit in 64 bits; there it need not be exact.
    across = high.astype(np.float64) - low.astype(np.float64)
    exact = np.where((low < 0) & (high >= 0), 0, high - low)
    return np.where((low < 0) & (high >= 0), across, exact.astype(np.float64))


def _per_leaf(values: Any, like: PyTree, name: str, default: Any) -> Mapping[str, Any]:
    paths = named_leaves(like)
    if values is None:
        return dict.fromkeys(paths, default)
    given = named_leaves(values)
    if list(given) == ["(root)"] and np.ndim(values) == 0:
        return dict.fromkeys(paths, values)
    absent = [path for path, leaf in paths.items() if leaf is not None]
    absent = [path for path in absent if given.get(path) is None]
    if absent:
        raise ValueError(
            f"`compare({name}=...)` must be a number or a tree like the reference. "
            f"Got nothing for {', '.join(absent)}."
        )
    return {path: given.get(path, default) for path in paths}


def _host(leaf: Any) -> np.ndarray | None:
    """The leaf's numbers on the host; a PRNG key is compared by its bits."""
    if leaf is None:
        return None
    if isinstance(leaf, jax.Array):
        whole = leaf.is_fully_addressable or leaf.is_fully_replicated
        if not whole:
            rule = "must be whole on every process"
            got = f"an array over {leaf.sharding}"
            raise ValueError(requirement("compare(reference=...)", rule, got))
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _kind(leaf: np.ndarray | HeldArray | None) -> tuple[str, tuple[int, ...]]:
    if leaf is None:
        return "None", ()
    dtype = leaf.dtype if isinstance(leaf, HeldArray) else leaf.dtype.name
    return dtype, leaf.shape


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _products(whole: np.ndarray, first: np.ndarray, second: np.ndarray) -> Products:
    # Squares of tiny numbers would vanish; every process takes the same unit.
    unit = float(np.max(np.abs(whole), initial=0))
    unit = unit if unit > 0 and np.isfinite(unit) else 1.0
    a, b = first.ravel() / unit, second.ravel() / unit
    return Products(*(float(np.vdot(x, y).real) for x, y in ((a, b), (a, a), (b, b))))
