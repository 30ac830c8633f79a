"""The interface of all optimizers, and the driver that applies a rule to each leaf.

An `Optimizer` is a pair of pure functions over whole trees. `leafwise` makes one from
two functions of a single array:

    init_leaf(param) -> state                          a NamedTuple with a `step` count
    step_leaf(param, grad, state, h) -> (update, state)    h: hyperparameters by name

This module holds what all algorithms share: traversal of the tree, application of the
update, None gradients, precision, validation, schedules, and overrides of
hyperparameters for one step.

A parameter whose gradient is None keeps its value, state and step count, bit for bit. A
leaf that is not a floating array is never updated.

Precision. A step widens 16-bit parameters and their state to float32 and rounds once at
its end, where torch rounds after every operation. Moments and buffers have the dtype of
their parameter; scalars other than counts are float32 or wider. A complex parameter is
two real ones, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike, DTypeLike

from jdist._compat import alike, is_traced
from jdist._errors import (
    check_function,
    check_sequence,
    quoted,
    type_error,
    value_error,
)
from jdist._tree import (
    PyTree,
    check_arrays,
    described,
    is_inexact,
    is_none,
    path_of,
    type_name,
    wide_dtype,
)
from jdist.optim._hyperparameters import (
    Hyperparameter,
    check_overrides,
    known_zero,
    resolved,
)
from jdist.optim._loss_scale import Precision
from jdist.optim._whole_arrays import check_leaf


class Update(NamedTuple):
    """The change of one parameter: p <- p * (1 - decay) + delta."""

    delta: jax.Array
    """The summand; shape and dtype of the parameter."""

    decay: Any = 0
    """Decoupled weight decay: the fraction, a scalar, by which the parameter shrinks
    before the delta is added."""

    def applied(self, param: jax.Array) -> jax.Array:
        """The new parameter."""
        if not known_zero(self.decay):
            # A product of its own, rounded before the sum, as in torch.
            param = param * (1 - self.decay)
        return param + self.delta

    def total(self, param: jax.Array) -> jax.Array:
        """The sum of both terms, not rounded to the spacing of the parameter."""
        if known_zero(self.decay):
            return self.delta
        return self.delta - self.decay * param


InitLeaf: TypeAlias = Callable[[jax.Array], Any]
StepLeaf: TypeAlias = Callable[
    [jax.Array, jax.Array, Any, SimpleNamespace], tuple[Update, Any]
]


@dataclass(frozen=True, slots=True, eq=False)
class Optimizer:
    """A pure optimizer: a function that makes the state and one that makes a step.

    Attributes:
      name: The constructor's name, such as `adam`, for error messages.
      init_tree: `init_tree(params) -> state`.
      step_tree: `step_tree(params, grads, state, overrides) -> (params, state)`. With
        `updates=True` it returns the updates instead of the new parameters.
      hyperparameters: Hyperparameters by torch's names; each says whether a step can
        override it.
      loss_factor: `loss_factor(state) -> factor` of `scale_loss`; None means 1.
      precision: Arguments of `with_master_weights`; None without master weights.
      elementwise: Whether each number moves by the numbers at its place alone. If not,
        `zero` pads no array.
    """

    name: str
    init_tree: Callable[[Any], Any]
    step_tree: Callable[..., tuple[Any, Any]]
    hyperparameters: Mapping[str, Hyperparameter] = field(default_factory=dict)
    loss_factor: Callable[[Any], jax.Array] | None = None
    precision: Precision | None = None
    elementwise: bool = False

    @property
    def rule(self) -> tuple[Any, ...]:
        """A key that is equal only for optimizers that make the same steps."""
        # By identity: schedules are functions, which cannot be compared.
        return (id(self),)

    def init(self, params: PyTree) -> PyTree:
        """The state before the first step.

        Args:
          params: Any pytree: dicts, dataclasses, Flax NNX modules and states.

        Returns:
          For the algorithms of `jdist.optim`: tree like `params`, with the algorithm's
          NamedTuple in place of each floating leaf and None in place of any other,
          placed and sharded like the parameter, under jit too. `by_label`,
          `with_master_weights` and `from_optax` document theirs.

        Raises:
          ValueError: `params` has no leaves.
          TypeError: An array is of another framework.
        """
        check_arrays(f"{self.name}.init(params)", params, others=True)
        if not jax.tree.leaves(params):
            rule = "must have at least one leaf"
            raise value_error(f"{self.name}.init(params)", rule, "none")
        return _settled(self.init_tree(params), params)

    def step(
        self, params: PyTree, grads: PyTree, state: PyTree, **overrides: object
    ) -> tuple[PyTree, PyTree]:
        """One step: pure, so that it can be jitted, vmapped, sharded and donated to.

        Args:
          params: The parameters.
          grads: Tree like `params`: a gradient of the leaf's shape and dtype, or None
            to leave that parameter, its state and its count unchanged. With masters it
            may be wider than its compute copy, such as a float32 sum over
            micro-batches. For a complex leaf it is the direction of ascent, as in
            torch: the *conjugate* of what `jax.grad` returns.
          state: What `init` or the last step returned.
          **overrides: Numeric hyperparameters for this step only; they may be traced
            (no recompilation when they change).

        Returns:
          The new parameters and the new state.

        Raises:
          ValueError: The trees do not match, a gradient's shape or dtype is not its
            parameter's, or an override breaks its rule.
          TypeError: An override is not one of the optimizer's numeric hyperparameters;
            an array is of another framework.
        """
        return self._step(params, grads, state, overrides)

    def updates(
        self, params: PyTree, grads: PyTree, state: PyTree, **overrides: object
    ) -> tuple[PyTree, PyTree]:
        """The updates that `step` would add to the parameters, and the new state.

        These are the updates themselves, not differences of new and old parameters,
        which are rounded to the spacing of their numbers. Parameters plus updates are
        what `step` returns; they may differ in the last bit with decoupled weight
        decay, which torch rounds separately, and in 16 bits.

        Args:
          params: As for `step`.
          grads: As for `step`.
          state: As for `step`.
          **overrides: As for `step`.

        Returns:
          Updates in a tree like `params`, 0 where the gradient is None, in each
          parameter's dtype, or its master's; and the new state.

        Raises:
          ValueError: As `step`.
          TypeError: As `step`.

        Example:
          >>> import jax.numpy as jnp
          >>> from jdist import optim
          >>> opt, params = optim.sgd(lr=1e-9), jnp.array([1.0, 2.0])
          >>> float(opt.updates(params, params, opt.init(params))[0][0])
          -9.999999717180685e-10
        """
        return self._step(params, grads, state, overrides, updates=True)

    def _step(
        self,
        params: PyTree,
        grads: PyTree,
        state: PyTree,
        overrides: Mapping[str, Any],
        **form: bool,
    ) -> tuple[PyTree, PyTree]:
        try:
            _check_gradients(self.name, params, grads, self.precision is not None)
            return self.step_tree(params, grads, state, overrides, **form)
        except TypeError:
            # Looked for only now: in each eager step it would take longer than tracing.
            given = {"params": params, "grads": grads, "state": state}
            for name, tree in given.items():
                check_arrays(f"{self.name}.step({name}=...)", tree, others=True)
            raise

    def scale_loss(self, loss: jax.Array, state: PyTree) -> jax.Array:
        """The loss to differentiate: multiplied by the state's loss scale, if any.

        Args:
          loss: Any shape; widened to float32, in which its product cannot overflow.
          state: What `init` or the last step returned; `step` divides the gradients
            by the same scale.

        Raises:
          TypeError: The loss is no floating number or array.
          ValueError: The state is not this optimizer's.
        """
        if self.loss_factor is None:
            return loss
        check_arrays(f"{self.name}.scale_loss(loss)", loss, others=True)
        if not is_inexact(loss):
            rule = "must be a floating number or array"
            got = described(loss) if hasattr(loss, "dtype") else repr(loss)
            raise type_error(f"{self.name}.scale_loss(loss)", rule, got)
        loss = jnp.asarray(loss)
        # The default scale, 65536, is itself above float16's largest number.
        wide = loss.astype(wide_dtype(loss.dtype))
        return wide * self.loss_factor(state).astype(wide.dtype)


def leafwise(
    name: str,
    hyperparameters: Sequence[Hyperparameter],
    init_leaf: InitLeaf,
    step_leaf: StepLeaf,
    *,
    elementwise: bool = True,
    dimensions: int | None = None,
) -> Optimizer:
    """An optimizer that applies the same rule to each floating leaf separately.

    Args:
      name: For error messages.
      hyperparameters: In the order of the constructor; checked here.
      init_leaf: The state of one real floating array: a NamedTuple with an int32
        scalar `step` (or None, where no schedule can be given) and arrays of the
        parameter's dtype and number of dimensions, or scalars. Its structure may depend
        on that number alone.
      step_leaf: One step of one real array, float32 or wider: its `Update`, of the same
        shape and dtype, and the new state, like the old. `h.dtype` is the dtype in
        which the parameter is kept.
      elementwise: Whether each number of the results depends on the numbers at its
        place alone. Pass False for a rule with a norm, a mean or a product of matrices:
        such a rule takes no complex parameters, is given whole arrays by `zero`, and
        refuses the shards of a `shard_map`.
      dimensions: The number of dimensions that a parameter must have, if only one will
        do.

    Raises:
      ValueError: A hyperparameter breaks its rule. In `init` and `step`: a parameter
        has another number of dimensions; a rule that is not elementwise is given a
        complex parameter, or may have been given a shard of one.
      TypeError: A hyperparameter is of the wrong kind, or a rule is no function. In
        `step`: `step_leaf` returned something else than an `Update` and a state.

    Example:
      >>> import jax.numpy as jnp
      >>> from typing import NamedTuple
      >>> class Count(NamedTuple):
      ...     step: jax.Array
      >>> def sign_descent(*, lr=0.1):
      ...     return leafwise(
      ...         "sign_descent",
      ...         [Hyperparameter("lr", lr)],
      ...         lambda p: Count(jnp.zeros((), jnp.int32)),
      ...         lambda p, g, s, h: (Update(-h.lr * jnp.sign(g)), Count(s.step + 1)),
      ...     )
      >>> opt, params = sign_descent(), jnp.array([1.0, 2.0])
      >>> opt.step(params, jnp.array([3.0, -4.0]), opt.init(params))[0]
      Array([0.9, 2.1], dtype=float32)
    """
    _check_parts(hyperparameters, init_leaf, step_leaf)
    specs = {spec.name: spec for spec in hyperparameters}
    # Before the first step, so that a wrong constructor fails where it is written.
    for spec in specs.values():
        spec.check(name, spec.value)
    rule = _Rule(name, specs, init_leaf, step_leaf, elementwise, dimensions)
    call = f"{name}.step"

    def step_tree(
        params: PyTree,
        grads: PyTree,
        state: PyTree,
        overrides: Mapping[str, Any],
        updates: bool = False,
    ) -> tuple[PyTree, PyTree]:
        check_overrides(call, specs, overrides)
        structure: Any
        pairs, structure = jax.tree_util.tree_flatten_with_path(params)
        # Not `tree.leaves`, which drops the None of a parameter without a gradient.
        grad_leaves = structure.flatten_up_to(grads)
        state_leaves = matching(call, "state", params, state)
        move: Callable[..., tuple[Any, Any]]
        move = partial(rule.moved, overrides=overrides, updates=updates)
        # Leaves of one shape and dtype are traced once; the others get copies of the
        # equations. Only under jit, where a new constant is a tracer: outside it,
        # operations run one by one, and this would compile them.
        if is_traced(jnp.zeros(())):
            move = jax.jit(move, inline=True)
        new = []
        for (keys, param), grad, leaf_state in zip(
            pairs, grad_leaves, state_leaves, strict=True
        ):
            rule.check(f"{call}(params=...)", keys, param)
            rule.check_state(keys, param, leaf_state)
            if is_inexact(param) and grad is not None:
                new.append(move(param, grad, leaf_state))
            else:
                # The same state object: a count that moved would change the bias
                # corrections.
                new.append((jnp.zeros_like(param) if updates else param, leaf_state))
        new_params, new_state = ([pair[i] for pair in new] for i in (0, 1))
        return structure.unflatten(new_params), structure.unflatten(new_state)

    return Optimizer(name, rule.init, step_tree, specs, elementwise=elementwise)


def _check_parts(hyperparameters: object, init_leaf: object, step_leaf: object) -> None:
    must = "must be a sequence of Hyperparameter"
    check_sequence("leafwise(hyperparameters)", hyperparameters, Hyperparameter, must)
    check_function("leafwise(init_leaf)", init_leaf)
    check_function("leafwise(step_leaf)", step_leaf)


@dataclass(frozen=True, slots=True)
class _Rule:
    """The rule of one leaf, with conversion to and from the dtypes of a step."""

    name: str
    specs: Mapping[str, Hyperparameter]
    init_leaf: InitLeaf
    step_leaf: StepLeaf
    elementwise: bool
    dimensions: int | None

    def check(self, argument: str, keys: Any, param: ArrayLike) -> None:
        """Checks that the rule may be applied to a parameter."""
        check_leaf(argument, keys, param, self.elementwise, self.dimensions)

    def init(self, params: PyTree) -> PyTree:
        """The states of all leaves before the first step."""
        for keys, param in jax.tree.leaves_with_path(params):
            self.check(f"{self.name}.init(params)", keys, param)
        return jax.tree.map(
            lambda p: (
                _init_one(self.init_leaf, jnp.asarray(p)) if is_inexact(p) else None
            ),
            params,
        )

    def check_state(self, keys: Any, param: ArrayLike, state: PyTree) -> None:
        """Checks that the state of a leaf has the structure of this rule's states.

        Raises:
          ValueError: It has another.
        """
        if not is_inexact(param):
            return
        expected = _structure_of(self.init_leaf, jnp.ndim(param))
        if jax.tree.structure(state) != expected:
            rule = "must hold what "
            rule += f"`{self.name}.init` or the last step returned, at {path_of(keys)}"
            got = str(jax.tree.structure(state))
            raise value_error(f"{self.name}.step(state=...)", rule, got)

    def moved(
        self,
        param: ArrayLike,
        grad: ArrayLike,
        state: PyTree,
        *,
        overrides: Mapping[str, Any],
        updates: bool,
    ) -> tuple[Any, Any]:
        """One step of one leaf: its new value, or its update, and its new state."""
        param = jnp.asarray(param)
        # No result between here and `_left` is rounded to 16 bits.
        wide = _entered(param)
        call = f"{self.name}.step"
        h = resolved(call, self.specs, overrides, state.step, wide.dtype)
        h.dtype = param.dtype
        entered = jax.tree.map(_entered, state)
        update: Any
        update, new = self.step_leaf(wide, _entered(jnp.asarray(grad)), entered, h)
        if not isinstance(update, Update):
            rule = "must return an `Update` of the parameter and its new state"
            raise type_error(f"{self.name}: step_leaf", rule, type_name(update))
        # Not new - old, which is rounded to the spacing of the parameter.
        found = update.total(wide) if updates else update.applied(wide)
        return _left(found, param), jax.tree.map(_left, new, state)


# Not kept by the rule, which programs are compiled for and must not change.
@lru_cache(maxsize=1024)
def _structure_of(init_leaf: InitLeaf, ndim: int) -> Any:
    """The structure of a leaf's state, whatever its sizes."""
    one = jax.ShapeDtypeStruct((1,) * ndim, jnp.float32)
    # By abstract evaluation: the rule of the leaf may allocate.
    return jax.tree.structure(jax.eval_shape(init_leaf, one))


