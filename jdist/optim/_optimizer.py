"""The interface of all optimizers, and the driver that applies a rule per leaf.

An `Optimizer` is a pair of pure functions over whole trees. Most are made by
`leafwise` out of two small functions over one array each:

    init_leaf(param) -> state                          a NamedTuple with a `step` count
    step_leaf(param, grad, state, h) -> (update, state)    h: hyperparameters by name

All that is the same for every algorithm is here, once: walking the tree, adding the
update (or handing it out), skipping None, precision, validation, schedules, and
overriding a hyperparameter for one step.

A parameter whose gradient is None does not change, nor do its state and its step
count, bit for bit. A leaf that is not a floating array is never updated.

Precision. 16-bit parameters and their state are widened to float32 within a step and
rounded once at its end, where torch rounds after every operation. Moments and buffers
are kept in the dtype of their parameter; scalars that are no counts in float32 or
wider. A complex parameter is two real ones, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike, DTypeLike

from jdist._compat import alike, is_traced
from jdist._errors import requirement
from jdist._tree import PyTree, described, is_inexact, is_none, path_of, wide_dtype
from jdist.optim._hyperparameters import (
    Hyperparameter,
    check_overrides,
    known_zero,
    resolved,
)
from jdist.optim._loss_scale import Precision


class Update(NamedTuple):
    """How one parameter moves: p <- p * (1 - decay) + delta."""

    delta: jax.Array
    """The summand; shape and dtype of the parameter."""

    decay: Any = 0
    """The fraction by which it shrinks first, a scalar: decoupled weight decay, which
    torch multiplies in, so that it is rounded before the delta is added."""

    def applied(self, param: jax.Array) -> jax.Array:
        """The new parameter."""
        if not known_zero(self.decay):
            param = param * (1 - self.decay)
        return param + self.delta

    def total(self, param: jax.Array) -> jax.Array:
        """All that is added to the parameter, not rounded to its spacing."""
        if known_zero(self.decay):
            return self.delta
        return self.delta - self.decay * param


InitLeaf: TypeAlias = Callable[[jax.Array], Any]
StepLeaf: TypeAlias = Callable[
    [jax.Array, jax.Array, Any, SimpleNamespace], tuple[Update, Any]
]


@dataclass(frozen=True, slots=True, eq=False)
class Optimizer:
    """A pure optimizer: how to make the state, and how to make a step.

    Attributes:
      name: The constructor's name, such as `adam`; it stands in every error.
      init_tree: `init_tree(params) -> state`.
      step_tree: `step_tree(params, grads, state, overrides) -> (params, state)`; with
        a further `updates=True` it returns in the place of each parameter what the step
        adds to it.
      hyperparameters: What a step can override, and what is fixed, by torch's names.
      loss_factor: `loss_factor(state) -> factor` of `scale_loss`; None stands for 1.
      precision: What `with_master_weights` was told; None: there are no masters.
    """

    name: str
    init_tree: Callable[[Any], Any]
    step_tree: Callable[..., tuple[Any, Any]]
    hyperparameters: Mapping[str, Hyperparameter] = field(default_factory=dict)
    loss_factor: Callable[[Any], jax.Array] | None = None
    precision: Precision | None = None

    @property
    def rule(self) -> tuple[Any, ...]:
        """Equal for optimizers that make the same steps of the same parameters."""
        # By identity: schedules are functions, which cannot be compared.
        return (id(self),)

    def init(self, params: PyTree) -> PyTree:
        """The state before the first step.

        Args:
          params: Any pytree: dicts, dataclasses, Flax NNX modules and states.

        Returns:
          For the algorithms of `jdist.optim`: tree like `params`, with the algorithm's
          NamedTuple in the place of each floating leaf and None in that of any other,
          placed and sharded as the parameter is, under jit too. Others say what they
          return.

        Raises:
          ValueError: `params` has no leaves.
        """
        if not jax.tree.leaves(params):
            rule = "must have at least one leaf"
            raise ValueError(requirement(f"{self.name}.init(params)", rule, "none"))
        return _settled(self.init_tree(params), params)

    def step(
        self, params: PyTree, grads: PyTree, state: PyTree, **overrides: object
    ) -> tuple[PyTree, PyTree]:
        """One step: pure, so it may be jitted, vmapped, sharded and donated to.

        Args:
          params: The parameters.
          grads: Tree like `params`: a gradient of the leaf's shape and dtype, or None
            to leave that parameter, its state and its count unchanged. With masters it
            may be wider than its compute copy: a float32 sum over micro-batches is not
            to be rounded on its way. Of a complex leaf the direction of ascent, as in
            torch: the *conjugate* of what `jax.grad` gives.
          state: What `init` or the last step returned.
          **overrides: Numeric hyperparameters for this step only; they may be traced
            (no recompilation when they change).

        Returns:
          The new parameters and the new state.

        Raises:
          ValueError: The trees do not match, a gradient's shape or dtype is not its
            parameter's, or an override breaks its rule.
          TypeError: An override is not one of the optimizer's numeric hyperparameters.
        """
        _check_gradients(self.name, params, grads, self.precision is not None)
        return self.step_tree(params, grads, state, overrides)

    def updates(
        self, params: PyTree, grads: PyTree, state: PyTree, **overrides: object
    ) -> tuple[PyTree, PyTree]:
        """The updates that `step` would add to the parameters, and the new state.

        The update itself, and not the difference of new and old parameters, which is
        rounded to the spacing of their numbers. Added, it gives what `step` returns;
        after decoupled weight decay, which torch rounds by itself, and in 16 bits it
        may miss that by the last bit.

        Args:
          params: As for `step`.
          grads: As for `step`.
          state: As for `step`.
          **overrides: As for `step`.

        Returns:
          Tree like `params`, 0 where nothing moves, in each parameter's dtype; with
          masters in theirs. And the new state.

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
        _check_gradients(self.name, params, grads, self.precision is not None)
        return self.step_tree(params, grads, state, overrides, updates=True)

    def scale_loss(self, loss: jax.Array, state: PyTree) -> jax.Array:
        """The loss to differentiate: times the loss scale, if the state holds one.

        Args:
          loss: Any shape; widened to float32, in which its product cannot overflow.
          state: What `init` or the last step returned; `step` divides the gradients
            by the same scale.
        """
        if self.loss_factor is None:
            return loss
        loss = jnp.asarray(loss)
        wide = loss.astype(wide_dtype(loss.dtype))
        return wide * self.loss_factor(state).astype(wide.dtype)


