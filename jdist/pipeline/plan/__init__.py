"""Planning: profiles of layers, cuts, and PipeDream's partitioning."""
