"""Stages: pure functions with named inputs and outputs, also from modules."""
