"""Gradients of micro-batches, added up before a step."""
