"""Workers in several processes, each of which has a mesh of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import optim
from tests.pipeline import mesh_cases as cases
from tests.pipeline import mesh_models as models
from tests.rpc.hosts import become_worker, results

WIDE = "PP x DP x TP"


def on_each(cluster, body, *args, **options):
    """Of the first two workers; results by rank."""
    return results([cluster.start(rank, body, *args, **options) for rank in range(2)])


def same_bits(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def by_path(tree):
    """The leaves that are there."""
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def together(found):
    """The loss, and the gradients of the stages of all workers."""
    losses = [loss for loss, _ in found]
    assert losses[0] == losses[1]
    stages = zip(*(grads for _, grads in found), strict=True)
    return losses[0], [next(g for g in each if g is not None) for each in stages]


@pytest.mark.parametrize("schedule", models.SCHEDULES)
@pytest.mark.parametrize("layout", [name for name in models.LAYOUTS if name != "PP"])
def test_bits_are_those_of_meshes_in_one_process(cluster, layout, schedule):
    found = together(on_each(cluster, cases.gradient, layout, schedule, np.float32))
    own, batch, weights = models.problem()
    pipe, place = models.made(layout, schedule)
    same_bits(found, pipe.value_and_grad(place(own), batch, weights))


def test_workers_of_a_jax_group_have_the_same_bits(pair):
    """Processes of `jax.distributed`, each with a mesh of its own devices."""
    found = pair.everywhere(cases.gradient_in_a_group, WIDE, "1F1B", np.float32)
    for rank, (_, _, said) in enumerate(found):
        assert "`Workers(mesh=...)` must have devices of this process alone" in said
        assert f"devices of the processes [{1 - rank}] in process {rank}" in said
        assert "Make it of jax.local_devices()" in said
    own, batch, weights = models.problem()
    pipe, place = models.made(WIDE)
    expected = pipe.value_and_grad(place(own), batch, weights)
    same_bits(together([each[:2] for each in found]), expected)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float64])
def test_gradient_of_the_whole_batch(processes, dtype):
    own, batch, weights = models.problem(dtype=dtype)
    loss, grads = together(on_each(processes, cases.gradient, WIDE, "1F1B", dtype))
    given = {"workers": lambda own, batch: (loss, models.joined(grads))}
    judge = models.judge("mean")
    judge(
        own, batch, given, weights=weights, finite_differences=False
    ).raise_if_failed()


@pytest.mark.parametrize(
    "shapes", [((2, 2), (4, 1)), ((3, 1), (2, 2)), ((2, 1), None)], ids=str
)
def test_workers_may_have_different_meshes(cluster, shapes):
    """Or none: micro-batches are cut for all of them alike."""
    own, batch, weights = models.problem(cases.MANY)
    loss, grads = together(on_each(cluster, cases.unequal, shapes))
    given = {"workers": lambda own, batch: (loss, models.joined(grads))}
    judge = models.judge("mean")
    judge(
        own, batch, given, weights=weights, finite_differences=False
    ).raise_if_failed()


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.1}], ids=["plain", "clipped"])
def test_training_has_the_bits_of_one_process(processes, options):
    found = on_each(processes, cases.trained, WIDE, 3, **options)
    own, batch, weights = models.problem()
    pipe, place = models.made(WIDE, optimizer=optim.adam(lr=0.05), **options)
    state, losses = pipe.init(place(own)), []
    for _ in range(3):
        state, metrics = pipe.train_step(state, batch, weights)
        losses.append(float(metrics.loss))
    expected = pipe.evaluate(state, batch, weights).loss
    for rank, (told, (params, loss)) in enumerate(found):
        assert told == losses
        same_bits((params[rank], loss), (state.params[rank], expected))


@pytest.mark.parametrize("name", cases.FEATURES)
def test_features_have_the_bits_of_one_process(processes, name):
    """Every value is on one worker at least, and the same on all that have it."""
    expected = by_path(cases.on_host(cases.FEATURES[name](models.meshes(WIDE))))
    seen = set()
    for found in on_each(processes, cases.feature, name):
        for path, leaf in by_path(found).items():
            same_bits(leaf, expected[path])
            seen.add(path)
    assert seen == expected.keys()


@pytest.mark.parametrize("name", cases.FEATURES)
def test_meshes_of_two_processes_may_be_given_by_all(pair, name):
    """As places, in the place of names: the bits are those of one process."""
    expected = by_path(cases.on_host(cases.FEATURES[name](models.meshes(WIDE))))
    seen = set()
    for found in pair.everywhere(cases.feature_by_places, name):
        for path, leaf in by_path(found).items():
            same_bits(leaf, expected[path])
            seen.add(path)
    assert seen == expected.keys()


def test_a_checkpoint_is_restored_on_other_meshes(processes, tmp_path):
    folder = str(tmp_path)
    losses = on_each(processes, cases.trained, WIDE, 4, folder)[0][0]
    for layout in ("PP x DP", "PP x TP"):
        again = on_each(processes, cases.trained, layout, 2, folder, 2)[0][0]
        np.testing.assert_allclose(again, losses[2:], rtol=1e-5)


def test_all_programs_are_compiled_before_the_first_micro_batch(processes):
    for names in on_each(processes, cases.compiled_programs, WIDE):
        before, after = names[: names.index("all")], names[names.index("all") + 1 :]
        assert len(before) >= 2
        assert after == ["first"]


def test_a_killed_worker_is_named(fresh_hosts):
    group = fresh_hosts(2)
    group.everywhere(become_worker, heartbeat_timeout=600.0)
    task = group.start(0, cases.until_the_other_dies, WIDE)
    group.start(1, cases.dies_after_a_step, WIDE)
    group.alive.discard(1)
    name, text = task.result()
    assert name == "worker1"
    assert "value_and_grad, call 1 of a pipeline" in text


def test_a_data_axis_that_no_worker_has(cluster):
    said = on_each(cluster, cases.refusal, "rows", True)
    message = "must be an axis of one of the workers' meshes. Got 'rows', where the axe"
    assert all(message in text for text in said)
    said = on_each(cluster, cases.refusal, "rows", False)
    assert all("Got 'rows', where the axes are []" in text for text in said)


def test_meshes_that_cannot_be(cluster):
    manual, text = cluster.run(0, cases.wrong_meshes)
    assert (
        "`Workers(mesh=...)` must be meshes with automatic or explicit axes" in manual
    )
    assert "`Workers(mesh=...)` must be a jax.sharding.Mesh. Got 'mesh'." in text
