"""A stage: a pure function with named inputs and outputs."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jdist._errors import requirement
from jdist.segment import Segment, segment
from jdist.segment.internal import POLICIES


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a model, which lives on one device or in one process.

    Values have names. A stage takes those that earlier stages have put out, or entries
    of the batch, so that a value may skip stages and a stage may have several inputs
    and outputs.

    Args:
      fn: `fn(params, *inputs) -> output`, pure; of several outputs a tuple. With a
        state it is `fn(params, state, *inputs) -> (output, state)`; with a key, the key
        is its last argument.
      inputs: Names of what it takes, in the order of its arguments.
      outputs: Names of what it puts out.
      stateful: Whether it has a state, such as batch-norm statistics. Each micro-batch
        is given the state that the one before left behind; no cotangent flows into it.
      keyed: Whether it takes a PRNG key, another one for each micro-batch.
      recompute: What the backward pass computes again instead of keeping it: see
        `jdist.segment.segment`.
      tied: Parameters that it shares with other stages: from the path of its copy, a
        leaf or a subtree, to a name, which is the same for all stages that share it.
        The gradient of every copy is the sum over the stages, so that copies that begin
        equal stay equal.
      join_weight_gradients: Whether weight gradients wait for the stage's last backward
        pass and are then computed for all micro-batches at once: one product in place
        of one per micro-batch. Everything that these products need is kept until then,
        beyond what the schedule promises. For mean and sum only.
      in_evaluation: What `Pipeline.evaluate` calls instead of `fn`:
        `in_evaluation(params, *inputs)`, or `in_evaluation(params, state, *inputs)`
        where the stage is stateful, returns the outputs alone and takes no key. By
        default `fn` itself is called, and the state that it returns is dropped.

    Raises:
      TypeError: `fn` is not callable, or a name is none.
      ValueError: A name occurs twice, there is no output, or `recompute` is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> stage = Stage(lambda w, x: jnp.tanh(x @ w), inputs=("x",), outputs=("h",))
      >>> stage.outputs
      ('h',)
    """

    fn: Callable[..., Any]
    inputs: Sequence[str] = ("x",)
    outputs: Sequence[str] = ("h",)
    stateful: bool = False
    keyed: bool = False
    recompute: Any = False
    tied: Mapping[str, str] = field(default_factory=dict, hash=False)
    in_evaluation: Callable[..., Any] | None = None
    join_weight_gradients: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(requirement("Stage(fn)", "must be callable", self.fn))
        other: Any = self.in_evaluation
        if other is not None and not callable(other):
            call = "Stage(in_evaluation=...)"
            raise TypeError(requirement(call, "must be callable", other))
        for given in ("inputs", "outputs"):
            names = getattr(self, given)
            call = f"Stage({given}=...)"
            if isinstance(names, str) or not all(isinstance(n, str) for n in names):
                raise TypeError(requirement(call, "must be a tuple of names", names))
            object.__setattr__(self, given, tuple(names))
            if len(set(names)) != len(names):
                raise ValueError(requirement(call, "must be different names", names))
        _check_tied(self.tied)
        if not self.outputs:
            rule = "must name one value at least"
            raise ValueError(requirement("Stage(outputs=...)", rule, self.outputs))
        if not any(self.recompute is p or self.recompute == "dots" for p in POLICIES):
            rule = f"must be one of {', '.join(map(repr, sorted(POLICIES, key=str)))}"
            raise ValueError(requirement("Stage(recompute=...)", rule, self.recompute))

    def named(self, returned: Any) -> dict[str, Any]:
        """What `fn` returned as outputs by name.

        Raises:
          ValueError: It returned another number of values than there are names.
        """
        if len(self.outputs) == 1:
            return {self.outputs[0]: returned}
        if not isinstance(returned, tuple | list) or len(returned) != len(self.outputs):
            rule = f"must return the {len(self.outputs)} outputs {self.outputs}"
            size = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
            got = f"a {type(returned).__name__}{size}"
            raise ValueError(requirement("Stage(fn)", rule, got))
        return dict(zip(self.outputs, returned, strict=True))

    def compiled(self, constant: frozenset[str], label: Any) -> Segment:
        """The stage as a segment of `(params, state, inputs, key)`.

        Args:
          constant: Names of inputs that no cotangent is wanted of.
          label: Tells stages of one factory apart.
        """
        meant = self._label("stage", label, self.fn, constant)
        return segment(_body(self, constant), recompute=self.recompute, label=meant)

    def evaluated(self, compiled: Segment, label: Any) -> Segment:
        """As a segment too, what evaluation calls of it.

        Args:
          compiled: What `compiled` made. It is used in evaluation too where the stage
            has no function for that, so that both are the same program.
          label: Tells stages of one factory apart.
        """
        if self.in_evaluation is None:
            return compiled
        meant = self._label("evaluation", label, self.in_evaluation, frozenset())
        return segment(_body_in_evaluation(self), label=meant)

    def _label(
        self, use: str, label: Any, fn: Callable[..., Any], constant: frozenset[str]
    ) -> Hashable:
        # All stages share the code of `body`: what varies by intent is in the label.
        code = getattr(fn, "__code__", type(fn))
        return (use, label, code, self.stateful, self.keyed, constant)


def _check_tied(tied: Any) -> None:
    call = "Stage(tied=...)"
    names = list(tied.values()) if isinstance(tied, Mapping) else [None]
    if not all(isinstance(text, str) for text in [*tied, *names]):
        rule = "must be a dict from paths to names"
        raise TypeError(requirement(call, rule, tied))
    if len(set(names)) != len(names):
        rule = "must have a name of its own for each path"
        raise ValueError(requirement(call, rule, names))
    within = [(a, b) for a in tied for b in tied if b.startswith(f"{a}/")]
    if within:
        rule = "must not have a path within another one"
        raise ValueError(requirement(call, rule, f"{within[0][1]} in {within[0][0]}"))


def _body(stage: Stage, constant: frozenset[str]) -> Callable[..., Any]:
    fn, stateful, keyed, names = stage.fn, stage.stateful, stage.keyed, stage.inputs
    stopped = tuple(name in constant for name in names)

    def body(params: Any, state: Any, inputs: tuple[Any, ...], key: Any) -> Any:
        given = [
            jax.lax.stop_gradient(x) if stop else x
            for x, stop in zip(inputs, stopped, strict=True)
        ]
        if stateful:
            given.insert(0, jax.lax.stop_gradient(state))
        if keyed:
            given.append(key)
        returned = fn(params, *given)
        return returned if stateful else (returned, None)

    return body


def _body_in_evaluation(stage: Stage) -> Callable[..., Any]:
    fn, stateful = stage.in_evaluation, stage.stateful
    assert fn is not None

    def body(params: Any, state: Any, inputs: tuple[Any, ...], key: Any) -> Any:
        return fn(params, *((state, *inputs) if stateful else inputs)), None

    return body