def check_optimizer(argument: str, given: PyTree) -> None:
    """Checks that an argument is an `Optimizer`; the error says how to make one of it.

    Args:
      argument: Function and argument for the error message, such as
        `"train_step(optimizer=...)"`.
      given: The value.

    Raises:
      TypeError: The value is an optax transformation, a constructor that was not
        called, or another object.

    Example:
      >>> from jdist import optim
      >>> check_optimizer("train_step(optimizer=...)", optim.sgd)
      Traceback (most recent call last):
        ...
      TypeError: `train_step(optimizer=...)` must be an optimizer of jdist.optim. Got a
      function. Call a constructor, as `optim.adam(lr=1e-3)`, or wrap an optax
      transformation, `optim.from_optax(...)`.
    """
    if not isinstance(given, Optimizer):
        rule = "must be an optimizer of jdist.optim"
        remedy = (
            "Call a constructor, as `optim.adam(lr=1e-3)`, or wrap an optax "
            "transformation, `optim.from_optax(...)`."
        )
        raise type_error(argument, rule, type_name(given), remedy)


def count_zero() -> jax.Array:
    """The step count of a leaf before its first step: int32 scalar."""
    # Not float32, in which 2**24 + 1 is 2**24.
    return jnp.zeros((), jnp.int32)


