"""Attribution of a wrong training step to its gradient, update or model state.

Where the trainer shows the gradient that it gave to its optimizer, the parts are judged
one by one. Where it does not, its optimizer state may tell: an accumulator, such as
Adam's first moment or a momentum buffer, is a linear function of the gradient, so the
gradient that it was given can be read off. Either the reference's update makes the
trainer's new parameters of that gradient, or it does not.

Plain SGD keeps nothing: twice the rate and twice the gradient are then the same step.
Nothing is guessed there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from jdist._compat import double_precision
from jdist._tree import Shaped, is_inexact, words
from jdist.verify.bound import in_double, unit_roundoff
from jdist.verify.evaluation.lockstep import PrecisionPair, Value
from jdist.verify.evaluation.piecewise import BOTH
from jdist.verify.explanations.diagnosis import diagnose, nearest_factor
from jdist.verify.report import Attribution, LeafReport, worst_first
from jdist.verify.steps.clipping import clipped_in_parts
from jdist.verify.steps.tapped_values import VALUES
from jdist.verify.steps.trajectory import Moment

# A suspected cause must account for all but this share of what it is to explain.
REST = 1e-2

# Gradients so small that no rule for large ones, such as clipping, applies to them.
SMALL = (2.0**-30, 2.0**-29)

SHOW = (
    "Return verify.Trained(params, opt_state, gradient=...) with the gradient that the "
    "optimizer was given, and the report says which"
)
COMPOSE = (
    "verify.step(loss_fn, update, state, batches, candidates), with the loss and the "
    "optimizer's update, says which"
)
TOLD = 4
"""How many right values, or wrong leaves, are listed."""

UNKNOWN = "gradient or optimizer update"
CLIPPING = "gradient clipping"

STALE = "own at the parameters of the step before: they are stale"
"""The words after "it is the reference's" for a gradient of stale parameters."""


class Accumulator(NamedTuple):
    """A leaf of the optimizer's state that is linear in a leaf of the gradient.

    Attributes:
      name: Path of the leaf.
      factor: Factor that multiplies the gradient.
      origin: Value of the leaf for a gradient of zero, float64.
    """

    name: str
    factor: float
    origin: np.ndarray

    def gradient(self, leaves: Mapping[str, Any]) -> np.ndarray:
        """The gradient from which a state was computed, float64."""
        return (in_double(leaves[self.name]) - self.origin) / self.factor

    def bound(self, moment: Moment) -> np.ndarray:
        """The bound on the difference between the gradients of two right states."""
        limit = moment.limits[self.name]
        assert limit is not None, f"{self.name} is floating"
        return np.asarray(limit.bound) / abs(self.factor)


class _WrongStep(NamedTuple):
    """A wrong step of a trainer.

    Attributes:
      rows: The rows of all its leaves; some fail.
      found: Its leaves by path.
      moment: The reference's step.
    """

    rows: Sequence[LeafReport]
    found: Mapping[str, Any]
    moment: Moment

    @property
    def failing(self) -> list[str]:
        """The leaves that fail."""
        return [row.path for row in self.rows if row.problem]

    @property
    def updated(self) -> list[str]:
        """Those among the new parameters and the optimizer's state."""
        return list(_updated(dict.fromkeys(self.failing)))

    @property
    def complete(self) -> bool:
        """Whether all new parameters and the state are there, of the right shapes."""
        wanted = _updated(self.moment.wanted).items()
        return all(_alike(self.found.get(path), x) for path, x in wanted)

    def worst(self, *parts: str) -> str:
        """The worst leaf of some parts, and why it fails; others that fail too."""
        own = (
            r for r in self.rows if r.problem and any(within(r.path, p) for p in parts)
        )
        row, *others = worst_first(own)
        also = ", ".join(other.path for other in others[:TOLD])
        return f"{row.path}: {row.problem}" + (f"; also wrong: {also}" if also else "")

    def is_made_so(self, path: str, made: ArrayLike) -> bool:
        """Whether a leaf is this, up to rounding or a small part of its error."""
        found, limit = in_double(self.found[path]), self.moment.limits[path]
        assert limit is not None, f"{path} is floating"
        rest = found - np.asarray(made)
        if (np.abs(rest) <= limit.bound).all():
            return True
        error = found - in_double(self.moment.wanted[path])
        return bool(np.linalg.norm(rest) <= REST * np.linalg.norm(error))


