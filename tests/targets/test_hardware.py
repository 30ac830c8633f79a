"""Hardware by name, its figures, and what is said where a compiler is missing."""

import importlib.metadata
import re

import jax
import pytest

from jdist import Unavailable, targets
from jdist.targets import compilers
from tests.wrong_types import refused


@pytest.mark.parametrize(
    ("name", "chips", "hosts"),
    [
        ("v5e:1x1", 1, 1),
        ("v5e:2x4", 8, 1),
        ("v5e:4x4", 16, 4),
        ("v6e:16x16", 256, 64),
        ("v5p:2x2x1", 4, 1),
        ("v5p:8x8x16", 1024, 256),
        ("h100:2x8", 16, 2),
        ("a100:1x4", 4, 1),
        ("b200:9x8", 72, 9),
    ],
)
def test_a_name_says_chips_and_hosts(name, chips, hosts):
    hardware = targets.target(name)
    assert (hardware.name, hardware.chips, hardware.hosts) == (name, chips, hosts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e", "must be CHIP:SHAPE, such as 'v5e:4x4'.*Got v5e"),
        ("v5e:4x", "must be CHIP:SHAPE"),
        ("v9z:2x2", r"must be of a known chip: v5e, .*Hardware\(targets.Chip"),
        ("v5e:16", r"must have 2 or 3 positive numbers for tpu. Got \(16,\)"),
        ("h100:2x8x2", "must have 2 positive numbers for cuda"),
        ("h100:0x8", "must have 2 positive numbers"),
    ],
)
def test_other_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        targets.target(name)


def test_a_platform_that_jax_has_not_is_refused():
    chip = targets.Chip("mi300", "rocm", 1, 1.0, {"float32": 1.0})
    with pytest.raises(
        ValueError, match=r"platform=.*'tpu', 'cuda', 'cpu'. Got 'rocm'"
    ):
        targets.Hardware(chip, (1, 8))


def test_every_known_chip_has_its_figures_and_their_source():
    """Each is under a bound of physics that a slip of a unit would break."""
    for name, chip in targets.CHIPS.items():
        assert chip.name == name
        assert chip.source.startswith("https://")
        assert 10e9 < chip.memory < 300e9
        assert 0.5e12 < chip.bandwidth < 10e12
        assert 100e12 < chip.peak_flops["bfloat16"] < 5e15
        assert chip.peak_flops["float32_highest"] < chip.peak_flops["float32"]
        assert 1e11 < chip.link_bandwidth < 1e12
        assert (chip.gpu is not None) == (chip.platform == "cuda")


def test_meshes_have_all_chips():
    """Also of one's own chip, on as many CPU devices."""
    chip = targets.Chip("here", "cpu", 2**30, 1e10, {"float32": 1e11})
    hardware = targets.Hardware(chip, (6,))
    mesh = hardware.mesh({"data": 2, "model": 3})
    assert mesh.axis_names == ("data", "model")
    assert mesh.devices.shape == (2, 3)
    assert list(mesh.devices.flat) == jax.devices("cpu")[:6]
    assert hardware.devices is targets.Hardware(chip, (6,)).devices
    with pytest.raises(ValueError, match="multiply to the 6 chips of here:6"):
        hardware.mesh({"data": 4})
    with pytest.raises(
        Unavailable, match=r"needs 99 CPU devices.*host_platform_device"
    ):
        targets.Hardware(chip, (99,)).mesh({"data": 99})


@pytest.mark.parametrize(
    ("name", "package"), [("v5e:2x2", "libtpu"), ("h100:1x2", "jax-cuda12-plugin")]
)
def test_a_missing_compiler_is_an_error_with_the_remedy(monkeypatch, name, package):
    """Named with the command that installs it."""
    version = importlib.metadata.version

    def without(asked):
        if asked == package:
            raise importlib.metadata.PackageNotFoundError(asked)
        return version(asked)

    monkeypatch.setattr(importlib.metadata, "version", without)
    extra = targets.target(name).chip.platform
    message = rf"needs the package {package} .*pip install .*\[{extra}\]"
    with pytest.raises(Unavailable, match=message):
        compilers.devices(targets.target(name).chip, targets.target(name).shape)


