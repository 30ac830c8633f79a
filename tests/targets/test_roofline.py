"""Costs of recorded programs against numbers worked out by hand."""

import dataclasses

import pytest

from jdist import targets
from jdist.targets import arithmetic, hlo, roofline
from jdist.targets.collectives import FoundCollective, replica_groups, transfer_seconds
from tests.targets.texts import GPU, TPU, by_name

CHIP = targets.Chip(
    "round",
    "tpu",
    2**30,
    1e9,
    {"bfloat16": 1e9, "float32": 1e8, "float32_highest": 1e7},
    link_bandwidth=4e6,
    links=4,
)


def cost(text, chip=CHIP, per_host=4):
    return roofline.cost(hlo.parse(text), chip, per_host)


def test_loops_are_counted_as_often_as_they_run():
    """From 2 to 7, the limit carried along: five products in it, one outside."""
    found = cost(TPU)
    assert found.flops == 6 * 2 * 16 * 64 * 32
    assert found.unknown_loops == ()


def test_a_loop_of_unknown_length_counts_once_and_is_named():
    """Its limit comes from the data."""
    text = TPU.replace("%seven = s32[] constant(7)", "%seven = s32[] custom-call()")
    found = cost(text)
    assert found.unknown_loops == ("jit(step)/loop",)
    assert found.flops == 2 * 2 * 16 * 64 * 32
    assert "1 loops of unknown length" in roofline.estimate(found, CHIP).model


def test_collectives_of_a_tpu():
    """A scattered sum in the loop; a gather whose parts are three fusions is one."""
    scatter, gather = cost(TPU).collectives
    assert (scatter.kind, scatter.count, scatter.bytes) == ("reduce-scatter", 5, 1024)
    assert (scatter.devices, scatter.asynchronous) == (4, False)
    assert scatter.op_name == "jit(step)/loop/psum"
    assert (gather.kind, gather.count, gather.bytes) == ("all-gather", 1, 64 * 128 * 2)
    assert (gather.asynchronous, gather.overlaps, gather.devices) == (True, 1, 4)
    # Two links of 1e6 bytes per second; three of four parts pass each device.
    assert gather.seconds == pytest.approx(0.75 * 16384 / 2e6)
    # Hidden by one product of 65536 operations at 1e9 per second.
    assert gather.exposed_seconds == pytest.approx(gather.seconds - 65536 / 1e9)
    assert (
        scatter.seconds
        == scatter.exposed_seconds
        == pytest.approx(5 * 0.75 * 1024 / 2e6)
    )


def test_collectives_of_a_gpu():
    """Two parts hide what stands between, unless the compiler says that they wait."""
    reduced, permuted = cost(GPU).collectives
    assert (reduced.kind, reduced.bytes, reduced.devices) == ("all-reduce", 256, 4)
    assert (reduced.asynchronous, reduced.overlaps) == (True, 1)
    assert reduced.seconds == pytest.approx(2 * 0.75 * 256 / 2e6)
    assert (permuted.kind, permuted.devices, permuted.bytes) == (
        "collective-permute",
        4,
        256,
    )
    assert not permuted.asynchronous
    assert permuted.seconds == pytest.approx(256 / 1e6)


def test_two_collectives_of_one_channel():
    """XLA gives several permutes one channel; each is counted, fused or not."""
    sync = '"is_sync":true'
    lines = GPU.replace(sync, '"is_sync":false').splitlines()
    start = next(line for line in lines if "%permute-start =" in line)
    done = next(line for line in lines if "%permute-done =" in line)
    again = [line.replace("permute-", "permute-2-") for line in (start, done)]
    at = lines.index(done)
    text = "\n".join([*lines[:at], again[0], done, again[1], *lines[at + 1 :]])
    text = text.replace("collective-permute-2-", "collective-permute-")
    _, *permuted = cost(text).collectives
    assert [(each.kind, each.bytes, each.count) for each in permuted] == [
        ("collective-permute", 256, 1)
    ] * 2
    assert all(each.asynchronous for each in permuted)
    second = [
        line.replace("%async-", "%async-2-").replace("%kept", "%kept.2")
        for line in TPU.splitlines()
        if "%async-start" in line and "fusion" in line
    ]
    before, after = TPU.split("  %hidden")
    twice = cost("\n".join([before.rstrip(), *second, f"  %hidden{after}"]))
    gathers = [x for x in twice.collectives if x.kind == "all-gather"]
    assert [x.bytes for x in gathers] == [64 * 128 * 2] * 2


