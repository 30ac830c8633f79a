"""Registry of packages built upon rpc, whose installers run for every worker.

A package registers its installer when it is imported, before or after this process has
workers. A message that only such a package can read names a function of it in its
metadata (`NEEDS`): to look the name up imports the package, if the worker allows that.
"""

import threading
import weakref
from collections.abc import Callable

from jdist.rpc.calls.agent import Agent

__all__ = ["equip", "extend"]

Installer = Callable[[Agent], None]
_installers: dict[str, Installer] = {}
_agents: weakref.WeakSet[Agent] = weakref.WeakSet()
_lock = threading.Lock()


def extend(package: str, installer: Installer) -> None:
    """Has `installer(agent)` called once for every worker of this process.

    Args:
      package: Registers it; a second time changes nothing.
      installer: Gives one worker what the package needs there.
    """
    with _lock:
        if package in _installers:
            return
        _installers[package] = installer
        agents = [agent for agent in _agents if not agent.closed]
    for agent in agents:
        installer(agent)


def equip(agent: Agent) -> None:
    """Runs all installers for a new worker."""
    with _lock:
        # In this order: a package that registers from now on finds the worker itself.
        _agents.add(agent)
        installers = list(_installers.values())
    for installer in installers:
        installer(agent)
