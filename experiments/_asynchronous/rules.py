"""Rules of asynchronous pipelines as data: three pure functions of a stage.

A micro-batch enters a stage before the updates of the micro-batches just ahead of it. A
rule says which weights its forward pass sees, which its backward pass sees, and what
the stage's update makes of the gradient that comes out. *Which version* a micro-batch
meets is not the rule's: it is the version matrix of a schedule.

Below, w_t are the weights of a stage after t updates, g the gradient that makes w_{t+1}
of w_t, and tau the stage's delay: the updates between a micro-batch's forward pass and
its own update. With n stages and one micro-batch for each update, PipeDream's stage j,
counted from 0, has tau = n - 1 - j. Replicas of a stage update together, so that tau is
smaller there; rules that read tau alone are defined for them.

Each docstring says where its formula was read: in the authors' code, or in another's
account. No publication's own text was at hand.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jdist import optim

PyTree = Any
Number = float | jax.Array


class Place(NamedTuple):
    """A stage in its pipeline; the numbers may be traced.

    Attributes:
      stage: Its number, from 0.
      stages: The number of stages.
      delay: Its tau, at least 0.
    """

    stage: int | jax.Array
    stages: int | jax.Array
    delay: int | jax.Array


class Now(NamedTuple):
    """A version of a stage's weights, and what its update left beside them.

    Attributes:
      version: t, an int32 scalar.
      params: w_t.
      state: What the rule keeps: the optimizer's state, and more.
      rate: The learning rate, a scalar; None: that of the optimizer.
    """

    version: jax.Array
    params: PyTree
    state: PyTree
    rate: Number | None


def newest(place: Place, now: Now) -> PyTree:
    """A forward pass sees the weights as they are."""
    return now.params


def as_forward(place: Place, now: Now, seen: PyTree) -> PyTree:
    """A backward pass sees what its forward pass saw: weight stashing."""
    return seen


def newest_again(place: Place, now: Now, seen: PyTree) -> PyTree:
    """A backward pass sees the newest weights; nothing is stashed."""
    return now.params


@dataclass(frozen=True)
class Rule:
    """What the passes of a stage see, and how it updates.

    Attributes:
      begin: `begin(params) -> state`, before the first update.
      step: `step(place, grads, now, seen) -> (params, state)`: the next version, from
        the gradient and from what the forward pass of that gradient saw.
      forward: `forward(place, now) -> params`: what a forward pass sees that meets this
        version.
      backward: `backward(place, now, seen) -> params`: what a backward pass sees, at
        the newest version.
      stashes: Whether what forward passes saw is kept, by `backward` or by `step`.
    """

    begin: Callable[[PyTree], PyTree]
    step: Callable[[Place, PyTree, Now, PyTree], tuple[PyTree, PyTree]]
    forward: Callable[[Place, Now], PyTree] = newest
    backward: Callable[[Place, Now, PyTree], PyTree] = as_forward
    stashes: bool = True


def _overrides(rate: Number | None) -> dict[str, Number]:
    return {} if rate is None else {"lr": rate}


def _stepper(
    optimizer: optim.Optimizer,
) -> Callable[[Place, PyTree, Now, PyTree], tuple[PyTree, PyTree]]:
    def step(place: Place, grads: PyTree, now: Now, seen: PyTree) -> Any:
        return optimizer.step(now.params, grads, now.state, **_overrides(now.rate))

    return step


def stashed(optimizer: optim.Optimizer) -> Rule:
    """Weight stashing; vertical sync and 2BW too, by their version matrices.

    With `optim.nadam(betas=(0.99, 0.999))` it is what Ajanthan et al. train with (read
    in their code), with `optim.muon` under 2BW what Zmushko et al. do, and with
    `rotation.rotated_adam` basis rotation.

    Source:
      Narayanan et al., PipeDream, SOSP 2019, 3.3; Memory-Efficient Pipeline-Parallel
      DNN Training, arXiv:2006.09503. Read in the authors' code, which keeps two copies
      for 2BW and swaps them; w_{t+1} = w_t - rate grad f(w_{t-1}) in another's account.
    """
    return Rule(optimizer.init, _stepper(optimizer))


def unstashed(optimizer: optim.Optimizer) -> Rule:
    """No stashing: activations of older weights, and backward passes of the newest."""
    stepper = _stepper(optimizer)
    return Rule(optimizer.init, stepper, backward=newest_again, stashes=False)


# --- weight prediction ---

Direction = Callable[[PyTree, PyTree, Number], PyTree]
"""`direction(state, gradient, rate)`: the update that is predicted to come again."""
Aim = Literal["own update", "after own update", "round trip"]


def momentum_direction(state: PyTree, gradient: PyTree, rate: Number) -> PyTree:
    """-rate v: the last update of SGD with momentum.

    Args:
      state: Of `optim.sgd(momentum=...)`.
      gradient: Not read.
      rate: The learning rate.
    """
    return _by_leaf(lambda own: -rate * own.momentum_buffer, state)


def repeated_direction(momentum: float) -> Direction:
    """-rate (momentum v + g): the next update of SGD, if the gradient came again.

    So the code of SpecTrain's authors has it, and that of PipeOptim's.

    Args:
      momentum: That of `optim.sgd(momentum=...)`.
    """

    def direction(state: PyTree, gradient: PyTree, rate: Number) -> PyTree:
        def again(own: Any, g: jax.Array) -> jax.Array:
            return -rate * (momentum * own.momentum_buffer + g)

        return _by_leaf(again, state, gradient)

    return direction


def adam_direction(
    state: PyTree,
    gradient: PyTree,
    rate: Number,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> PyTree:
    """-rate m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), Adam's last update.

    Args:
      state: Of `optim.adam` with these `betas` and `eps`; the direction is 0 at t = 0.
      gradient: Not read.
      rate: The learning rate.
      betas: Decays of Adam's averages.
      eps: Adam's.
    """

    def direction(own: Any) -> jax.Array:
        # At t = 0 both averages are 0, and any divisor does.
        t = jnp.maximum(own.step, 1).astype(own.exp_avg.dtype)
        first, second = (1 - jnp.asarray(beta, t.dtype) ** t for beta in betas)
        divisor = jnp.sqrt(own.exp_avg_sq / second) + eps
        return -rate * (own.exp_avg / first) / divisor

    return _by_leaf(direction, state)


def _by_leaf(
    function: Callable[..., jax.Array], state: PyTree, *others: PyTree
) -> PyTree:
    """Maps the optimizer's states of single arrays."""
    return jax.tree.map(
        function, state, *others, is_leaf=lambda own: hasattr(own, "step")
    )


