"""Values to headers and buffers and back, and which functions may be named."""

from jdist.rpc.codec.codec import Codec
from jdist.rpc.codec.functions import FunctionTable

__all__ = ["Codec", "FunctionTable"]
