"""Every action by the name of its fault."""

from faults.harness import host_faults, phone_faults
from faults.harness.action import ALL, Undo

ACTIONS = {name: done for name, done in ALL.items() if done.__module__ in {host_faults.__name__, phone_faults.__name__}}
__all__ = ["ACTIONS", "Undo"]
