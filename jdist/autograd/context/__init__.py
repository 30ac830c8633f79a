"""Contexts: one distributed computation each, with its ids, gradients and end."""
