"""The first tap, and its direction, at which a candidate differs from the reference.

Values come first, in the order of the program: at every passage each example must occur
within its bound. Rows beside these (padding, bubbles) do not matter.

Then cotangents, from the last tap to the first. Right trainers scale them: they sum
and divide later, or take a local mean and weight it by B_i / B. So the first cotangent
of an example that is seen gives its factor, which it has to keep at the taps before.
Copies of a row count once, and parts of a row on several shards are added up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from jdist.verify.explanations import likeness
from jdist.verify.tracing.alignment import NONE, Aligned, Passed, align, units
from jdist.verify.tracing.layout import finite_part
from jdist.verify.tracing.recording import TapRecord
from jdist.verify.tracing.reference import Passage, Rows
from jdist.verify.tracing.report import Difference

STALE = (
    "the backward pass has other values than the forward pass, as of stale parameters"
)


@dataclass(slots=True)
class Findings:
    """The result of a search.

    Attributes:
      difference: The first difference; None if all taps are right.
      right: The taps before it.
      notes: The comparisons that were not made.
      factors: For each example, the factor of its cotangents at the last tap.
      entered: The last tap, at which the factors were found; empty if there is none.
      groups: The examples of each call in the backward pass, at that tap.
      of_parts: The places of values without examples that are of parts of the batch.
    """

    difference: Difference | None = None
    right: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    factors: dict[int, complex] = field(default_factory=dict)
    entered: str = ""
    groups: list[tuple[int, ...]] = field(default_factory=list)
    of_parts: set[int] = field(default_factory=set)


def search(
    passages: Sequence[Passage], records: Sequence[TapRecord], counted: np.ndarray
) -> Findings:
    """Looks for the first difference.

    Args:
      passages: The reference's passages, in order.
      records: The candidate's records.
      counted: Which examples have a weight.
    """
    findings = Findings()
    aligned = _aligned(passages, records, findings.notes)
    if not records:
        findings.notes.append(
            "the candidate has reached no tap: it is compiled ahead of time, or runs "
            "in another process. See `verify.TapRecording` and `verify.replay`"
        )
    findings.difference = _forward(passages, aligned, counted, findings)
    if findings.difference is None:
        findings.difference = _Backward(passages, aligned, counted, findings).first()
    return findings


def _aligned(
    passages: Sequence[Passage], records: Sequence[TapRecord], notes: list[str]
) -> dict[int, Aligned]:
    """The candidate's records by place, where it reached that tap."""
    places: dict[tuple[str, object], list[int]] = {}
    for place, passage in enumerate(passages):
        places.setdefault((passage.name, passage.layout), []).append(place)
    by_name: dict[str, list[TapRecord]] = {}
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    found: dict[int, Aligned] = {}
    fitting: set[int] = set()
    for (name, _), own in places.items():
        like = passages[own[0]].layout
        fit = [
            r for r in by_name.get(name, ()) if like.rows(r.value, r.axes) is not None
        ]
        fitting.update(map(id, fit))
        if fit:
            aligned = align(own, [passages[p] for p in own], fit)
            found.update(dict.fromkeys(own, aligned))
    absent = {p.name for p in passages} - by_name.keys()
    if absent and records:
        notes.append(f"not reached by the candidate: {', '.join(sorted(absent))}")
    own_names = {p.name for p in passages}
    strange = sorted({r.name for r in records} - own_names)
    notes += [f"{name} is no tap in the loss" for name in strange]
    misfits = {
        (r.name, r.value.shape)
        for r in records
        if id(r) not in fitting and r.name in own_names
    }
    notes += [
        f"{name} was not compared where its shape is {shape}"
        for name, shape in sorted(misfits)
    ]
    return found


# --- forward ---


def _forward(
    passages: Sequence[Passage],
    aligned: Mapping[int, Aligned],
    counted: np.ndarray,
    findings: Findings,
) -> Difference | None:
    orders: set[tuple[int, ...]] = set()
    for place, passage in enumerate(passages):
        own = aligned.get(place)
        if own is None:
            continue
        # Records of another process may be of its backward pass alone.
        passed = own.forward if len(own.forward.found) else own.backward
        classes = own.classes_at(place)
        missing = [
            e
            for e in range(own.examples)
            if classes[e] not in passed.found and _counts(passage, e, counted)
        ]
        if missing and _is_of_parts(passage, own, passed):
            findings.of_parts.add(place)
            findings.notes.append(
                f"{passage.label} was not compared: it has no axis of examples, and "
                "the candidate computes it of parts of the batch"
            )
            continue
        if missing:
            return _wrong_values(passages, place, own, missing, orders)
        findings.right.append(f"forward {passage.label}")
        if passage.layout.axis is not None:
            # Where equal rows give no order, that of the tap before is kept.
            orders = _orders(own, place) or orders
    return None