def matching(call: str, argument: str, params: PyTree, tree: PyTree) -> list[Any]:
    """The subtrees of `tree` at the leaves of `params`, None included.

    Raises:
      ValueError: `tree` does not have the structure of `params`.
    """
    structure: Any = jax.tree.structure(params)
    try:
        return structure.flatten_up_to(tree)
    except ValueError as error:
        got = str(jax.tree.structure(tree, is_leaf=is_none))
        rule = (
            f"must have the structure of params, {structure}, with a leaf or None for "
            "each parameter"
        )
        raise value_error(f"{call}({argument}=...)", rule, got) from error


def _check_gradients(name: str, params: PyTree, grads: PyTree, masters: bool) -> None:
    # Checked first: an error of the computation would name a primitive, not the leaf.
    leaves = matching(f"{name}.step", "grads", params, grads)
    for (keys, param), grad in zip(
        jax.tree.leaves_with_path(params), leaves, strict=True
    ):
        if grad is None:
            continue
        if not is_inexact(param):
            # A tree would be taken for the gradient of an integer, and passed over.
            if not jax.tree_util.all_leaves([grad]):
                rule = f"must have a leaf or None for {path_of(keys)}, as params have"
                shown = str(jax.tree.structure(grad))
                raise value_error(f"{name}.step(grads=...)", rule, shown)
            continue
        dtype = jnp.result_type(param)
        try:
            got = jnp.result_type(grad)
        except (TypeError, ValueError):  # a subtree, or no array
            argument = f"{name}.step(grads=...)"
            check_arrays(argument, grads, others=True)
            rule = f"must have an array or None for its parameter at {path_of(keys)}"
            raise value_error(argument, rule, quoted(grad)) from None
        # Without masters a wider gradient would be rounded to the parameter's dtype.
        fits = got == dtype or (masters and _widens(dtype, got))
        if jnp.shape(grad) != jnp.shape(param) or not fits:
            argument = f"{name}.step(grads=...)"
            rule = f"must match its parameter at {path_of(keys)}, {described(param)}"
            rule += ", or be of a wider dtype" if masters else ""
            raise value_error(argument, rule, described(grad))


