"""What a worker may be told about sending arrays from device to device."""

import dataclasses

from jdist._errors import requirement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Large JAX arrays go from device to device by `jax.experimental.transfer`.

    It is used between workers that both have it switched on, for arrays that are not on
    CPU devices. The port that each worker opens for it asks nobody who he is, and what
    passes there is not encrypted: see docs/security.md.

    Attributes:
      least_bytes: Smaller arrays go by the wire.
      most_bytes: Of device memory that arrays under way may hold; what is beyond that
        goes by the wire.
      cpu: Whether arrays on CPU devices go this way too. It is slower there; it is
        meant for trying things out.

    Raises:
      ValueError: A number is not positive.

    Example:
      >>> Transfer(least_bytes=1 << 24).cpu
      False
    """

    least_bytes: int = 1 << 20
    most_bytes: int = 1 << 32
    cpu: bool = False

    def __post_init__(self) -> None:
        for name in ("least_bytes", "most_bytes"):
            number = getattr(self, name)
            if type(number) is not int or number < 1:
                call = f"Transfer({name}=...)"
                rule = "must be a positive number of bytes"
                raise ValueError(requirement(call, rule, number))
