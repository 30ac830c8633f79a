"""One script per claim; `python -m experiments` lists them."""
