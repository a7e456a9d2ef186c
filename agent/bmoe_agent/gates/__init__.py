"""Conditions a phone must meet before a cell is measured, and how they are waited for."""

from bmoe_proto.gates import GATES

from bmoe_agent.gates.baseline import Baseline, BaselineError
from bmoe_agent.gates.sources import Reading, Told
from bmoe_agent.gates.wait import Gates

__all__ = ["GATES", "Baseline", "BaselineError", "Gates", "Reading", "Told"]
