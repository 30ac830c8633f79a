"""Compares two gradient trees leaf by leaf, on the host in float64.

Structure comes first, then dtype and shape, then every number. NaN and infinity never
pass, not even when both sides have them. NumPy only: the judge shares no code with what
it judges.
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jdist._errors import check_type, quoted, requirement
from jdist._tree import PyTree, is_inexact, named_leaves, words
from jdist.verify.bound import (
    BLIND,
    Limit,
    blocks_of,
    bound,
    in_blocks,
    in_double,
    inner,
)
from jdist.verify.explanations.diagnosis import diagnose
from jdist.verify.processes.finding import Finding, Products, merged, restored, worst_of
from jdist.verify.processes.peers import TIMEOUT, Peers, joined
from jdist.verify.processes.shards import HeldArray, Shard, held
from jdist.verify.report import LeafReport, Report, looseness

Named = str | tuple[str, tuple[int, ...]]
"""A candidate's leaf by path, and the order of its axes as they are in the
reference."""

ASSUMED = 10
"""The error/bound up to which a leaf with an assumed bound is not judged."""

_ASSUMED = (
    f"rounding may explain it, since this bound assumes what was not measured: up to "
    f"{ASSUMED} times the bound are no verdict. Judge by `verify.gradients`, which "
    f"measures the bound, or pass `terms` and `scale`"
)

Describe = Callable[[str, Mapping[str, np.ndarray | None], Shard, np.ndarray], str]
"""`(path, wanted, shard, error/bound) -> words` for a shard that fails."""


def compare(
    reference: PyTree,
    candidate: PyTree,
    terms: PyTree = None,
    scale: PyTree = None,
    *,
    names: Mapping[str, Named] | None = None,
    timeout: float = TIMEOUT,
) -> Report:
    """Judges one gradient tree against another.

    Without `terms` and `scale` the bound assumes what it does not know: right gradients
    of deep models have been 3 times as far from each other. A leaf between this bound
    and 10 times as much is then *not judged*. `verify.gradients` measures its bound.

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
        the reference; right unless terms cancel.
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
      ValueError: There is no leaf to compare; two leaves have one path; a leaf of the
        reference is divided over processes; `terms` or `scale` do not have the
        reference's structure, or are no numbers that count or measure something;
        `names` leaves out a leaf of either side, names one that is not there or one
        twice, or orders axes that the leaf does not have.
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
            path: _assumed(path, leaf, terms_of[path], scale_of[path])
            for path, leaf in wanted.items()
        }
        found = renamed("compare", reference, peers.computed(candidate), names)
        measured = terms is not None and scale is not None
        excuse = ("", 0.0) if measured else (_ASSUMED, ASSUMED)
        rows = compare_leaves("candidate", wanted, found, limits, peers, None, *excuse)
        return Report(rows, notes=looseness(rows))


