"""Taps at the modules of a torch model, for a candidate that trains in torch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np

from jdist._errors import check_type, quoted, requirement
from jdist._tree import PyTree, path_of
from jdist.verify.candidates import copied
from jdist.verify.comparison import Named, check_name, ordered
from jdist.verify.tracing.recording import TapRecord, replay, under_way


@contextmanager
def shown(
    module: Any, names: Mapping[str, Named] | None = None
) -> Iterator[Callable[[Any, str], Any]]:
    """A context manager that taps the results of a torch model's modules.

    In a `with` statement a forward pass shows each module's result, and a backward pass
    its cotangent, to `verify.trace` or to a `verify.TapRecording`. A candidate that
    trains in torch is then traced as one in JAX. In another process, such as one over
    gloo, record with a `TapRecording` and `verify.replay` its records in the candidate.
    Outside of a recording the hooks copy nothing.

    Args:
      module: The `torch.nn.Module`. Its parameters and its results are not changed. A
        module that recomputes its forward pass shows it twice.
      names: Maps the reference's taps to the paths of modules, such as
        `{"block3": "blocks.3"}`. A value whose axes are in another order is named with
        that order, as for `numpy.transpose`: `("features.0", (0, 2, 3, 1))` for images
        with channels last. None: each submodule, by its path with `/` for `.`.

    Yields:
      `show(tensor, name)`: taps a tensor of any shape, or a tree of tensors, that no
      module returns, as `verify.tap`; returns it. To be called before its use.

    Raises:
      TypeError: It is no torch module, or `names` is no mapping to paths.
      ValueError: `names` has a path that is no submodule, or orders axes that the value
        does not have.

    Example:
      >>> import numpy as np
      >>> from jdist import verify
      >>> def gradient(model, x, y):  # in torch
      ...     with verify.shown(model, names={"hidden": "0"}) as show:
      ...         loss = ((show(model(x), "out") - y) ** 2).mean()
      ...         loss.backward()
      ...     return loss, [p.grad for p in model.parameters()]
    """
    kinds = "named_modules", "register_forward_hook"
    if not all(hasattr(module, kind) for kind in kinds):
        rule, got = "must be a torch.nn.Module", type(module).__name__
        raise TypeError(requirement("shown(module)", rule, got))
    modules = {path: each for path, each in module.named_modules() if path}
    with ExitStack() as hooks:
        for tap, (path, axes) in _taps(modules, names).items():
            handle = modules[path].register_forward_hook(_hook(tap, axes))
            hooks.callback(handle.remove)
        yield lambda tensors, name: _show(tensors, name, None)


def _taps(
    modules: Mapping[str, Any], names: Mapping[str, Named] | None
) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """The path of each tap's module, and the order of its value's axes."""
    if names is None:
        return {path.replace(".", "/"): (path, None) for path in modules}
    call = "shown(names=...)"
    check_type(call, names, Mapping, "must be a mapping from the reference's taps")
    taps = {}
    for tap, named in names.items():
        check_name(f"shown(names={{{tap!r}: ...}})", named)
        path, axes = (named, None) if isinstance(named, str) else named
        if path not in modules:
            rule = "must name submodules"
            raise ValueError(requirement(call, rule, quoted(path)))
        taps[tap] = path, axes
    return taps


def _hook(tap: str, axes: tuple[int, ...] | None) -> Callable[[Any, Any, Any], None]:
    def after(module: Any, inputs: Any, result: Any) -> None:
        _show(result, tap, axes)

    return after


def _show(tensors: PyTree, name: str, axes: tuple[int, ...] | None) -> PyTree:
    if under_way.value:
        for keys, leaf in jax.tree.leaves_with_path(tensors):
            if hasattr(leaf, "register_hook") and leaf.is_floating_point():
                _record(leaf, f"{name}/{path_of(keys)}" if keys else name, axes)
    return tensors


def _record(tensor: Any, name: str, axes: tuple[int, ...] | None) -> None:
    """Records a tensor now, and its cotangent when it is known."""

    def array(tensor: Any) -> Any:
        found = np.asarray(copied(tensor))
        where = f"shown(names={{{name!r}: ...}})"
        return found if axes is None else ordered(where, "value", found, axes)

    # A later operation may overwrite it.
    value = array(tensor)
    replay([TapRecord(name, 0, value, None)])
    if tensor.requires_grad:
        tensor.register_hook(lambda g: replay([TapRecord(name, 0, value, array(g))]))
