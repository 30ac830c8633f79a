"""Runs a program in lockstep piece by piece; pieces that are alike compile once.

A large program takes XLA longer to compile than to run, above all with an error after
every equation. So it is cut into *pieces*: products, loops and branches singly, and all
that stands between two of them together. Equal pieces, such as those of a transformer's
blocks, share one compiled program. Values are freed after their last use. In a small
program only decisions and `stop_gradient` stand alone: to call its pieces takes as long
as to run them. So too where few pieces are alike.

A run has one of three forms:

- `BOTH`: the program as it is, and in float64 (`lockstep`);
- `EXACT`: in float64 alone;
- `DRAWN`: perturbed as rounding would, in float64; of the form `drawn_form` in float32
  unless the program has float64. The roundings of float32 come on top of those that are
  drawn: errors are at most somewhat larger than those of the program.

Several runs with the same rounded side can be made `together`.

Decisions, such as an argmax, are the rounded side's. A run on one side takes them from
a run of both: a piece that decides is *replayed* with the rounded inputs that it had
there. What stands under `stop_gradient` can be held at its values there, too. A drawn
run may also be *free*: it decides by its own values, rounded, as another program would.

Taps of the program stand alone, so that equal pieces between them are shared, and pass
their values to an observer without a program of their own; those in loops do so from
inside a piece.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.typing import ArrayLike

from jdist._compat import equations_in, inner_programs
from jdist.verify.bound import LARGE, single_of, wide_of
from jdist.verify.evaluation.compilation import TINY, quick_to_compile
from jdist.verify.evaluation.lockstep import (
    HELD,
    UNMEASURED,
    Form,
    Observer,
    Perturbation,
    PrecisionPair,
    RoundedSideNeeded,
    Value,
    as_array,
    called,
    has_sides,
    interpreted,
    noise_pool,
    results_of,
    sized_variables,
    value_of,
)
from jdist.verify.evaluation.products import kept_bits

BOTH = Form(True, wide_of)
EXACT = Form(False, wide_of)
DRAWN = Form(False, wide_of, drawn=True)


Recording = dict[int, "list[Value]"]
"""The inputs of pieces that decide, or hold values, by the pieces' numbers."""

# The equations, and the entries of the largest value, of a small program.
FEW_EQUATIONS, FEW_ENTRIES = 500, 2**21

# It is cut, too, where pieces have more equations on average, as updates of leaves do.
MANY = 20

# A longer program of as small values is left whole, too, if more than this share of its
# equations would be compiled after it was cut: few pieces are alike.
UNLIKE = 0.75

# A group of more equations between products is divided.
LONG = 100

# Pieces that XLA may be given ahead of those that have run: each takes its memory.
AHEAD = 4


class Abandoned(Exception):
    """A run was ended before its results were there."""