def renamed(
    call: str,
    reference: PyTree,
    candidate: PyTree,
    names: Mapping[str, Named] | None,
) -> dict[str, Any]:
    """The candidate's leaves by the reference's paths, axes in the reference's order.

    Args:
      call: The public function that was given `names`, for the errors' text.
      reference: As in `compare`.
      candidate: As in `compare`.
      names: As in `compare`.

    Raises:
      ValueError: `names` is no complete map, as in `compare`.
    """
    wanted, found = named_leaves(reference), named_leaves(candidate)
    if names is None:
        return found
    rule = "must be a mapping from the reference's paths"
    check_type(f"{call}(names=...)", names, Mapping, rule)
    for path, x in names.items():
        check_name(f"{call}(names={{{path!r}: ...}})", x)
    theirs = {path: x if isinstance(x, str) else x[0] for path, x in names.items()}
    named = list(theirs.values())
    needed = [path for path, leaf in wanted.items() if leaf is not None]
    # Raised, not reported as a missing leaf: a map that leaves out a parameter of both
    # sides would hide its gradient.
    faults = {
        # Before the leaves without a name: of a name with a typo there is one too.
        "name leaves of the reference only": [p for p in theirs if p not in wanted],
        "name leaves of the candidate only": [p for p in named if p not in found],
        "name every leaf of the reference": [p for p in needed if p not in theirs],
        "name every leaf of the candidate": [p for p in found if p not in named],
        "name a leaf of the candidate once": [
            p for p in dict.fromkeys(named) if named.count(p) > 1
        ],
    }
    for rule, paths in faults.items():
        if paths:
            got = f"{'no ' if 'every' in rule else ''}{', '.join(paths)}"
            known = wanted if "reference" in rule else found
            close = difflib.get_close_matches(paths[0], known, n=1)
            remedy = f"Is {close[0]} meant?" if close and "only" in rule else ""
            where = f"{call}(names=...)"
            raise ValueError(requirement(where, f"must {rule}", got, remedy))
    # A leaf that the reference has as None needs no name: there is nothing to find.
    renamed: dict[str, Any] = {p: None for p, leaf in wanted.items() if leaf is None}
    for path, x in names.items():
        own = found[theirs[path]]
        if not isinstance(x, str):
            where = f"{call}(names={{{path!r}: ...}})"
            own = ordered(where, "candidate's leaf", own, x[1])
        renamed[path] = own
    return renamed


def check_name(where: str, name: Any) -> None:
    """Checks the form of an entry of `names`.

    Args:
      where: The entry, for the error's text.
      name: The entry.

    Raises:
      TypeError: It is neither a path nor a pair of a path and an order of axes.
    """
    pair = isinstance(name, tuple) and len(name) == 2 and isinstance(name[0], str)
    if isinstance(name, str) or (pair and isinstance(name[1], Sequence)):
        return
    rule = "must be a path of the candidate, or a pair of it and the order of its axes"
    raise TypeError(requirement(where, rule, quoted(name)))


def ordered(
    where: str, what: str, leaf: ArrayLike | None, axes: tuple[int, ...]
) -> jax.Array | np.ndarray | None:
    """Transposes a leaf, `what` in errors, to the reference's order of axes.

    None stays None.
    """
    if leaf is None:
        return None
    # An array over several processes cannot be converted to NumPy.
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if sorted(axes) != list(range(array.ndim)):
        rule = f"must order the {array.ndim} axes of the {what}"
        raise ValueError(requirement(where, rule, quoted(axes)))
    return array.transpose(axes)


def compare_leaves(
    name: str,
    wanted: Mapping[str, Any],
    found: Mapping[str, Any],
    limits: Mapping[str, Limit | None],
    peers: Peers | None = None,
    describe: Describe | None = None,
    excuse: str = "",
    excused: float = math.inf,
) -> tuple[LeafReport, ...]:
    """The rows of one candidate: the reference's leaves in order, then extra ones.

    Args:
      name: The name of the candidate.
      wanted: The reference's leaves by path, whole on this host.
      found: The candidate's; of an array over several processes the shards of this one.
      limits: The limit of each floating leaf of the reference; None for other leaves.
      peers: The processes that judge together, all of which get the same rows; None
        for this one alone.
      describe: The words for a shard that fails; None for `diagnose`.
      excuse: Why differing values prove nothing; leaves that would fail because of them
        are then *not judged*. Empty if there is no reason.
      excused: The error/bound up to which the excuse holds.

    Raises:
      PeersLost: A process raised, or did not come in time.
    """
    judged = _Judged(
        name,
        {path: _host(leaf) for path, leaf in wanted.items()},
        limits,
        describe or described_shard,
        excuse,
        excused,
    )
    arrays = {path: None if x is None else held(x) for path, x in found.items()}
    findings = [
        judged.finding(path, arrays)
        for path, leaf in judged.wanted.items()
        # None on both sides is equal, and gets no row.
        if not (leaf is None and path in arrays and arrays[path] is None)
    ]
    findings += [
        Finding(LeafReport(name, path, *_kind(leaf), problem="not in the reference"))
        for path, leaf in arrays.items()
        if path not in wanted
    ]
    each = [findings]
    if peers is not None and peers.size > 1:
        records = peers.exchange(list(map(asdict, findings)))
        each = [list(map(restored, own)) for own in records]
    # By path, because processes may have found different leaves.
    by_path: dict[str, dict[int, Finding]] = {}
    for rank, own in enumerate(each):
        for finding in own:
            by_path.setdefault(finding.row.path, {})[rank] = finding
    return tuple(merged(own, len(each)) for own in by_path.values())


