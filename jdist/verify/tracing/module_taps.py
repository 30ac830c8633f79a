"""Taps at every submodule of a Flax NNX model."""

from functools import cache
from typing import TYPE_CHECKING, TypeVar

from jdist._flax import check_module
from jdist._tree import PyTree
from jdist.verify.tracing.taps import tap

if TYPE_CHECKING:
    from flax import nnx

Model = TypeVar("Model", bound="nnx.Module")

NAME = "tap_name"


def tapped(model: Model) -> Model:
    """A copy of a Flax NNX model in which every submodule's result is tapped.

    Args:
      model: The model; it is not changed. A submodule is named by its path, such as
        `blocks/3/mlp`; one that stands at several paths by the first of them.

    Returns:
      A model that computes the same, and that `nnx.split`, `nnx.merge` and NNX's
      transformations treat like the given one. Its submodules are of subclasses of
      their classes; its own class is the given model's. The layers of a module that
      `nnx.vmap` made are one submodule, `layers`, whose tap is passed several times.

    Raises:
      TypeError: It is no Flax NNX module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jdist import verify
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
      >>> with verify.TapRecording() as recording:
      ...     _ = jax.block_until_ready(tapped(model)(jnp.ones((5, 2))))
      >>> [(r.name, r.value.shape) for r in recording.records]
      [('layers/0', (5, 3))]
    """
    remedy = "Mark values of other models with `verify.tap`."
    check_module("tapped(model)", model, remedy)
    # Imported on use: Flax is an optional dependency.
    from flax import nnx

    copy = nnx.clone(model)
    for path, module in list(nnx.iter_modules(copy)):
        if path and callable(module):
            setattr(module, NAME, "/".join(map(str, path)))
            module.__class__ = _marked(type(module))
    return copy


# One subclass for each class: programs of two copies would otherwise differ.
@cache
def _marked(kind: type) -> type:
    """The subclass of a module's class whose call is tapped."""

    def called(self: object, *args: PyTree, **options: PyTree) -> PyTree:
        return tap(kind.__call__(self, *args, **options), getattr(self, NAME))

    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (kind,), {**about, "__call__": called})
