"""The command line: what can be asked for, and what is refused."""

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv6Address
from pathlib import Path

from jdist._errors import requirement
from jdist.rpc import ProcessSettings, new_cluster_key
from jdist.rpc.extension import settings_of_each

DESCRIPTION = """\
Starts N workers on this machine, with torchrun's environment variables. The first that
fails ends the others; its traceback is printed last and its exit code returned.
"""
# torchrun's default.
DEFAULT_PORT = 29500
_LAST_PORT = 2**16 - 1
_GRACE = 5.0
_KEY_VARIABLE = "JDIST_CLUSTER_KEY"
# 128 bits cannot be guessed.
_KEY_BYTES = 16
_NEW_KEY = "Make one by `(umask 077; openssl rand -hex 32 > cluster.key)`."


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; misuse ends the program with status 2.

    Returns:
      The options. Those with a computed default are filled in: `command`, `settings`
      (of each worker), and across machines the two ports. A port of None is chosen
      later.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _across_machines(options)
        options.settings = settings_of_each(
            "--cores", _settings(options), options.nproc, options.cores
        )
        options.command = _command(options)
    # NotImplementedError: this system cannot pin processes to cores.
    except (ValueError, NotImplementedError) as error:
        parser.error(str(error))
    return options


def _parser() -> argparse.ArgumentParser:
    # An abbreviation that is unique today may become ambiguous with a new option.
    parser = argparse.ArgumentParser(
        "python -m jdist.launch", description=DESCRIPTION, allow_abbrev=False
    )
    _add_meeting(parser)
    _add_running(parser)
    _add_settings(parser)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "-m", "--module", action="store_true", help="the program is a module's name"
    )
    kind.add_argument(
        *("--no-python", "--no_python"),
        action="store_true",
        help="the program is not a Python script",
    )
    parser.add_argument("program", help="the script to run")
    # Arguments after the program belong to it, even if they look like options here.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


# An option's names after the first are those of torchrun.


def _add_meeting(parser: argparse.ArgumentParser) -> None:
    """Adds options for the number of workers and their rendezvous."""
    add, count, port = parser.add_argument, _between(1, 2**16), _between(1, _LAST_PORT)
    add(
        *("--nproc", "--nproc-per-node", "--nproc_per_node"),
        type=count,
        required=True,
        metavar="N",
        help="workers on this machine",
    )
    add("--nnodes", type=count, default=1, metavar="N", help="machines (default 1)")
    add("--standalone", action="store_true", help="one machine, which is the default")
    add(
        *("--node-rank", "--node_rank"),
        type=_between(0, 2**16 - 1),
        metavar="N",
        help="number of this machine",
    )
    add(
        *("--master-addr", "--master_addr"),
        type=_host,
        metavar="HOST",
        help="address of machine 0, as the others reach it",
    )
    add(
        *("--master-port", "--master_port"),
        type=port,
        metavar="PORT",
        help="for rpc's coordinator (default: a free one)",
    )
    add(
        "--jax-port",
        type=port,
        metavar="PORT",
        help="for jax.distributed's (default: the next)",
    )
    add(
        # A file, because all users of a machine can read its command lines.
        "--key-file",
        type=_path,
        metavar="FILE",
        help=f"holds the run's secret; or set {_KEY_VARIABLE}",
    )


