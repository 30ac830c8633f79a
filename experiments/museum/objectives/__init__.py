"""Contrastive losses and those of reinforcement learning."""
