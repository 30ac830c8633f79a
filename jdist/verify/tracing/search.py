"""The first tap, and its direction, at which a candidate differs from the reference.

Values come first, in the order of the program: at every passage each example must occur
within its bound. Rows beside these (padding, bubbles) do not matter.

Then cotangents, from the last tap to the first. Right trainers scale them: they sum
and divide later, or take a local mean and weight it by B_i / B. So the first cotangent
of an example that is seen gives its factor, which it has to keep at the taps before.
Copies of a row count once, and parts of a row on several shards are added up.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jdist.verify.explanations.diagnosis import likeness
from jdist.verify.tracing.alignment import NONE, Aligned, align, units, within
from jdist.verify.tracing.layout import Layout, finite_part
from jdist.verify.tracing.mesh_parts import ValuePart, declared, divisions, part_of
from jdist.verify.tracing.recording import TapRecord
from jdist.verify.tracing.reference import APART, Passage
from jdist.verify.tracing.report import UNCOMPARED, Difference, counts_told

ABSENT = "no such value is computed"

DECLARE = (
    ": it may be divided over several axes of the mesh. Say which: "
    "verify.tap(x, name, axis=dimension)"
)

# The largest share of an error that its explanation may leave; and how far parts of a
# cotangent have to be from counting once.
SHARE = 1e-2

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
    passages: Sequence[Passage],
    records: Sequence[TapRecord],
    counted: np.ndarray,
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
        findings.notes.insert(0, UNCOMPARED)
        findings.notes.append(
            "the candidate has reached no tap: it is compiled ahead of time, or runs "
            "in another process. See `verify.TapRecording` and `verify.replay`"
        )
    elif not aligned.forward:
        findings.notes.insert(0, UNCOMPARED)
    findings.difference = _forward(passages, aligned.forward, counted, findings)
    if findings.difference is not None:
        return findings
    # Copies of a cotangent are the whole each, or terms of a sum: which, all taps
    # together can tell.
    tried: list[tuple[int, float, Findings]] = []
    for summed in (False, True):
        own = deepcopy(findings)
        backward = _Backward(passages, aligned.backward, counted, own, summed)
        own.difference = backward.first()
        own.factors = {e: factor.value for e, factor in backward.factors.items()}
        if own.difference is None:
            return own
        tried.append((len(own.right), -own.difference.ratio, own))
    return max(tried, key=lambda x: x[:2])[2]


Orders = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""Coordinates of a device, and examples as a call on it has them, call by call; `NONE`
for those that are not known."""

Places = dict[int, list[Aligned]]
"""The candidate's records by place, for each part of the value; where it passed."""


class _Sides(NamedTuple):
    """Records by the part that they show.

    Attributes:
      forward: For values, of which each copy has to be right.
      backward: For cotangents: those of several copies may be parts of a sum.
    """

    forward: Places
    backward: Places


def _aligned(
    passages: Sequence[Passage], records: Sequence[TapRecord], notes: list[str]
) -> _Sides:
    """The candidate's records by place, where it reached that tap."""
    places: dict[tuple[str, Layout, int], list[int]] = {}
    for place, passage in enumerate(passages):
        key = passage.name, passage.layout, len(passage.forward.values)
        places.setdefault(key, []).append(place)
    by_name: dict[str, list[TapRecord]] = {}
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    left = set(map(id, records))
    learned: set[tuple[str, int]] = set()
    sides = _Sides({}, {})
    # What is declared first: a shape alone may be explained by several tables.
    for find in (_declared, partial(_inferred, learned)):
        for (name, layout, _), own in places.items():
            like = [passages[p] for p in own]
            free = [r for r in by_name.get(name, ()) if id(r) in left]
            parts = find(layout, like, free)
            blocks: dict[ValuePart, list[TapRecord]] = {}
            for part, each in parts.items():
                blocks.setdefault(part.block(), []).extend(each)
                for record in each:
                    left.discard(id(record))
            for side, given in zip(sides, (parts, blocks), strict=True):
                aligned = [align(own, like, each, part) for part, each in given.items()]
                for place in own if aligned else ():
                    side.setdefault(place, []).extend(aligned)
    notes += _not_compared(passages, records, left)
    return sides


