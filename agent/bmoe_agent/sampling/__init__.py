"""What the kernel says while the engine runs, and what saying so costs."""

from bmoe_agent.sampling.observer import Observer
from bmoe_agent.sampling.sampler import Sampler

__all__ = ["Observer", "Sampler"]
