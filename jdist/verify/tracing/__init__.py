"""Localization of the first wrong value behind a gradient, by taps.

- `primitive`: the tap as a primitive of JAX.
- `recording`: what taps see, and how it travels between processes.
- `taps`: marks values; `module_taps`: every submodule of a Flax model;
  `torch_taps`: those of a torch model.
- `layout`: the axis of a value along which its examples are laid out.
- `reference`: right values and cotangents, and their bounds.
- `alignment`: which rows of a candidate are which examples.
- `search`: the first difference.
- `shares`: how often each example is in a wrong gradient.
- `report`: the finding.
- `mask_policy`: on which devices random draws are the same.
- `fault_localization`: `trace` and `trace_judge`, which combine them.
"""

__all__: list[str] = []