def _not_compared(
    passages: Sequence[Passage], records: Sequence[TapRecord], left: Set[int]
) -> Iterator[str]:
    """Notes on taps that were not reached, and on records of other shapes."""
    names = {p.name for p in passages}
    reached = {r.name for r in records}
    if records and names - reached:
        yield f"not reached by the candidate: {', '.join(sorted(names - reached))}"
    for name in sorted(reached - names):
        yield f"{name} is no tap in the loss"
    misfits = {
        (r.name, r.value.shape, any(not axis.declared for axis in r.mesh))
        for r in records
        if id(r) in left and r.name in names
    }
    for name, shape, free in sorted(misfits):
        advice = DECLARE if free else ""
        yield f"{name} was not compared where its shape is {shape}{advice}"


def _declared(
    layout: Layout, passages: Sequence[Passage], records: Sequence[TapRecord]
) -> dict[ValuePart, list[TapRecord]]:
    """The records whose shape is right with what their taps declare."""
    found: dict[ValuePart, list[TapRecord]] = {}
    for record in records:
        part = part_of(layout, record, declared(record))
        if part is not None:
            found.setdefault(part, []).append(record)
    return found


def _inferred(
    learned: set[tuple[str, int]],
    layout: Layout,
    passages: Sequence[Passage],
    records: Sequence[TapRecord],
) -> dict[ValuePart, list[TapRecord]]:
    """The records of which one division over the mesh explains shape and values.

    Args:
      learned: The axes of the taps before, with the sizes of what they divide.
      layout: The layout of the passages.
      passages: The reference's passages.
      records: Records of other shapes.
    """
    alike: dict[object, list[TapRecord]] = {}
    for record in records:
        key = record.mesh, record.axes, record.value.shape
        alike.setdefault(key, []).append(record)
    found: dict[ValuePart, list[TapRecord]] = {}
    for own in alike.values():
        tried = []
        for division in divisions(layout, own[0]):
            parts: dict[ValuePart, list[TapRecord]] = {}
            for record in own:
                part = part_of(layout, record, division)
                if part is not None:
                    parts.setdefault(part, []).append(record)
            known = sum(
                int((aligned.forward.found != NONE).sum())
                for part, each in parts.items()
                for aligned in [align(range(len(passages)), passages, each, part)]
            )
            pairs = {
                (cut.axis, layout.shape[cut.dim])
                for part in parts
                for cut in part.block().cuts
            }
            tried.append((known, len(pairs & learned), parts, pairs))
        tried.sort(key=lambda x: x[:2], reverse=True)
        # Among several that explain the shape, the values tell the right one; else
        # what the axes divide at the taps before.
        if tried and (len(tried) == 1 or tried[0][:2] > tried[1][:2]):
            known, _, parts, pairs = tried[0]
            learned |= pairs if known else set()
            for part, each in parts.items():
                found.setdefault(part, []).extend(each)
    return found


# --- forward ---


def _forward(
    passages: Sequence[Passage],
    aligned: Places,
    counted: np.ndarray,
    findings: Findings,
) -> Difference | None:
    # At the first tap those of any other one.
    orders = max((_orders(x, p) for p, x in aligned.items()), key=_known, default=[])
    for place, passage in enumerate(passages):
        owns = aligned.get(place, ())
        whole = passage.layout.axis is None
        every = np.ones(len(passage.forward.values), bool) if whole else counted.copy()
        every[list(passage.undecided.get("forward", ()))] = False
        if not owns or not every.any():
            continue
        told = [_told(own, place, every, orders) for own in owns]
        wrong = [each for each in told if each.missing]
        if whole and any(_of_parts(passages, passage, each.own) for each in wrong):
            findings.of_parts.add(place)
            findings.notes.append(
                f"{passage.label} was not compared: it has no axis of examples, and "
                "the candidate computes it of parts of the batch"
            )
            continue
        if wrong:
            differences = {
                str(each.own.part): _wrong_values(passages, place, each)
                for each in wrong
            }
            return _joined(differences, len(owns))
        if all(each.known for each in told):
            findings.right.append(f"forward {passage.label}")
        else:
            words = "examples have it in common, and no other tap tells whose it is"
            findings.notes.append(f"{passage.label} was not compared: {words}")
        # Where equal rows give no order, that of the tap before is kept.
        orders = max(_orders(owns, place), orders, key=_known)
    return None


