"""Published figures of chips, and GPU descriptions for the compiler."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from jdist._errors import check_number, check_type

TERA, GIGA, GIB = 1e12, 1e9, 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A description of a GPU, from which XLA compiles without the device.

    Example:
      >>> h200 = Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 50 * 2**20, 228 * 2**10)

    Attributes:
      name: The device's name, as the driver reports it.
      compute_capability: Major and minor number of the compute capability.
      cores: Number of streaming multiprocessors.
      units_per_core: Number of float32 units of each.
      clock: Highest clock frequency, in GHz.
      cache: Size of the level-2 cache in bytes.
      shared_memory: Shared memory of each multiprocessor in bytes. A block may have
        1024 less.
      cudnn: Version of cuDNN to compile for, as major and minor number.
    """

    name: str
    compute_capability: tuple[int, int]
    cores: int
    units_per_core: int
    clock: float
    cache: int
    shared_memory: int
    cudnn: tuple[int, int] = (9, 8)


@dataclass(frozen=True, slots=True)
class Chip:
    """One kind of accelerator, described by its published figures.

    Also describes a chip that `target` does not know; `Hardware(chip, shape)` combines
    many of one kind.

    Example:
      >>> from jdist import targets
      >>> mine = targets.Chip("mine", "cpu", 8 * 2**30, 2e10, {"float32": 1e11})
      >>> targets.Hardware(mine, (1,)).chips
      1

    Attributes:
      name: Name of the chip, such as "v5e".
      platform: "tpu", "cuda" or "cpu": JAX's name of the compiler.
      memory: Device memory in bytes; of a GPU, without the part that its driver
        reserves.
      bandwidth: Bandwidth of the device memory, bytes per second.
      peak_flops: Peak FLOP/s of dense matrix products, by the dtype of the operands, at
        JAX's default precision: a product of float32 is one bfloat16 pass on a TPU and
        one TF32 pass on a GPU. Optional `"float32_highest"`: at
        `jax.lax.Precision.HIGHEST`.
      link_bandwidth: Bytes per second that a chip can send to its neighbours, one
        direction, all links together: ICI or NVLink.
      links: Number of those links. Two of them, one axis of a torus, carry a
        collective; in a switched network all do, and the number is 1.
      network_bandwidth: Bandwidth of each chip to other hosts, bytes per second, one
        direction; 0 if the links themselves reach every host, as in a TPU slice.
      source: Source of each figure: a publication, or a derivation.
      gpu: Description of a GPU for the compiler; None for other platforms.
    """

    name: str
    platform: str
    memory: int
    bandwidth: float
    # A mapping is not hashable, and a `Chip` is part of a cache key in `hardware`.
    peak_flops: Mapping[str, float] = field(hash=False)
    link_bandwidth: float = 0.0
    links: int = 1
    network_bandwidth: float = 0.0
    source: str = "given by the user"
    gpu: Gpu | None = None

    def __post_init__(self) -> None:
        check_type("Chip(name=...)", self.name, str, "must be a name, a str")
        rule = "must be a mapping from dtypes to FLOP/s"
        check_type("Chip(peak_flops=...)", self.peak_flops, Mapping, rule)
        above = {f"peak_flops[{key!r}]": x for key, x in self.peak_flops.items()}
        above |= {"memory": self.memory, "bandwidth": self.bandwidth}
        for name, value in (above | {"links": self.links}).items():
            check_number(f"Chip({name})", value, "must be above 0", lambda x: x > 0)
        for name in ("link_bandwidth", "network_bandwidth"):
            rule = "must be at least 0"
            check_number(f"Chip({name})", getattr(self, name), rule, lambda x: x >= 0)


XLA = (
    "https://github.com/openxla/xla/blob/main/xla/backends/gpu/target_config/specs/"
    "{}.txtpb (memory, its bandwidth, what the compiler must know)"
)


def _tpu(
    name: str,
    gib: int,
    gbps: float,
    tflops: float,
    ici: float,
    links: int,
    int8: float | None = None,
) -> Chip:
    """A TPU; `ici` is the published bandwidth of both directions together, in GB/s."""
    # A float32 product at the highest precision takes six bfloat16 passes.
    peak = {"bfloat16": tflops, "float32": tflops, "float32_highest": tflops / 6}
    peak |= {} if int8 is None else {"int8": int8}
    return Chip(
        name,
        "tpu",
        gib * GIB,
        gbps * GIGA,
        MappingProxyType({dtype: value * TERA for dtype, value in peak.items()}),
        # `Chip.link_bandwidth` is that of one direction.
        link_bandwidth=ici / 2 * GIGA,
        links=links,
        source=f"https://docs.cloud.google.com/tpu/docs/{name} (all but products of "
        "float32, which follow from those of bfloat16: one pass, six at the highest)",
    )


def _gpu(
    name: str,
    memory: int,
    gbps: float,
    tflops: Mapping[str, float],
    nvlink: float,
    network: float,
    source: str,
    gpu: Gpu,
) -> Chip:
    """A GPU; `nvlink` and `network` are in GB/s, one direction."""
    # Tensor cores have one peak for both 16-bit types.
    peak = {**tflops, "float16": tflops["bfloat16"]}
    return Chip(
        name,
        "cuda",
        memory,
        gbps * GIGA,
        MappingProxyType({dtype: value * TERA for dtype, value in peak.items()}),
        link_bandwidth=nvlink * GIGA,
        network_bandwidth=network * GIGA,
        source=source,
        gpu=gpu,
    )


_KNOWN = (
    _tpu("v5e", 16, 819, 197, 400, 4, int8=393),
    _tpu("v5p", 95, 2765, 459, 1200, 6),
    _tpu("v6e", 32, 1600, 918, 800, 4, int8=1836),
    _gpu(
        "a100",
        85_100_068_864,
        2039,
        {
            "bfloat16": 312,
            "int8": 624,
            "float32": 156,
            "float32_highest": 19.5,
            "float64": 19.5,
        },
        300,
        25,
        f"{XLA.format('a100_sxm_80')}; "
        "https://www.nvidia.com/en-us/data-center/a100/ (peaks, NVLink); "
        "data sheet of the DGX A100 (network: 200 Gb/s for each GPU)",
        Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 40 * 2**20, 164 * 2**10),
    ),
    _gpu(
        "h100",
        84_942_979_072,
        3352,
        {
            "bfloat16": 989.4,
            "float8": 1978.9,
            "int8": 1978.9,
            "float32": 494.7,
            "float32_highest": 66.9,
            "float64": 66.9,
        },
        450,
        50,
        f"{XLA.format('h100_sxm')}; NVIDIA H100 Tensor Core GPU "
        "Architecture, white paper (peaks, dense); "
        "https://www.nvidia.com/en-us/data-center/h100/ (NVLink); "
        "data sheet of the DGX H100 (network: 400 Gb/s for each GPU)",
        Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 50 * 2**20, 228 * 2**10),
    ),
    _gpu(
        "b200",
        191_514_411_008,
        7672,
        {
            "bfloat16": 2250,
            "float8": 4500,
            "int8": 4500,
            "float32": 1100,
            "float32_highest": 75,
            "float64": 37,
        },
        900,
        50,
        f"{XLA.format('b200')}; NVIDIA Blackwell data sheet, HGX B200 "
        "(peaks, without sparsity; NVLink); "
        "data sheet of the DGX B200 (network: 400 Gb/s for each GPU)",
        Gpu("NVIDIA B200", (10, 0), 148, 128, 1.965, 132_644_864, 228 * 2**10),
    ),
)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _KNOWN})
"""The chips that `target` knows, by name."""