class PredictedState(NamedTuple):
    """The optimizer's state, and the last gradient; None if no direction reads it."""

    optimizer: PyTree
    gradient: PyTree


def predicted(
    optimizer: optim.Optimizer,
    direction: Direction,
    *,
    aim: Aim,
    keeps_gradient: bool = False,
) -> Rule:
    """Weight prediction: passes see w_t + s d, with d the direction of the last update.

    The publications differ in where the prediction aims:

        own update         s = tau forward, 0 backward: at this stage's weights when its
                           own backward pass has come. PipeOptim's formula
        after own update   s = tau + 1 forward, 0 backward. PipeOptim's code
        round trip         s = tau + floor(j / 2) forward, floor(j / 2) backward: at its
                           weights when the backward pass of stage 0 has come. SpecTrain
                           (its direction is SGD's), XPipe (Adam's)

    Args:
      optimizer: The one whose direction it is.
      direction: See `Direction`.
      aim: One of the three. A round trip is counted in stages of one worker each.
      keeps_gradient: Whether the direction reads the last gradient.

    Source:
      Chen et al., SpecTrain, arXiv:1809.02839: s in the authors' code, whose direction
      is `repeated_direction`; that of the formula, `momentum_direction`, is from
      another's account ("the smoothed gradient"). Guan et al., PipeOptim,
      arXiv:2312.00839: both in the authors' repository. Guan et al., XPipe,
      arXiv:1911.04610: in another's account, where s is (n - j / 2 - 1) rounded, and
      floor(j / 2), for one micro-batch in each update; its bellwether of several is not
      here.
    """
    if aim not in get_args(Aim):
        raise ValueError(f"predicted(aim=...) must be one of {get_args(Aim)}: {aim!r}")

    def ahead(now: Now, steps: int | jax.Array) -> PyTree:
        if isinstance(steps, int) and not steps:
            return now.params
        if now.rate is None:
            raise ValueError("a prediction needs the learning rate: Now(rate=None)")
        move = direction(now.state.optimizer, now.state.gradient, now.rate)
        return jax.tree.map(lambda w, d: w + steps * d, now.params, move)

    def begin(params: PyTree) -> PredictedState:
        none = jax.tree.map(jnp.zeros_like, params) if keeps_gradient else None
        return PredictedState(optimizer.init(params), none)

    def step(place: Place, grads: PyTree, now: Now, seen: PyTree) -> Any:
        params, state = optimizer.step(
            now.params, grads, now.state.optimizer, **_overrides(now.rate)
        )
        return params, PredictedState(state, grads if keeps_gradient else None)

    def later(place: Place) -> int | jax.Array:
        return place.stage // 2 if aim == "round trip" else 0

    def forward(place: Place, now: Now) -> PyTree:
        more = 1 if aim == "after own update" else later(place)
        return ahead(now, place.delay + more)

    return Rule(
        begin,
        step,
        forward=forward,
        backward=lambda place, now, seen: ahead(now, later(place)),
        stashes=False,
    )


