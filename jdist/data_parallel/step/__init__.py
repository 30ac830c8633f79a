"""Training steps over replicas and their variants."""
