"""How much of a model's file is in memory, and what that file is."""

from bmoe_agent.residency.look import Residency
from bmoe_agent.residency.model import describe

__all__ = ["Residency", "describe"]
