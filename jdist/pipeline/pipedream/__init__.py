"""PipeDream: asynchronous epochs with weight stashing."""
