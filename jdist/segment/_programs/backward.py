"""The backward program of a plan, for one pattern of present and absent cotangents.

The backward program recomputes the residuals from the kept values and the parameters,
then runs JAX's own linear part backwards. If an output has no cotangent, the linear
part is traced without it, and the program contains no work for it. The result
distinguishes absent from zero in the same way: a cotangent that is a structural zero,
because no path leads from it to a live output, is None.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType, NamedSharding, Sharding
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from jdist._compat import evaluate, part_of, trace
from jdist._errors import requirement
from jdist._tree import PyTree, described, is_inexact, is_none, path_of
from jdist.segment._programs.plan import ForwardPlan

Layout = tuple[Sharding | None, ...] | None


@dataclass(frozen=True, eq=False)
class BackwardProgram:
    """The backward program of one plan and one pattern of cotangents.

    Attributes:
      plan: The plan of the forward pass.
      program: The program from parameters, kept values and live cotangents to the
        cotangents of the floating leaves of (params, inputs).
      groups: The program's arguments: (parameters, kept values, live cotangents).
    """

    plan: ForwardPlan
    program: ClosedJaxpr
    groups: tuple[list[Var], list[Var], list[Var]]

    @property
    def _count(self) -> int:
        """Number of results that are gradients of parameters; these come first."""
        return sum(self.plan.trained[: self.plan.param_count])

    @property
    def d_params(self) -> list[Any]:
        """The results that are gradients of parameters."""
        return self.program.jaxpr.outvars[: self._count]

    @property
    def d_inputs(self) -> list[Any]:
        """The results that are cotangents of inputs, without structural zeros."""
        outvars = self.program.jaxpr.outvars[self._count :]
        return [x for x in outvars if not self.is_absent(x)]

    @functools.cached_property
    def _makers(self) -> dict[Var, JaxprEqn]:
        return {x: e for e in self.program.jaxpr.eqns for x in e.outvars}

    def is_absent(self, atom: Var | Literal) -> bool:
        """Whether a result is a structural zero: no cotangent flows there."""
        # JAX writes a structural zero as a literal 0, perhaps broadcast.
        if isinstance(atom, Literal):
            return not np.any(atom.val)
        maker = self._makers.get(atom)
        return (
            maker is not None
            and maker.primitive.name == "broadcast_in_dim"
            and self.is_absent(maker.invars[0])
        )

    def run(self, arguments: Sequence[Any], layout: Layout) -> tuple[Any, Any]:
        """All gradients and cotangents, as (d_params, d_inputs)."""
        results = [*self.d_params, *self.d_inputs]
        inputs = self.program.jaxpr.invars
        found = evaluate(
            part_of(self.program, inputs, results, effects=True), arguments
        )
        d_params, d_inputs = found[: self._count], found[self._count :]
        return (
            self.params_tree(self.placed(self.d_params, d_params, layout)),
            self.inputs_tree(d_inputs, layout),
        )

    def params_tree(self, gradients: Sequence[Any]) -> PyTree:
        """Tree like the parameters, None for what is not floating."""
        given = iter(gradients)
        trained = self.plan.trained[: self.plan.param_count]
        leaves = [next(given) if is_trained else None for is_trained in trained]
        return jax.tree.unflatten(self.plan.arguments.children()[0], leaves)

    def placed(
        self, atoms: Sequence[Any], values: Sequence[Any], layout: Layout
    ) -> list[Any]:
        """The values of `atoms`; a gradient of a parameter is laid out like it."""
        if layout is None:
            return list(values)
        params = zip(self.d_params, _places(self.plan, layout), strict=False)
        place_of = {id(atom): place for atom, place in params}
        return [
            _placed(value, place_of.get(id(atom)))
            for atom, value in zip(atoms, values, strict=True)
        ]

    def inputs_tree(self, cotangents: Sequence[Any], layout: Layout) -> PyTree:
        """Tuple like the inputs, laid out like them; None where no cotangent flows."""
        given = iter(cotangents)
        places = _places(self.plan, layout)[self._count :]
        outvars = self.program.jaxpr.outvars[self._count :]
        flowing = iter(
            None if self.is_absent(x) else _placed(next(given), to)
            for x, to in zip(outvars, places, strict=True)
        )
        trained = self.plan.trained[self.plan.param_count :]
        leaves = [next(flowing) if is_trained else None for is_trained in trained]
        return jax.tree.unflatten(self.plan.arguments.children()[1], leaves)


def _places(plan: ForwardPlan, layout: Layout) -> list[Sharding | None]:
    """The sharding of the cotangent of each floating leaf."""
    if layout is None:
        return [None] * sum(plan.trained)
    pairs = zip(layout, plan.trained, strict=True)
    return [place for place, is_trained in pairs if is_trained]


def _placed(value: jax.Array, place: Sharding | None) -> jax.Array:
    """The value constrained to a sharding, if there is one."""
    if place is None:
        return value
    # Under explicit axes the type of the value carries its sharding already.
    if isinstance(place, NamedSharding) and AxisType.Explicit in place.mesh.axis_types:
        return value
    return jax.lax.with_sharding_constraint(value, place)


def gradient(
    plan: ForwardPlan, kept: Sequence[Any], params: PyTree, d_outputs: PyTree
) -> BackwardProgram:
    """Builds the backward program for the cotangents that `d_outputs` has."""
    cotangents, live = cotangents_of(d_outputs, plan.outputs)
    linear, residuals = plan.linear_part(live)
    shapes = [x for x in jax.tree.leaves(plan.outputs) if is_inexact(x)]
    dtypes = [x.dtype for x, is_live in zip(shapes, live, strict=True) if is_live]
    params_vars = plan.program.jaxpr.invars[: plan.param_count]
    sources = [*params_vars, *plan.kept]
    # Without effects: what the forward pass printed is not printed a second time.
    again = part_of(plan.program, sources, residuals, effects=False)

    def run(params: list[Any], kept: list[Any], cotangents: list[Any]) -> list[Any]:
        found = evaluate(again, [*params, *kept])
        # A Python number as cotangent is weakly typed; the linear part is not.
        strong = [
            jax.lax.convert_element_type(x, d)
            for x, d in zip(cotangents, dtypes, strict=True)
        ]
        return evaluate(linear, [*found, *strong])

    # Traced as one program, so that XLA sees recomputation and pull-back together.
    groups = (jax.tree.leaves(params), list(kept), cotangents)
    program, _ = trace(run, *groups)
    values = iter(program.jaxpr.invars)
    first, second, third = (list(islice(values, len(group))) for group in groups)
    return BackwardProgram(plan, program, (first, second, third))


@functools.lru_cache(maxsize=1024)
def passed_on(plan: ForwardPlan) -> tuple[int | None, ...] | None:
    """For each input the output whose cotangent it takes; None if one is computed."""
    # A compiled program that returns its arguments costs as much to call as one that
    # computes, and allocates an array for each input, all of which are then sent to
    # another worker.
    # Parameters need gradients, and kept values are there to be computed with.
    if plan.param_count or plan.kept:
        return None
    if not all(map(is_inexact, jax.tree.leaves(plan.outputs))):
        return None
    found = gradient(plan, (), (), plan.outputs)
    if found.program.effects:
        return None
    places = {given: place for place, given in enumerate(found.groups[2])}
    atoms = iter(found.program.jaxpr.outvars)
    sources: list[int | None] = []
    for is_trained in plan.trained:
        atom = next(atoms) if is_trained else None
        if atom is None or found.is_absent(atom):
            sources.append(None)
        elif isinstance(atom, Var) and atom in places:
            sources.append(places[atom])
        else:
            return None
    return tuple(sources)


# --- which outputs have a cotangent ---


def cotangents_of(d_outputs: PyTree, outputs: PyTree) -> tuple[list[Any], list[bool]]:
    """The cotangents given, and for each floating output whether it has one.

    Raises:
      ValueError: `d_outputs` does not fit `outputs`, in structure, shape or dtype; or
        an output that is not floating is given a cotangent.
    """
    given = dict(jax.tree.leaves_with_path(d_outputs, is_leaf=is_none))
    cotangents, live = [], []
    for keys, shape in jax.tree.leaves_with_path(outputs):
        # A None may stand for a whole subtree, at any depth above the output.
        above = [keys[:depth] for depth in range(len(keys) + 1)]
        place = next((at for at in above if at in given), None)
        if place is None or (place != keys and given[place] is not None):
            _refuse(keys, "must have the structure of the outputs", "no leaf there")
        cotangent = given[place]
        if cotangent is not None:
            _check(keys, cotangent, shape)
            cotangents.append(cotangent)
        if is_inexact(shape):
            live.append(cotangent is not None)
    known = [keys for keys, _ in jax.tree.leaves_with_path(outputs)]
    for keys, leaf in given.items():
        if leaf is not None and keys not in known:
            _refuse(
                keys, "must have the structure of the outputs", "a leaf of no output"
            )
    return cotangents, live


def _check(keys: KeyPath, cotangent: ArrayLike, shape: jax.ShapeDtypeStruct) -> None:
    if not is_inexact(shape):
        rule = f"must be None for an output of {shape.dtype}, which has no cotangent"
        _refuse(keys, rule, described(jax.typeof(cotangent)))
    got = jax.typeof(cotangent)
    # A weak type, that of a Python number, takes the output's dtype if it can.
    loses = jnp.iscomplexobj(cotangent) and shape.dtype.kind != "c"
    fits = got.dtype == shape.dtype or (got.weak_type and not loses)
    if got.shape != shape.shape or not fits:
        rule = f"must be like its output, {described(shape)}"
        _refuse(keys, rule, described(got))


def _refuse(keys: KeyPath, rule: str, got: str) -> NoReturn:
    raise ValueError(
        requirement(
            "Segment.backward(d_outputs=...)",
            rule,
            f"{got} at {path_of(keys)}",
            "None, also in place of a whole subtree, says that no cotangent flows.",
        )
    )
