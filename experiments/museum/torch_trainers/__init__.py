"""Trainers in torch, over gloo."""
