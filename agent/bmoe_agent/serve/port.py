"""What the service asks of the rest of the agent: implemented by supervisor.py, and by whatever a test needs.

Every method may be called from any of the service's threads and returns soon: nothing here waits for an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bmoe_proto.v1 import telemetry_pb2 as pb


class RefusedError(Exception):
    """A request that makes no sense here; the message goes to whoever asked."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """What is being measured now: law 7 rules what may cross the wire meanwhile."""

    run_id: bytes  # the cell's; empty while the phone itself is measured for a moment, when nothing is sent at all
    send_during_cells: bool = False  # the plan's exception: nothing waits


class Supervisor(Protocol):
    """The agent behind the service."""

    def submit(self, plan: pb.Plan) -> pb.SubmitReply:
        """Take a plan, or say why not."""

    def cancel(self, plan_id: str, *, only_current_cell: bool) -> pb.CancelReply:
        """Cancel a plan (the running one for "") or its current cell."""

    def listing(self) -> list[pb.PlanListing]:
        """The plans; the service adds the runs from the spool."""

    def status(self) -> pb.StatusReply:
        """Everything but backlog, free, spool and quota bytes and the kept-for store, which the service fills in."""

    def state(self) -> str:
        """One word for heartbeats: "idle", "gating", "loading", "measuring", "between", "stopping"."""

    def measuring(self) -> Measuring | None:
        """What is being measured now, if anything. Cheap: asked before every message."""

    def clock(self) -> pb.ClockPair:
        """Boot and wall clock, read together."""

    def tell(self, run_id: bytes, note: pb.Note) -> bool:
        """Keep a host's evidence with a run; False when the run is not open any more."""

    def secret(self) -> bytes:
        """The shared secret as it is now."""

    def rotate(self, new_secret: bytes | None, keep_for_store: bytes | None, *, forget: bool) -> None:
        """Durably replace the secret and/or the store that records are kept for; `forget`: keep for none.

        The supervisor sets the spool's `kept_for` too. Raises RefusedError.
        """