def leafwise(
    name: str,
    hyperparameters: Sequence[Hyperparameter],
    init_leaf: InitLeaf,
    step_leaf: StepLeaf,
) -> Optimizer:
    """An optimizer that treats each floating leaf alone, by the same rule.

    Args:
      name: For errors.
      hyperparameters: In the order of the constructor; checked here.
      init_leaf: The state of one real floating array: a NamedTuple with an int32
        scalar `step` (or None, where no schedule can be given) and arrays of the
        parameter's shape and dtype, or scalars.
      step_leaf: One step of one real array, float32 or wider: its `Update`, of the same
        shape and dtype, and the new state, like the old. Elementwise, for complex
        parameters.

    Raises:
      ValueError: A hyperparameter breaks its rule.
      TypeError: A hyperparameter is of the wrong kind. In `step`: `step_leaf` returned
        something else than an `Update` and a state.

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
    specs = {spec.name: spec for spec in hyperparameters}
    # Before the first step, so that a wrong constructor fails where it is written.
    for spec in specs.values():
        spec.check(name, spec.value)
    # To recognise a leaf's state in `step`, whatever the shapes.
    one = jax.ShapeDtypeStruct((), jnp.float32)
    # By abstract evaluation: the rule of the leaf may allocate.
    state_structure: Any = jax.tree.structure(jax.eval_shape(init_leaf, one))
    rule = _Rule(name, specs, state_structure, step_leaf)
    call = f"{name}.step"

    def init_tree(params: PyTree) -> PyTree:
        return jax.tree.map(
            lambda p: _init_one(init_leaf, jnp.asarray(p)) if is_inexact(p) else None,
            params,
        )

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
        grad_leaves = structure.flatten_up_to(grads)
        state_leaves = matching(call, "state", params, state)
        move: Callable[..., tuple[Any, Any]]
        move = partial(rule.moved, overrides=overrides, updates=updates)
        # Under jit, leaves of one shape and dtype are traced once, and what was found
        # is copied for the others.
        if is_traced(jnp.zeros(())):
            move = jax.jit(move, inline=True)
        new = []
        for (keys, param), grad, leaf_state in zip(
            pairs, grad_leaves, state_leaves, strict=True
        ):
            rule.check_state(keys, param, leaf_state)
            if is_inexact(param) and grad is not None:
                new.append(move(param, grad, leaf_state))
            else:
                # The very state, and not a copy: a count that moved would change the
                # bias corrections.
                new.append((jnp.zeros_like(param) if updates else param, leaf_state))
        new_params, new_state = ([pair[i] for pair in new] for i in (0, 1))
        return structure.unflatten(new_params), structure.unflatten(new_state)

    return Optimizer(name, init_tree, step_tree, specs)


@dataclass(frozen=True, slots=True)
class _Rule:
    """The rule of one leaf, between the tree's dtypes and those of a step."""

    name: str
    specs: Mapping[str, Hyperparameter]
    state_structure: Any
    step_leaf: StepLeaf

    def check_state(self, keys: Any, param: ArrayLike, state: PyTree) -> None:
        """Refuses what is not the state of this rule, in the place of a leaf.

        Raises:
          ValueError: It is not.
        """
        if is_inexact(param) and jax.tree.structure(state) != self.state_structure:
            rule = "must hold what "
            rule += f"`{self.name}.init` or the last step returned, at {path_of(keys)}"
            got = str(jax.tree.structure(state))
            raise ValueError(requirement(f"{self.name}.step(state=...)", rule, got))

    def moved(
        self,
        param: ArrayLike,
        grad: ArrayLike,
        state: PyTree,
        *,
        overrides: Mapping[str, Any],
        updates: bool,
    ) -> tuple[Any, Any]:
        """The new parameter, or with `updates` what is added to it; and its state."""
        param = jnp.asarray(param)
        # From here to `_left` nothing is rounded to 16 bits.
        wide = _entered(param)
        call = f"{self.name}.step"
        h = resolved(call, self.specs, overrides, state.step, wide.dtype)
        entered = jax.tree.map(_entered, state)
        update: Any
        update, new = self.step_leaf(wide, _entered(jnp.asarray(grad)), entered, h)
        if not isinstance(update, Update):
            rule = "must return an `Update` of the parameter and its new state"
            got = type(update).__name__
            raise TypeError(requirement(f"{self.name}: step_leaf", rule, got))
        # Two forms, because the difference of new and old is rounded to their spacing.
        found = update.total(wide) if updates else update.applied(wide)
        return _left(found, param), jax.tree.map(_left, new, state)


