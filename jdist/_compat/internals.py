"""The names of JAX that it does not document, all of them, looked up at import.

Where a release of JAX lacks one, importing jdist says so with the releases that it
supports; no step fails in the middle.

Names that JAX exports without documenting them are used where they are needed:
`jax.interpreters.ad.Zero`, `jax.interpreters.partial_eval.dce_jaxpr`,
`jax.core.eval_jaxpr`, and the registries of `ad`, `batching` and `mlir`. The tests of
this package fail when one changes.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

import jax

OLDEST = "0.10.2"


def _internal(module: str, name: str) -> Any:
    """`jax._src.<module>.<name>`.

    Raises:
      ImportError: This release of JAX lacks it.
    """
    try:
        return getattr(import_module(f"jax._src.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"jdist needs a release of JAX that it was tested with, {OLDEST} or newer "
            f"(docs/install.md): `jax._src.{module}.{name}` is not in the installed "
            f"one, {jax.__version__}. Install a tested release, or a newer jdist."
        ) from error


# `type(x) is ArrayImpl` takes a tenth of the time of `isinstance(x, jax.Array)`, which
# would replace it.
ArrayImpl: type[jax.Array] = _internal("array", "ArrayImpl")
"""The class of arrays of numbers; PRNG key arrays have another class."""

# Without a replacement: none is needed once equations hold programs.
WRAPPED_FUNCTION = _internal("linear_util", "WrappedFun")
"""The type in which equations hold derivative rules that are still to be called."""

# As above.
STATIC_ARGUMENT = _internal("util", "Unhashable")
"""The type in which these hold arguments that are no arrays (`nondiff_argnums`), as an
attribute `val`."""

# Puts an array on a device in a fifth of the time of `jax.device_put`, which would
# replace it but for weak types.
batched_device_put = _internal("lib", "xla_client").batched_device_put

# Without it JAX collects when something else is placed.
let_go: Callable[[], None] = _internal("lib", "_jax").collect_garbage
"""Gives back the NumPy memory of arrays that are gone, which JAX keeps of `placed`."""

# The coordinator's client, for keys and values, and to leave without the coordinator. A
# public client of `jax.distributed` would replace it.
distributed_state = _internal("distributed", "global_state")

# What lets an effect stand in loops and custom derivatives. Marks of
# `jax.extend.core.Effect` would replace them.
effect_registries = tuple(
    _internal("effects", f"{name}_effects")
    for name in ("lowerable", "control_flow_allowed", "custom_derivatives_allowed")
)

# A public key of these settings would replace it.
trace_context: Callable[[], Any] = _internal("config", "trace_context")
"""A key of all settings of JAX that change what a function is traced to."""

# A protocol for types that are no arguments would replace these. `__jax_array__` does
# not: operators and some functions of `jax.numpy` ask for it, while `jax.jit` and the
# functions of `jax.lax` raise a ValueError of their own where it exists.
_avals = _internal("core", "pytype_aval_mappings")
_register = _internal("dtypes", "register_canonicalize_value_handler")


def refuse_as_argument(kind: type, refuse: Callable[[Any], NoReturn]) -> None:
    """Has JAX call `refuse(x)` for each argument x of this type, or one derived."""
    # A TypeError of `refuse` would be replaced by another one in `jax.jit`.
    _avals[kind] = refuse
    _register(kind, refuse)
