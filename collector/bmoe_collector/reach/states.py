"""The states a phone can be in, and what a person does about each.

In: an exception of a call, or what an agent says of itself. Out: a state's name and a sentence. Decided by calls with
deadlines only: adb accepts connections for a phone on which nothing listens.
"""

from __future__ import annotations

from dataclasses import dataclass

from bmoe_proto import calls
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_collector.reach.adb import AdbError

ADVICE = {
    "ready": "",
    "reachable": "",
    "new": "",
    "database": "`bmoe db check`; what is not stored stays on the phone",
    "host_storage": "make room or mend permissions on this host; what is not stored stays on the phone",
    "held": "another collector drains it",
    "away": "connect it, or switch adb over Wi-Fi on",
    "no_agent": "start the agent on the phone: `bmoe-agent serve`",
    "frozen": "wake the phone: open Termux, or exempt it from battery optimisation",
    "silent": "the phone's shell does not answer: replug it, or `adb reconnect`",
    "unauthorized": "accept this host's key on the phone's screen",
    "offline": "replug the phone, or `adb reconnect`",
    "unpaired": "`bmoe pair` with the secret `bmoe-agent init` showed",
    "wrong_secret": "pair again: `bmoe pair` with the phone's present secret",
    "not_the_agent": "something else answers under the agent's name: find out what before pairing again",
    "too_old": "upgrade bmoe-fleet on the phone",
    "too_new": "upgrade bmoe-fleet on this host",
    "refused": "",
    "clock_jumped": "the phone's wall clock moved; times are placed by its boot clock",
    "storage_full": "drain the phone, or free space on it",
    "adb": "check `adb devices`",
    "trouble": "the log of `bmoe collect` has the whole story",
}

LOW_FREE_BYTES = 256 << 20
JUMP_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class ClockSeen:
    """The relation of a phone's two clocks, for telling a jump."""

    boot_id: str
    offset_ns: int

    @staticmethod
    def of(pair: pb.ClockPair) -> ClockSeen:
        """From a pair of readings."""
        return ClockSeen(pair.boot_id, pair.wall_ns - pair.boot_ns)

    def jump_s(self, later: ClockSeen) -> float | None:
        """How far the wall clock moved against the boot clock since, in seconds; None when it did not, or after a reboot."""
        if self.boot_id != later.boot_id or abs(later.offset_ns - self.offset_ns) <= JUMP_NS:
            return None
        return (later.offset_ns - self.offset_ns) / 1e9


def state_of(error: Exception) -> tuple[str, str]:
    """The state an exception tells of, and its message."""
    table: list[tuple[type[Exception], str]] = [
        (calls.WrongSecret, "wrong_secret"),
        (calls.NotTheAgent, "not_the_agent"),
        (calls.TooOld, "too_old"),
        (calls.TooNew, "too_new"),
        (calls.Frozen, "frozen"),
        (calls.NotThere, "no_agent"),
        (calls.Refused, "refused"),
        (AdbError, "adb"),
    ]
    for kind, state in table:
        if isinstance(error, kind):
            return state, str(error)
    return "trouble", f"{type(error).__name__}: {error}"


def storage_problem(status: pb.StatusReply) -> str:
    """Why the phone will soon not be able to record, or nothing."""
    if status.quota_bytes and status.spool_bytes >= 0.95 * status.quota_bytes:
        return f"spool at {status.spool_bytes >> 20} of {status.quota_bytes >> 20} MiB"
    if status.free_bytes and status.free_bytes < LOW_FREE_BYTES:
        return f"{status.free_bytes >> 20} MiB free"
    return ""