def _widens(dtype: DTypeLike, other: DTypeLike) -> bool:
    """Whether the second dtype, if of the same kind, holds all numbers of the first."""
    kinds = (jnp.floating, jnp.complexfloating)
    alike = any(all(jnp.issubdtype(d, k) for d in (dtype, other)) for k in kinds)
    if not alike:
        return False
    own, wider = jnp.finfo(dtype), jnp.finfo(other)
    return bool(own.nmant <= wider.nmant and own.maxexp <= wider.maxexp)


# --- one leaf: into the precision of the step, and out of it ---


def _entered(array: jax.Array) -> jax.Array:
    """Widens 16-bit numbers to float32; splits complex ones along a new last axis."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.stack([array.real, array.imag], axis=-1)
    return array.astype(wide_dtype(array.dtype)) if is_inexact(array) else array


def _left(new: jax.Array, old: jax.Array) -> jax.Array:
    """Inverse of `_entered`, to the dtype of `old`: the only rounding to 16 bits."""
    if jnp.issubdtype(old.dtype, jnp.complexfloating):
        new = jax.lax.complex(new[..., 0], new[..., 1])
    return new.astype(old.dtype)


def _init_one(init_leaf: InitLeaf, param: jax.Array) -> PyTree:
    if not jnp.issubdtype(param.dtype, jnp.complexfloating):
        return _laid_out(init_leaf(param), param)
    # A rule sees real arrays only. Those of the parameter's shape are complex again
    # between steps, so that they can be sharded as the parameter is.
    real = _entered(param)
    state = jax.tree.map(
        lambda s: _left(s, param) if s.shape == real.shape else s, init_leaf(real)
    )
    return _laid_out(state, param)


def _laid_out(state: PyTree, param: jax.Array) -> PyTree:
    """Lays the arrays of a leaf's state out like their parameter."""
    traced = is_traced(param)
    if not (traced or param.committed):
        return state

    def laid_out(array: jax.Array) -> jax.Array:
        sizes = list(zip(array.shape, param.shape, strict=False))
        if array.ndim != param.ndim or not all(a in (b, 1) for a, b in sizes):
            return array
        gone = tuple(i for i, (a, b) in enumerate(sizes) if a != b)
        # Zeros do not depend on the parameter: in a program the compiler would
        # replicate them without a hint. Outside they have its layout already.
        if not (traced or gone):
            return array
        # Of the sum only the layout is read. A slice would do, but for an explicit
        # axis, along which JAX takes none.
        like = param.sum(gone, keepdims=True) if gone else param
        return alike(array, like) if traced else jax.device_put(array, like.sharding)

    return jax.tree.map(laid_out, state)


def _settled(state: PyTree, params: PyTree) -> PyTree:
    """Moves uncommitted arrays, such as counts, to the parameters' devices."""
    # A count whose place changed in the first step would compile it again. And a
    # checkpoint restores arrays as committed: to the first device alone, a count cannot
    # enter a program over the mesh of the parameters.
    arrays = [p for p in jax.tree.leaves(params) if isinstance(p, jax.Array)]
    # Under jit arrays have no devices yet: the compiler lays the state out.
    if any(map(is_traced, arrays)):
        return state
    # With parameters on several sets of devices no single one is right.
    places = {_whole(p) for p in arrays if p.committed}
    if len(places) != 1:
        return state
    (place,) = places

    def settled(leaf: object) -> object:
        if isinstance(leaf, jax.Array) and not (is_traced(leaf) or leaf.committed):
            return jax.device_put(leaf, place)
        return leaf

    return jax.tree.map(settled, state)


def _whole(param: jax.Array) -> Sharding:
    """The devices of a parameter, as a sharding that replicates over them."""
    place = param.sharding
    if isinstance(place, NamedSharding):
        return NamedSharding(place.mesh, PartitionSpec())
    return place