def _add_running(parser: argparse.ArgumentParser) -> None:
    """Adds options for failures and output."""
    add = parser.add_argument
    add(
        *("--max-restarts", "--max_restarts"),
        type=_between(0, 2**16),
        default=0,
        metavar="N",
        help="how often all are started again after a failure (default 0)",
    )
    add(
        *("--log-dir", "--log_dir"),
        type=_folder,
        metavar="FOLDER",
        help="also write each worker's output to a file here",
    )
    add(
        "--grace",
        type=_seconds,
        default=_GRACE,
        metavar="SECONDS",
        help=f"between asking to end and killing (default {_GRACE:g})",
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds options for the settings of the processes."""
    add = parser.add_argument
    add(
        "--pin",
        dest="cores",
        action="store_const",
        const=1,
        default=0,
        help="one core of its own for each worker",
    )
    add("--cores", type=_between(0, 2**16), metavar="N", help="the same, N cores each")
    add(
        "--callback-threads",
        type=_between(0, 2**16),
        metavar="N",
        help="least size of XLA's thread pool; 0 leaves it (default 8)",
    )
    add(
        "--no-process-settings",
        action="store_true",
        help="leave scheduling class, allocator and thread pools as they are",
    )


def _between(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        # `int` also accepts signs, spaces and underscores.
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be in {least}..{most}, not {text}")
        return int(text)

    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        # NaN fails every comparison, so that one error covers both kinds of misuse.
        seconds = math.nan
    # An infinite grace period would keep a failed run alive for ever.
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds, at least 0, not {text}")
    return seconds


def _host(text: str) -> str:
    try:
        IPv6Address(text)
    except ValueError:
        # What has a port would be taken for an address of IPv6.
        if not re.fullmatch(r"[^\s:/]+", text):
            rule = "must be a host's name or address, without a port"
            raise argparse.ArgumentTypeError(f"{rule}, not {text!r}") from None
    return text


def _path(text: str) -> Path:
    # Nothing, as an unset variable of a shell gives, would be this folder.
    if not text:
        raise argparse.ArgumentTypeError("must be a path, not nothing")
    return Path(text)


def _folder(text: str) -> Path:
    folder = _path(text)
    if folder.exists() and not folder.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, not the file {text}")
    return folder


def _across_machines(options: argparse.Namespace) -> None:
    """Checks and completes the options for several machines."""
    if options.nnodes > 1:
        if options.standalone:
            rule = "must be left out when there are several machines"
            raise ValueError(requirement("--standalone", rule, "it"))
        for name in ("node_rank", "master_addr"):
            if getattr(options, name) is None:
                option = f"--{name.replace('_', '-')}"
                rule = "must be given when there are several machines"
                raise ValueError(requirement(option, rule, "nothing"))
        options.master_port = options.master_port or DEFAULT_PORT
        if options.max_restarts:
            rule = "must be 0 across machines: the launchers do not know of each other"
            remedy = "Let the cluster's scheduler start the whole run again."
            got = options.max_restarts
            raise ValueError(requirement("--max-restarts", rule, got, remedy))
    options.node_rank = options.node_rank or 0
    if options.node_rank >= options.nnodes:
        rule = f"must be below --nnodes, {options.nnodes}"
        raise ValueError(requirement("--node-rank", rule, options.node_rank))
    # A rank has 16 bits in every id of rpc.
    if options.nproc * options.nnodes > 2**16:
        rule = "must be at most 65536 workers in all"
        raise ValueError(
            requirement("--nproc", rule, f"{options.nproc} x {options.nnodes}")
        )
    if options.master_port and not options.jax_port:
        options.jax_port = options.master_port + 1
    # The default above exceeds the valid ports if --master-port is the last one.
    if options.jax_port and options.jax_port in (options.master_port, _LAST_PORT + 1):
        rule = "must be a port other than --master-port"
        raise ValueError(requirement("--jax-port", rule, options.jax_port))


def _command(options: argparse.Namespace) -> list[str]:
    # Nothing, as an unset variable of a shell gives, would be this folder.
    if not options.program:
        rule = "must name a script, a module or a command"
        raise ValueError(requirement("program", rule, "nothing"))
    rest = [options.program, *options.arguments]
    if options.no_python:
        return rest
    if options.module:
        return ["-m", *rest]
    # Checked once here; otherwise every worker would fail with the same error.
    path = Path(options.program)
    no_program = path.is_dir() and not (path / "__main__.py").is_file()
    if no_program or not path.exists():
        rule, remedy = "must be a file", "For a module, give --module before its name."
        raise ValueError(requirement("program", rule, options.program, remedy))
    return rest


def _settings(options: argparse.Namespace) -> ProcessSettings | None:
    if options.no_process_settings:
        return None
    if options.callback_threads is None:
        return ProcessSettings()
    return ProcessSettings(callback_threads=options.callback_threads)


def cluster_key(
    file: Path | None, nnodes: int, environment: Mapping[str, str] = os.environ
) -> str:
    """The secret of the run, from the file, the environment, or fresh on one machine.

    Raises:
      ValueError: There are several machines and no key, the key is too short, the file
        cannot be read, or others on this machine may read it.
    """
    if file is not None:
        return _checked(f"--key-file {file}", _private_text(file))
    if _KEY_VARIABLE in environment:
        return _checked(_KEY_VARIABLE, environment[_KEY_VARIABLE].strip())
    if nnodes == 1:
        return new_cluster_key()
    rule = "must be set on every machine, to the same secret, or --key-file be given"
    raise ValueError(requirement(_KEY_VARIABLE, rule, "neither", _NEW_KEY))


def _private_text(file: Path) -> str:
    try:
        with file.open() as opened:
            # The mode of the open file: the path may lead to another file by then.
            mode = os.fstat(opened.fileno()).st_mode & 0o777
            if mode & 0o077:
                rule = "must be readable by its owner alone"
                remedy = f"Try `chmod 600 {file}`."
                raise ValueError(
                    requirement(f"--key-file {file}", rule, f"mode {mode:o}", remedy)
                )
            return opened.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        rule = "must be a file of text that can be read"
        got = str(error)
        raise ValueError(
            requirement(f"--key-file {file}", rule, got, _NEW_KEY)
        ) from error


def _checked(origin: str, key: str) -> str:
    if len(key.encode()) < _KEY_BYTES:
        rule = f"must hold a random secret of at least {_KEY_BYTES} bytes"
        raise ValueError(requirement(origin, rule, f"{len(key)} characters", _NEW_KEY))
    return key