def _is_of_parts(passage: Passage, aligned: Aligned, passed: Passed) -> bool:
    """Whether a value without examples differs from call to call.

    What does not depend on the batch, such as a parameter, is the same in all calls.
    """
    if passage.layout.axis is not None:
        return False
    return len(np.unique(passed.values, axis=0)) > len(aligned.places)


def _counts(passage: Passage, example: int, counted: np.ndarray) -> bool:
    return passage.layout.axis is None or bool(counted[example])


def _orders(aligned: Aligned, place: int) -> set[tuple[int, ...]]:
    """The order of examples in each call, where all its rows are one example's."""
    classes = aligned.classes_at(place)
    each = enumerate(classes.tolist())
    example = {c: e for e, c in each if np.sum(classes == c) == 1}
    passed = aligned.forward
    calls = [
        tuple(example.get(int(c), NONE) for c in passed.found[rows])
        for rows in passed.rows_by_call()
    ]
    return {call for call in calls if call and NONE not in call}


def _wrong_values(
    passages: Sequence[Passage],
    place: int,
    aligned: Aligned,
    missing: list[int],
    orders: set[tuple[int, ...]],
) -> Difference:
    passage = passages[place]
    examples = tuple(missing) if passage.layout.axis is not None else ()
    rows = _assigned(passage, aligned, missing, orders)
    if not rows:
        words = "no such value is computed"
        return Difference("forward", passage.label, examples, float("inf"), words)
    known = sorted(rows)
    found = aligned.forward.values[[rows[e] for e in known]]
    others = {p.label: p.forward.values[known] for p in _alike(passages, passage)}
    bounds = passage.forward.bounds[known]
    ratio, words = _described(passage, others, found, bounds, known)
    return Difference("forward", passage.label, examples, ratio, words)


def _assigned(
    passage: Passage,
    aligned: Aligned,
    missing: list[int],
    orders: set[tuple[int, ...]],
) -> dict[int, int]:
    """The most likely row of each missing example.

    The rows of a call are matched to the examples of a call at the tap before. Among
    several choices, and where there is none, the row of the nearest direction is taken.
    """
    passed, expected = aligned.forward, passage.forward.values
    strange = passed.found == NONE
    cosine = _cosines(passed.values, expected)
    proposals = []
    for rows in passed.rows_by_call():
        for order in orders:
            if len(order) == len(rows) and strange[rows].any():
                pairs = [
                    (e, int(r))
                    for e, r in zip(order, rows, strict=True)
                    if strange[r] and e in missing
                ]
                if pairs:
                    score = float(np.mean([cosine[r, e] for e, r in pairs]))
                    proposals.append((score, pairs))
    taken: dict[int, int] = {}
    # Greedy, the best proposal first: a row or an example is assigned once.
    for _, pairs in sorted(proposals, reverse=True):
        if not any(e in taken or r in taken.values() for e, r in pairs):
            taken.update(pairs)
    left = np.flatnonzero(strange)
    for example in set(missing) - taken.keys():
        free = [r for r in left.tolist() if r not in taken.values()]
        if free:
            taken[example] = max(free, key=lambda r: float(cosine[r, example]))
    return taken


