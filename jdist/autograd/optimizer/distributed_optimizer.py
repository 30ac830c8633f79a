"""`DistributedOptimizer`: steps parameters on many workers, each on its owner."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist._compat import called_outside_mesh
from jdist._errors import check_number, listed, type_error, value_error
from jdist._tree import PyTree, descriptions, type_name
from jdist.autograd.contexts import here
from jdist.autograd.optimizer.owned_optimizer import (
    CREATE,
    OwnedOptimizer,
    check_same,
    kind_of,
)
from jdist.optim import Optimizer
from jdist.optim.internal import shrinking, sum_of
from jdist.rpc import RemoteModule, RRef, WorkerInfo
from jdist.rpc.extension import NEEDS, current, current_agent

_CALL = "DistributedOptimizer"

State = dict[str, dict[str, np.ndarray]]
"""Arrays by name of the worker, then by path."""


class DistributedOptimizer:
    """Steps parameters that live on several workers with the gradients of a context.

    On each owner of parameters it builds one functional optimizer for all of those that
    are there. Gradients, state and parameters never leave their owner for a step.

    Steps on common parameters, of this optimizer or of others, come one after another:
    each variable has a lock. But between the forward pass of one trainer and its step
    others may step the same parameters: its gradients are then *stale*, those of older
    values. A trainer that needs the whole sequence for itself must arrange that.

    Args:
      optimizer: A constructor of `jdist.optim`; or a function that returns such an
        optimizer or an optax transformation, such as `optax.adam`. It travels by name:
        owners must be able to import it and allow it (see `rpc.init_rpc`).
      params_rrefs: References to variables on any workers, each once; a local one is
        wrapped as `rpc.RRef(variable)`. Those of a trainable module on another worker
        are `module.remote_parameters()`. They hold full precision: of an optimizer with
        masters they are rounded to its compute copies.
      *args: Arguments of the constructor.
      **kwargs: Its keyword arguments. A schedule travels by name, too.

    Raises:
      TypeError: `optimizer` is no function, or something that cannot travel; or what is
        given is no reference.
      ValueError: There are no references, or `optimizer` has no name.
      ForbiddenFunction: `optimizer` is not allowed.
      ExceptionGroup: "Error creating optimizer.", with the errors of all owners that
        could not: a hyperparameter out of range, something that is no variable, a
        variable given twice.

    Source: `torch.distributed.optim.DistributedOptimizer`. Unlike there, concurrent
    steps never race, all errors are reported, a parameter without a gradient never
    moves by an older one, and state can be saved.

    Example:
      >>> import jax.numpy as jnp
      >>> from jdist import autograd, optim, rpc
      >>> with rpc.local_cluster(["worker0", "worker1"]):
      ...     there = rpc.remote("worker1", autograd.variable, args=(jnp.ones(2),))
      ...     here = autograd.variable(jnp.zeros(2))
      ...     dist_opt = DistributedOptimizer(
      ...         optim.sgd, [there, rpc.RRef(here)], lr=0.5)
      ...     with autograd.context() as context_id:
      ...         loss = autograd.apply(
      ...             lambda a, b: (3 * a + b).sum(), there.to_here(), here)
      ...         autograd.backward(context_id, [loss])
      ...         dist_opt.step(context_id)
      ...     there.to_here().tolist(), here.value.tolist()
      ([-0.5, -0.5], [-0.5, -0.5])
    """

    def __init__(
        self,
        optimizer: Callable[..., Any],
        params_rrefs: Iterable[Any],
        *args: object,
        **kwargs: object,
    ) -> None:
        _check_factory(optimizer)
        # An unnameable function is refused here, before any owner has made its part.
        current_agent().codec.functions.reference(optimizer)
        owners: dict[WorkerInfo, dict[int, RRef[Any]]] = {}
        rule = "must be a list of references to variables"
        params_rrefs = listed(f"{_CALL}(params_rrefs)", params_rrefs, object, rule)
        for position, rref in enumerate(params_rrefs):
            if not isinstance(rref, RRef):
                rule = "must be a reference to a variable"
                remedy = "One that is here goes into `rpc.RRef(variable)`."
                if isinstance(rref, RemoteModule):
                    remedy = "Those of a module are `module.remote_parameters()`."
                argument = f"{_CALL}(params_rrefs[{position}])"
                raise type_error(argument, rule, rref, remedy)
            owners.setdefault(rref.owner(), {})[position] = rref
        if not owners:
            rule = "must not be empty: optimizer got an empty parameter list"
            raise value_error(f"{_CALL}(params_rrefs)", rule, "nothing")
        self._own = list(owners.get(current_agent().info, {}).values())
        bodies = {w: (optimizer, args, kwargs, rrefs) for w, rrefs in owners.items()}
        complaint = "Error creating optimizer."
        made = _ask_all(CREATE, bodies, current.DEFAULT, complaint)
        self._parts: dict[WorkerInfo, RRef[Any]] = {
            w: part for w, (part, _) in made.items()
        }
        # Only now that all owners have masters: after an error no value is rounded.
        if any(has_masters for _, has_masters in made.values()):
            self._ask(OwnedOptimizer.begin, complaint, current.DEFAULT)

    @called_outside_mesh
    def step(
        self,
        context_id: int,
        *,
        max_norm: float | None = None,
        timeout: float = current.DEFAULT,
        **overrides: object,
    ) -> jax.Array | None:
        """Steps all parameters with the gradients that a context has for them.

        Owners work in parallel; it returns when all are done. A parameter without a
        gradient keeps its value, its state and its count.

        Args:
          context_id: Id of the context, after its backward pass.
          max_norm: If given, gradients are scaled down together so that their norm over
            all owners is at most this, as `optim.clip_by_global_norm` does. Their
            squares are added in the order of `params_rrefs`, so the norm does not
            depend on who owns what. It takes a second round of messages.
          timeout: Seconds for each owner to answer; -1 for the default, 0 for no limit.
          **overrides: Numeric hyperparameters for this step, such as `lr`.

        Returns:
          With `max_norm` the norm before, over all owners; else None.

        Raises:
          ContextNotFound: There is no such context here, or it ended meanwhile: "Could
            not find autograd context with id".
          TypeError: An override, or `max_norm`, is no number.
          ValueError: `max_norm` is negative, or would be of replicated variables and
            of others.
          ExceptionGroup: "Error running optimizer.", with the errors of all owners that
            failed, such as where there are masters and another has set a variable.
            Their parameters are as before; those of the others have been stepped,
            unless it was the norm that failed.
        """
        here().retrieve(context_id)
        # Checked before the first message, so that no owner steps if one is wrong.
        values = {name: _number(name, value) for name, value in overrides.items()}
        factor = norm = None
        if max_norm is not None:
            norm = self._norm(context_id, max_norm, timeout)
            factor = np.asarray(shrinking(norm, max_norm))
        arguments = (context_id, factor, values)
        self._ask(OwnedOptimizer.step, "Error running optimizer.", timeout, arguments)
        # A context that ended meanwhile had no gradients on some owners, which then did
        # not step: that must raise.
        here().retrieve(context_id)
        return norm

    def state(self, timeout: float = current.DEFAULT) -> State:
        """Gathers all parameters and all state.

        Args:
          timeout: Seconds for each owner to answer; -1 for the default, 0 for no limit.

        Returns:
          For each owner's name the numbers by path: `params/0/w` is a leaf of the first
          variable that it owns, `state/0/w/exp_avg` one of that variable's state. A
          checkpoint of orbax stores it as it is.

        Raises:
          ExceptionGroup: Some owners failed.
        """
        complaint = "Error reading the optimizer's state."
        answers = self._ask(OwnedOptimizer.read, complaint, timeout)
        return {worker.name: numbers for worker, numbers in answers.items()}

    def load_state(self, state: State, timeout: float = current.DEFAULT) -> None:
        """Sets parameters and state on their owners to what `state` returned.

        Args:
          state: What `state` returned, of an optimizer like this one: made by the same
            constructor for variables of the same shapes on workers of the same names.
          timeout: Seconds for each owner to answer; -1 for the default, 0 for no limit.

        Raises:
          ValueError: It is of another optimizer; the message names the first
            difference. Nothing has changed.
          ExceptionGroup: Some owners failed.
        """
        complaint = "Error loading the optimizer's state."
        here = self._ask(OwnedOptimizer.describe, complaint, timeout)
        found = {worker.name: description for worker, description in here.items()}
        given = {name: descriptions(numbers) for name, numbers in state.items()}
        # All owners are compared before one is written to.
        for name in sorted(found.keys() | given.keys()):
            check_same(given.get(name, {}), found.get(name, {}), f"{name}/")
        bodies = {w: (part, state[w.name]) for w, part in self._parts.items()}
        _ask_all(kind_of(OwnedOptimizer.write), bodies, timeout, complaint)

    def _norm(self, context_id: int, max_norm: float, timeout: float) -> jax.Array:
        rule = "must be at least 0"
        check_number(f"{_CALL}.step(max_norm=...)", max_norm, rule, lambda n: n >= 0)
        self._refuse_unequal_norms()
        complaint = "Error running optimizer, in the norm of the gradients."
        answers = self._ask(OwnedOptimizer.squares, complaint, timeout, (context_id,))
        found: dict[int, Any] = {}
        for squares in answers.values():
            # By position, and added in that order: the norm does not depend on the
            # owners.
            found |= squares
        ordered = [
            jnp.asarray(s) for position in sorted(found) for s in found[position]
        ]
        return jnp.sqrt(sum_of(ordered)) if ordered else jnp.zeros(())

    def _refuse_unequal_norms(self) -> None:
        """Checks that a norm is not over both replicated variables and others."""
        replicated = here().replicated
        shared = [rref.local_value() in replicated for rref in self._own]
        # Each trainer would scale the replicated ones by another factor.
        if any(shared) and not (all(shared) and len(self._parts) == 1):
            argument = f"{_CALL}.step(max_norm=...)"
            rule = "must be of replicated variables alone, or of none: gradients of "
            rule += "others differ between trainers, and so would the replicas"
            remedy = "Make an optimizer for the replicated ones and one for the others."
            raise value_error(argument, rule, "both kinds", remedy)

    def _ask(
        self,
        operation: Callable[..., Any],
        complaint: str,
        timeout: float,
        arguments: tuple[Any, ...] = (),
    ) -> dict[WorkerInfo, Any]:
        bodies = {worker: (part, *arguments) for worker, part in self._parts.items()}
        return _ask_all(kind_of(operation), bodies, timeout, complaint)


def _check_factory(optimizer: object) -> None:
    argument = f"{_CALL}(optimizer)"
    rule = "must be a function that makes an optimizer, by which it can travel"
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        remedy = (
            "Pass a constructor, such as `optim.sgd` or `optax.sgd`, and its "
            "arguments; or a function of your own."
        )
        raise type_error(argument, rule, type_name(optimizer), remedy)


def _number(name: str, value: PyTree) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        if not isinstance(value, np.ndarray | np.generic | jax.Array):
            rule = "must be a number or a scalar array"
            remedy = "Give the constructor a schedule, or here its value."
            raise type_error(f"{_CALL}.step({name}=...)", rule, value, remedy)
        return np.asarray(value)
    return value


# An owner may be asked before it has imported autograd for its first variable.
_META = {NEEDS: "jdist.autograd.optimizer.owned_optimizer:install"}


def _ask_all(
    kind: str, bodies: Mapping[WorkerInfo, Any], timeout: float, complaint: str
) -> dict[WorkerInfo, Any]:
    """Sends each worker a request and waits for all answers.

    Args:
      kind: Kind of the requests.
      bodies: The body of each worker's request.
      timeout: Seconds for each; -1 for the default, 0 for no limit.
      complaint: Begins the text of the error if any of them fails.

    Raises:
      ExceptionGroup: Some failed. It holds the errors of all of these, and its message
        names them.
    """
    agent = current_agent()
    *others, (last, last_body) = bodies.items()
    # One owner is asked on this thread itself, which saves a hand-off.
    waits: dict[WorkerInfo, Callable[[], Any]] = {
        last: lambda: agent.call(last, kind, last_body, timeout, _META)
    }
    answers: dict[WorkerInfo, Any] = {}
    errors: dict[WorkerInfo, Exception] = {}
    for worker, body in others:
        try:
            waits[worker] = agent.call_async(worker, kind, body, timeout, _META).wait
        except Exception as error:  # noqa: BLE001 - raised below, all together
            errors[worker] = error
    for worker, wait in waits.items():
        # All answers are awaited, also after an error: the owners step regardless, and
        # the caller must know which have.
        try:
            answers[worker] = wait()
        except Exception as error:  # noqa: BLE001 - raised below, all together
            errors[worker] = error
    if errors:
        raise _all_of(errors, answers, complaint)
    return answers


def _all_of(
    errors: Mapping[WorkerInfo, Exception],
    answers: Iterable[WorkerInfo],
    complaint: str,
) -> ExceptionGroup[Exception]:
    # Not in the order of arrival: the message is the same in every run.
    by_rank = sorted(errors, key=lambda worker: worker.id)
    told = "; ".join(
        f"{worker.name!r}: {type(errors[worker]).__name__}: {errors[worker]}"
        for worker in by_rank
    )
    done = ", ".join(repr(w.name) for w in sorted(answers, key=lambda w: w.id))
    rest = f" Done on {done}." if done else ""
    text = f"{complaint} It failed on {told}.{rest}"
    return ExceptionGroup(text, [errors[worker] for worker in by_rank])
