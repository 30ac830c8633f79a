"""Live comparisons with torch, run by `make parity`."""
