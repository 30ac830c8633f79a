"""The only part that knows JAX versions and what is not plain public API.

Everything else in jdist uses names that JAX documents. What differs between the
supported releases (0.10.2 and newer), or is reachable but undocumented, is wrapped
here, with a test in `tests/test_compat.py`, or for what `jdist.segment` is made of in
`tests/segment/test_programs.py`, that fails when JAX changes it.
"""

from jdist._compat.ahead import Ahead as Ahead
from jdist._compat.alike import alike as alike
from jdist._compat.programs import WRAPPED_FUNCTION as WRAPPED_FUNCTION
from jdist._compat.programs import Loop as Loop
from jdist._compat.programs import byte_count as byte_count
from jdist._compat.programs import called_program as called_program
from jdist._compat.programs import constants_of as constants_of
from jdist._compat.programs import equations_for as equations_for
from jdist._compat.programs import evaluate as evaluate
from jdist._compat.programs import inner_programs as inner_programs
from jdist._compat.programs import loop_counts as loop_counts
from jdist._compat.programs import loop_of as loop_of
from jdist._compat.programs import no_cotangent as no_cotangent
from jdist._compat.programs import part_of as part_of
from jdist._compat.programs import parts_of_wrapped as parts_of_wrapped
from jdist._compat.programs import reads as reads
from jdist._compat.programs import refuse_as_argument as refuse_as_argument
from jdist._compat.programs import rewritten as rewritten
from jdist._compat.programs import trace as trace
from jdist._compat.programs import trace_context as trace_context
from jdist._compat.programs import trace_whole as trace_whole
from jdist._compat.programs import without_unread as without_unread
from jdist._compat.runtime import abandon_distributed as abandon_distributed
from jdist._compat.runtime import beside as beside
from jdist._compat.runtime import default_device as default_device
from jdist._compat.runtime import distributed_client as distributed_client
from jdist._compat.runtime import double_precision as double_precision
from jdist._compat.runtime import is_traced as is_traced
from jdist._compat.runtime import let_go as let_go
from jdist._compat.runtime import placed as placed
from jdist._compat.runtime import require_backend as require_backend
from jdist._compat.runtime import set_cpu_device_count as set_cpu_device_count
from jdist._compat.shards import after as after
from jdist._compat.shards import laid_out as laid_out
from jdist._compat.shards import map_shards as map_shards
from jdist._compat.shards import tracks_varying_axes as tracks_varying_axes
from jdist._compat.shards import varying_axes as varying_axes
from jdist._compat.staging import device_count_of as device_count_of
from jdist._compat.staging import thread_pool_size as thread_pool_size
from jdist._compat.staging import unrepeatable_effect as unrepeatable_effect