class InlinedVariable:
    """A variable of a program whose calls are inlined."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval


class Equation(NamedTuple):
    """An equation, with variables of the inlined program or literals."""

    own: JaxprEqn
    inputs: Sequence[Any]
    outputs: Sequence[InlinedVariable]


@dataclass(slots=True, eq=False)
class Piece:
    """Equations that are compiled together.

    Attributes:
      equations: In order.
      inputs: What they take from outside.
      outputs: What later pieces, or the program's results, take from them.
      freed: Inputs and outputs that no later piece takes.
      key: Equal for pieces that may share a compiled program.
      decides: Whether its results may depend on decisions.
      holds: Whether it has a `stop_gradient`.
      decisions: The primitives that decide by values; none where the rounded side also
        stands for what has no other.
    """

    equations: list[Equation]
    inputs: list[InlinedVariable]
    outputs: list[InlinedVariable]
    freed: list[InlinedVariable]
    key: object
    decides: bool
    holds: bool
    decisions: frozenset[str]


class CompiledPiece(NamedTuple):
    """A piece in one form, compiled when it runs first.

    Attributes:
      run: `run(noise, values, before)`; the noise is the amplitude, the seed, the pool
        and the beginning of positions.
      missed: Primitives whose rounding could not be measured.
    """

    run: Callable[..., list[Value]]
    missed: set[str]


class Pieces:
    """A program that runs piece by piece, with its compiled pieces.

    Args:
      program: As traced in the settings that it is judged in.
      accumulation: The dtype in which sums of 16-bit numbers are accumulated.
      compiled: Compiled pieces by their keys, which programs may share.
      observer: Is called with every tapped value. Positions begin with the seed of the
        run and the number of the piece.

    Attributes:
      program: The program.
      inputs: Shapes and dtypes of the program's arguments.
      largest: The number of entries of its largest value.
      tiny: Whether its values are so small that it is over at once.
      missed: Primitives whose rounding could not be measured.
      decisions: The primitives whose decisions a free run makes for itself.
    """

    def __init__(
        self,
        program: ClosedJaxpr,
        accumulation: Any,
        compiled: dict[Any, CompiledPiece],
        observer: Observer | None = None,
    ) -> None:
        self.missed: set[str] = set()
        self._accumulation = accumulation
        self._compiled = compiled
        self.program = program
        self.inputs = [x.aval for x in program.jaxpr.invars]
        self._inputs, self._constants, equations, results = _inlined(program)
        # The numbers of the results that are this variable.
        self._wanted: dict[InlinedVariable, list[int]] = {}
        for number, variable in enumerate(results):
            self._wanted.setdefault(variable, []).append(number)
        self._observer = observer if any(map(_shows, equations)) else None
        each = [(x.own.primitive.name, x.inputs, x.outputs) for x in equations]
        self._sized = sized_variables(each, results)
        values = [*self._inputs, *(x for y in equations for x in y.outputs)]
        self.largest = max((x.aval.size for x in values), default=1)
        cut = functools.partial(_cut, equations, self._inputs, results)
        extremes = _EXTREMES if any(map(_compares, equations)) else frozenset()
        self._pieces, count = cut(_ALONE | extremes), len(equations)
        short = count <= min(FEW_EQUATIONS, MANY * len(self._pieces))
        whole = self.largest <= FEW_ENTRIES and (
            short or _unlike(self._pieces) > UNLIKE * count
        )
        if whole:
            self._pieces = cut(_APART | extremes)
        self.tiny = whole and self.largest <= TINY
        self.holds = any(piece.holds for piece in self._pieces)
        self.decisions = frozenset().union(*(x.decisions for x in self._pieces))
        free = [i for i, piece in enumerate(self._pieces) if piece.decisions]
        self._last_free = max(free, default=-1)
        self._abandoned = False
        self._pool: np.ndarray | None = None
        self._placed: jax.Array | None = None

    @property
    def deciding(self) -> int:
        """The number of pieces that a run on one side has to be told decisions for."""
        return sum(piece.decides for piece in self._pieces)

    def run(
        self,
        inputs: Sequence[Value],
        form: Form,
        *,
        amplitude: ArrayLike = 0.0,
        seed: int | np.ndarray = 0,
        recording: Recording | None = None,
        replay: Recording | None = None,
        free: bool = False,
        receive: Callable[[int, PrecisionPair], None] | None = None,
    ) -> list[PrecisionPair]:
        """Evaluates the program; to be called with 64-bit types enabled.

        Args:
          inputs: Its arguments. A floating array is exact, with the same value on both
            sides; a `PrecisionPair` has a wide side of its own, or a function that
            makes it for each piece that needs it.
          form: The form of the run.
          amplitude: Factor of the perturbations; of several runs one for each.
          seed: Seed of a drawn run, and the number of any run for an observer; of
            several runs one for each.
          recording: Is filled, for runs that replay it.
          replay: A recording.
          free: Whether decisions are made anew, and not replayed. The run then ends
            with the last of them, and what it has recorded is replayed for results.
          receive: Is called with the number of each result and the result as soon as
            there is one; none is kept then.

        Returns:
          The results; empty if `receive` takes them.

        Raises:
          RoundedSideNeeded: The program decides and nothing is replayed.
          Abandoned: Another thread abandoned the run.
        """
        values: dict[InlinedVariable, Value] = dict(self._constants)
        found = dict[int, PrecisionPair]()
        take = functools.partial(self._take, form, receive or found.__setitem__)
        given = dict(zip(self._inputs, inputs, strict=True))
        late = {x for x in given.keys() - self._wanted if _is_late(given[x])}
        values |= given
        values |= {x: _entering(given[x], form) for x in given if x not in late}
        take(values)
        for number, piece in enumerate(self._pieces):
            operands = [
                _entering(values[x], form) if x in late else values[x]
                for x in piece.inputs
            ]
            sided = any(isinstance(x, PrecisionPair) for x in operands)
            if piece.decides and sided and not form.rounded:
                if replay is None:
                    raise RoundedSideNeeded
                own = free and bool(piece.decisions)
                operands = _with_rounded(operands, replay[number], own)
            before = None
            if form.held and piece.holds and sided:
                assert replay is not None
                before = [
                    _but(now, wide=getattr(old, "wide", None))
                    for now, old in zip(operands, replay[number], strict=True)
                ]
            noise = self._source(form, amplitude, seed, number)
            made = self._ran(piece, form, noise, operands, before)
            if recording is not None and sided and (piece.decides or piece.holds):
                recording[number] = operands
            values.update(made)
            take(made)
            for variable in piece.freed:
                del values[variable]
            # Taps in loops deliver while a piece runs.
            if number % AHEAD == 0 or self._observer is not None:
                jax.block_until_ready(list(made.values()))
            if free and number == self._last_free:
                return []
        return [found[number] for number in sorted(found)]

    def _take(
        self,
        form: Form,
        receive: Callable[[int, PrecisionPair], None],
        values: dict[InlinedVariable, Value],
    ) -> None:
        """Passes on those of the values that are results."""
        for variable, value in values.items():
            for number in self._wanted.get(variable, ()):
                receive(number, _with_sides(value, form))

    def _ran(
        self,
        piece: Piece,
        form: Form,
        noise: Sequence[Any],
        operands: list[Value],
        before: list[Value] | None,
    ) -> dict[InlinedVariable, Value]:
        """The outputs of a piece."""
        if self._abandoned:
            raise Abandoned
        compiled = self._program(piece, form)
        try:
            found = compiled.run(noise, operands, before)
        except RoundedSideNeeded:
            piece.decides = True
            raise
        # What JAX does not evaluate in float64 is as the rounded side has it.
        piece.decides |= bool(compiled.missed)
        self.missed |= compiled.missed
        return dict(zip(piece.outputs, found, strict=True))

    def _source(
        self, form: Form, amplitude: ArrayLike, seed: int | np.ndarray, number: int
    ) -> tuple[Any, ...]:
        """The arguments of a piece's perturbation in this run: see `_compiled`."""
        # NumPy's: to make scalars of JAX took as long as the pieces of a small program.
        here: tuple[Any, ...] = ()
        if self._observer is not None:
            here = np.int32(seed), np.int32(number)
        if not form.drawn:
            return None, np.uint32(0), None, here
        bits = np.uint32((seed * 1000003 + number * 799939) & 0xFFFFFFFF)
        return np.asarray(amplitude, float), bits, self._noise(), here

    @contextlib.contextmanager
    def abandoned(self) -> Iterator[None]:
        """Ends runs on other threads before their next piece, while its block runs."""
        self._abandoned = True
        try:
            yield
        finally:
            self._abandoned = False

    def exact(
        self,
        inputs: Sequence[Value],
        recording: Recording | None = None,
        *,
        sized: bool = False,
    ) -> list[PrecisionPair]:
        """The results in float64, and a rounded side where the program decides."""
        form = EXACT._replace(sized=sized, sizes=wide_of)
        if not self.deciding:
            try:
                return self.run(inputs, form, recording=recording)
            except RoundedSideNeeded:
                pass
        return self.run(inputs, form._replace(rounded=True), recording=recording)

    def _noise(self) -> jax.Array | np.ndarray:
        if self._pool is None:
            self._pool = noise_pool(self.largest)
        # A mesh that is set may not have the device on which it is placed.
        if not jax.sharding.get_abstract_mesh().empty:
            return self._pool
        if self._placed is None:
            self._placed = jnp.asarray(self._pool)
        return self._placed

    def _program(self, piece: Piece, form: Form) -> CompiledPiece:
        wanted = tuple(form.sized and x in self._sized for x in piece.outputs)
        key = piece.key, wanted, form, self._accumulation, self._observer
        if key not in self._compiled:
            sized = self._sized if form.sized else frozenset()
            # It runs once for several runs.
            quick = self.tiny or (form.together and self.largest <= TINY)
            self._compiled[key] = _compiled(
                piece, form, sized, self._accumulation, quick, self._observer
            )
        return self._compiled[key]


