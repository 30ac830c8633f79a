"""Random programs over workers: the bits of the same segments run on one worker."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jdist import autograd, rpc, verify
from tests.autograd import programs as cases
from tests.autograd.engine_cases import at_rest, plain, same
from tests.autograd.programs import Program, Step, programs

ANY = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


def loss_of(results):
    return sum(weighted(x, k + 1.0) for k, x in enumerate(results))


def weighted(x, weight):
    return weight * jnp.sum(x * x)


def roots_of(results):
    """Each result counts differently; an input that is one becomes a root, too."""
    return [autograd.apply(weighted, x, k + 1.0) for k, x in enumerate(results)]


def check(program, inputs):
    """SMART over workers against the same segments here; twice, the second adds."""
    over = gradients(program, inputs, cases.run)
    here = gradients(program, inputs, cases.run_here)
    for one, other in zip(over, here, strict=True):
        assert same(one, other), (program, one, other)
    return over[0]


def gradients(program, inputs, run):
    """Gradients of the inputs, after a first and a second pass."""
    variables = [autograd.variable(x) for x in inputs]
    with autograd.context() as context_id:
        roots = roots_of(run(program, *variables))
        found = []
        for retain in (True, False):
            autograd.backward(context_id, roots, retain_graph=retain)
            found.append(plain(autograd.get_gradients(context_id), variables))
    return found


def right(program, inputs, found):
    """Within the judge's bound of `jax.grad` of the whole program."""

    def loss(params):
        return loss_of(cases.run_plain(program, *params))

    expected = jax.grad(loss)([jnp.asarray(x) for x in inputs])
    given = [
        jnp.zeros_like(x) if gradient is None else jnp.asarray(gradient)
        for x, gradient in zip(inputs, found, strict=True)
    ]
    # An entry of a product of matrices has three terms.
    terms = 3 * cases.calls(program) + len(program.results)
    verify.compare(expected, given, terms=terms).raise_if_failed()


@settings(max_examples=40, **ANY)
@given(program=programs(inputs=3, workers=[0, 1, 2, 3]), seed=st.integers(0, 99))
def test_random_programs_over_four_workers_of_one_process(threads, program, seed):
    inputs = cases.numbers(seed, 3)
    right(program, inputs, threads.run(0, check, program, inputs))


@settings(max_examples=15, **ANY)
@given(program=programs(inputs=2, workers=[0, 1, 2, 3]), seed=st.integers(0, 99))
def test_random_programs_over_four_processes(processes, program, seed):
    inputs = cases.numbers(seed, 2)
    right(program, inputs, processes.run(0, check, program, inputs))


def fast_too(program, inputs):
    """FAST equals SMART when every send is used, and says so when one is not."""
    variables = [autograd.variable(x) for x in inputs]
    with autograd.context() as context_id:
        roots = roots_of(cases.run(program, *variables))
        autograd.backward(context_id, roots, retain_graph=True)
        smart = plain(autograd.get_gradients(context_id), variables)
        if unused(context_id, cases.marked_from(roots)):
            with pytest.raises(autograd.UnusedSend, match="FAST mode waits"):
                autograd.backward(context_id, roots, mode="fast")
            return
        autograd.backward(context_id, roots, mode="fast")
        both = plain(autograd.get_gradients(context_id), variables)
    assert same([None if x is None else x + x for x in smart], both)


def unused(context_id, marked):
    """Send functions without a gradient on workers that take part."""
    sends = [
        set(rpc.rpc_sync(rank, cases.sends_of, args=(context_id,))) for rank in range(4)
    ]
    taking_part = [
        mine for rank, mine in enumerate(sends) if rank == 0 or mine & marked
    ]
    return set().union(*taking_part) - marked


@settings(max_examples=40, **ANY)
@given(program=programs(inputs=2, workers=[1, 2, 3], longest=3))
def test_fast_mode_on_random_programs(threads, program):
    threads.run(0, fast_too, program, cases.numbers(1, 2))
    assert all(threads.everywhere(at_rest))


def fixed(*steps, results):
    return Program(tuple(Step(*step) for step in steps), results)


# What the random ones have found, or might not find often.
BACK = fixed((0, "sync", "mean", (0, 1)), results=(2, 0))
EXAMPLES = {
    "an input as result": fixed((1, "sync", "mean", (0, 0)), results=(0, 2, 2)),
    "back to the caller": fixed(
        (1, "sync", BACK, (0, 1)),
        (None, "sync", "product", (2, 3)),
        (1, "async", "matmul", (4, 2)),
        results=(5, 3),
    ),
    "everything on one worker": fixed(
        (0, "sync", "two", (0,)), (0, "remote", "three", (2, 3, 1)), results=(4,)
    ),
    "nothing over workers": fixed((None, "sync", "three", (0, 1, 0)), results=(3,)),
    "no cotangent for an argument": fixed(
        (2, "sync", "first", (0, 1)), (3, "remote", "first", (2, 0)), results=(3,)
    ),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", EXAMPLES)
def test_programs_worth_keeping(cluster, name, dtype):
    """Small arrays of 32 bits travel as NumPy's, and the bits are the same."""
    inputs = [x.astype(dtype) for x in cases.numbers(5, 2)]
    found = cluster.run(0, check, EXAMPLES[name], inputs)
    right(EXAMPLES[name], inputs, found)


def test_bits_repeat_from_run_to_run(threads):
    program = fixed(
        *[(1 + k % 3, "async", "mean", (0, k % 2)) for k in range(6)],
        (None, "sync", "three", (2, 3, 4)),
        (None, "sync", "three", (5, 6, 7)),
        results=(8, 10, 9),
    )
    inputs = cases.numbers(6, 2)
    runs = [threads.run(0, check, program, inputs) for _ in range(5)]
    assert all(same(runs[0], other) for other in runs)