def attributed(
    rows: Sequence[LeafReport], found: Mapping[str, Any], moment: Moment, step: int
) -> tuple[Attribution, ...]:
    """Attributes the first wrong step of a trainer to its parts.

    Args:
      rows: The rows of all its leaves at that step; some fail.
      found: Its leaves by path.
      moment: The reference's step.
      step: Its number, from 1.
    """
    # No gradient can be read off leaves of other processes.
    wrong = _WrongStep(rows, {path: _whole(x) for path, x in found.items()}, moment)
    failing, parts = wrong.failing, list[tuple[str, str]]()
    if any(within(path, "states") for path in failing):
        parts.append(("model state", wrong.worst("states")))
    values = [row for row in rows if within(row.path, VALUES)]
    if any(within(path, "gradient") for path in failing):
        worst, clip = wrong.worst("gradient"), _clip_of_shown(wrong)
        parts.append((CLIPPING, f"{clip}. {worst}") if clip else ("gradient", worst))
    # A tapped value, or the model's state alone, is wrong: no more is to be inferred.
    elif not wrong.updated or any(row.problem for row in values):
        pass
    elif any(within(path, "gradient") for path in found):
        why = f"its gradient is right; {wrong.worst('params', 'state')}"
        clip = _clip_of_state(wrong)
        told = clip or _in_turns(wrong) or _decayed(wrong)
        part = CLIPPING if clip else "optimizer update"
        parts.append((part, f"{told}; {why}" if told else why))
    else:
        parts.append(_inferred(wrong))
    name, parts = rows[0].candidate, _with_values(parts, values)
    return tuple(Attribution(name, step, part, why) for part, why in parts)


def _with_values(
    parts: list[tuple[str, str]], values: Sequence[LeafReport]
) -> list[tuple[str, str]]:
    """The parts, and the first wrong value that is tapped in the update."""
    names = [bare(row.path) for row in values]
    first = next((i for i, row in enumerate(values) if row.problem), None)
    if first is not None:
        why = values[first].problem
        if first:
            why += f". Right before it: {', '.join(names[:first][-TOLD:])}"
        return [*parts, (names[first], why)]
    if not names:
        return parts
    right = f"its tapped values are right: {', '.join(names[-TOLD:])}"
    return [(part, f"{right}; {why}") for part, why in parts]


def attributed_of_whole(
    of_batch: Mapping[str, bool],
    rows: Sequence[LeafReport],
    found: Mapping[str, Any],
    moment: Moment,
    step: int,
) -> tuple[Attribution, ...]:
    """Attributes the first wrong step of a trainer without a known gradient.

    Args:
      of_batch: Whether each leaf of the new state depends on the batch.
      rows: As in `attributed`.
      found: As in `attributed`.
      moment: As in `attributed`.
      step: As in `attributed`.
    """
    wrong = _WrongStep(rows, found, moment)
    updated = [path for path in wrong.failing if _is_updated(path)]
    rest = (path for path in wrong.failing if path not in updated)
    places = dict.fromkeys(path.partition("/")[0] for path in rest)
    parts = [(_PARTS.get(x, x), wrong.worst(x)) for x in places]
    # Such as a count: no gradient can make it wrong.
    fixed = [path for path in updated if not of_batch.get(path)]
    if fixed:
        why = f"{fixed[0]}, which does not depend on the batch, is wrong"
        parts.append(("optimizer update", why))
    elif updated:
        parts.append((UNKNOWN, f"{wrong.worst(*updated)}. {COMPOSE}"))
    name = rows[0].candidate
    return tuple(Attribution(name, step, part, why) for part, why in parts)


_PARTS = dict.fromkeys(("states", "batch_stats", "model_state"), "model state")


def _is_updated(path: str) -> bool:
    # Also "opt", "opt_state", "optim", "optimizer".
    return within(path, "params") or within(path, "state") or path.startswith("opt")


def within(path: str, part: str) -> bool:
    """Whether a leaf is in a part of a state."""
    return path == part or path.startswith(f"{part}/")


