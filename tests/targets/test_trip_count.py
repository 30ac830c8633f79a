"""Turns of loops, with counters in the ways that compilers write them."""

import jax
import jax.numpy as jnp
import pytest

from jdist.targets import hlo
from jdist.targets.trip_count import LONGEST, trip_count
from tests.targets.texts import TPU

HALVES = """HloModule m

%increment (a: u32[], b: u32[]) -> u32[] {
  %a = u32[] parameter(0)
  %b = u32[] parameter(1)
  ROOT %sum = u32[] add(%a, %b)
}

%body (c: (u32[], u32[], f32[3])) -> (u32[], u32[], f32[3]) {
  %c = (u32[], u32[], f32[3]) parameter(0)
  %low = u32[] get-tuple-element(%c), index=0
  %high = u32[] get-tuple-element(%c), index=1
  %rest = f32[3] get-tuple-element(%c), index=2
  %one = u32[] constant(1)
  %next = u32[] fusion(%low, %one), kind=kLoop, calls=%increment
  %carried = pred[] compare(%next, %low), direction=LT
  %more = u32[] add(%high, %one)
  %above = u32[] select(%carried, %more, %high)
  ROOT %t = (u32[], u32[], f32[3]) tuple(%next, %above, %rest)
}

%condition (d: (u32[], u32[], f32[3])) -> pred[] {
  %d = (u32[], u32[], f32[3]) parameter(0)
  %low.1 = u32[] get-tuple-element(%d), index=0
  %high.1 = u32[] get-tuple-element(%d), index=1
  %zero = u32[] constant(0)
  %nothing = s32[] constant(0)
  %limit = u32[] constant(LIMIT)
  %signed = s32[] bitcast-convert(%high.1)
  %negative = pred[] compare(%signed, %nothing), direction=LT
  %small = pred[] compare(%high.1, %zero), direction=EQ
  %below = pred[] compare(%low.1, %limit), direction=LT
  %both = pred[] and(%small, %below)
  ROOT %or = pred[] or(%negative, %both)
}

ENTRY %main (x: f32[3]) -> f32[3] {
  %x = f32[3] parameter(0)
  %first = u32[] constant(FIRST)
  %top = u32[] constant(TOP)
  %start = (u32[], u32[], f32[3]) tuple(%first, %top, %x)
  %loop = (u32[], u32[], f32[3]) while(%start), condition=%condition, body=%body
  ROOT %out = f32[3] get-tuple-element(%loop), index=2
}
"""
"""A counter of 64 bits as a TPU has it: two words, with a carry."""


def turns(text):
    module = hlo.parse(text)
    (found,) = (
        each
        for computation in module.computations.values()
        for each in computation.instructions
        if each.opcode == "while"
    )
    return trip_count(found)


def halves(first, top, limit):
    filled = HALVES.replace("FIRST", str(first)).replace("TOP", str(top))
    return turns(filled.replace("LIMIT", str(limit)))


def test_a_limit_that_is_carried_along():
    """From 2 to 7; a step of 2, another comparison, downwards."""
    assert turns(TPU) == 5
    assert turns(TPU.replace("constant(1)", "constant(2)")) == 3
    assert turns(TPU.replace("direction=LT", "direction=LE")) == 6
    down = TPU.replace("direction=LT", "direction=NE").replace(
        "constant(1)", "constant(-1)"
    )
    down = down.replace("constant(2)", "constant(9)")
    assert turns(down) == 2
    assert turns(TPU.replace("constant(7)", "constant(1)")) == 0


def test_what_the_compiler_states_holds():
    stated = 'body=%body, backend_config={"known_trip_count":{"n":"9"}}'
    assert turns(TPU.replace("body=%body", stated)) == 9


@pytest.mark.parametrize(
    ("first", "top", "limit", "expected"),
    [
        (0, 0, 6, 6),
        (4, 0, 6, 2),
        # The words carry: four turns to 2 ** 64, which is 0.
        (2**32 - 4, 2**32 - 1, 3, 4 + 3),
        (0, 1, 6, 0),
    ],
)
def test_a_counter_in_two_words(first, top, limit, expected):
    """With carry, sign and wrapping."""
    assert halves(first, top, limit) == expected


def test_unknown_lengths():
    """From the data; without an end; longer than is tried."""
    data = TPU.replace("%seven = s32[] constant(7)", "%seven = s32[] custom-call()")
    assert turns(data) is None
    still = TPU.replace("%one = s32[]{:T(128)} constant(1)", "%one = s32[] constant(0)")
    assert turns(still) is None
    assert turns(TPU.replace("constant(7)", f"constant({LONGEST + 3})")) is None


def test_loops_of_jax_as_the_cpu_compiles_them():
    """Which states it."""
    x = jax.ShapeDtypeStruct((11, 4, 4), jnp.float32)

    def loop(x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x[0], x)[0]

    assert turns(jax.jit(loop).lower(x).compile().as_text()) == 11
