"""XLA's text is read: types in tuples, literals, attributes, aliases."""

import pytest

from jdist.targets import hlo
from tests.targets.texts import GPU, TPU, by_name


def test_the_module():
    """Header and entry; other tables of the text are passed over."""
    module = hlo.parse(TPU)
    assert module.partitions == 16
    assert module.aliased_parameters == (0, 2)
    assert module.donated_in_vain == (1,)
    assert module.entry.name == "main"
    assert list(module.computations)[:2] == ["fused", "start"]
    shapes = [each.shapes[0].sizes for each in module.entry.parameters]
    assert shapes == [(16, 64), (64, 32), (8, 4)]


def test_an_instruction():
    """Quotes, braces and commas inside an attribute do not end it."""
    module = hlo.parse(TPU)
    product = module.computations["fused"].root
    assert (product.name, product.opcode) == ("convolution.1", "convolution")
    assert [each.name for each in product.operands] == ["a", "b"]
    assert product.operands[0].users == [product]
    assert product.attribute("dim_labels") == "bf_io->bf"
    assert product.op_name == "jit(step)/dot, (general)"
    assert product.attribute("window") == ""
    assert module.entry.parameters[0].op_name == "p['x']"
    quoted = GPU.replace('custom_call_target="other"', 'custom_call_target="a,b"')
    assert by_name(hlo.parse(quoted).entry)["conv"].target == "a,b"
    gemm = by_name(hlo.parse(GPU).entry)["gemm"]
    assert gemm.target == "__cublas$gemm"
    assert gemm.attribute("backend_config").endswith('["0"]}}}')


def test_shapes():
    """Sizes, memory spaces, and bytes of types from 4 bits to 128."""
    tuple_type = (
        "(s32[]{:T(128)}, bf16[16,64]{1,0:T(8,128)(2,1)S(1)}, /*index=2*/f32[3])"
    )
    counter, array, vector = hlo.shapes_of(tuple_type)
    assert (counter.sizes, counter.bytes, counter.space) == ((), 4, 0)
    assert (array.sizes, array.bytes, array.space) == ((16, 64), 2048, 1)
    assert (vector.elements, vector.bytes) == (3, 12)
    texts = (
        "pred[3]",
        "s4[6]",
        "f8e4m3fn[5]",
        "c64[2]",
        "c128[2]",
        "token[]",
        "u16[<=4]",
    )
    assert [hlo.shapes_of(text)[0].bytes for text in texts] == [3, 3, 5, 16, 32, 0, 8]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not a program", "must be an HLO module with an entry.*not a program"),
        ("HloModule a\n\nENTRY %m () -> f32[] {\n  half a line\n}", "half a line"),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        hlo.parse(text)