def check_optimizer(argument: str, given: PyTree) -> None:
    """Refuses what is no `Optimizer`, and says how to make one of it.

    Args:
      argument: Function and argument that it was given to, for the error's text, such
        as `"train_step(optimizer=...)"`.
      given: What was given.

    Raises:
      TypeError: It is an optax transformation, a constructor that was not called, or
        something else.

    Example:
      >>> from jdist import optim
      >>> check_optimizer("train_step(optimizer=...)", optim.sgd)
      Traceback (most recent call last):
        ...
      TypeError: `train_step(optimizer=...)` must be an optimizer of jdist.optim. Got
      the function sgd. Call it: `optim.sgd(...)`.
    """
    if isinstance(given, Optimizer):
        return
    rule = "must be an optimizer of jdist.optim"
    got, remedy = repr(given), "Make one, such as `optim.adam(lr=1e-3)`."
    if hasattr(given, "init") and hasattr(given, "update"):
        got = f"an optax transformation ({type(given).__name__})"
        remedy = "Wrap it: `optim.from_optax(...)`."
    elif callable(given) and hasattr(given, "__name__"):
        kind = "class" if isinstance(given, type) else "function"
        module = getattr(given, "__module__", "") or ""
        got = f"the {kind} {given.__name__}"
        if module.startswith("jdist.optim"):
            remedy = f"Call it: `optim.{given.__name__}(...)`."
        elif module.startswith("optax"):
            remedy = f"Call and wrap it: `optim.from_optax({given.__name__}(...))`."
        else:
            remedy = "Call it and give what it returns, if it makes an optimizer."
    raise TypeError(requirement(argument, rule, got, remedy))


