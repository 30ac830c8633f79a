"""What lies on which replica, and running one function on each of them."""

__all__: list[str] = []
