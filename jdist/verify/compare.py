"""Comparing two gradient trees, leaf by leaf, on the host in float64.

Structure comes first, then dtype and shape, then every number. NaN and infinity never
pass, not even when both sides have them. NumPy only: the judge shares no code with what
it judges.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._errors import requirement
from jdist._tree import PyTree, is_inexact, named_leaves
from jdist.verify.bound import BLIND, Limit, bound
from jdist.verify.diagnosis import diagnose
from jdist.verify.report import LeafReport, Report, looseness

Named = str | tuple[str, tuple[int, ...]]
"""A candidate's leaf by path, and the order in which its axes are the reference's."""


def compare(
    reference: PyTree,
    candidate: PyTree,
    terms: Any = None,
    scale: Any = None,
    *,
    name: str = "candidate",
    names: Mapping[str, Named] | None = None,
) -> Report:
    """Judges one gradient tree against another.

    Args:
      reference: Pytree of arrays (or None leaves).
      candidate: Pytree that must have the same structure, dtypes and shapes, and
        entries that differ from the reference's by no more than rounding explains.
        Leaves that are not floating must be equal.
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

    Returns:
      A `Report` with a row per leaf; see `jdist.verify.bound` for the bound.

    Raises:
      ValueError: There is no leaf to compare; `terms` or `scale` do not have the
        reference's structure; `names` leaves out a leaf of either side, names one that
        is not there or one twice, or orders axes that the leaf does not have.

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
    wanted = named_leaves(reference)
    if not wanted:
        raise ValueError(
            "`compare(reference=...)` must have leaves. Got an empty tree."
        )
    terms_of = _per_leaf(terms, reference, "terms", default=1)
    scale_of = _per_leaf(scale, reference, "scale", default=None)
    limits = {
        path: _assumed(_host(leaf), terms_of[path], scale_of[path])
        for path, leaf in wanted.items()
    }
    rows = compare_leaves(name, wanted, renamed(reference, candidate, names), limits)
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


def _ordered(path: str, leaf: Any, axes: tuple[int, ...]) -> np.ndarray | None:
    """A leaf with its axes in the reference's order; None, no gradient, has none."""
    array = _host(leaf)
    if array is None:
        return None
    if sorted(axes) != list(range(array.ndim)):
        rule = f"must order the {array.ndim} axes of the candidate's leaf"
        where = f"compare(names={{{path!r}: ...}})"
        raise ValueError(requirement(where, rule, repr(axes)))
    return np.transpose(array, axes)


def compare_leaves(
    name: str,
    wanted: Mapping[str, Any],
    found: Mapping[str, Any],
    limits: Mapping[str, Limit | None],
) -> tuple[LeafReport, ...]:
    """The rows of one candidate: the reference's leaves in order, then extra ones.

    Args:
      name: Of the candidate.
      wanted: The reference's leaves by path.
      found: The candidate's.
      limits: What each floating leaf of the reference is held against.
    """
    wanted, found = ({path: _host(x) for path, x in t.items()} for t in (wanted, found))
    rows = [
        _structural(name, path, wanted, found)
        or _numeric(name, path, wanted, found[path], limits[path])
        for path in wanted
        if not (wanted[path] is None and path in found and found[path] is None)
    ]
    rows += [
        LeafReport(name, path, *_kind(found[path]), problem="not in the reference")
        for path in found
        if path not in wanted
    ]
    return tuple(rows)


def _structural(
    name: str, path: str, wanted: Mapping[str, Any], found: Mapping[str, Any]
) -> LeafReport | None:
    """A failing row if the leaf is missing or of another kind."""
    expected = _kind(wanted[path])
    if path not in found:
        return LeafReport(name, path, *expected, problem="missing from the candidate")
    got = _kind(found[path])
    if got == expected:
        return None
    (dtype, shape), (got_dtype, got_shape) = expected, got
    what = "dtype" if dtype != got_dtype else "shape"
    pair = (dtype, got_dtype) if dtype != got_dtype else (shape, got_shape)
    problem = f"wrong {what}: expected {pair[0]}, got {pair[1]}"
    return LeafReport(name, path, dtype, shape, problem=problem)


def _numeric(
    name: str,
    path: str,
    wanted: Mapping[str, Any],
    found: Any,
    limit: Limit | None,
) -> LeafReport:
    reference = wanted[path]
    dtype, shape = _kind(reference)
    if limit is None:
        equal = np.array_equal(reference, found)
        zeros = (0.0,) * 4 if equal else (float("nan"),) * 4
        problem = "" if equal else "values that are not floating must be equal"
        cosine = 1.0 if equal else float("nan")
        return LeafReport(name, path, dtype, shape, *zeros, cosine, problem)
    expected, got = _wide(reference), _wide(found)
    # inf - inf is NaN and fails below, as it should.
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(expected - got)
        relative = np.where(error == 0, 0, error / np.abs(expected))
        ratio = np.where(
            error == 0, 0, error / np.broadcast_to(limit.bound, error.shape)
        )
        cosine = _cosine(expected, got)  # Shown to a reader; no verdict rests on it.
    worst = float(np.max(ratio, initial=0))
    furthest = float(np.max(ulp_distance(reference, found), initial=0))
    problem, unjudged = "", ""
    if not worst <= 1:
        problem = diagnose(path, wanted, found, ratio)
    elif furthest > 0 and _blind(expected, limit):
        unjudged = _says_nothing(expected, limit)
    return LeafReport(
        name,
        path,
        dtype,
        shape,
        float(np.max(error, initial=0)),
        float(np.max(relative, initial=0)),
        furthest,
        worst,
        cosine,
        problem,
        unjudged,
    )


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
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return None if leaf is None else np.asarray(leaf)


def _kind(leaf: np.ndarray | None) -> tuple[str, tuple[int, ...]]:
    return ("None", ()) if leaf is None else (leaf.dtype.name, leaf.shape)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Cosine of the angle between two leaves as vectors; 1 if both are zero."""
    a, b = (float(np.linalg.norm(leaf)) for leaf in (first.ravel(), second.ravel()))
    if a == 0 or b == 0:
        return 1.0 if a == b else 0.0
    return min(1.0, float(np.vdot(first.ravel() / a, second.ravel() / b).real))
