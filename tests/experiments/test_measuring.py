"""What experiments measure with: collectives, from a program's text."""

import re

from experiments import gradient_compression
from experiments._collectives import Collective, collectives

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
