"""Dropout over layouts and in recomputations."""
