"""Stages of a model, one after the other, and micro-batches."""
