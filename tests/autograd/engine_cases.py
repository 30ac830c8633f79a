"""Functions that workers of engine tests call on each other, and their helpers."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np

from jdist import autograd, rpc
from jdist.autograd.engine.messages import GRADIENTS
from jdist.rpc.base import current
from jdist.rpc.calls.callee import Reply
from tests.rpc.rref.common import wait_for

MODES = ("local", "sync", "async", "remote")


def numbers(*seed, shape=(3, 3), dtype=np.float64):
    """Random values, the same for the same seed."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def leaves(count, *seed, **kind):
    """So many variables of distinct values."""
    return [autograd.variable(numbers(*seed, k, **kind)) for k in range(count)]


def call(mode, to, fn, *args):
    """`fn(*args)` here or on another worker, in one of four ways."""
    if mode == "local":
        return run_here(fn, *args)
    if mode == "sync":
        return rpc.rpc_sync(to, fn, args=args)
    if mode == "async":
        return rpc.rpc_async(to, fn, args=args).wait()
    return rpc.remote(to, fn, args=args).to_here()


def run_here(fn, *args):
    if getattr(fn, "__jdist_autograd_eager__", False):
        return fn(*args)
    return autograd.apply(fn, *args)


def me():
    return rpc.get_worker_info()


def after(steps=1):
    """The name of the worker that comes so many ranks later, among four."""
    return f"worker{(me().id + steps) % 4}"


def plain(gradients, variables):
    """Gradients of these variables as NumPy arrays, None for those that have none."""
    found = [gradients.get(variable) for variable in variables]
    return [None if x is None else jax.tree.map(np.asarray, x) for x in found]


def both(compute, variables, mode, how="smart", **options):
    """Gradients of `compute(mode, *variables)`: local ones, and those over workers."""
    results = []
    for chosen in ("local", mode):
        with autograd.context() as context_id:
            loss = compute(chosen, *variables)
            roots = loss if isinstance(loss, list) else [loss]
            autograd.backward(context_id, roots, mode=how, **options)
            gradients = autograd.get_gradients(context_id)
            assert set(gradients) <= set(variables)
            results.append(plain(gradients, variables))
    return results


def same(one, other):
    """Whether two lists of gradients are equal, bit for bit."""
    if [x is None for x in one] != [x is None for x in other]:
        return False
    pairs = [(x, y) for x, y in zip(one, other, strict=True) if x is not None]
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in pairs
    )


# --- pure functions ---


def add(x, y):
    return x + y


def mul(x, y):
    return x * y


def matmul(x, y):
    return x @ y


def total(x):
    return jnp.sum(x)


def sine(x):
    return jnp.sin(x)


def cosine(x):
    return jnp.cos(x)


def stack(*parts):
    return jnp.stack(parts)


def chain(first, *rest):
    return jnp.linalg.multi_dot([first, *rest])


def batched(x, y):
    return jnp.einsum("bij,bjk->bik", x, y)


def split(x, parts):
    return tuple(jnp.split(x, parts))


def scaled(x, n, y):
    """An integer, a tuple of outputs and one that has no derivative."""
    return x * y**n, jnp.argmax(x), {"rest": y - x}


def select(weights, indices):
    return jnp.take(weights, indices, axis=0).sum(axis=1)


def ignore(x, y):
    return x * 2.0


# --- functions that run as Python ---


@autograd.eager
def nested(x, y, hops):
    """x + y computed so many hops further."""
    if hops == 0:
        return autograd.apply(add, x, y)
    return rpc.rpc_sync(after(), nested, args=(x, y, hops - 1))


@autograd.eager
def back_and_forth(x, y, to):
    """Calls the caller back, in the same context."""
    return rpc.rpc_sync(to, mul, args=(x, y)) + x


@autograd.eager
def product_of_nested(x, y):
    """Uses the arguments itself and passes them on."""
    there = rpc.rpc_sync(after(), mul, args=(x, y))
    return (x + y) * there


@autograd.eager
def drops(x, y):
    """Makes a call whose result it does not use."""
    rpc.rpc_sync(after(), mul, args=(x, y))
    return x + y


_own = {}
_lock = threading.Lock()


def own(name, *seed):
    """A variable of this worker, by name; made the first time."""
    with _lock:
        if name not in _own:
            _own[name] = autograd.variable(numbers(*seed))
        return _own[name]


@autograd.eager
def return_own(name, seed):
    return own(name, seed)


@autograd.eager
def times_own(name, seed, x):
    return own(name, seed) * x


def gradient_of_own(context_id, name):
    """The gradient of this worker's variable in its context."""
    found = autograd.get_gradients(context_id)
    assert len(found) <= 1 or name in _own
    gradient = found.get(_own[name])
    return None if gradient is None else np.asarray(gradient)


def forget_own():
    _own.clear()


# --- looking at the engine ---


def at_rest(timeout=60.0):
    """Waits until this worker takes part in no pass; whether it does not."""

    def quiet():
        return rpc.debug_info()["num_current_backward_passes"] == 0

    return wait_for(quiet, timeout)


class Traffic:
    """Counts what comes to a worker of this process for its engine, and what it says.

    Attributes:
      requests: For each, who asked and how many arrays and bytes came.
      answers: How many arrays and bytes went back, for each that was answered at once.
    """

    def __init__(self, name):
        self.requests = []
        self.answers = []
        with rpc.use_worker(name):
            self._handlers = current.worker().callee._handlers
        self._handler = self._handlers[GRADIENTS]

    def __enter__(self):
        self._handlers[GRADIENTS] = self._count
        return self

    def __exit__(self, *exception):
        self._handlers[GRADIENTS] = self._handler

    def _count(self, caller, body, meta):
        self.requests.append((caller.name, *_size(body)))
        answer = self._handler(caller, body, meta)
        if isinstance(answer, Reply):
            self.answers.append(_size(answer.value))
        return answer


def _size(gradients):
    arrays = [x for _, cotangents in gradients for x in cotangents if x is not None]
    return len(arrays), sum(array.nbytes for array in arrays)


@contextlib.contextmanager
def counting(names):
    """Counts what comes to the engines of these workers of this process."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Traffic(name)) for name in names}