def count_zero() -> jax.Array:
    """The step count of a leaf that has not been stepped: int32, scalar."""
    # An integer: a float32 count would stand still at 2**24.
    return jnp.zeros((), jnp.int32)


def matching(call: str, argument: str, params: PyTree, tree: PyTree) -> list[Any]:
    """The subtrees of `tree` in the places of the leaves of `params`, None included.

    Raises:
      ValueError: `tree` has not the structure of `params`.
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
        raise ValueError(requirement(f"{call}({argument}=...)", rule, got)) from error


def _check_gradients(name: str, params: PyTree, grads: PyTree, masters: bool) -> None:
    # Checked before anything is computed: inside jit the error would name a primitive.
    leaves = matching(f"{name}.step", "grads", params, grads)
    for (keys, param), grad in zip(
        jax.tree.leaves_with_path(params), leaves, strict=True
    ):
        if grad is None or not is_inexact(param):
            continue
        dtype, got = jnp.result_type(param), jnp.result_type(grad)
        fits = got == dtype or (masters and _widens(dtype, got))
        if jnp.shape(grad) != jnp.shape(param) or not fits:
            argument = f"{name}.step(grads=...)"
            rule = f"must match its parameter at {path_of(keys)}, {described(param)}"
            rule += ", or be of a wider dtype" if masters else ""
            raise ValueError(requirement(argument, rule, described(grad)))


def _widens(dtype: DTypeLike, other: DTypeLike) -> bool:
    """Whether every number of one floating dtype is one of the other, of its kind."""
    kinds = (jnp.floating, jnp.complexfloating)
    alike = any(all(jnp.issubdtype(d, k) for d in (dtype, other)) for k in kinds)
    if not alike:
        return False
    own, wider = jnp.finfo(dtype), jnp.finfo(other)
    return bool(own.nmant <= wider.nmant and own.maxexp <= wider.maxexp)


# --- one leaf: into the precision of the step, and out of it ---


def _entered(array: jax.Array) -> jax.Array:
    """16-bit numbers as float32, complex ones as a last axis of two real ones."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.stack([array.real, array.imag], axis=-1)
    return array.astype(wide_dtype(array.dtype)) if is_inexact(array) else array


def _left(new: jax.Array, old: jax.Array) -> jax.Array:
    """Inverse of `_entered`, into the dtype of `old`: the one rounding of a step."""
    if jnp.issubdtype(old.dtype, jnp.complexfloating):
        new = jax.lax.complex(new[..., 0], new[..., 1])
    return new.astype(old.dtype)


def _init_one(init_leaf: InitLeaf, param: jax.Array) -> PyTree:
    if not jnp.issubdtype(param.dtype, jnp.complexfloating):
        return _placed(init_leaf(param), param)
    real = _entered(param)
    return _placed(
        jax.tree.map(
            lambda s: _left(s, param) if s.shape == real.shape else s, init_leaf(real)
        ),
        param,
    )


def _placed(state: PyTree, param: jax.Array) -> PyTree:
    """Arrays laid out as their parameter is; scalars where a step will leave them."""
    # Zeros do not follow from the parameter: a compiler that is told nothing puts them
    # whole on every device. A count that moved after the first step would compile the
    # step a second time.
    if is_traced(param):
        return jax.tree.map(
            lambda s: alike(s, param) if s.shape == param.shape else s, state
        )
    if not param.committed:
        return state
    # A scalar cannot be divided over an axis.
    place = _whole(param)
    return jax.tree.map(lambda s: s if s.ndim else jax.device_put(s, place), state)


def _settled(state: PyTree, params: PyTree) -> PyTree:
    """The state with unplaced arrays, such as optax's counts, beside the parameters."""
    # An array that a checkpoint has restored is tied to its devices: a count on the
    # first one alone could not meet parameters on a mesh.
    arrays = [p for p in jax.tree.leaves(params) if isinstance(p, jax.Array)]
    # Under jit arrays have no place yet; the compiler lays the state out.
    if any(map(is_traced, arrays)):
        return state
    # Where parameters lie in several places no single one is right, and nothing is
    # moved.
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
    """The place of a parameter, for values that are not divided as it is."""
    place = param.sharding
    if isinstance(place, NamedSharding):
        return NamedSharding(place.mesh, PartitionSpec())
    return place
