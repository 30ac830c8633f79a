"""Chrome's trace format: one line per action, a track per worker."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jdist.pipeline.simulate.timeline import Timeline

COLORS = {"F": "thread_state_running", "B": "rail_response", "W": "rail_animation"}
"""Names of colours that the viewer knows."""


def write(timeline: "Timeline", path: Path) -> Path:
    """Writes the actions one by one, so that millions need no memory."""
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for worker in range(timeline.workers):
            named = {"name": f"worker {worker}"}
            entry = {"ph": "M", "name": "thread_name", "pid": 0, "tid": worker}
            file.write(json.dumps({**entry, "args": named}) + ",\n")
        between = ""
        for record in timeline.records():
            entry = {
                "ph": "X",
                "name": f"{record.stage}{record.kind}{record.micro_batch}",
                "cat": record.kind,
                "cname": COLORS[record.kind],
                "pid": 0,
                "tid": record.worker,
                "ts": record.start * 1e6,
                "dur": (record.end - record.start) * 1e6,
                "args": {"stage": record.stage, "micro_batch": record.micro_batch},
            }
            file.write(between + json.dumps(entry))
            between = ",\n"
        file.write("\n]}\n")
    return path