# --- PipeMare ---


class PipeMareState(NamedTuple):
    """The optimizer's state, and delta: a moving average of w_{t+1} - w_t."""

    optimizer: PyTree
    delta: PyTree


def pipemare(
    optimizer: optim.Optimizer,
    *,
    anneal: int,
    decay: float = math.exp(-2),
    first: Literal[0, 1] = 0,
) -> Rule:
    """PipeMare: no stashing, smaller rates for older gradients, corrected weights.

        rate of a stage   alpha / max(tau, 1)^p, with p = 1 - min(k / anneal, 1)  (T1)
                          in update k, the first of which has the number `first`
        backward pass     sees w_t - tau delta_t                                  (T2)
        delta_{t+1}     = gamma delta_t + (1 - gamma) (w_{t+1} - w_t)
        gamma           = decay^(1 / tau)

    Here tau is the delay of the schedule that runs. The publication's own pipeline has
    a forward and a backward pass in each clock, and so about twice the delay. Its third
    technique, an epoch of synchronous warm-up, is a schedule and not a rule.

    Args:
      optimizer: Any with a learning rate `lr`.
      anneal: Updates until all stages have the rate alpha, at least 1.
      decay: D, what is left of an old difference after tau updates, in (0, 1).
      first: The number of the first update.

    Source:
      Yang et al., PipeMare, MLSys 2021, arXiv:1910.05124, 3.1 and 3.2. T1 was read in
      the code of Ajanthan et al., who compare with it: there `first` is 1. Of T2 the
      weights that a backward pass sees were read in another's account, where delta is
      "how quickly weights change"; its decay was found neither there nor in code.
    """

    def begin(params: PyTree) -> PipeMareState:
        return PipeMareState(
            optimizer.init(params), jax.tree.map(jnp.zeros_like, params)
        )

    def backward(place: Place, now: Now, seen: PyTree) -> PyTree:
        def corrected(w: jax.Array, delta: jax.Array) -> jax.Array:
            return w - place.delay * delta

        return jax.tree.map(corrected, now.params, now.state.delta)

    def step(place: Place, grads: PyTree, now: Now, seen: PyTree) -> Any:
        if now.rate is None:
            raise ValueError("PipeMare divides the learning rate: Now(rate=None)")
        base = jnp.asarray(now.rate)
        number = (now.version + first).astype(base.dtype)
        power = 1 - jnp.minimum(number / anneal, 1)
        delay = jnp.maximum(place.delay, 1)
        rate = base / delay**power
        params, state = optimizer.step(
            now.params, grads, now.state.optimizer, **_overrides(rate)
        )
        # Without delay there is nothing to correct, and 1 / tau is infinite.
        gamma = jnp.where(place.delay > 0, decay ** (1 / delay), 0)
        delta = jax.tree.map(
            lambda d, new, old: gamma * d + (1 - gamma) * (new - old),
            now.state.delta,
            params,
            now.params,
        )
        return params, PipeMareState(state, delta)

    return Rule(begin, step, backward=backward, stashes=False)


# --- corrections of the gradient and of the update ---


def look_ahead(*, momentum: float) -> Rule:
    """Nesterov's method whose gradient is late and discounted.

        d_t     = gamma (w_t - w_{t-1})
        w_{t+1} = w_t + d_t - rate (1 - gamma) g,  g at w + d of the version that is met

    The authors train with NAdam in its place: `stashed(optim.nadam(...))`.

    Args:
      momentum: gamma, in [0, 1); the authors' is 0.99, in their theory (t - 2) / t.

    Source:
      Ajanthan et al., Nesterov Method for Asynchronous Pipeline Parallel Optimization,
      ICML 2025, arXiv:2505.01099, (10). Their code has NAdam alone; this formula was
      read in another's account, which writes it out.
    """

    def forward(place: Place, now: Now) -> PyTree:
        return jax.tree.map(
            lambda w, before: w + momentum * (w - before), now.params, now.state
        )

    def step(place: Place, grads: PyTree, now: Now, seen: PyTree) -> Any:
        if now.rate is None:
            raise ValueError("Nesterov's step needs the learning rate: Now(rate=None)")
        ahead, size = forward(place, now), now.rate * (1 - momentum)
        params = jax.tree.map(lambda y, g: y - size * g, ahead, grads)
        return params, now.params

    # A copy: JAX donates no array twice.
    return Rule(lambda params: jax.tree.map(jnp.copy, params), step, forward=forward)


