"""Training that stays exact while replicas come and go."""

__all__: list[str] = []
