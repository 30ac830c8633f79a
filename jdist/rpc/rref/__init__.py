"""Remote references: values that stay where they are, and are kept while needed."""

from jdist.rpc.rref.proxy import Proxy
from jdist.rpc.rref.reference import RRef, remote

__all__ = ["Proxy", "RRef", "remote"]
