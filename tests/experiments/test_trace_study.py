"""What the study of places plants is there, and nothing else is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _traced_transformer as model
from experiments import trace_study
from experiments.trace_study import Place, Subject
from jdist import verify


@pytest.fixture(scope="module")
def subject():
    # The experiments run with JAX's own defaults.
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        yield Subject("float32", 12, 7)


@pytest.fixture(scope="module")
def reference(subject):
    """The weighted mean's gradient, by a model without switches."""

    def mean(params):
        own = model.losses(params, subject.batch)
        return jnp.sum(subject.weights * own) / subject.weights.sum()

    return jax.jit(jax.value_and_grad(mean))(subject.params)


@pytest.fixture(scope="module")
def results(subject):
    """`result(program)`: its loss and gradient."""
    return lambda program: program.run(subject.params, subject.batch)


TRAINERS = ("accumulation", "data parallel", "shard_map")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_without_a_defect_a_trainer_is_right(subject, reference, results, trainer):
    """At neutral switches, and in other orders of the examples."""
    programs = [subject.program("", trainer, None), *subject.right(2, [trainer])]
    assert len(programs) == 3
    for program in programs:
        loss, gradient = results(program)
        assert float(loss) == pytest.approx(float(reference[0]), rel=1e-5)
        assert trace_study.effect(reference[1], gradient) < 1e-5


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_defect_changes_the_gradient(subject, results, trainer):
    """Of all kinds that the trainer can have, each once."""
    right = results(subject.program("", trainer, None))[1]
    made = [plant(subject, trainer) for plant in trace_study.PLANTS["float32"]]
    programs = [program for program in made if program is not None]
    assert len(programs) == len(made) - 1
    assert len({program.kind for program in programs}) == len(programs)
    for program in programs:
        size = trace_study.effect(right, results(program)[1])
        assert 1e-5 < size < 1e3, (program.kind, size)


def test_the_switches_are_of_one_layer(subject):
    """Of the layer and the direction that the place names."""
    program = subject.switched("sign", "accumulation", {"mlp_back": -1.0})
    assert program.place.direction == "backward"
    assert program.place.tap.startswith("mlp[")
    neutral = model.neutral(subject.layers)
    assert all(len(values) == subject.layers for values in neutral)
    assert {float(v) for v in np.concatenate(neutral[:4])} == {1.0}
    assert not np.concatenate([values.astype(int) for values in neutral[4:]]).any()


def test_defects_are_random_and_repeat():
    """The seed says which; kinds and trainers go round."""
    first, again, other = (
        [
            (p.kind, p.trainer, p.place)
            for p in Subject("float32", 12, seed).defects(20, TRAINERS)
        ]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(first) == 20
    assert {trainer for _, trainer, _ in first} == set(TRAINERS)


def test_a_place_is_right_or_wrong():
    found = verify.Difference("forward", "mlp[3]", (1, 2), 9.0, "")
    assert Place("forward", "mlp[3]").is_named(found)
    assert Place("forward", examples=(1, 2)).is_named(found)
    assert not Place("forward", "mlp[4]").is_named(found)
    assert not Place("backward", "mlp[3]").is_named(found)
    assert not Place("forward", examples=(1,)).is_named(found)
    assert not Place("forward").is_named(None)
