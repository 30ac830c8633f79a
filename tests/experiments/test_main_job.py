"""`make run`'s job: it holds from a fresh process, and its parts do what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

from experiments import _digits
from experiments import data_parallel_equivalence as job
from tests.experiments.quick import check_held, run_quick


@pytest.mark.parametrize("count", job.REPLICAS)
def test_shard_sizes_are_all_different_and_move_on(count):
    """They add up to the batch at every step, and every replica gets each size."""
    seen = {job.shard_sizes(count, step) for step in range(count)}
    assert len(seen) == count
    for sizes in seen:
        assert sum(sizes) == job.BATCH
        assert len(set(sizes)) == count
        assert min(sizes) > 0


def test_judged_steps_have_the_shards_in_every_order():
    """Also those of the quick form, which are not all steps."""
    for count in job.REPLICAS:
        steps = range(0, job.QUICK.steps, job.QUICK.judge_every)
        judged = {job.shard_sizes(count, step) for step in steps}
        assert len(judged) == count


def test_the_images_are_those_of_scikit_learn():
    """Which are read without it, and with their labels."""
    seed, count = 3, 1797
    found = _digits.data(seed, 1, 1).test
    images, labels = load_digits(return_X_y=True)
    rows = np.random.default_rng(seed).permutation(count)[: count // 5]
    np.testing.assert_array_equal(found[0].reshape(-1, 64) * 16, images[rows])
    np.testing.assert_array_equal(found[1], labels[rows])


def test_a_single_different_bit_is_seen(mesh):
    """The comparison of replicas does see one replica that differs."""
    where = NamedSharding(mesh(2), PartitionSpec())
    same = [jax.device_put(jnp.arange(3.0), d) for d in mesh(2).devices]
    off = [same[0], same[1].at[1].set(np.nextafter(1.0, 2))]
    make = jax.make_array_from_single_device_arrays
    assert job.replicas_identical({"w": make((3,), where, same)})
    assert not job.replicas_identical({"w": make((3,), where, off)})


def test_replicas_share_a_device_where_there_are_too_few():
    """By vmap, and the report says so."""
    kinds = [type(where) for _, where, _ in job.replicas(2)]
    assert kinds == [Mesh, int, int]
    assert job.sharing(2) == "2 device(s) here, and 4, 8 replicas share one by vmap"
    assert job.sharing(8) == ""


# Its training runs are long enough to be compiled well.
@pytest.mark.optimized
def test_the_quick_form_holds(tmp_path):
    """The command of `make run`, and the figures in its JSON."""
    done = run_quick(tmp_path, "data_parallel_equivalence")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("Proved ")
    record = check_held(done, tmp_path, "data_parallel_equivalence")
    alone, *others = record["data"]["runs"]
    replicated = [run for run in others if run["ratios"]]
    assert [run["name"] for run in replicated] == [f"{k} devices" for k in (2, 8)]
    for run in replicated:
        assert len(run["ratios"]) == 9
        assert run["identical"] == record["data"]["steps"] == 75
        assert max(run["ratios"]) <= 1
        assert run["accuracy"] > 0.95
    assert alone["accuracy"] > 0.95
    assert min(min(run["caught"]) for run in replicated if run["caught"]) > 100
    assert set(record["data"]["error_over_bound"]["8 devices"]) == {
        "low", "median", "high",
    }  # fmt: skip