@pytest.mark.parametrize(
    ("pairs", "hidden_again"),
    [
        ("{{1,0},{2,1},{3,2}}", True),  # The other way, as a pipeline's cotangents.
        ("{{0,1},{3,2}}", False),
    ],
)
def test_permutes_share_the_links_of_the_pairs_that_they_share(pairs, hidden_again):
    """A kernel hides two permutes at once if they send over different links."""
    sync = '"is_sync":true'
    lines = GPU.replace(sync, '"is_sync":false').splitlines()
    start = next(line for line in lines if "%permute-start =" in line)
    lines.remove(start)
    again = start.replace("permute-start =", "permute-start.2 =")
    again = again.replace("{{0,1},{1,2},{2,3}}", pairs)
    at = next(i for i, line in enumerate(lines) if "%gemm =" in line)
    done = next(line for line in lines if "%permute-done =" in line)
    done = done.replace("-done =", "-done.2 =").replace("-start)", "-start.2)")
    text = [*lines[:at], start, again, *lines[at : at + 1], done, *lines[at + 1 :]]
    text = [line for line in text if "%all-reduce-" not in line]
    slow = dataclasses.replace(
        CHIP, bandwidth=1e15, peak_flops={"float32": 1024e6 / 320}
    )
    sent = [x for x in cost("\n".join(text), slow).collectives if "permute" in x.kind]
    # The product takes 320 us, a permute 256.
    assert [x.seconds for x in sent] == [pytest.approx(256e-6)] * 2
    left = sorted(x.exposed_seconds for x in sent)
    assert left == [0, pytest.approx(0 if hidden_again else 192e-6)]


def test_memory_traffic():
    """An update in place moves the update; chips' own memory counts nothing."""
    updated = by_name(hlo.parse(GPU).entry)["updated"]
    assert arithmetic.bytes_accessed(updated) == 256 + 4 + 256
    product = by_name(hlo.parse(TPU).computations["body"])["product"]
    assert arithmetic.bytes_accessed(product) == 64 * 32 * 2


def test_the_longer_branch_counts():
    """Of a conditional; with a product by cuBLAS before it."""
    assert cost(GPU).flops == 2 * 2 * 8 * 8 * 8


def test_the_estimate_adds_up():
    """Kernels or memory, whichever is longer, and what of collectives is not hidden."""
    found = cost(TPU)
    estimate = roofline.estimate(found, CHIP)
    assert estimate.compute == pytest.approx(found.flops / 1e9)
    assert estimate.memory == pytest.approx(found.bytes / 1e9)
    assert estimate.seconds == pytest.approx(
        max(estimate.kernels, estimate.memory) + estimate.exposed
    )
    assert estimate.exposed == pytest.approx(
        sum(each.exposed_seconds for each in found.collectives)
    )
    assert estimate.model.startswith("Estimate by roofline")


@pytest.mark.parametrize(
    ("dtype", "precision", "peak"),
    [
        ("bf16", "default", 1e9),
        ("f16", "default", 1e9),
        ("f32", "default", 1e8),
        ("f32", "highest", 1e7),
        ("f8e4m3fn", "default", 1e9),
        ("s8", "default", 1e9),
        ("f64", "default", 1e7),
    ],
)
def test_each_type_has_its_peak(dtype, precision, peak):
    """What a chip has no unit for counts as the next wider one, or as the slowest."""
    found = arithmetic.MatrixProducts(dtype, precision, 1)
    assert roofline._peak(CHIP, found) == peak