@dataclass(frozen=True, slots=True)
class _Judged:
    """One candidate, with the reference and its limits; see `compare_leaves`."""

    name: str
    wanted: Mapping[str, np.ndarray | None]
    limits: Mapping[str, Limit | None]
    describe: Describe
    excuse: str
    excused: float = math.inf

    def finding(self, path: str, found: Mapping[str, HeldArray | None]) -> Finding:
        """Compares structure, then each shard with its slice of the reference."""
        row = LeafReport(self.name, path, *_kind(self.wanted[path]))
        if path not in found:
            return Finding(replace(row, problem="missing from the candidate"))
        whole, array = self.wanted[path], found[path]
        for what, expected, got in zip(
            ("dtype", "shape"), _kind(whole), _kind(array), strict=True
        ):
            if expected != got:
                problem = f"wrong {what}: expected {expected}, got {got}"
                return Finding(replace(row, problem=problem))
        assert whole is not None, "a None beside a None is not looked at"
        assert array is not None, "its kind is the reference's"
        if not array.shards:  # Other processes have the leaf.
            return Finding(_equal(row), replicas=array.replicas)
        own = [self._of_shard(row, whole, shard) for shard in array.shards]
        # In the angle, replicas of a shard would otherwise count more than once.
        first = [of for (_, of), x in zip(own, array.shards, strict=True) if x.first]
        products = Products(*map(sum, zip(Products(), *first, strict=True)))
        return Finding(worst_of([row for row, _ in own]), products, array.replicas)

    def _of_shard(
        self, row: LeafReport, whole: np.ndarray, shard: Shard
    ) -> tuple[LeafReport, Products]:
        reference, found = whole[shard.index], shard.values
        limit = self.limits[row.path]
        if limit is None:
            if not np.array_equal(reference, found):
                problem = "values that are not floating must be equal"
                return replace(row, problem=problem), Products()
            return _equal(row), Products()
        allowed = np.broadcast_to(limit.bound, whole.shape)[shard.index]
        row, products = _distances(row, whole, shard, allowed)
        worst = row.ratio
        problem, unjudged = "", ""
        # NaN and infinity are wrong whatever a candidate draws.
        if self.excuse and 1 < worst <= self.excused and worst < math.inf:
            unjudged = self.excuse
        # Not `worst > 1`, which is false for NaN.
        elif not worst <= 1:
            errors, ratios = _errors(in_double(reference), in_double(found), allowed)
            unjudged = _other_choices(limit, shard, errors)
            if not unjudged:
                problem = self.describe(row.path, self.wanted, shard, ratios)
        # A leaf that is bit-equal to the reference needs no bound.
        elif row.max_ulp > 0:
            unjudged = _unmeasured(reference, allowed, shard)
            unjudged = unjudged or _says_nothing(whole, limit)
        return replace(row, problem=problem, unjudged=unjudged), products


def _equal(row: LeafReport) -> LeafReport:
    """The row of a leaf without a difference."""
    return replace(row, max_abs=0, max_rel=0, max_ulp=0, ratio=0, cosine=1)


