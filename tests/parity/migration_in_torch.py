"""Runs torch's blocks of the migration guide, each page on two processes of its own.

`python -m tests.parity.migration_in_torch FOLDER`: FOLDER/blocks.json holds the blocks
of each page, `[[heading, code, sets], ..]`; what rank 0 has as `found` after each block
that sets it is written to FOLDER/PAGE.json.
"""

import json
import os
import socket
import sys
import traceback
import types
from pathlib import Path

# Imported here, once: the processes of all pages are forks of this one.
import torch
import torch.distributed.fsdp
import torch.distributed.nn
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor


def plain(value):
    """Tensors as nested lists."""
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def run(blocks, rank, path):
    """The blocks of a page as one program, which the other worker can import from."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    torch.set_num_threads(1)
    found = []
    for heading, code, sets in blocks:
        if rank == 0 or heading != "torch, worker0":
            exec(compile(code, path.stem, "exec"), vars(main))
            if sets:
                found.append(plain(main.found))
    if rank == 0:
        path.write_text(json.dumps(found))


def forked(blocks, rank, path):
    """Starts one of a page's processes."""
    child = os.fork()
    if child:
        return child
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    code = 1
    try:
        run(blocks, rank, path)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)  # Tearing gloo down now and then aborts: its threads still run.


def main(folder):
    """One page after the other."""
    pages = json.loads((folder / "blocks.json").read_text())
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    for name, blocks in pages.items():
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(found.getsockname()[1])
        children = [forked(blocks, rank, folder / f"{name}.json") for rank in (0, 1)]
        ended = [os.waitpid(child, 0)[1] for child in children]
        if any(ended):
            sys.exit(f"{name}: a process has failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
