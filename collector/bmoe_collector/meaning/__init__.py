"""What the numbers of a run mean, by the contract: pure functions of a RunRecord.

`derive(record)` works everything out; `facts(record)` is the flat part that lists, filters and comparison use, and `FACTS`
the table that documents it.
"""

from bmoe_collector.meaning.derive import Derived, derive
from bmoe_collector.meaning.facts import FACTS, Fact, facts, facts_of

__all__ = ["FACTS", "Derived", "Fact", "derive", "facts", "facts_of"]