def kept_pieces(accumulation: Any = None) -> Callable[..., Pieces]:
    """A cached `pieces_of(program, observer=None) -> Pieces`.

    Pieces of its programs that are alike are compiled once. The accumulation and the
    observer are as of `Pieces`.
    """
    compiled: dict[Any, CompiledPiece] = {}

    @functools.cache
    def pieces_of(program: ClosedJaxpr, observer: Observer | None = None) -> Pieces:
        return Pieces(program, accumulation, compiled, observer)

    return pieces_of


def _with_sides(value: Value, form: Form) -> PrecisionPair:
    """A value with the sides of a form; what depends on no input has none."""
    if isinstance(value, PrecisionPair):
        return value
    found = _entering(value, form)
    return found if isinstance(found, PrecisionPair) else PrecisionPair(found, found)


def drawn_form(program: ClosedJaxpr) -> Form:
    """The form of a program's draws."""
    doubles = max(_widths(program), default=0) > 32
    return Form(False, wide_of if doubles else single_of, drawn=True)


def rounds_as_drawn(program: ClosedJaxpr) -> bool:
    """Whether a draw with errors of 0 is the program as it rounds."""
    # Draws have products of full precision. An algorithm that is stated may be followed
    # for some shapes only.
    equations = list(equations_in(program))
    precisions = {x.params.get("precision") for x in equations}
    usual = {None, (jax.lax.Precision.DEFAULT,) * 2, (jax.lax.Precision.HIGHEST,) * 2}
    whole = all(kept_bits(x) is None for x in equations)
    return whole and precisions <= usual and _widths(program) == {32}


