"""Tests of workers that Ray places; `make ray` runs them."""