def _distances(
    row: LeafReport, whole: np.ndarray, shard: Shard, allowed: np.ndarray
) -> tuple[LeafReport, Products]:
    """The row of a shard's errors, and the products.

    `whole` is all of the reference's leaf.
    """
    reference, found = whole[shard.index], shard.values
    # Scaled, because squares of tiny numbers underflow; by the whole leaf, so that the
    # sums of all processes have one unit.
    unit = float(np.max(np.abs(whole), initial=0))
    unit = unit if unit > 0 and np.isfinite(unit) else 1.0
    flat = [x.reshape(1, -1) for x in (reference, found, allowed)]
    # `np.maximum`, because NaN is the largest.
    most, products = np.zeros(4), np.zeros(3)
    for block in blocks_of(*flat[0].shape):
        own, other, bound = (x[block] for x in flat)
        expected, got = in_double(own), in_double(other)
        error, ratio = _errors(expected, got, bound)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            relative = np.where(error == 0, 0, error / np.abs(expected))
            # Informative only: no verdict depends on the angle.
            a, b = (x.ravel() / unit for x in (expected, got))
            products += [inner(x, y) for x, y in ((a, b), (a, a), (b, b))]
        each = (error, relative, ulp_distance(own, other), ratio)
        most = np.maximum(most, [np.max(x) for x in each])
    angle = Products(*products.tolist())
    names = "max_abs", "max_rel", "max_ulp", "ratio"
    numbers: dict[str, Any] = dict(zip(names, most.tolist(), strict=True))
    return replace(row, **numbers, cosine=angle.cosine), angle