def _clip_of_shown(wrong: _WrongStep) -> str:
    """The clip that explains a gradient that the trainer shows; empty if none does."""
    right = {p: x for p, x in wrong.moment.wanted.items() if within(p, "gradient")}
    right = {p: x for p, x in right.items() if x is not None}
    shown = {path: wrong.found[path] for path in right if path in wrong.found}
    if not all(_alike(shown.get(path), x) for path, x in right.items()):
        return ""
    return clipped_in_parts(shown, right, wrong.moment)


def _clip_of_state(wrong: _WrongStep) -> str:
    """The clip that explains an optimizer's state; empty if none does."""
    moment = wrong.moment
    if moment.composed is None or not wrong.complete:
        return ""
    accumulators = _accumulators(moment) or {}
    own, gradient = (
        {path: x.gradient(leaves) for path, x in accumulators.items()}
        for leaves in (moment.wanted, wrong.found)
    )
    return clipped_in_parts(gradient, own, moment) if gradient else ""


def _inferred(wrong: _WrongStep) -> tuple[str, str]:
    """The part, and why, from the optimizer's state alone."""
    moment, worst = wrong.moment, wrong.worst("params", "state")
    unknown = UNKNOWN, f"{worst}. {SHOW}"
    if not wrong.complete:
        return unknown
    if told := _in_turns(wrong):
        return "optimizer update", f"{told}; {worst}"
    fixed = [p for p in wrong.updated if moment.limits[p] is None]
    if fixed:
        why = f"{fixed[0]}, which does not depend on the gradient, is wrong"
        return "optimizer update", why
    # Last, because it compiles the update in float64.
    accumulators = _accumulators(moment)
    if accumulators is None:
        return unknown
    return _of_gradient(wrong, accumulators) or unknown


def _of_gradient(
    wrong: _WrongStep, accumulators: Mapping[str, Accumulator]
) -> tuple[str, str] | None:
    """The part, and why, given the gradient that the optimizer was given."""
    moment, worst = wrong.moment, wrong.worst("params", "state")
    # The reference's is read off too: it may have been clipped.
    own = {p: x.gradient(moment.wanted) for p, x in accumulators.items()}
    gradient = {p: x.gradient(wrong.found) for p, x in accumulators.items()}
    ratios = {
        p: np.abs(gradient[p] - own[p]) / x.bound(moment)
        for p, x in accumulators.items()
    }
    off = [path for path, ratio in ratios.items() if (ratio > 1).any()]
    if not off:
        right = "optimizer state"
        if any(within(path, "state") for path in wrong.updated):
            right = next(iter(accumulators.values())).name
        told = "; ".join(filter(None, (f"its {right} is right", _decayed(wrong))))
        return "optimizer update", f"{told}; {worst}"
    if clip := clipped_in_parts(gradient, own, moment):
        return CLIPPING, f"{clip}; {worst}"
    # Before the update is tried: decay that is added to the gradient is the optimizer's
    # mistake, and its update of that gradient would agree.
    decay = _decay({path: gradient[path] - own[path] for path in off}, moment)
    if decay is not None:
        why = f"as if a weight decay of {decay:.3g} were added to the gradient"
        return "optimizer update", f"{why} of {', '.join(map(bare, off))}"
    if not _explained(wrong, gradient):
        return None
    path = max(off, key=lambda path: float(ratios[path].max()))
    known = own | ({STALE: moment.stale[path]} if path in moment.stale else {})
    told = diagnose(path, known, gradient[path], ratios[path])
    why = "its optimizer state is the reference's update of another gradient, of"
    return "gradient", f"{why} {bare(path)}: {told}"


