"""Stages: pure functions with named inputs and outputs, compiled as segments."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax

from jdist._errors import check_flags, check_function, type_error, value_error
from jdist._tree import PyTree, type_name
from jdist.segment import Segment, segment
from jdist.segment.internal import POLICIES, is_policy, unguarded

Recompute = bool | Literal["dots"]
"""Recomputation in a backward pass; see `jdist.segment.segment`."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a model that runs on one device or in one process.

    Values have names. The inputs of a stage are outputs of earlier stages or entries of
    the batch, so that a value may skip stages and a stage may have several inputs and
    outputs.

    Args:
      fn: `fn(params, *inputs) -> output`, pure; a tuple for several outputs. With a
        state it is `fn(params, state, *inputs) -> (output, state)`; with a key, the key
        is its last argument.
      inputs: Names of its inputs, in the order of its arguments.
      outputs: Names of its outputs.
      stateful: Whether it has a state, such as batch-norm statistics. Each micro-batch
        gets the state that the one before returned; no cotangent flows into it.
      keyed: Whether it takes a PRNG key, a different one for each micro-batch.
      recompute: Values that the backward pass computes again instead of keeping them;
        see `jdist.segment.segment`.
      tied: Parameters that it shares with other stages: from the path of its copy (a
        leaf or a subtree) to a name that is the same for all stages that share it.
        The gradient of every copy is the sum over all copies, so that copies that begin
        equal stay equal. A stage with ends may have several of one name.
      in_evaluation: The function that `Pipeline.evaluate` calls instead of `fn`:
        `in_evaluation(params, *inputs)`, or `in_evaluation(params, state, *inputs)`
        where the stage is stateful, returns the outputs alone and takes no key. By
        default `fn` is called, and the state that it returns is dropped.

    Raises:
      TypeError: `fn` is no function, or a name is not a string.
      ValueError: An input or output occurs twice, there is no output, a tied path is
        within another one, or `recompute` is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> stage = Stage(lambda w, x: jnp.tanh(x @ w), inputs=("x",), outputs=("h",))
      >>> stage.outputs
      ('h',)
    """

    fn: Callable[..., PyTree]
    inputs: Sequence[str] = ("x",)
    outputs: Sequence[str] = ("h",)
    stateful: bool = False
    keyed: bool = False
    recompute: Recompute = False
    tied: Mapping[str, str] = field(default_factory=dict, hash=False)
    in_evaluation: Callable[..., PyTree] | None = None

    def __post_init__(self) -> None:
        check_function("Stage(fn)", self.fn)
        if self.in_evaluation is not None:
            check_function("Stage(in_evaluation=...)", self.in_evaluation)
        for given in ("inputs", "outputs"):
            names = getattr(self, given)
            call = f"Stage({given}=...)"
            several = isinstance(names, Iterable) and not isinstance(names, str)
            if not several or not all(isinstance(n, str) for n in names):
                raise type_error(call, "must be a tuple of names", names)
            # The class is frozen, and a list would make it unhashable.
            object.__setattr__(self, given, tuple(names))
            if len(set(names)) != len(names):
                raise value_error(call, "must be different names", names)
        check_flags("Stage", stateful=self.stateful, keyed=self.keyed)
        _check_tied(self.tied)
        if not self.outputs:
            rule = "must name one value at least"
            raise value_error("Stage(outputs=...)", rule, self.outputs)
        if not is_policy(self.recompute):
            rule = f"must be one of {', '.join(map(repr, sorted(POLICIES, key=str)))}"
            raise value_error("Stage(recompute=...)", rule, self.recompute)

    def named(self, returned: PyTree) -> dict[str, PyTree]:
        """The outputs by name, from the return value of `fn`.

        Raises:
          ValueError: It returned another number of values than there are names.
        """
        return outputs_by_name("Stage(fn)", self.outputs, returned)

    def compiled(self, constant: frozenset[str], label: Hashable) -> Segment:
        """The stage as a segment of `(params, state, inputs, key)`.

        Args:
          constant: Names of inputs whose cotangents are not needed.
          label: Distinguishes stages made by one factory.
        """
        meant = self._label("stage", label, self.fn), constant
        body = _body(self, constant)
        return unguarded(segment(body, recompute=self.recompute, label=meant))

    def evaluated(self, compiled: Segment, label: Hashable) -> Segment:
        """The segment that evaluation runs.

        Args:
          compiled: The result of `compiled`, which is returned if the stage has no
            function for evaluation.
          label: Distinguishes stages made by one factory.
        """
        if self.in_evaluation is None:
            # The same segment, so that one function is not compiled twice.
            return compiled
        meant = self._label("evaluation", label, self.in_evaluation)
        return unguarded(segment(_body_in_evaluation(self), label=meant))

    def _label(self, use: str, label: Hashable, fn: Callable[..., PyTree]) -> Hashable:
        # All stages share the code of `body`. The label tells `segment` which
        # differences are intended, so that it does not warn of recompilations. Callable
        # objects have no code: their class stands for it.
        code = getattr(fn, "__code__", type(fn))
        return use, label, code, self.stateful, self.keyed


def _check_tied(tied: Mapping[str, str]) -> None:
    call = "Stage(tied=...)"
    texts = [*tied, *tied.values()] if isinstance(tied, Mapping) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise type_error(call, "must be a dict from paths to names", tied)
    # A leaf below both paths would be summed under two names.
    within = [(a, b) for a in tied for b in tied if b.startswith(f"{a}/")]
    if within:
        rule = "must not have a path within another one"
        raise value_error(call, rule, f"{within[0][1]} in {within[0][0]}")


def _body(stage: Stage, constant: frozenset[str]) -> Callable[..., PyTree]:
    fn, stateful, keyed, names = stage.fn, stage.stateful, stage.keyed, stage.inputs
    stopped = tuple(name in constant for name in names)

    def body(
        params: PyTree, state: PyTree, inputs: tuple[PyTree, ...], key: PyTree
    ) -> PyTree:
        given = [
            # Otherwise the backward pass would compute cotangents of inputs from the
            # batch, which nothing needs.
            jax.lax.stop_gradient(x) if stop else x
            for x, stop in zip(inputs, stopped, strict=True)
        ]
        if stateful:
            # No gradient flows from one micro-batch to another through a state, such as
            # a running mean.
            given.insert(0, jax.lax.stop_gradient(state))
        if keyed:
            given.append(key)
        returned = fn(params, *given)
        return returned if stateful else (returned, None)

    return body


def _body_in_evaluation(stage: Stage) -> Callable[..., PyTree]:
    fn, stateful = stage.in_evaluation, stage.stateful
    assert fn is not None

    def body(
        params: PyTree, state: PyTree, inputs: tuple[PyTree, ...], key: PyTree
    ) -> PyTree:
        return fn(params, *((state, *inputs) if stateful else inputs)), None

    return body


def outputs_by_name(
    call: str, names: Sequence[str], returned: PyTree
) -> dict[str, PyTree]:
    """The values that a function returned, by name.

    Args:
      call: The function, for the error's text.
      names: Names of its outputs; of a single one the value is returned alone.
      returned: The return value.

    Raises:
      ValueError: It returned another number of values than there are names.
    """
    # A single output is not wrapped in a tuple.
    if len(names) == 1:
        return {names[0]: returned}
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        rule = f"must return the {len(names)} outputs {tuple(names)}"
        size = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise value_error(call, rule, f"{type_name(returned)}{size}")
    return dict(zip(names, returned, strict=True))