def _widths(program: ClosedJaxpr) -> set[int]:
    """The widths in bits of the floating dtypes in a program."""
    made = [x for each in equations_in(program) for x in each.outvars]
    variables = (*program.jaxpr.invars, *made)
    dtypes = {getattr(x.aval, "dtype", jnp.dtype(int)) for x in variables}
    return {jnp.finfo(x).bits for x in dtypes if jnp.issubdtype(x, jnp.inexact)}


# ---------------------------------------------------------------------------------
# A program as pieces.


def _inlined(
    program: ClosedJaxpr,
) -> tuple[
    list[InlinedVariable], dict[InlinedVariable, Value], list[Equation], list[Any]
]:
    """Inputs, constants, the equations that results need, and results."""
    constants: dict[InlinedVariable, Value] = {}
    equations: list[Equation] = []

    def constant(value: Any) -> InlinedVariable:
        array = as_array(value)
        variable = InlinedVariable(jax.typeof(array))
        constants[variable] = array
        return variable

    def walk(program: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        consts = map(constant, program.consts)
        return interpreted(program.jaxpr, consts, inputs, results_of_one, lambda x: x)

    def results_of_one(equation: JaxprEqn, given: list[Any]) -> list[Any]:
        inner = called(equation)
        if inner is not None:
            return walk(inner, given)
        made: list[Any] = [InlinedVariable(x.aval) for x in equation.outvars]
        equations.append(Equation(equation, given, made))
        return made

    inputs = [InlinedVariable(x.aval) for x in program.jaxpr.invars]
    results = [
        constant(value_of(x)) if isinstance(x, Literal) else x
        for x in walk(program, inputs)
    ]
    needed, kept = set(results), []
    for equation in reversed(equations):
        effects = equation.own.effects or _shows(equation)
        if effects or not needed.isdisjoint(equation.outputs):
            kept.append(equation)
            needed.update(x for x in equation.inputs if not isinstance(x, Literal))
    constants = {x: value for x, value in constants.items() if x in needed}
    return inputs, constants, kept[::-1], results


def _shows(equation: Equation) -> bool:
    """Whether it has a tap."""
    return any(x.primitive.name == "tap" for x in _all(equation.own))


def _compares(equation: Equation) -> bool:
    """Whether it compares floating numbers for equality."""
    given: Sequence[Any] = equation.own.invars
    return equation.own.primitive.name == "eq" and all(
        jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in given
    )


# Equations that always stand alone.
_APART = frozenset({"stop_gradient", "tap"})

# Likewise in a large program: what costs much to compile or to run.
_ALONE = _APART | {
    "dot_general", "conv_general_dilated", "scatter-add", "gather", "scan", "while",
    "cond", "sort", "top_k", "custom_linear_solve",
}  # fmt: skip

# Likewise where their results are compared for equality, as in their derivatives: XLA
# may compute what they take a second time, with another rounding, and nothing is equal.
_EXTREMES = frozenset({
    "max", "min", "reduce_max", "reduce_min", "cummax", "cummin", "reduce_window_max",
    "reduce_window_min",
})  # fmt: skip

_DECIDING = frozenset({"sort", "top_k", "cond", "while"})

_LOOPS = frozenset({"scan", "custom_linear_solve"})


def _cut(
    equations: Sequence[Equation],
    inputs: Sequence[InlinedVariable],
    results: Sequence[InlinedVariable],
    singly: frozenset[str],
) -> list[Piece]:
    """The pieces of a program, in order; primitives that stand in one of their own."""
    sided = {x for x in inputs if has_sides(x.aval)}
    groups: list[tuple[list[Equation], bool]] = []
    together = False
    for equation in equations:
        given = _variables(equation)
        on_sides = not sided.isdisjoint(given)
        if on_sides:
            sided.update(x for x in equation.outputs if has_sides(x.aval))
        decides = on_sides and _decides(equation.own)
        alone = decides or equation.own.primitive.name in singly
        if alone or not together:
            groups.append(([equation], decides))
        else:
            groups[-1][0].append(equation)
        together = not alone
    if singly >= _ALONE:
        groups = [(part, decides) for x, decides in groups for part in _divided(x)]
    last: dict[InlinedVariable, int] = {}
    for number, (group, _) in enumerate(groups):
        last.update((x, number) for each in group for x in _variables(each))
    kept = set(results)
    return [
        _piece(group, decides, number, last, kept)
        for number, (group, decides) in enumerate(groups)
    ]


def _divided(group: list[Equation]) -> Iterator[list[Equation]]:
    """Parts of a long group that have nothing in common, such as updates of leaves."""
    for part in _parts(group, through=True) if len(group) > LONG else [group]:
        yield from _parts(part, through=False) if len(part) > LONG else [part]


def _parts(group: list[Equation], *, through: bool) -> list[list[Equation]]:
    """Parts of a group between which no array passes, in an order to run them in.

    If not `through`, a number, such as a norm, connects nothing: what takes it runs
    after what makes it.
    """
    # A part is known by its level, and by the place of its first equation.
    parts: dict[tuple[int, int], list[int]] = {}
    part_of: list[tuple[int, int]] = []
    made: dict[Any, int] = {}
    numbers: list[bool] = []
    for place, equation in enumerate(group):
        given = _variables(equation)
        number = all(x.aval.size == 1 for x in (*given, *equation.outputs))
        before = [made[x] for x in given if x in made]
        steps = (part_of[i][0] + (numbers[i] != number) for i in before)
        level = 0 if through else max(steps, default=0)
        joined = sorted({part_of[i] for i in before if part_of[i][0] == level})
        key = joined[0] if joined else (level, place)
        own = parts.setdefault(key, [])
        for other in joined[1:]:
            for i in parts[other]:
                part_of[i] = key
            own += parts.pop(other)
        own.append(place)
        part_of.append(key)
        numbers.append(number)
        made.update((x, place) for x in equation.outputs)
    return [[group[i] for i in sorted(parts[key])] for key in sorted(parts)]


def _unlike(pieces: Sequence[Piece]) -> int:
    """The number of equations that are compiled if equal pieces are compiled once."""
    return sum({x.key: len(x.equations) for x in pieces}.values())


def _piece(
    group: list[Equation],
    decides: bool,
    number: int,
    last: dict[InlinedVariable, int],
    kept: set[Any],
) -> Piece:
    """A piece; `last` has the number of the last piece that takes a variable."""
    made = [x for equation in group for x in equation.outputs]
    own = set(made)
    inputs = [x for equation in group for x in _variables(equation) if x not in own]
    inputs = list(dict.fromkeys(inputs))
    outputs = [x for x in made if x in kept or last.get(x, -1) > number]
    freed = [x for x in (*inputs, *outputs) if last.get(x, -1) <= number]
    names = {x: place for place, x in enumerate((*inputs, *made))}
    key = tuple(_fingerprint(x.own, x.inputs, x.outputs, names) for x in group)
    taken = tuple(names[x] for x in outputs)
    holds = any(x.primitive.name == "stop_gradient" for y in group for x in _all(y.own))
    decisions = _decisions(group) if decides else frozenset()
    shared = key, taken
    return Piece(group, inputs, outputs, freed, shared, decides, holds, decisions)


def _decides(equation: JaxprEqn) -> bool:
    """Whether the rounded side may decide about its results."""
    return any(
        each.primitive.name in UNMEASURED or _chooses(each) for each in _all(equation)
    )


def _chooses(equation: JaxprEqn) -> bool:
    """Whether an equation makes an order, a branch or an integer of floating values."""
    return equation.primitive.name in _DECIDING or (
        equation.primitive.name not in _LOOPS
        and any(has_sides(x.aval) for x in equation.invars)
        and not all(has_sides(x.aval) for x in equation.outvars)
    )


def _decisions(group: Sequence[Equation]) -> frozenset[str]:
    """The primitives that decide in a piece, if a free run may repeat it."""
    each = [x for equation in group for x in _all(equation.own)]
    # The bits of a float are no decision: any rounding changes them.
    if any(x.primitive.name in UNMEASURED | {"bitcast_convert_type"} for x in each):
        return frozenset()
    return frozenset(x.primitive.name for x in each if _chooses(x))


def _all(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """An equation and those in its programs."""
    yield equation
    for inner in inner_programs(equation):
        yield from equations_in(inner)


def _variables(equation: Equation) -> list[InlinedVariable]:
    return [x for x in equation.inputs if not isinstance(x, Literal)]


def _fingerprint(
    equation: JaxprEqn, inputs: Sequence[Any], outputs: Sequence[Any], names: Any
) -> object:
    """Equal for equations that compute the same, with variables of the same names."""
    params = tuple((k, _part(x)) for k, x in sorted(equation.params.items()))
    given = tuple(
        _part(x) if isinstance(x, Literal) else (names[x], x.aval) for x in inputs
    )
    made = tuple((names.get(x), x.aval) for x in outputs)
    return equation.primitive, equation.ctx, params, given, made


def _part(value: Any) -> object:
    """Equal for parameters that mean the same.

    What has no hash equals itself alone. A piece that is compiled refers to its
    equations, so that no other object has the `id` of what is in its key.
    """
    found: object = id(value)
    if isinstance(value, Literal):
        array = np.asarray(value.val)
        found = "literal", value.aval, array.dtype, array.tobytes()
    elif isinstance(value, Jaxpr):  # From JAX 0.12 on with constants.
        found = _shape_of(value, getattr(value, "consts", ()))
    elif isinstance(value, ClosedJaxpr):
        found = _shape_of(value.jaxpr, value.consts)
    elif isinstance(value, tuple | list):
        found = type(value), tuple(map(_part, value))
    elif isinstance(value, dict):
        found = tuple((k, _part(x)) for k, x in sorted(value.items()))
    else:
        with contextlib.suppress(TypeError):
            hash(value)
            found = type(value), value
    return found


def _shape_of(jaxpr: Jaxpr, consts: Sequence[Any]) -> object:
    """Equal for programs that compute the same of the same constants."""
    given = [*jaxpr.constvars, *jaxpr.invars]
    made = [x for each in jaxpr.eqns for x in each.outvars]
    names = {x: place for place, x in enumerate((*given, *made))}
    results = tuple(
        _part(x) if isinstance(x, Literal) else names[x] for x in jaxpr.outvars
    )
    each = tuple(_fingerprint(x, x.invars, x.outvars, names) for x in jaxpr.eqns)
    return tuple(x.aval for x in given), each, results, tuple(map(id, consts))


# ---------------------------------------------------------------------------------
# A piece as a program.


def _compiled(
    piece: Piece,
    form: Form,
    sized: frozenset[Any],
    accumulation: Any,
    quick: bool,
    observer: Observer | None,
) -> CompiledPiece:
    missed: set[str] = set()

    def once(noise: Sequence[Any], given: Sequence[Value]) -> list[Value]:
        amplitude, seed, pool, here = noise
        run_of = form, accumulation, missed, observer
        perturbation = Perturbation(amplitude, seed, pool, here, *run_of)
        values = dict(zip(piece.inputs, given, strict=True))
        for equation in piece.equations:
            operands = [
                value_of(x) if isinstance(x, Literal) else values[x]
                for x in equation.inputs
            ]
            own = not sized.isdisjoint(equation.outputs)
            found = results_of(equation.own, operands, perturbation, own)
            values.update(zip(equation.outputs, found, strict=True))
        return [_leaving(values[x], form) for x in piece.outputs]

    def run(
        noise: Sequence[Any], given: list[Value], before: list[Value] | None
    ) -> list[Value]:
        if form.together:
            return _together(once, noise, given)
        if before is None:
            return once(noise, given)
        # The first is where `stop_gradient` holds its values.
        both = jax.tree.map(lambda *x: jnp.stack(x), before, given)
        held = jax.vmap(functools.partial(once, noise), axis_name=HELD)(both)
        return jax.tree.map(lambda x: x[1], held)

    if piece.equations[0].own.primitive.name == "tap":
        return CompiledPiece(run, missed)  # It stands alone, and computes nothing.
    options = quick_to_compile(quick)
    return CompiledPiece(jax.jit(run, compiler_options=options), missed)


def _together(
    once: Callable[..., list[Value]], noise: Sequence[Any], given: list[Value]
) -> list[Value]:
    """Evaluates a piece for several runs, of which only wide sides differ."""

    def apart(noise: Sequence[Any], given: list[Value]) -> tuple[list[Any], ...]:
        found = once(noise, given)
        return (
            [x.wide if isinstance(x, PrecisionPair) else None for x in found],
            [_but(x, wide=None, size=None) for x in found],
            [x.size if isinstance(x, PrecisionPair) else None for x in found],
        )

    amplitude, *_, here = noise
    drawn = None if amplitude is None else 0
    own = drawn, drawn, None, here and (0, None)
    axes = [
        _but(x, rounded=None, wide=0, size=None)
        if isinstance(x, PrecisionPair)
        else None
        for x in given
    ]
    wide, rest, sizes = jax.vmap(apart, (own, axes), (0, None, 0))(noise, given)
    return [
        _but(x, wide=each, size=None if size is None else size[0])
        for x, each, size in zip(rest, wide, sizes, strict=True)
    ]


def _but(value: Value, **parts: Any) -> Any:
    """A value with other parts, if it has any."""
    return replace(value, **parts) if isinstance(value, PrecisionPair) else value


def _entering(value: Any, form: Form) -> Value:
    """An argument of the program, with the sides of a form."""
    if not isinstance(value, PrecisionPair):
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return value
        value = PrecisionPair(value, value.astype(form.wider(value.dtype)))
    rounded, wide = value.rounded, value.wide
    if callable(wide):
        wide = wide()
    dtype = wide.dtype if rounded is None else form.wider(rounded.dtype)
    if wide.dtype != dtype:
        wide = wide.astype(dtype)
    size = value.size if form.sized else None
    return PrecisionPair(rounded if form.rounded else None, wide, size)


def _is_late(value: Any) -> bool:
    """Whether an argument has its wide side only while it is needed."""
    if isinstance(value, PrecisionPair):
        return callable(value.wide)
    return bool(value.size > LARGE)


def _leaving(value: Value, form: Form) -> Value:
    """A result of a piece; one that was replayed has a rounded side too many."""
    if not isinstance(value, PrecisionPair) or form.rounded:
        return value
    return replace(value, rounded=None)


def _with_rounded(
    operands: list[Value], recorded: list[Value], own: bool
) -> list[Value]:
    """Operands with a rounded side: that of the recording, or their own rounded."""
    each = zip(operands, recorded, strict=True)
    return [
        _but(now, rounded=now.wide.astype(old.rounded.dtype) if own else old.rounded)
        if isinstance(now, PrecisionPair) and isinstance(old, PrecisionPair)
        else now
        for now, old in each
    ]