CONVOLUTIONS = {
    # 3 x 3 over 5 x 5 with padding 1: 13 taps along each axis meet an input.
    "same": ("f32[1,5,5,2]", "f32[3,3,2,7]", "f32[1,5,5,7]",
             "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
             2 * 2 * 7 * 13 * 13),
    "stride": ("f32[1,9,9,2]", "f32[3,3,2,7]", "f32[1,4,4,7]",
               "window={size=3x3 stride=2x2}, dim_labels=b01f_01io->b01f",
               2 * 2 * 7 * 12 * 12),
    # A batched product as a TPU has it: of all taps only those of the same batch.
    "batched": ("f32[4,8,2]", "f32[4,2,7]", "f32[4,8,7]",
                "window={size=4 stride=3 pad=0_0 lhs_dilate=4}, "
                "dim_labels=0bf_0io->0bf",
                2 * 4 * 8 * 2 * 7),
}  # fmt: skip


@pytest.mark.parametrize("name", ["same", "stride", "batched"])
def test_padding_is_no_work(name):
    """Only taps that meet an input count, as XLA counts them."""
    left, right, out, attributes, flops = CONVOLUTIONS[name]
    text = (
        f"HloModule m\n\nENTRY %m (a: {left}, b: {right}) -> {out} {{\n"
        f"  %a = {left} parameter(0)\n  %b = {right} parameter(1)\n"
        f"  ROOT %c = {out} convolution(%a, %b), {attributes}\n}}"
    )
    assert cost(text).flops == flops


def groups_of(text):
    module = hlo.parse(
        "HloModule m, num_partitions=8\n\nENTRY %m (x: f32[]) -> f32[] {\n"
        "  %x = f32[] parameter(0)\n"
        f"  ROOT %a = f32[] all-reduce(%x), replica_groups={text}, to_apply=%add\n}}"
    )
    return replica_groups(module.entry.root)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=2,'y'=2,'z'=2] {'y'}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=2,'y'=4] {'x','y'}", (tuple(range(8)),)),
        ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'}", ((0, 1), (2, 3))),
        ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}", ((0, 2), (1, 3))),
        ("mesh['x'=2,'y'=2], device_ids=(3,1,0,2) {'y'}", ((3, 1), (0, 2))),
    ],
)
def test_groups_of_devices(text, expected):
    """In each form that XLA writes."""
    assert groups_of(text) == expected


@pytest.mark.parametrize("text", ["mesh['x'=8] {'x':(2)4}", "something new"])
def test_groups_in_another_form_are_refused(text):
    """Rather than guessed."""
    with pytest.raises(ValueError, match="groups of devices that this version"):
        groups_of(text)


def test_hosts_share_their_adapters():
    """A ring of all GPUs of two hosts has as many adapters; one of two has one each."""
    h100 = targets.target("h100:2x8").chip
    (reduced, permuted) = (each for each in cost(GPU, h100, 8).collectives)
    # Groups are (0, 4, 8, 12): two devices of each host.
    assert reduced.seconds == pytest.approx(2 * 0.75 * 256 / 100e9)
    assert permuted.seconds == pytest.approx(256 / 450e9)
    assert cost(GPU, h100, 16).collectives[0].seconds < reduced.seconds


def test_no_bandwidth_takes_for_ever():
    """A chip without links has no collectives; saying so is better than no time."""
    alone = targets.Chip("alone", "cpu", 1, 1.0, {"float32": 1.0})
    found = FoundCollective("all-reduce", 8, ((0, 1),), "", "")
    assert transfer_seconds(found, alone, 2) == float("inf")


def test_one_kernel_does_not_hide_two_collectives():
    """The links are shared: what is left of the kernel hides the second."""
    first = "  %all-reduce-start = "
    line = next(x for x in GPU.splitlines() if x.startswith(first))
    second = line.replace("all-reduce-start =", "other =").replace("_id=1", "_id=9")
    done = "  %all-reduce-done = f32[8,8]{1,0} all-reduce-done(%all-reduce-start)"
    both = f"{done}\n  %other-done = f32[8,8]{{1,0}} all-reduce-done(%other)"
    text = GPU.replace(line, f"{line}\n{second}").replace(done, both)
    reduced = [x for x in cost(text).collectives if x.kind == "all-reduce"]
    kernel = 2 * 8 * 8 * 8 / 1e8
    hidden = sum(each.seconds - each.exposed_seconds for each in reduced)
    assert len(reduced) == 2
    assert hidden == pytest.approx(kernel)
