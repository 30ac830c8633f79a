"""The engine: backward passes over the graphs of all workers of a context."""
