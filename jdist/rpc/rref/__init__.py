"""Remote references: values that stay where they are, and are kept while needed."""

from jdist.rpc.rref.creation import remote as remote
from jdist.rpc.rref.reference import RRef as RRef
