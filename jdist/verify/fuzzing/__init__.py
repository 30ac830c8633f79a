"""The search for the smallest layout in which a trainer is wrong.

- `layout_grid`: all layouts that are allowed.
- `coverage`: few layouts with each pair of values of two axes.
- `shrinking`: a layout with fewer axes that fails as it did.
- `verdict`: what was found of a layout, and when two fail for the same reason.
- `layout_judge`: judges a layout; keeps what it measures of each claim.
- `judging_process`: a process that judges, with a deadline.
- `report`: all verdicts, the smallest layouts, and a table.
- `layout_search`: `fuzz`, which combines them.
"""

__all__: list[str] = []