class CompensatedState(NamedTuple):
    """The optimizer's state, and the moving average of g^2; None if lambda is fixed."""

    optimizer: PyTree
    mean_square: PyTree


def compensated(
    optimizer: optim.Optimizer, *, strength: float, adaptive: float | None = None
) -> Rule:
    """Delay compensation: g + lambda g^2 (w_t - w_met), a Taylor term of the gradient.

        DC-ASGD-c   lambda = strength
        DC-ASGD-a   lambda = strength / sqrt(s + 1e-7), s <- m s + (1 - m) g^2

    Args:
      optimizer: It is given the compensated gradient.
      strength: lambda, or lambda_0.
      adaptive: m of the adaptive form, in [0, 1); None: the constant one.

    Source:
      Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation,
      ICML 2017, arXiv:1609.08326. g^2 stands for the diagonal of the Hessian. Both
      forms were read in the authors' code, for plain SGD.
    """

    def begin(params: PyTree) -> CompensatedState:
        squares = jax.tree.map(jnp.zeros_like, params)
        state = optimizer.init(params)
        return CompensatedState(state, None if adaptive is None else squares)

    def step(place: Place, grads: PyTree, now: Now, seen: PyTree) -> Any:
        squares = now.state.mean_square
        if adaptive is None:
            factors = jax.tree.map(lambda g: strength * g * g, grads)
        else:
            squares = jax.tree.map(
                lambda s, g: adaptive * s + (1 - adaptive) * g * g, squares, grads
            )
            factors = jax.tree.map(
                lambda s, g: strength / jnp.sqrt(s + 1e-7) * g * g, squares, grads
            )
        grads = jax.tree.map(
            lambda g, f, w, met: g + f * (w - met), grads, factors, now.params, seen
        )
        params, state = optimizer.step(
            now.params, grads, now.state.optimizer, **_overrides(now.rate)
        )
        return params, CompensatedState(state, squares)

    return Rule(begin, step)


class FeedbackState(NamedTuple):
    """The optimizer's state, and its last update, without the correction."""

    optimizer: PyTree
    update: PyTree


def error_feedback(optimizer: optim.Optimizer, *, strength: float = 1.0) -> Rule:
    """Error feedback on updates: w_{t+1} = w_t + u_t + c (u_t - u_{t-1}).

    u_t is the optimizer's update by the late gradient. One step ago u_{t-1} was made in
    place of u_t, and the difference is made up for. The first update has no correction.

    Args:
      optimizer: Any.
      strength: c.

    Source:
      Zmushko et al., One-Step Gradient Delay is Not a Barrier for Large-Scale
      Asynchronous Pipeline Parallel LLM Pretraining, arXiv:2606.30634, algorithms 1 and
      2; under 2BW. Read in another's account, with its code.
    """

    def begin(params: PyTree) -> FeedbackState:
        return FeedbackState(
            optimizer.init(params), jax.tree.map(jnp.zeros_like, params)
        )

    def step(place: Place, grads: PyTree, now: Now, seen: PyTree) -> Any:
        update, state = optimizer.updates(
            now.params, grads, now.state.optimizer, **_overrides(now.rate)
        )

        def moved(w: jax.Array, u: jax.Array, before: jax.Array) -> jax.Array:
            correction = strength * (u - before)
            return w + u + jnp.where(now.version > 0, correction, 0)

        params = jax.tree.map(moved, now.params, update, now.state.update)
        return params, FeedbackState(state, update)

    return Rule(begin, step)


# --- memory ---


class Memory(NamedTuple):
    """What a stage holds between its passes, beside gradients and activations.

    Attributes:
      versions: Versions of its weights, with the newest.
      weights: Their bytes.
      state: Bytes of the rule's state, with the optimizer's.
    """

    versions: int
    weights: int
    state: int


def memory(rule: Rule, place: Place, params: PyTree) -> Memory:
    """The memory of a stage under a rule.

    Args:
      rule: The rule.
      place: The stage: weights that are stashed are kept for its delay.
      params: Its weights, or their shapes.
    """
    versions = int(place.delay) + 1 if rule.stashes else 1
    state = jax.eval_shape(rule.begin, params)
    return Memory(versions, versions * _bytes(params), _bytes(state))


def _bytes(tree: PyTree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
