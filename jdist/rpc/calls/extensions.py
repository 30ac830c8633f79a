"""Packages built upon rpc give every worker of the process what they need there.

A part registers its installer when it is imported, before or after this process has
workers. A message that only such a part can read names, in its metadata, a function of
that part: to look it up imports the part, if the worker allows the name.
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


def extend(part: str, installer: Installer) -> None:
    """Has `installer(agent)` called once for every worker of this process.

    Args:
      part: The package that registers it; a second time changes nothing.
      installer: Gives one worker what the part needs there.
    """
    with _lock:
        if part in _installers:
            return
        _installers[part] = installer
        agents = [agent for agent in _agents if not agent.closed]
    for agent in agents:
        installer(agent)


def equip(agent: Agent) -> None:
    """Gives a new worker everything that was registered so far."""
    with _lock:
        _agents.add(agent)
        installers = list(_installers.values())
    for installer in installers:
        installer(agent)