def _cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The magnitude of the cosine between rows; 0 where one is 0 or not finite."""
    unit = units(second)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        first, second = finite_part(first) / unit, finite_part(second) / unit
        sizes = [np.linalg.norm(x, axis=1, keepdims=True) for x in (first, second)]
        cosine = abs((first / sizes[0]) @ (second / sizes[1]).conj().T)
    found: np.ndarray = np.nan_to_num(cosine)
    return found


# --- backward ---


@dataclass(slots=True)
class _Backward:
    """The search among cotangents, from the last tap to the first."""

    passages: Sequence[Passage]
    aligned: Mapping[int, Aligned]
    counted: np.ndarray
    findings: Findings
    slack: dict[int, float] = field(default_factory=dict)
    whole: dict[int, complex] = field(default_factory=dict)

    def first(self) -> Difference | None:
        if not any(len(a.backward.found) for a in self.aligned.values()):
            return None
        for place in reversed(range(len(self.passages))):
            passage, own = self.passages[place], self.aligned.get(place)
            if passage.backward is None or own is None:
                continue
            if place in self.findings.of_parts:
                continue
            strange = self._strange(place, passage, passage.backward, own)
            if strange:
                label, far = passage.label, float("inf")
                return Difference("backward", label, strange, far, STALE)
            difference = self._at(place, passage, own)
            if difference is not None:
                return difference
            self.findings.right.append(f"backward {passage.label}")
        return None

    def _at(self, place: int, passage: Passage, own: Aligned) -> Difference | None:
        whole = passage.layout.axis is None
        factors = self.findings.factors
        # Values of the whole batch have cotangents that are sums over all calls.
        if whole and len({round(abs(f), 6) for f in factors.values()}) > 1:
            return None  # A sum over calls, each with a factor of its own.
        wrong: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        starts = not whole and not factors
        # Once for each class, because its examples cannot be told apart.
        for label in dict.fromkeys(own.classes_at(place)):
            members = own.members(label)
            # From the last tap to the first, the last place of a class comes first.
            if max(p for p, _ in members) != place:
                continue  # Equal values at several passages were judged with the last.
            if not (whole or any(self.counted[e] for _, e in members)):
                continue  # A trainer may weight its examples' gradients afterwards.
            found, expected, allowed = self._sums(own, label, members)
            if sum(p == place for p, _ in members) > 1 and not whole:
                # Equal examples: which cotangent is whose, and which is a copy, cannot
                # be told. Their direction can.
                factor = _fitted(expected, found)
                expected, allowed = factor * expected, abs(factor) * allowed
            if not np.abs(expected).any() and not np.abs(found).any():
                continue
            if not (np.abs(found - expected) <= allowed).all():
                wrong.update({e: (found, expected, allowed) for _, e in members})
        if starts and factors:
            self.findings.entered = passage.label
            self.findings.groups = _groups(own, place)
        if not wrong:
            return None
        return self._difference(passage, own, wrong)

    def _strange(
        self, place: int, passage: Passage, wanted: Rows, own: Aligned
    ) -> tuple[int, ...]:
        """The examples that no cotangent reaches, where unknown values have some."""
        assert own.backward.cotangents is not None
        # At the last tap alone: at earlier ones the cotangents themselves are compared.
        if passage.layout.axis is None or self.findings.factors:
            return ()
        # Without such values the examples are lost, which the gradient shows.
        if not own.backward.cotangents[own.backward.found == NONE].any():
            return ()
        classes = own.classes_at(place)
        return tuple(
            e
            for e in np.flatnonzero(self.counted).tolist()
            if wanted.values[e].any() and classes[e] not in own.backward.found
        )

    def _sums(
        self, own: Aligned, label: int, members: list[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The candidate's cotangent of a class, what it should be, and the bound."""
        assert own.backward.cotangents is not None
        found = _total(own.backward.cotangents[own.backward.found == label])
        flowing = [(rows, e) for p, e in members if (rows := self.passages[p].backward)]
        each = np.stack([rows.values[e] for rows, e in flowing])
        widths = np.stack([rows.bounds[e] for rows, e in flowing])
        whole = self.passages[members[0][0]].layout.axis is None
        keys = [0 if whole else e for _, e in flowing]
        table = self._of_whole() if whole else self.findings.factors
        if not any(key in table for key in keys):
            self._establish(table, keys, found, each, widths)
        known = [table[key] for key in keys if key in table]
        # Members of a class without a factor yet are taken to have the others' one.
        usual = sum(known) / len(known) if known else 1.0
        own_factor = np.array([table.get(k, usual) for k in keys])[:, None]
        slack = np.array([self.slack.get(k, 0.0) for k in keys])[:, None]
        size = np.abs(own_factor)
        allowed = np.sum(size * (widths + slack * np.abs(each)), axis=0)
        return found, _total(own_factor * each), allowed

    def _of_whole(self) -> dict[int, complex]:
        """The factor of values without examples: the one that all examples have."""
        for factor in self.findings.factors.values():
            return {0: factor}
        return self.whole

    def _establish(
        self,
        table: dict[int, complex],
        keys: list[int],
        found: np.ndarray,
        each: np.ndarray,
        widths: np.ndarray,
    ) -> None:
        """Takes the factor of a class from its first cotangent that is not zero."""
        total = _total(each)
        power = float(np.vdot(total, total).real)
        if power == 0:
            return
        factor = _fitted(total, found)
        width = np.linalg.norm(np.sum(widths, axis=0) * np.abs(total)) / power
        for key in keys:
            table[key] = factor
            # The factor is fitted: its own error widens the bounds at earlier taps.
            self.slack[key] = float(width)

    def _difference(
        self,
        passage: Passage,
        own: Aligned,
        wrong: Mapping[int, tuple[np.ndarray, np.ndarray, np.ndarray]],
    ) -> Difference:
        known = sorted(wrong)
        examples = tuple(known) if passage.layout.axis is not None else ()
        found, expected, allowed = (
            np.stack([wrong[e][i] for e in known]) for i in range(3)
        )
        if not found.any():
            words = "no cotangent arrives"
            if (own.backward.found == NONE).any():
                words = STALE
            return Difference("backward", passage.label, examples, float("inf"), words)
        others = {
            p.label: p.backward.values[known]
            for p in _alike(self.passages, passage)
            if p.backward is not None
        }
        others[passage.label] = expected
        ratio, words = _described(passage, others, found, allowed, known)
        return Difference("backward", passage.label, examples, ratio, words)


