"""What experiments measure with: collectives from text, intervals from a profile."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from experiments import gradient_compression
from experiments._collectives import Collective, collectives
from experiments._trace import Interval, overlap, traced, union

PROGRAM = """
%then.1 (x: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3}}
}
%else.2 (x: f32[8]) -> f32[8] {
  %small = f16[2]{0} all-reduce(%y), replica_groups={{0,1,2,3}}
  ROOT %b = u8[16]{0} all-gather(%z), replica_groups={{0,1,2,3}}
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %pair = (f32[3,2]{1,0}, f64[]) all-reduce(%x, %w), replica_groups={{0,1,2,3}}
  %done = f32[4]{0} copy(%all-reduce.7)
  ROOT %c = f32[8] conditional(%i, %x, %x), branch_computations={%then.1, %else.2}
}
"""


def test_collectives_are_read_with_their_bytes():
    """Tuples, scalars, and no mention of a name that only looks like one."""
    found = collectives(PROGRAM)
    assert [(c.kind, c.result) for c in found] == [
        ("all-reduce", 32),
        ("all-reduce", 4),
        ("all-gather", 16),
        ("all-reduce", 32),
    ]
    assert [c.sent(4) for c in found] == [48, 6, 12, 48]
    assert Collective("collective-permute", 10).sent(4) == 10


def test_of_two_branches_the_smaller_counts():
    """48 for the entry; 48 or 18 for the branches."""
    assert gradient_compression.bytes_sent(PROGRAM) == 48 + 18
    named = re.sub(
        r"branch_computations=\{%then.1, %else.2\}",
        "true_computation=%else.2, false_computation=%then.1",
        PROGRAM,
    )
    assert gradient_compression.bytes_sent(named) == 48 + 18


def test_the_overlap_of_intervals():
    """What touches is joined; each moment counts once."""

    def at(*pairs):
        return [Interval(a, b, "", 0) for a, b in pairs]

    first = at((0, 2), (1, 3), (5, 6))
    assert union(first) == [(0, 3), (5, 6)]
    assert overlap(first, at((2, 5.5), (2.5, 2.75))) == pytest.approx(1.5)
    assert overlap(first, []) == 0


def test_a_profile_names_program_and_device(mesh):
    """On both devices of a mesh, in order."""

    def add_up(x):
        return jax.lax.psum(x @ x.T, "data")

    fn = jax.jit(
        jax.shard_map(
            add_up, mesh=mesh(2), in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
        )
    )  # fmt: skip
    x = jnp.asarray(np.random.default_rng(0).normal(size=(128, 64)))
    jax.block_until_ready(fn(x))
    found = [i for i in traced(lambda: fn(x)) if "add_up" in i.program]
    assert {i.device for i in found} == {0, 1}
    assert all(0 <= i.start <= i.end for i in found)
    assert found == sorted(found)
