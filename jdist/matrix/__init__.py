"""The rows of `python -m jdist.verify`: one module for each family of strategies."""
