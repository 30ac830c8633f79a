"""What JAX's plugins write to standard error where they find no device."""

import re

# The CUDA plugin logs when it is imported, before any setting could silence it; the
# launcher puts a worker's name before each of its lines.
_NOTICE = re.compile(
    r"^(?:\[\w+\] )?(?:"
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written "
    r"to STDERR"
    r"|I\d{4} [\d:.]+ +\d+ cudart_stub\.cc:\d+\] Could not find cuda drivers .*"
    r")\n",
    re.MULTILINE,
)


def without_notices(errors):
    """A process's standard error without those lines, so that the rest can be empty."""
    return _NOTICE.sub("", errors)