@pytest.mark.parametrize(
    ("name", "package"), [("v5e:2x2", "libtpu"), ("h100:1x2", "jax-cuda12-plugin")]
)
def test_a_compiler_of_another_version_is_an_error(monkeypatch, name, package):
    """The message has both versions."""
    version = importlib.metadata.version

    def older(asked):
        return "0.0.1" if asked == package else version(asked)

    monkeypatch.setattr(importlib.metadata, "version", older)
    message = rf"needs the {package} that fits jaxlib {version('jaxlib')}. Got 0.0.1"
    with pytest.raises(Unavailable, match=re.escape(message)[:40]):
        compilers.devices(targets.target(name).chip, targets.target(name).shape)


def test_a_gpu_is_described_to_the_compiler():
    """By its own figures; one without them is refused."""
    chip = targets.CHIPS["a100"]
    text = compilers._gpu_text(chip)
    for line in (
        "core_count: 108",
        "memory_bandwidth: 2039000000000",
        "device_memory_size: 85100068864",
        "cuda_compute_capability { major: 8 minor: 0 }",
        'device_description_str: "NVIDIA A100-SXM4-80GB"',
    ):
        assert line in text
    bare = targets.Chip("bare", "cuda", 1, 1.0, {"float32": 1.0})
    with pytest.raises(ValueError, match=r"Chip\(gpu=.*must say what the compiler"):
        compilers._gpu_text(bare)


def test_variables_of_the_compiler_do_not_stay(monkeypatch):
    """They describe a machine that this is not; a user's own are kept."""
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    with compilers._environment(compilers.QUIET_TPU):
        assert compilers.os.environ["TPU_SKIP_MDS_QUERY"] == "1"
        assert compilers.os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
    assert "TPU_SKIP_MDS_QUERY" not in compilers.os.environ
    assert compilers.os.environ["TPU_WORKER_HOSTNAMES"] == "mine"


CHIP = {
    "name": "mine",
    "platform": "cpu",
    "memory": 1024,
    "bandwidth": 1e9,
    "peak_flops": {"float32": 1e9},
}
HERE = targets.Hardware(targets.Chip(**CHIP), (1,))


def job(hardware, batch=8):
    return lambda x: x, jax.ShapeDtypeStruct((batch,), "float32")


def chip(**change):
    return targets.Chip(**CHIP | change)


WRONG = {
    "target(name": (targets.target, [None, 3, b"v5e:4x4", ["v5e:4x4"]]),
    "Hardware(chip": (lambda v: targets.Hardware(v, (1,)), [None, "v5e", 3]),
    "Hardware(shape": (
        lambda v: targets.Hardware(chip(), v),
        [None, 1, "1", (1.0,), ("1",)],
    ),
    "Chip(name": (lambda v: chip(name=v), [None, 3]),
    "Chip(memory": (lambda v: chip(memory=v), [None, "16 GB", [1]]),
    "Chip(peak_flops": (lambda v: chip(peak_flops=v), [None, 1e9, {"float32": "1e9"}]),
    "Chip(links": (lambda v: chip(links=v), [None, "2"]),
    "compile(target": (
        lambda v: targets.compile(lambda x: x, target=v),
        [None, "v5e:4x4", chip()],
    ),
    "largest_batch(job": (lambda v: targets.largest_batch(v, HERE), [None, "job", 3]),
    "largest_batch(hardware": (
        lambda v: targets.largest_batch(job, v),
        [None, "v5e:4x4", chip()],
    ),
    "largest_batch(multiple": (
        lambda v: targets.largest_batch(job, HERE, multiple=v),
        ["2", 2.0, True],
    ),
    "largest_batch(tolerance": (
        lambda v: targets.largest_batch(job, HERE, tolerance=v),
        [None, "0.1", [0.1]],
    ),
    "smallest_slice(job": (lambda v: targets.smallest_slice(v, "v5e"), [None, 3]),
}
"""What the message names, the call, and values of wrong types."""


@pytest.mark.parametrize("named", WRONG)
def test_a_wrong_type(named):
    refused(*WRONG[named], named)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": 0}, r"Chip\(memory\)` must be above 0. Got 0"),
        ({"bandwidth": float("nan")}, r"Chip\(bandwidth\)` must be above 0. Got nan"),
        ({"peak_flops": {"int8": -1}}, r"peak_flops\['int8'\]\)` must be .* Got -1"),
        ({"network_bandwidth": -1.0}, r"network_bandwidth\)` must be at least 0. Got"),
    ],
)
def test_figures_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        chip(**change)


def test_an_unknown_chip_of_a_search():
    with pytest.raises(
        ValueError, match=r"chip=...\)` must be one of 'v5e', .*Got \[\]"
    ):
        targets.smallest_slice(job, [])