def _errors(
    expected: np.ndarray, found: np.ndarray, allowed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Errors of numbers in double precision, and their ratios to the bound."""
    # inf - inf is NaN and fails, as it should.
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(expected - found)
        known = np.where(np.isnan(allowed), np.inf, allowed)
        return error, np.where(error == 0, 0, error / known)


def described_shard(
    path: str,
    wanted: Mapping[str, np.ndarray | None],
    shard: Shard,
    ratio: np.ndarray,
    what: str = "",
) -> str:
    """The position of a shard, and the words of `diagnose` for it.

    Args:
      path: The path of its leaf.
      wanted: The reference's leaves by path, whole.
      shard: The shard, with its position and the candidate's numbers.
      ratio: error/bound of each number.
      what: What these numbers are, such as "its step: "; empty for the leaf itself.
    """
    whole = wanted[path]
    slices = {
        other: leaf[shard.index]
        for other, leaf in wanted.items()
        if leaf is not None and whole is not None and leaf.shape == whole.shape
    }
    wrong = {x: i for x, i in shard.blocks.items() if not (ratio[i] <= 1).all()}
    if 0 < len(wrong) < len(shard.blocks):
        # NaN would compare false with every ratio.
        sizes = {x: np.nan_to_num(ratio[i], nan=np.inf).max() for x, i in wrong.items()}
        index = wrong[max(sizes, key=sizes.__getitem__)]
        part = Shard(index, shard.values[index])
        told = described_shard(path, wanted, part, ratio[index], what)
        return f"on {' and '.join(wrong)} alone, {told}"
    where = f"in {shard.place}, " if shard.index else ""
    return f"{where}{what}{diagnose(path, slices, shard.values, ratio, shard.origin)}"


def _assumed(
    path: str, leaf: np.ndarray | None, terms: float, scale: ArrayLike | None
) -> Limit | None:
    """The limit of a leaf without measurements."""
    if leaf is None or not is_inexact(leaf):
        return None
    # A bound that is negative or infinite would let every number pass.
    if _no_number(terms) or np.ndim(terms) or not terms >= 0 or terms % 1:
        rule = "must be a whole number, at least 0"
        got = f"{terms!r} for {path}"
        raise ValueError(requirement("compare(terms=...)", rule, got))
    if scale is None:
        scale = np.max(np.abs(in_double(leaf)), initial=0)
    elif (
        _no_number(scale)
        or not ((own := np.asarray(scale)) >= 0).all()
        or np.isinf(own).any()
    ):
        rule, got = "must be finite and at least 0", f"{scale!r} for {path}"
        raise ValueError(requirement("compare(scale=...)", rule, got))
    return Limit(bound(leaf.dtype, leaf.size, int(terms), scale), scale)


def _no_number(given: object) -> bool:
    """Whether a value is no real number and no array of such."""
    return np.asarray(given).dtype.kind not in "biuf"


def _says_nothing(expected: np.ndarray, limit: Limit) -> str:
    """Words if zero would pass although the gradient is not zero to rounding."""
    squares, most = np.zeros(2), np.zeros(3)
    widths = (np.broadcast_to(x, expected.shape) for x in (limit.bound, limit.size))
    for own, allowed, size in in_blocks(expected, *widths):
        if (np.abs(own) > allowed).any():
            return ""
        # An entry without a bound is right bit for bit here, and says nothing of
        # others.
        known = np.isfinite(allowed)
        allowed, size, own = allowed[known], size[known], np.abs(own[known])
        squares += [inner(x, x) for x in (allowed, size)]
        most = np.maximum(most, [np.max(x, initial=0) for x in (allowed, own, size)])
    # See the end of the derivation in `bound`.
    width, power = np.sqrt(squares)
    if not (width > BLIND * power and most[2] > 0):
        return ""
    return (
        f"rounding explains differences up to {most[0]:.1e}, and the largest entry is "
        f"{most[1]:.1e}: zero would pass too"
    )


def _other_choices(limit: Limit, shard: Shard, error: np.ndarray) -> str:
    """Words if decisions within rounding explain what the bound does not."""
    other = limit.undecided
    if other is None:
        return ""
    allowed = np.asarray(limit.bound)
    norm = np.linalg.norm(allowed) + other.in_norm
    allowed, changes = allowed[shard.index], other.bound[shard.index]
    # False for NaN.
    if not ((error <= allowed + changes).all() and np.linalg.norm(error) <= norm):
        return ""
    most = np.max(changes, initial=0)
    return f"{other.words}: here other choices explain differences up to {most:.1e}"


def _unmeasured(expected: np.ndarray, allowed: np.ndarray, shard: Shard) -> str:
    """Words if an entry has no bound, which may hide any difference."""
    unknown = ~np.isfinite(allowed)
    if not unknown.any():
        return ""
    error, _ = _errors(in_double(expected), in_double(shard.values), allowed)
    hidden = unknown & (error > 0)
    if not hidden.any():
        return ""
    entry = np.argwhere(hidden)[0]
    place = (entry + np.array(shard.origin, int) if shard.index else entry).tolist()
    return (
        f"rounding could not be measured at {place}, where the difference is "
        f"{error[tuple(entry)]:.1e}: any number would pass"
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
        ordered.append(np.where(bits < 0, lowest - bits - 1, bits))
    if kind.itemsize < 8:
        return np.abs(np.subtract(*ordered, dtype=np.float64))
    low, high = np.minimum(*ordered), np.maximum(*ordered)
    # Across zero the difference may not fit in 64 bits; there it need not be exact.
    across = high.astype(np.float64) - low.astype(np.float64)
    exact = np.where((low < 0) & (high >= 0), 0, high - low)
    return np.where((low < 0) & (high >= 0), across, exact.astype(np.float64))


def _per_leaf(
    values: PyTree, like: PyTree, name: str, default: int | None
) -> Mapping[str, Any]:
    paths = named_leaves(like)
    if values is None:
        return dict.fromkeys(paths, default)
    given = named_leaves(values)
    # One number for all leaves is itself a tree of one leaf.
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


def _host(leaf: ArrayLike | None) -> np.ndarray | None:
    """The leaf's numbers on the host; a PRNG key is compared by its bits."""
    if leaf is None:
        return None
    if isinstance(leaf, jax.Array):
        whole = leaf.is_fully_addressable or leaf.is_fully_replicated
        if not whole:
            rule = "must be whole on every process"
            got = f"an array over {leaf.sharding}"
            raise ValueError(requirement("compare(reference=...)", rule, got))
        leaf = words(leaf)
    return np.asarray(leaf)


def _kind(leaf: np.ndarray | HeldArray | None) -> tuple[str, tuple[int, ...]]:
    if leaf is None:
        return "None", ()
    dtype = leaf.dtype if isinstance(leaf, HeldArray) else leaf.dtype.name
    return dtype, leaf.shape
