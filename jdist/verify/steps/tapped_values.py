"""Values inside an update that `verify.tap` marks, such as a norm or a momentum.

The reference's update shows both sides of each to all trainers that are followed, so
that they have limits like the leaves of a state. What a candidate shows under the same
name, on any device and in any loop, must be one of the reference's values.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jdist._compat import equations_in
from jdist._errors import quoted, requirement
from jdist._tree import is_inexact
from jdist.verify.bound import Limit, in_double
from jdist.verify.evaluation.lockstep import Position, PrecisionPair
from jdist.verify.tracing.primitive import show
from jdist.verify.tracing.recording import (
    TapRecord,
    TapRecording,
    in_program_order,
    labels,
)

VALUES = "values"
"""The part of a step that tapped values are."""


def value_path(label: str) -> str:
    """The path of a tapped value among a step's leaves."""
    return f"{VALUES}/{label}"


class SeenValues:
    """Collects the tapped values of an update from all trainers that are followed.

    Args:
      update: The update's program.
      loss: Traces the loss; called only if the update has taps.

    Attributes:
      names: The names of its taps.

    Raises:
      ValueError: The loss has a tap of the same name: a candidate's values could not be
        told apart.
    """

    def __init__(self, update: ClosedJaxpr, loss: Callable[[], Any]) -> None:
        self.names = _taps(update)
        self._lock = threading.Lock()
        self._sides: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        if self.names:
            with TapRecording():
                both = sorted(self.names & _taps(loss().jaxpr))
            if both:
                rule = "must not have a tap's name in common with the loss"
                raise ValueError(requirement("step(update=...)", rule, quoted(both[0])))

    def observe(
        self, name: str, position: Position, given: Sequence[PrecisionPair]
    ) -> PrecisionPair:
        """Shows what a tap passes on, of all trainers together."""
        value = given[0]
        if not is_inexact(value.rounded):
            return value  # Its results tell.
        # The trainer's number makes a row of what is the same for all of them.
        number, *place = position
        at = jnp.stack([jnp.asarray(x, jnp.int32) for x in place])
        # The wide side passes on: results are made of it, so the tap is kept.
        sides = value.wide, value.rounded
        shown = show(*sides, at, jnp.asarray(number), name=name, receive=self._receive)
        return replace(value, wide=shown)

    def _receive(self, name: str, axes: int, arrays: Sequence[np.ndarray]) -> None:
        del axes
        wide, rounded, at, _ = arrays
        with self._lock:
            self._sides[tuple(at[0].tolist()), name] = rounded[0], wide

    def taken(self) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """The values of the last step by label, and each of all trainers in float64.

        The label is the name, with a number if the tap is passed several times.
        """
        with self._lock:
            sides, self._sides = self._sides, {}
        # By position, because XLA's threads show taps in any order.
        keys = sorted(sides)
        shown = [sides[key] for key in keys]
        rounded = (own for own, _ in shown)
        values = zip(labels([name for _, name in keys]), rounded, strict=True)
        return dict(values), [wide for _, wide in shown]


def _taps(program: ClosedJaxpr) -> frozenset[str]:
    own = (x for x in equations_in(program) if x.primitive.name == "tap")
    return frozenset(x.params["name"] for x in own)


