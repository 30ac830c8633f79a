"""Stages: pure functions with named inputs and outputs, also made from modules."""

__all__: list[str] = []
