"""Evaluation of a program in its own precision, in float64, and as rounding may go."""

__all__: list[str] = []
