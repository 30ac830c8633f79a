"""What replicas start from and read: process groups, samplers, checkpoints."""