def _fitted(expected: np.ndarray, found: np.ndarray) -> complex:
    """The least-squares factor from `expected` to `found`; 1 if `expected` is all 0."""
    power = float(np.vdot(expected, expected).real)
    factor: complex = (np.vdot(expected, found) / power).item() if power else 1.0
    return factor


def _total(rows: np.ndarray) -> np.ndarray:
    """The sum of all distinct rows."""
    # Replicas and padding repeat a row bit for bit; shards hold different parts of it.
    distinct: np.ndarray = np.unique(rows, axis=0) if len(rows) > 1 else rows
    return distinct.sum(axis=0)


def _groups(aligned: Aligned, place: int) -> list[tuple[int, ...]]:
    """The examples of each call in the backward pass that has cotangents."""
    classes = aligned.classes_at(place)
    assert aligned.backward.cotangents is not None
    groups: list[tuple[int, ...]] = []
    met: set[int] = set()
    for rows in aligned.backward.rows_by_call():
        live = [r for r in rows if aligned.backward.cotangents[r].any()]
        reached = {int(c) for c in aligned.backward.found[live]} - {NONE}
        group = [e for e, c in enumerate(classes) if c in reached and e not in met]
        met.update(group)
        if group:
            groups.append(tuple(group))
    return groups


# --- words ---


def _alike(passages: Sequence[Passage], passage: Passage) -> list[Passage]:
    """The passages whose rows have the same shape, the given one first."""
    rest = [
        p
        for p in passages
        if p is not passage
        and p.layout.row_shape() == passage.layout.row_shape()
        and len(p.forward.values) == len(passage.forward.values)
    ]
    return [passage, *rest]


def _described(
    passage: Passage,
    wanted: Mapping[str, np.ndarray],
    found: np.ndarray,
    bounds: np.ndarray,
    examples: list[int],
) -> tuple[float, str]:
    """The largest error/bound of several examples, and what they look like."""
    expected = wanted[passage.label]
    usual = np.isfinite(found) | (found == expected)
    if not usual.all():
        row, entry = divmod(int(np.argmin(usual)), found.shape[1])
        return float("inf"), f"not finite: {_at(passage, found, row, entry, examples)}"
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(found == expected, 0, np.abs(found - expected))
        ratio = np.where(error == 0, 0, error / bounds)
    row, entry = divmod(int(np.argmax(ratio)), ratio.shape[1])
    words = (
        f"expected {expected[row, entry]:.6g}, got "
        f"{_at(passage, found, row, entry, examples)}"
    )
    whole = {label: finite_part(x) for label, x in wanted.items()}
    whole |= _transposed(passage, whole[passage.label])
    alike = likeness(passage.label, whole, finite_part(found))
    if not alike:
        alike = _cosine_words(finite_part(expected), finite_part(found))
    return float(ratio[row, entry]), f"{words}; {alike}"


def _transposed(passage: Passage, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Rows with two axes of each example's part exchanged, under their words."""
    shape = passage.layout.row_shape()
    return {
        f"{passage.label} transposed": (
            rows.reshape(-1, *shape).swapaxes(first + 1, second + 1).reshape(rows.shape)
        )
        for first, second in combinations(range(len(shape)), 2)
        if shape[first] == shape[second]
    }


def _at(
    passage: Passage, found: np.ndarray, row: int, entry: int, examples: list[int]
) -> str:
    """One entry, with its example and its index in it."""
    shape = passage.layout.row_shape()
    index = ", ".join(map(str, np.unravel_index(entry, shape or (1,)))) if shape else ""
    where = f" at [{index}]" if index else ""
    if passage.layout.axis is not None:
        where += f" of example {examples[row]}"
    return f"{found[row, entry]:.6g}{where}"


def _cosine_words(expected: np.ndarray, found: np.ndarray) -> str:
    a, b = (float(np.linalg.norm(x)) for x in (expected, found))
    cosine = float(np.vdot(expected, found).real) / (a * b) if a * b > 0 else 0.0
    return f"its cosine with the reference is {cosine:.6g}"