def _updated(leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {
        p: x for p, x in leaves.items() if within(p, "params") or within(p, "state")
    }


def _whole(leaf: ArrayLike | None) -> np.ndarray | None:
    """The leaf on this host; None where no host has all of it."""
    if isinstance(leaf, jax.Array):
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            return None
        leaf = words(leaf)
    return None if leaf is None else np.asarray(leaf)


def _alike(leaf: Shaped | None, reference: Shaped | None) -> bool:
    if reference is None:
        return leaf is None
    return leaf is not None and leaf.shape == reference.shape


def bare(path: str) -> str:
    """A leaf's path without the part of the state that it is in."""
    return path.partition("/")[2] or path


# --- the gradient that an optimizer state was made of ---


def _accumulators(moment: Moment) -> dict[str, Accumulator] | None:
    """An accumulator for each leaf of the gradient; None if a leaf has none."""
    gradients = [
        path for path, x in moment.wanted.items()
        if within(path, "gradient") and x is not None
    ]  # fmt: skip
    # A fixed seed, so that a report can be reproduced.
    rng = np.random.default_rng(0)
    own = [in_double(moment.wanted[path]) for path in gradients]
    # Far from 0, because the tangent is divided by it.
    direction = [rng.uniform(1, 2, size=x.shape).astype(x.dtype) for x in own]
    with double_precision(), jax.numpy_dtype_promotion("standard"):
        # Two gradients: a slope that differs between them is not linear.
        slopes = [
            jax.jvp(
                lambda *wide: _update(moment, wide),
                [x * small for x in own],
                direction,
            )
            for small in SMALL
        ]
    known: dict[str, Accumulator] = {}
    for name in _floating(moment):
        value = np.asarray(slopes[0][0][name])
        first, second = (np.asarray(tangent[name]) for _, tangent in slopes)
        # They depend on the step, not on the gradient alone.
        if within(name, "params") or _is_average(name, moment, *slopes[0]):
            continue
        for path, point, along in zip(gradients, own, direction, strict=True):
            factor = _factor(first, along)
            # A slope that depends on the gradient: not linear, as a square.
            if path in known or factor is None or _factor(second, along) != factor:
                continue
            origin = value - factor * SMALL[0] * point
            known[path] = Accumulator(name, factor, origin)
            break
    return known if len(known) == len(gradients) else None


def _is_average(
    name: str,
    moment: Moment,
    after: Mapping[str, jax.Array],
    tangent: Mapping[str, jax.Array],
) -> bool:
    """Whether a leaf is an average of a parameter, or a copy of it.

    Such a leaf becomes a + c (p - a), of the new parameter p, with 0 < c <= 1.
    """
    old, own = in_double(moment.before[name]), np.asarray(tangent[name])
    # The update has rounded c and 1 - c; a factor is known to 12 digits.
    near = max(4 * unit_roundoff(moment.wanted[name].dtype), 1e-9)
    for path in (path for path in after if within(path, "params")):
        share = _factor(own, np.asarray(tangent[path]))
        if share is None or not 0 < share < 1 + near:
            continue
        way = share * (np.asarray(after[path]) - old)
        rest = np.linalg.norm(np.asarray(after[name]) - old - way)
        if rest <= near * (np.linalg.norm(old) + np.linalg.norm(way)):
            return True
    return False


def _factor(tangent: np.ndarray, along: np.ndarray) -> float | None:
    """The ratio of a tangent to its direction, to 12 digits; None if it varies."""
    if tangent.shape != along.shape or not tangent.any() or not along.all():
        return None
    # Entry by entry, because an accumulator has one factor for all entries.
    ratio = tangent / along
    factor = float(ratio.ravel()[0].real)
    if factor == 0 or not np.allclose(ratio, factor, rtol=1e-12, atol=0):
        return None
    # So that the slopes at two gradients compare equal if the update is linear.
    return float(f"{factor:.11e}")


def _update(moment: Moment, gradient: Sequence[ArrayLike]) -> dict[str, jax.Array]:
    """The floating leaves of the reference's update of another gradient, in float64."""
    after = _updated_from(moment, _start(moment), gradient)
    wide = [x.wide for x in after if is_inexact(x.rounded)]
    return dict(zip(_floating(moment), wide, strict=True))


def _start(moment: Moment) -> list[Value]:
    """The parameters and the optimizer's state before the step."""
    assert moment.composed is not None
    params, _, opt_state = moment.composed.inputs
    return jax.tree.leaves((params, opt_state))


def _updated_from(
    moment: Moment, state: Sequence[Value], gradient: Sequence[ArrayLike]
) -> list[PrecisionPair]:
    """The reference's update of any state and gradient, in float64."""
    assert moment.composed is not None
    params, own, _ = map(jax.tree.leaves, moment.composed.inputs)
    pairs, count = map(PrecisionPair, own, gradient), len(params)
    given = [*state[:count], *pairs, *state[count:]]
    return moment.composed.update.run(given, BOTH)


# --- an update for each part of the batch ---


def _in_turns(wrong: _WrongStep) -> str:
    """The micro-batches that an update ran once for each, in words; empty if for none.

    It moves the parameters by each in turn, or by the mean of all moves: momenta tell.
    """
    moment, failing = wrong.moment, wrong.updated
    if moment.composed is None or not wrong.complete:
        return ""
    names = [p for p, x in _updated(moment.wanted).items() if x is not None]
    own = [p for p in _floating(moment) if p in failing]
    states = [p for p in own if within(p, "state")]
    told = states or own
    if not told:
        return ""

    with double_precision(), jax.numpy_dtype_promotion("standard"):
        begin: list[Value] = _start(moment)
        for count, shares, gradients in moment.in_parts():
            # Each micro-batch's share of the gradient, or a gradient of its own.
            for scales in dict.fromkeys([tuple(shares), (1.0,) * count]):
                state = begin
                for scale, part in zip(scales, gradients, strict=True):
                    given = [x for p, x in part.items() if x is not None]
                    slope = [scale * in_double(x) for x in given]
                    after = _updated_from(moment, state, slope)
                    state = [x if is_inexact(x.rounded) else x.rounded for x in after]
                made = {p: x.wide for p, x in zip(names, after, strict=True)}
                if all(wrong.is_made_so(p, made[p]) for p in told):
                    return _turns_told(count, states, moment)
    return ""


def _turns_told(count: int, states: Sequence[str], moment: Moment) -> str:
    words = f"as if it ran once for each of {count} micro-batches"
    if not states:
        return words
    linear = [x.name for x in (_accumulators(moment) or {}).values()]
    momenta = [path for path in states if path in linear]
    if momenta:
        return f"{words}: its momentum {momenta[0]} is that of {count} updates"
    return f"{words}: its {states[0]} is that of {count} updates"


def _floating(moment: Moment) -> list[str]:
    """Paths of the leaves that the update returns in float64."""
    updated = _updated(moment.wanted).items()
    return [path for path, x in updated if x is not None and is_inexact(x)]


def _explained(wrong: _WrongStep, gradient: Mapping[str, np.ndarray]) -> bool:
    """Whether the reference's update of that gradient gives what was found."""
    wanted = wrong.moment.wanted.items()
    order = [p for p, x in wanted if p in gradient and x is not None]
    with double_precision(), jax.numpy_dtype_promotion("standard"):
        after = _update(wrong.moment, [gradient[path] for path in order])
    return all(wrong.is_made_so(p, after[p]) for p in wrong.updated)


def _decayed(wrong: _WrongStep) -> str:
    """The decay that explains what is wrong in new parameters; empty if none does."""
    _, found, moment = wrong
    added = {}
    for path in wrong.updated:
        if not within(path, "params") or path not in moment.before:
            continue
        limit, wanted = moment.limits[path], moment.wanted[path]
        if limit and _alike(found.get(path), wanted):
            extra = in_double(found[path]) - in_double(wanted)
            added[path] = np.where(np.abs(extra) > limit.bound, extra, 0)
    rate = _decay(added, moment) if added else None
    told = "times the parameters were added there (a weight decay)"
    return "" if rate is None else f"as if {rate:.3g} {told}"


def _decay(added: Mapping[str, np.ndarray], moment: Moment) -> float | None:
    """The multiple of the parameters that was added to some entries, if that is all."""
    # A decay has one rate for all leaves.
    pairs = [
        (extra[extra != 0], in_double(moment.before[own])[extra != 0])
        for path, extra in added.items()
        for own in [path.replace("gradient", "params", 1)]
    ]
    extra, params = map(np.concatenate, zip(*pairs, strict=True))
    # A single number is always a multiple of another.
    if extra.size < 2:
        return None
    rate = nearest_factor(params, extra)
    fits = np.linalg.norm(extra - rate * params) <= REST * np.linalg.norm(extra)
    return rate if fits else None