class _Told(NamedTuple):
    """What the values of a part tell at a passage.

    Attributes:
      own: The records of the part.
      missing: The examples of which the part is wrong.
      rows: The wrong row of an example, where the order of its call tells it.
      known: Whether it is known whose the rows are.
    """

    own: Aligned
    missing: list[int]
    rows: dict[int, int]
    known: bool


def _told(own: Aligned, place: int, every: np.ndarray, orders: Orders) -> _Told:
    """Compares a part of the examples that count.

    Integers, single numbers, and what examples have in common do not tell whose they
    are. There the rows of a call are those of a call at the tap before.
    """
    passage, passed = own.passage_at(place), own.forward
    # Not by its class: an example's own value has to be there.
    seen = own.seen_at(place).copy()
    if passage.layout.axis is None:
        return _Told(own, np.flatnonzero(every & ~seen).tolist(), {}, True)
    common, bounds = _common(own.classes_at(place)), passage.forward.bounds
    single = bounds.shape[1] == 1 or bool((bounds == APART).all())
    by_order, rows = common | single, dict[int, int]()
    known = not (single and common.any())
    if by_order.any() or (every & ~seen).any():
        for call, each in _matched(own, place, orders):
            same = within(passed.values[each], *(x[call] for x in passage.forward))
            # What is another example's value by itself may be so in its own place.
            wrong = ~same & (by_order[call] | (passed.found[each] == NONE))
            rows.update(zip(call[wrong].tolist(), each[wrong].tolist(), strict=True))
            seen[call[~same & by_order[call]]] = False
            known = True
    return _Told(own, np.flatnonzero(every & ~seen).tolist(), rows, known)


def _of_parts(passages: Sequence[Passage], passage: Passage, own: Aligned) -> bool:
    """Whether a value without examples is computed of parts of the batch.

    What does not depend on the batch, such as a parameter, is the same in all calls.
    """
    passes = sum(
        len(p.forward.values)
        for p in passages
        if p.name == passage.name and p.layout == passage.layout
    )
    return len({row.tobytes() for row in own.shown.values}) > passes


def _common(classes: np.ndarray) -> np.ndarray:
    """Which examples have a class in common with others."""
    common: np.ndarray = np.bincount(classes)[classes] > 1
    return common


