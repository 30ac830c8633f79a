"""The whole batch's loss and gradient from replicas that each see a part."""
