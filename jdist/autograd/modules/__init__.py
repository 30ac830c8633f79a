"""Flax NNX modules and replicated parameters as variables."""
