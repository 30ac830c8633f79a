"""Problems for the judge: loss, parameters, batch and candidates in one value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jdist._errors import requirement
from jdist._own_code import named, own_code
from jdist._tree import PyTree, type_name
from jdist.verify.gradient_check import gradients
from jdist.verify.report import Report

Given = ParamSpec("Given")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Problem:
    """The arguments of `verify.gradients`, in one value that a module can export.

    Attributes:
      loss_fn: `loss_fn(params, batch)`: losses `(examples,)`, or a scalar.
      params: Pytree of parameters.
      batch: Pytree of arrays, each `(examples, ...)`.
      candidates: Name to `fn(params, batch) -> (loss, gradient)`.
      weights: `(examples,)` or None.
      reduction: "mean", "sum", "max" or "min".
      accumulation: The dtype in which 16-bit sums are accumulated; None for float32.
      finite_differences: Whether the reference itself is compared with finite
        differences.
    """

    loss_fn: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any
    candidates: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    weights: Any = None
    reduction: str = "mean"
    accumulation: Any = None
    finite_differences: bool = True

    def judge(self) -> Report:
        """Runs `verify.gradients` on it."""
        # The fields are the arguments, by the same names.
        return gradients(**{x.name: getattr(self, x.name) for x in fields(self)})

    def guarded(self) -> "Problem":
        """The same problem, whose functions raise their errors as `OwnCodeRaised`."""
        candidates = {
            name: _guarded(f"candidate {name!r}", candidate)
            for name, candidate in self.candidates.items()
        }
        loss_fn = _guarded("loss_fn", self.loss_fn)
        return replace(self, loss_fn=loss_fn, candidates=candidates)


def _guarded(what: str, fn: Callable[Given, Result]) -> Callable[Given, Result]:
    def guarded(*arguments: Given.args, **options: Given.kwargs) -> Result:
        with own_code(what):
            return fn(*arguments, **options)

    return guarded


def load(specification: str) -> Problem:
    """Loads a problem by `module:name`.

    The name may stand for a `Problem`, or for a function without arguments that returns
    one. Modules are also looked for in the current folder.

    Raises:
      ValueError: The text is not `module:name`, there is no such module or name, or
        what is there is not a problem; the message says which, and what was found.
      OwnCodeRaised: The module, or the function, raised.
    """
    found: object = named(specification, "problem")
    if callable(found):
        with own_code(f"{specification}()"):
            found = found()
    if isinstance(found, Problem):
        return found
    rule = "must be a verify.Problem, or a function that returns one"
    raise ValueError(requirement(specification, rule, type_name(found)))


def standard(dtype: DTypeLike) -> Problem:
    """The small problem of the equivalence matrix, made to expose common mistakes.

    A matrix used twice, once transposed; a parameter never used; a logarithm of the
    input, which a row of zeros would turn into NaN; unequal sizes throughout; unequal
    weights, one of them 0; losses spread far enough that no maximum is nearly tied.
    """
    rng = np.random.default_rng(11)
    examples, inputs, hidden, classes = 11, 5, 7, 3

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    params = {
        "shared": normal(inputs, hidden) / 2,
        "bias": normal(hidden) / 2,
        "readout": normal(inputs, classes) / 2,
        "unused": normal(2),
    }
    batch = {
        # Positive, for the logarithm in the loss.
        "x": jnp.asarray(rng.uniform(0.5, 2.0, size=(examples, inputs)), dtype),
        "label": jnp.asarray(rng.integers(classes, size=examples), jnp.int32),
        # Distinct factors: a tie of losses would make max and min ambiguous.
        "difficulty": jnp.asarray(rng.permutation(examples) * 0.5 + 1, dtype),
    }
    weights = rng.uniform(0.5, 2.0, size=examples).astype(np.float32)
    # Padding: an example that must not count at all.
    weights[4] = 0
    return Problem(_standard_loss, params, batch, weights=weights)


def with_rules(dtype: DTypeLike) -> Problem:
    """The standard problem, with derivative rules that see a cotangent's scale.

    In `jax.grad` of the mean the backward pass of an example begins with its weight's
    share of the total. A strategy that begins with another scale and corrects it
    afterwards has another gradient here; so may one that accumulates a maximum.
    """
    # No finite difference is the derivative that these rules have on purpose.
    return replace(standard(dtype), loss_fn=_loss_with_rules, finite_differences=False)


def _standard_loss(
    params: PyTree,
    batch: PyTree,
    inner: Callable[[jax.Array], jax.Array] = lambda x: x,
    outer: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    hidden = jnp.tanh(jnp.log(batch["x"]) @ params["shared"] + params["bias"][None, :])
    scores = inner(hidden @ params["shared"].T) @ params["readout"]
    scores = jax.nn.log_softmax(outer(scores))
    own = jnp.take_along_axis(scores, batch["label"][:, None], axis=1)[:, 0]
    return batch["difficulty"] * (1 - own)


def _loss_with_rules(params: PyTree, batch: PyTree) -> jax.Array:
    return _standard_loss(params, batch, _clipped, _saturated)


@jax.custom_vjp
def _clipped(x: jax.Array) -> jax.Array:
    """An identity that clips its cotangent."""
    return x


@jax.custom_vjp
def _saturated(x: jax.Array) -> jax.Array:
    """An identity whose cotangent is small beside 1, whatever arrives."""
    return x


_clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
_saturated.defvjp(lambda x: (x, None), lambda _, g: (g / (0.1 + jnp.abs(g)),))
