"""Where training starts: one tree on all replicas, compared first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jdist.data_parallel import replicate
from jdist.data_parallel.replicas.broadcast import check_agree, description
from tests.data_parallel.recording import copies_differ
from tests.replicas import over


def test_replica_0s_bits_go_everywhere(mesh, rng):
    """Copies that parted ways, arrays elsewhere, NumPy, numbers and keys."""
    where = NamedSharding(mesh(3), PartitionSpec())
    values = [rng.normal(size=4) for _ in range(3)]
    parted = jax.make_array_from_single_device_arrays(
        (4,),
        where,
        [jax.device_put(v, d) for v, d in zip(values, mesh(3).devices, strict=True)],
    )
    assert copies_differ(parted) == 1
    tree = {
        "parted": parted,
        "elsewhere": jax.device_put(jnp.arange(3), jax.devices()[5]),
        "numpy": np.arange(3, dtype=np.float32),
        "number": 1.5,
        "key": jax.random.key(3),
        "none": None,
    }
    found = replicate(tree, mesh(3))
    assert (
        copies_differ({k: v for k, v in found.items() if k not in ("key", "none")}) == 0
    )
    np.testing.assert_array_equal(found["parted"], values[0])
    assert found["elsewhere"].tolist() == [0, 1, 2]
    assert found["numpy"].dtype == np.float32
    assert found["number"].dtype == np.float64
    assert not found["number"].weak_type
    assert found["key"] == tree["key"]
    assert found["none"] is None
    assert {leaf.sharding for leaf in jax.tree.leaves(found)} == {where}


@pytest.mark.parametrize("kind", ["devices", "one device"])
def test_no_buffer_is_shared_with_the_caller(mesh, kind):
    """Or the first donated step would take the caller's array along."""
    where = mesh(2) if kind == "devices" else 2
    own = {"w": jnp.arange(1000.0), "v": replicate(jnp.ones(1000), **over(where))}
    buffers = {
        shard.data.unsafe_buffer_pointer()
        for leaf in (*own.values(), *replicate(own, **over(where)).values())
        for shard in leaf.addressable_shards
    }
    assert len(buffers) == (1 + 2 + 2 * 2 if kind == "devices" else 4)


TREE = {"encoder": {"w": np.zeros((3, 4)), "b": np.zeros(4)}, "scale": None}


def compare(*trees, name="params"):
    """What `replicate` does with the trees of several processes."""
    check_agree([description(tree) for tree in trees], f"replicate({name}=...)")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            TREE | {"encoder": {"w": np.zeros((3, 4)), "b": np.zeros(5)}},
            r"float64 of shape \(4,\) at encoder/b. Got float64 of shape \(5,\) on "
            r"process 2",
        ),
        (
            TREE | {"encoder": {"w": np.zeros((3, 4), "f4"), "b": np.zeros(4)}},
            r"float64 of shape \(3, 4\) at encoder/w. Got float32 of shape \(3, 4\)",
        ),
        (TREE | {"encoder": {"w": np.zeros((3, 4))}}, r"at encoder/b. Got no leaf"),
        (TREE | {"new": np.zeros(2)}, r"no leaf at new. Got float64 of shape \(2,\)"),
        (TREE | {"scale": 1.0}, r"None at scale. Got float64 of shape \(\)"),
        (
            {"encoder": {"b": np.zeros(4), "w": np.zeros((3, 4))}, "scale": ()},
            r"None at scale. Got no leaf on process 2",
        ),
    ],
)
def test_processes_that_differ(other, message):
    """Leaf path and process."""
    compare(TREE, TREE)
    with pytest.raises(ValueError, match=r"replicate\(params=.*" + message):
        compare(TREE, TREE, other)


def test_the_same_leaves_in_another_structure():
    """A list is no tuple, and what is checked has a name."""
    with pytest.raises(
        ValueError, match=r"opt_state=.*\[\*\]\).*\(\*,\)\) on process 1"
    ):
        compare([np.ones(2)], (np.ones(2),), name="opt_state")