def _matched(
    own: Aligned, place: int, orders: Orders
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The examples and the rows of each call, which is like one at the tap before."""
    passed, each = own.forward, list(own.forward.rows_by_call())
    places = [(p, own.classes_at(p)) for p in own.places]
    alike = _cosines(passed.values, own.passage_at(place).forward.values)
    tried = [
        (int(same.sum()), p == place, p == place and alike[rows, whose].mean().round(3),
         -abs(number * len(orders) // len(each) - k), number, (k, p))
        for number, rows in enumerate(each)
        for k, (device, call) in enumerate(orders)
        if (device, len(call)) == (passed.devices[number], len(rows))
        for whose in [np.array(call)]
        for p, classes in places
        for same in [(passed.found[rows] == classes[whose]) & (whose != NONE)]
    ]  # fmt: skip
    used: set[Any] = set()
    # The calls that agree most first; those that agree equally by their direction, and
    # then in their order.
    for *_, number, (k, p) in sorted(tried, reverse=True):
        if not used & {number, (k, p)}:
            used |= {number, (k, p)}
            call = np.array(orders[k][1])
            if p == place:
                yield call[call != NONE], each[number][call != NONE]


def _joined(differences: Mapping[str, Difference], parts: int) -> Difference:
    """One difference of those of several parts: the worst one's words."""
    # A part without any such value cannot describe it.
    part, worst = max(
        differences.items(), key=lambda x: (x[1].words != ABSENT, x[1].ratio)
    )
    examples = {e for each in differences.values() for e in each.examples}
    words = worst.words
    if part:
        more = len(differences) - 1
        others = f" and {more} more" if more else ""
        words = f"on {part}{others} of {parts} parts: {words}"
    return replace(worst, examples=tuple(sorted(examples)), words=words)


def _orders(owns: Sequence[Aligned], place: int) -> Orders:
    """The device and the order of examples of each call, as far as it is known."""
    return [
        (device, call)
        for own in owns
        if own.passage_at(place).layout.axis is not None
        for classes in [own.classes_at(place)]
        for apart in [np.flatnonzero(~_common(classes))]
        for example in [dict(zip(classes[apart].tolist(), apart.tolist(), strict=True))]
        for device, rows in zip(
            own.forward.devices, own.forward.rows_by_call(), strict=True
        )
        for found in [own.forward.found[rows].tolist()]
        for call in [tuple(example.get(label, NONE) for label in found)]
        if {*call} - {NONE}
    ]


def _known(orders: Orders) -> int:
    """Of how many rows it is known whose they are."""
    return sum(e != NONE for _, call in orders for e in call)


def _wrong_values(passages: Sequence[Passage], place: int, told: _Told) -> Difference:
    own, missing = told.own, told.missing
    passage, passed = own.passage_at(place), own.forward
    examples = tuple(missing) if passage.layout.axis is not None else ()
    rows = {e: row for e, row in told.rows.items() if e in missing}
    # Rows of no example, or of another one that is near to a missing one.
    near = np.isin(passed.found, own.classes_at(place)[missing])
    strange = np.flatnonzero((passed.found == NONE) | near).tolist()
    cosine = _cosines(passed.values, passage.forward.values)
    for example in missing:
        free = [row for row in strange if row not in rows.values()]
        # No call tells which it is: the one of the nearest direction.
        if free and example not in rows:
            rows[example] = max(free, key=lambda r: float(cosine[r, example]))
    if not rows:
        return Difference("forward", passage.label, examples, float("inf"), ABSENT)
    known = sorted(rows)
    found = passed.values[[rows[e] for e in known]]
    alike = _alike(passages, passages[place], own.part)
    others = {label: p.forward.values[known] for label, p in alike.items()}
    bounds = passage.forward.bounds[known]
    ratio, words = _described(passage, others, found, bounds, known)
    return Difference("forward", passage.label, examples, ratio, words)


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

WHOLE = -1
"""The key of the factor of values without examples."""


class _Factor(NamedTuple):
    """What a candidate multiplies cotangents by, fitted at the tap where they begin.

    Attributes:
      value: The factor.
      error: Its error, which widens the bounds at earlier taps.
      place: The tap where it was fitted.
    """

    value: complex
    error: float
    place: int


class _Wrong(NamedTuple):
    """The wrong cotangents of one part of a value.

    Attributes:
      rows: The examples.
      found: The cotangent of each.
      expected: What it should be.
      bounds: The largest difference that rounding explains.
    """

    rows: list[int]
    found: np.ndarray
    expected: np.ndarray
    bounds: np.ndarray


@dataclass(slots=True)
class _Backward:
    """The search among cotangents, from the last tap to the first.

    Attributes:
      summed: Whether copies of a cotangent are terms of a sum, and not the whole each.
      factors: The factor of each example.
      whole: The factor of values without examples, until examples have one.
    """

    passages: Sequence[Passage]
    aligned: Places
    counted: np.ndarray
    findings: Findings
    summed: bool
    factors: dict[int, _Factor] = field(default_factory=dict)
    whole: dict[int, _Factor] = field(default_factory=dict)

    def first(self) -> Difference | None:
        each = [own for owns in self.aligned.values() for own in owns]
        if not any(len(own.backward.found) for own in each):
            return None
        for place in reversed(range(len(self.passages))):
            passage = self.passages[place]
            owns = self.aligned.get(place, ())
            compared = passage.backward is not None and owns
            if not compared or place in self.findings.of_parts:
                continue
            difference = self._judged(place, owns)
            if difference is not None:
                return difference
            self.findings.right.append(f"backward {passage.label}")
        return None

    def _judged(self, place: int, owns: Sequence[Aligned]) -> Difference | None:
        passage, factors = self.passages[place], self.factors
        whole = passage.layout.axis is None
        # Values of the whole batch have cotangents that are sums over all calls.
        if whole and len({round(abs(f.value), 6) for f in factors.values()}) > 1:
            return None  # A sum over calls, each with a factor of its own.
        starts = not whole and not factors
        self._establish(place, owns)
        if starts and factors:
            self.findings.entered = passage.label
            self.findings.groups = _groups(owns, place)
        return self._first_wrong(place)

    def _establish(self, place: int, owns: Sequence[Aligned]) -> None:
        """Takes factors from the first cotangents that are not zero."""
        whole = self.passages[place].layout.axis is None
        table = self._table(place)
        proposals: dict[int, list[_Factor]] = defaultdict(list)
        for own in owns:
            for label, members in self._classes(place, own):
                found, each, widths, keys = self._flowing(own, label, members)
                total = _total(each)
                power = float(np.vdot(total, total).real)
                if power == 0 or any(key in table for key in keys):
                    continue
                # Stale. Without such values the examples are lost, or count 0 times.
                if not (whole or found.any()) and _has_unknown(own):
                    continue
                factor = complex(_fitted(total, found))
                width = np.linalg.norm(np.sum(widths, axis=0) * np.abs(total)) / power
                value = factor if factor.imag else factor.real
                for key in keys:
                    proposals[key].append(_Factor(value, float(width), place))
        for key, proposed in proposals.items():
            # Parts of an example have one factor: 1 if that explains any of them.
            ones = (x for x in proposed if abs(x.value - 1) <= x.error)
            (self.whole if whole else self.factors)[key] = next(ones, proposed[0])

    def _classes(
        self, place: int, own: Aligned
    ) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """The classes that are judged at a place, and their members."""
        whole = self.passages[place].layout.axis is None
        # Once for each class, because its examples cannot be told apart.
        for label in dict.fromkeys(own.classes_at(place).tolist()):
            members = own.members(label)
            # From the last tap to the first, the last place of a class comes first.
            if max(p for p, _ in members) != place:
                continue  # Equal values at several passages were judged with the last.
            if not (whole or any(self.counted[e] for _, e in members)):
                continue  # A trainer may weight its examples' gradients afterwards.
            if any(e in self._undecided(p) for p, e in members):
                continue
            yield label, members

    def _first_wrong(self, place: int) -> Difference | None:
        """The difference at a place; or at a later tap, if that explains this one."""
        wrong = self._wrong_parts(place)
        if not wrong:
            return None
        table, whole = self._table(place), self.passages[place].layout.axis is None
        keys = {WHOLE if whole else e for _, each in wrong for e in each.rows}
        sources = {table[key].place for key in keys if key in table}
        # Several losses have cotangents of their own: one that is right in absolute
        # terms is right, and the tap that the factor was taken from is not.
        right = not any(self._wrong(place, own, absolute=True) for own, _ in wrong)
        absolute = bool(sources) and right
        # A loss that was compared before the examples had a factor may not have theirs.
        heads = () if absolute else self._heads_behind(place, wrong)
        for source in [max(sources)] if absolute else heads:
            if first := self._wrong_parts(source, absolute):
                place, wrong = source, first
                label = f"backward {self.passages[place].label}"
                if label in self.findings.right:
                    del self.findings.right[self.findings.right.index(label) :]
                break
        differences = {
            str(own.part): self._difference(place, own, each) for own, each in wrong
        }
        return _joined(differences, len(self.aligned[place]))

    def _heads_behind(
        self, place: int, wrong: Sequence[tuple[Aligned, _Wrong]]
    ) -> list[int]:
        """The places of the scalar values that explain a difference, the last first."""
        names: set[str] = set()
        for own, each in wrong:
            names |= _shares_of_heads(own.passage_at(place), each).keys()
        return [
            p
            for p in reversed(range(place + 1, len(self.passages)))
            if self.passages[p].name in names and p in self.aligned
        ]

    def _wrong_parts(
        self, place: int, absolute: bool = False
    ) -> list[tuple[Aligned, _Wrong]]:
        """The parts of a value whose cotangents are wrong."""
        owns = self.aligned[place]
        found = [(own, self._wrong(place, own, absolute)) for own in owns]
        return [(own, wrong) for own, wrong in found if wrong is not None]

    def _wrong(self, place: int, own: Aligned, absolute: bool) -> _Wrong | None:
        """The wrong cotangents of a part; `absolute`: without any factors."""
        table = {} if absolute else self._table(place)
        wrong: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for label, members in self._classes(place, own):
            found, each, widths, keys = self._flowing(own, label, members)
            known = [table[key].value for key in keys if key in table]
            # Members of a class without a factor yet are taken to have the others' one.
            usual = _Factor(sum(known) / len(known) if known else 1.0, 0.0, place)
            factors = [table.get(key, usual) for key in keys]
            values = np.array([factor.value for factor in factors])[:, None]
            errors = np.array([factor.error for factor in factors])[:, None]
            allowed = np.sum(np.abs(values) * (widths + errors * np.abs(each)), axis=0)
            expected = _total(values * each)
            if found.any() and sum(p == place for p, _ in members) > 1:
                # Equal examples: which cotangent is whose, and which is a copy, cannot
                # be told. Their direction can.
                factor = _fitted(expected, found)
                expected, allowed = factor * expected, abs(factor) * allowed
            if not np.abs(expected).any() and not np.abs(found).any():
                continue
            if not (np.abs(found - expected) <= allowed).all():
                wrong.update({e: (found, expected, allowed) for _, e in members})
        if not wrong:
            return None
        rows = sorted(wrong)
        columns = zip(*(wrong[e] for e in rows), strict=True)
        return _Wrong(rows, *map(np.stack, columns))

    def _undecided(self, place: int) -> Set[int]:
        return self.passages[place].undecided.get("backward", frozenset())

    def _flowing(
        self, own: Aligned, label: int, members: list[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
        """A class's cotangent; the reference's and bounds; the keys of its factors."""
        assert own.backward.cotangents is not None
        rows = own.backward.cotangents[own.backward.found == label]
        flowing = [(x, e) for p, e in members if (x := own.passage_at(p).backward)]
        each = np.stack([x.values[e] for x, e in flowing])
        widths = np.stack([x.bounds[e] for x, e in flowing])
        whole = self.passages[members[0][0]].layout.axis is None
        keys = [WHOLE if whole else e for _, e in flowing]
        return rows.sum(axis=0) if self.summed else _total(rows), each, widths, keys

    def _table(self, place: int) -> Mapping[int, _Factor]:
        """The factors at a place; those of the batch are what all examples have."""
        if self.passages[place].layout.axis is not None:
            return self.factors
        first = next(iter(self.factors.values()), None)
        return self.whole if first is None else {WHOLE: first}

    def _difference(self, place: int, own: Aligned, wrong: _Wrong) -> Difference:
        passage, rows = own.passage_at(place), wrong.rows
        examples = tuple(rows) if passage.layout.axis is not None else ()
        if not wrong.found.any():
            words = STALE if _has_unknown(own) else "no cotangent arrives"
            return Difference("backward", passage.label, examples, float("inf"), words)
        alike = _alike(self.passages, self.passages[place], own.part)
        others = {
            label: p.backward.values[rows]
            for label, p in alike.items()
            if p.backward is not None
        }
        others[passage.label] = wrong.expected
        begins = all(e in self.factors and self.factors[e].place == place for e in rows)
        told = _shares_told(_shares_of_heads(passage, wrong, begins))
        told = told or _multiples(wrong)
        ratio, words = _described(
            passage, others, wrong.found, wrong.bounds, rows, told
        )
        return Difference("backward", passage.label, examples, ratio, words)


def _shares_of_heads(
    passage: Passage, wrong: _Wrong, begins: bool = False
) -> dict[str, float]:
    """How often a cotangent counts what comes through scalar values; empty if not so.

    With the parts g_h that come through each of them and the rest g_0, a cotangent that
    is wrong in this way alone is g_0 + sum_h c_h g_h; those of c_h that are not 1. If
    the trainer's own factor begins here, it is c_0 g_0 + ...; those of c_h / c_0.
    """
    assert passage.backward is not None, "a cotangent is wrong"
    rows, found, expected, _ = wrong
    each = passage.backward.values[rows]
    # The candidate's own factor of each example is in what is expected.
    pairs = zip(each, expected, strict=True)
    factors = np.array([_fitted(own, x) for own, x in pairs])[:, None]
    parts = {name: factors * x[rows] for name, x in passage.through.items()}
    parts = {name: x for name, x in parts.items() if x.any()}
    if not parts or not np.isfinite(found).all():
        return {}
    error = float(np.linalg.norm(found - expected))
    own = expected - sum(parts.values())
    shares = _solved(list(parts.values()), found - own, error)
    if shares is None and begins:
        # Their factor was fitted to what is wrong: that of the rest is unknown, too.
        parts = {name: passage.through[name][rows] for name in parts}
        own = each - sum(parts.values())
        shares = _solved([own, *parts.values()], found, error) if own.any() else None
        shares = None if shares is None or not shares[0] else shares[1:] / shares[0]
    if shares is None:
        return {}
    counts = {n: float(x.real) for n, x in zip(parts, shares, strict=True)}
    return {name: count for name, count in counts.items() if abs(count - 1) > SHARE}


def _solved(
    parts: list[np.ndarray], wanted: np.ndarray, error: float
) -> np.ndarray | None:
    """The multiples of parts that add up to an array; None if none do."""
    sizes = np.array([np.linalg.norm(x) for x in parts])
    matrix = np.stack([x.ravel() for x in parts], 1) / sizes
    shares, _, _, singular = np.linalg.lstsq(matrix, wanted.ravel())
    # What is left of the error has to be small, and the parts have to be unlike.
    left = np.linalg.norm(matrix @ shares - wanted.ravel())
    found: np.ndarray = shares / sizes
    return None if left > SHARE * error or singular[-1] < SHARE else found


def _multiples(wrong: _Wrong) -> str:
    """How often each example's cotangent counts, if that is all that is wrong."""
    rows, found, expected, _ = wrong
    factors = np.array(list(map(_fitted, expected, found)))
    rest = np.linalg.norm(found - factors[:, None] * expected)
    groups: dict[float, list[int]] = {}
    for place, factor in enumerate(factors.real.tolist()):
        groups.setdefault(round(factor, 3), []).append(place)
    # One number is always a multiple of another; several of one factor are no accident.
    few = 1 < len(groups) <= max(2, len(rows) // 2)
    if not few or not rest <= SHARE * np.linalg.norm(found - expected):
        return ""
    return counts_told(
        [([rows[i] for i in own], factors[own[0]].real) for own in groups.values()]
    )


def _shares_told(shares: Mapping[str, float]) -> str:
    return " and ".join(
        f"its part through {name} is "
        + (f"{share:.4g} times the reference" if abs(share) > SHARE else "absent")
        for name, share in shares.items()
    )


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


def _groups(owns: Sequence[Aligned], place: int) -> list[tuple[int, ...]]:
    """The examples of each call in the backward pass that has cotangents."""
    groups: list[tuple[int, ...]] = []
    met: set[int] = set()
    for own in owns:
        classes = own.classes_at(place).tolist()
        assert own.backward.cotangents is not None
        for rows in own.backward.rows_by_call():
            live = [r for r in rows if own.backward.cotangents[r].any()]
            reached = {int(c) for c in own.backward.found[live]} - {NONE}
            group = tuple(
                e for e, c in enumerate(classes) if c in reached and e not in met
            )
            met.update(group)
            groups += [group] if group else []
    return groups


def _has_unknown(own: Aligned) -> bool:
    """Whether a cotangent is of a value that no example has; padding has zeros."""
    assert own.backward.cotangents is not None
    return bool(own.backward.cotangents[own.backward.found == NONE].any())


# --- words ---


def _alike(
    passages: Sequence[Passage], passage: Passage, part: ValuePart
) -> dict[str, Passage]:
    """What a part may be instead of its own: the given passage's part comes first.

    The same part of other passages whose rows have the same shape, and other parts of
    the same passage.
    """
    rest = [
        p
        for p in passages
        if p is not passage
        and p.layout.row_shape() == passage.layout.row_shape()
        and len(p.forward.values) == len(passage.forward.values)
    ]
    found = {p.label: part.of(p) for p in [passage, *rest]}
    for other in part.neighbours():
        found[f"{passage.label} on {other}"] = other.of(passage)
    return found


def _described(
    passage: Passage,
    wanted: Mapping[str, np.ndarray],
    found: np.ndarray,
    bounds: np.ndarray,
    examples: list[int],
    alike: str = "",
) -> tuple[float, str]:
    """The largest error/bound of several examples, and what they look like.

    `alike` is what they look like if they are known values in no other way.
    """
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
    known = likeness(passage.label, whole, finite_part(found))
    # A factor says nothing of one number of many, and everything of a loss's cotangent.
    if found.size == 1 and passage.layout.axis is None and expected.all():
        known = f"it is {(found / expected).real.item():.6g} times the reference"
    alike = known or alike
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
        for first, second in itertools.combinations(range(len(shape)), 2)
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