def shown_values(
    records: Iterable[TapRecord],
    wanted: Mapping[str, Any],
    limits: Mapping[str, Limit | None],
) -> dict[str, np.ndarray]:
    """For each tapped value that a candidate shows, by path, what tells most of it.

    Replicas and loops show a value many times, and XLA in any order. Values that are
    none of the reference's stand for those that the candidate does not show, in the
    program's order, or else for the nearest.
    """
    by_name: dict[str, list[str]] = defaultdict(list)
    for path in wanted:
        if path.startswith(f"{VALUES}/"):
            by_name[path.removeprefix(f"{VALUES}/").partition("[")[0]].append(path)
    by_device: dict[Any, list[_Passage]] = defaultdict(list)
    for record in in_program_order(records):
        paths = by_name.get(record.name, [])
        for each in _each(record, [wanted[path] for path in paths]):
            ratios = [
                _ratio(value, wanted[path], limits[path])
                for path, value in zip(paths, each, strict=True)
            ]
            by_device[record.name, record.place].append(_Passage(each, ratios))
    found: dict[str, np.ndarray] = {}
    wrong: dict[str, tuple[float, np.ndarray]] = {}
    # Sorted, because devices arrive in any order.
    for (name, _), passed in sorted(by_device.items(), key=lambda x: x[0]):
        for path, passage, i in _assigned(by_name[name], passed):
            if passage.ratios[i] <= 1:
                found.setdefault(path, passage.values[i])
            # Among several devices, the one that is farthest off.
            elif path not in wrong or passage.ratios[i] > wrong[path][0]:
                wrong[path] = passage.ratios[i], passage.values[i]
    return found | {path: value for path, (_, value) in wrong.items()}


class _Passage(NamedTuple):
    """One passage of a tap: its value in the place of each of the reference's.

    Attributes:
      values: The value, of the shape of each of the reference's.
      ratios: Its error/bound as each of them.
    """

    values: list[np.ndarray]
    ratios: list[float]


def _assigned(
    paths: Sequence[str], passed: Sequence[_Passage]
) -> Iterator[tuple[str, _Passage, int]]:
    """Which of the reference's values each passage on one device is."""
    best = [int(np.argmin(passage.ratios)) for passage in passed]
    right = [passage.ratios[i] <= 1 for passage, i in zip(passed, best, strict=True)]
    each = list(zip(passed, best, right, strict=True))
    yield from ((paths[i], passage, i) for passage, i, ok in each if ok)
    strange = [passage for passage, _, ok in each if not ok]
    shown = {i for _, i, ok in each if ok}
    left = [i for i in range(len(paths)) if i not in shown]
    # A wrong value makes those after it wrong: they are in the reference's order.
    if len(strange) > len(left):
        # Those that are too many stand for the nearest: which is extra is not known.
        strange.sort(key=lambda passage: (min(passage.ratios), *passage.ratios))
    for k, passage in enumerate(strange):
        i = left[k] if k < len(left) else int(np.argmin(passage.ratios))
        yield paths[i], passage, i


def _each(record: TapRecord, wanted: Sequence[Any]) -> Iterable[list[np.ndarray]]:
    """The values of a record in the forward pass, beside each of the reference's.

    A shard stands in the reference's value, in the place of its part.
    """
    if record.cotangent is not None or not wanted:
        return
    like = np.asarray(wanted[0])
    part = [slice(0, size) for size in like.shape]
    for axis, i in zip(record.mesh, record.place, strict=True):
        if axis.dim is not None and axis.dim < like.ndim:
            own = part[axis.dim]
            size = (own.stop - own.start) // axis.size
            first = own.start + i * size
            part[axis.dim] = slice(first, first + size)
    shape = like[tuple(part)].shape
    if record.value.shape[record.axes :] != shape:
        return
    # Another precision is no fault of its own: the value tells.
    for value in record.value.astype(like.dtype).reshape(-1, *shape):
        wholes = [np.array(own) for own in wanted]
        for whole in wholes:
            whole[tuple(part)] = value
        yield wholes


def _ratio(value: np.ndarray, wanted: np.ndarray, limit: Limit | None) -> float:
    assert limit is not None, "taps mark floating values"
    with np.errstate(invalid="ignore"):
        off = np.abs(in_double(value) - in_double(wanted))
        ratio = float(np.max(off / limit.bound, initial=0))
    # Equal infinities do not differ.
    if np.array_equal(value, wanted, equal_nan=True):
        return 0.0
    return ratio if np.isfinite(ratio) else float("inf")
