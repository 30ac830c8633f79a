"""The command line: what can be asked for, and what is refused."""

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

from jdist._errors import value_error
from jdist.rpc import ProcessSettings, new_cluster_key
from jdist.rpc.extension import settings_of_each

DESCRIPTION = """\
Starts N workers on this machine, with torchrun's environment variables. The first that
fails ends the others; its traceback is printed last and its exit code returned.
"""
# torchrun's default.
DEFAULT_PORT = 29500
_LAST_PORT = 2**16 - 1
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
    options.cores = options.cores or int(options.pin)
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
    for names, kind, shown, told in _OPTIONS:
        _add(parser, names, told, type=kind, metavar=shown)
    for names, told in _SWITCHES.items():
        _add(parser, names, told, action="store_true")
    kind_of_program = parser.add_mutually_exclusive_group()
    _add(kind_of_program, "-m --module", "the program is a module", action="store_true")
    what = "the program is not a Python script"
    _add(kind_of_program, "--no-python", what, action="store_true")
    parser.set_defaults(
        nnodes=1, max_restarts=0, grace=5.0, cores=0, callback_threads=8
    )
    parser.add_argument("program", help="the script to run")
    # Arguments after the program belong to it, even if they look like options here.
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _add(
    parser: argparse._ActionsContainer, names: str, told: str, **about: Any
) -> None:
    """Adds an option by all of its names, torchrun's spellings among them."""
    underscored = [
        f"--{n[2:].replace('-', '_')}" for n in names.split() if n in _SHARED
    ]
    about["required"] = names == _NPROC
    parser.add_argument(*names.split(), *underscored, help=told, **about)


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


_count, _port, _from_0 = _between(1, 2**16), _between(1, _LAST_PORT), _between(0, 2**16)

_SHARED = frozenset((
    "--nproc-per-node", "--node-rank", "--master-addr", "--master-port",
    "--max-restarts", "--log-dir", "--no-python",
))  # fmt: skip
"""Options that torchrun also spells with underscores."""

_NPROC = "--nproc --nproc-per-node"
_OPTIONS: tuple[tuple[str, Callable[[str], object], str, str], ...] = (
    (_NPROC, _count, "N", "workers on this machine"),
    ("--nnodes", _count, "N", "machines (default 1)"),
    ("--node-rank", _between(0, 2**16 - 1), "N", "number of this machine"),
    ("--master-addr", _host, "HOST", "address of machine 0, as the others reach it"),
    ("--master-port", _port, "PORT", "for rpc's coordinator (default: a free one)"),
    ("--jax-port", _port, "PORT", "for jax.distributed's (default: the next)"),
    # A file, because all users of a machine can read its command lines.
    ("--key-file", _path, "FILE", f"holds the run's secret; or set {_KEY_VARIABLE}"),
    ("--max-restarts", _from_0, "N", "times to start all again after a failure (0)"),
    ("--log-dir", _folder, "FOLDER", "also write each worker's output to a file here"),
    ("--grace", _seconds, "SECONDS", "between asking to end and killing (default 5)"),
    ("--cores", _from_0, "N", "cores of its own for each worker"),
    (
        "--callback-threads",
        _from_0,
        "N",
        "least size of XLA's pool (8); 0 leaves it",
    ),
)
"""Names, type, how a value is shown, and description of each option."""

_SWITCHES = {
    "--standalone": "one machine, which is the default",
    "--pin": "one core of its own for each worker",
    "--no-process-settings": "leave scheduling class, allocator and thread pools alone",
}


def _across_machines(options: argparse.Namespace) -> None:
    """Checks and completes the options for several machines."""
    if options.nnodes > 1:
        if options.standalone:
            rule = "must be left out when there are several machines"
            raise value_error("--standalone", rule, "it")
        for name in ("node_rank", "master_addr"):
            if getattr(options, name) is None:
                rule = "must be given when there are several machines"
                raise value_error(f"--{name.replace('_', '-')}", rule, "nothing")
        options.master_port = options.master_port or DEFAULT_PORT
        if options.max_restarts:
            rule = "must be 0 across machines: the launchers do not know of each other"
            remedy = "Let the cluster's scheduler start the whole run again."
            raise value_error("--max-restarts", rule, options.max_restarts, remedy)
    options.node_rank = options.node_rank or 0
    if options.node_rank >= options.nnodes:
        rule = f"must be below --nnodes, {options.nnodes}"
        raise value_error("--node-rank", rule, options.node_rank)
    # A rank has 16 bits in every id of rpc.
    if options.nproc * options.nnodes > 2**16:
        rule = "must be at most 65536 workers in all"
        raise value_error("--nproc", rule, f"{options.nproc} x {options.nnodes}")
    if options.master_port and not options.jax_port:
        options.jax_port = options.master_port + 1
    # The default above exceeds the valid ports if --master-port is the last one.
    if options.jax_port and options.jax_port in (options.master_port, _LAST_PORT + 1):
        rule = "must be a port other than --master-port"
        raise value_error("--jax-port", rule, options.jax_port)


def _command(options: argparse.Namespace) -> list[str]:
    # Nothing, as an unset variable of a shell gives, would be this folder.
    if not options.program:
        rule = "must name a script, a module or a command"
        raise value_error("program", rule, "nothing")
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
        raise value_error("program", rule, options.program, remedy)
    return rest


def _settings(options: argparse.Namespace) -> ProcessSettings | None:
    if options.no_process_settings:
        return None
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
    raise value_error(_KEY_VARIABLE, rule, "neither", _NEW_KEY)


def _private_text(file: Path) -> str:
    try:
        with file.open() as opened:
            # The mode of the open file: the path may lead to another file by then.
            mode = os.fstat(opened.fileno()).st_mode & 0o777
            if mode & 0o077:
                rule = "must be readable by its owner alone"
                remedy = f"Try `chmod 600 {file}`."
                raise value_error(f"--key-file {file}", rule, f"mode {mode:o}", remedy)
            return opened.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        rule = "must be a file of text that can be read"
        raise value_error(f"--key-file {file}", rule, str(error), _NEW_KEY) from error


def _checked(origin: str, key: str) -> str:
    if len(key.encode()) < _KEY_BYTES:
        rule = f"must hold a random secret of at least {_KEY_BYTES} bytes"
        raise value_error(origin, rule, f"{len(key)} characters", _NEW_KEY)
    return key
