"""The local graph: variables, recorded values, and the nodes that computed them."""

__all__: list[str] = []
