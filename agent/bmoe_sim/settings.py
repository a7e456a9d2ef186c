"""What the simulator is told beyond the engine's own argv: one environment variable, BMOE_SIM.

Comes in: a comma list of `key=value` (a value may be percent-encoded: `%2C` is a comma). Goes out: `Settings`.

    pose=0.19|newest    which engine to be (flags, lines, keys, columns)              newest
    seed=N              seeds timing and routing                                       0
    tok_s=F             about how many tokens a plain decode makes a second            20
    load_s=F            how long loading takes                                         0.05
    prefill_s=F         how long each prefill takes                                    n_prompt / (10 x tok_s)
    noise=F             standard deviation of the log of a token's time                0.04
    text=STR|@PATH      the answer's bytes, cut into tokens of four; generation ends with them
    eog=N               an end of generation after N tokens
    reason=N            the first N tokens are reasoning, where thinking is on         0
    reset=N             at token N all answer text so far is reclassified as reasoning
    think_ctl=WORD      template|prefill|none                                          template
    majflt=F            mean major faults a token                                      0
    burn=0|1            really compute on -t threads; wall and CPU time are measured   0
    burn_mib=F          MiB each thread hashes for a token                             8
    pin=0|1             each computing thread stays on a processor of its own          0
    arms=N              a patched engine: two settings alternate every N tokens of the process, told in columns of its
                        own, `arm` and `tokens_since_switch`, with a preamble key `arm_block` and a line `arms:`
    arm_effect=F        what a token's compute is multiplied by in arm 1                0.95
    hook=0|1            whether this build has the overlap hook                        1
    device_idle=1       --prefill-device is accepted and computes nothing
    copy=DIR            independent byte copies of stdout and of each file, and a note of argv, per process
    fault=KIND@AT[:ARG] what goes wrong, several joined by `+`; AT is a token of the process counted from 1,
                        or `load` or `prefill`:
        hang   never continue                         pause:S  stop for S seconds, then continue
        crash  SIGABRT with an assertion on stderr    segv     SIGSEGV
        kill   SIGKILL                                term     SIGTERM
        oom:M  take M MiB (64), then SIGKILL          exit:C   end with status C (1) and a word on stderr
        fatal  the engine's own fatal error, exit 1   torn     half a line, then SIGKILL
        half_char  the token ends inside a character  overflow:B  a line of B bytes (1 MiB) that is no telemetry
        noise  a line of bytes that are no text       clamp    cache management beyond wall: compute clamps to 0
        failrows:N  N failed row reads in the report (AT is ignored)
"""

import re
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

FAULTS = frozenset(
    "hang pause crash segv kill term oom exit fatal torn half_char overflow noise clamp failrows".split()  # noqa: SIM905
)
_FAULT = re.compile(r"(\w+)@(\d+|load|prefill)(?::([\d.]+))?$")


class SettingsError(Exception):
    """BMOE_SIM holds something that means nothing."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong: what, where, and its number."""

    kind: str
    at: str
    arg: float | None = None


@dataclass
class Settings:
    """BMOE_SIM, read."""

    pose: str = "newest"
    seed: int = 0
    tok_s: float = 20.0
    load_s: float = 0.05
    prefill_s: float | None = None
    noise: float = 0.04
    text: bytes | None = None
    eog: int = 0
    reason: int = 0
    reset: int = 0
    think_ctl: str = "template"
    majflt: float = 0.0
    burn: bool = False
    burn_mib: float = 8.0
    pin: bool = False
    arms: int = 0
    arm_effect: float = 0.95
    hook: bool = True
    device_idle: bool = False
    copy: str = ""
    faults: list[Fault] = field(default_factory=list)

    def fault(self, kind: str, at: int | str) -> Fault | None:
        """The fault of this kind at this place, if one was asked for."""
        return next((f for f in self.faults if f.kind == kind and f.at == str(at)), None)

    def any_fault(self, kind: str) -> Fault | None:
        """The first fault of this kind, wherever."""
        return next((f for f in self.faults if f.kind == kind), None)

    def arm(self, token: int) -> tuple[int, int]:
        """Which arm a token of the process (from 0) is in, and how many tokens since it was switched to."""
        return token // self.arms % 2, token % self.arms

    @property
    def old(self) -> bool:
        """Whether it poses as 0.19."""
        return self.pose == "0.19"

    @property
    def version(self) -> str:
        """What --version and the CSV say; it names the simulator whatever the pose."""
        return "0.19.0-simulator" if self.old else "0.24.0-simulator"


def _flag(value: str) -> bool:
    return value not in {"", "0", "no", "false"}


def _positive(value: str) -> float:
    number = float(value)
    if not number > 0:
        raise ValueError("must be above 0")
    return number


def parse(text: str) -> Settings:
    """Read BMOE_SIM. Raises SettingsError naming the entry and what it may be."""
    out = Settings()
    for entry in filter(None, (part.strip() for part in text.split(","))):
        key, _, raw = entry.partition("=")
        value = unquote_to_bytes(raw)
        word = value.decode("utf-8", "surrogateescape")
        try:
            if key == "pose":
                if word not in {"0.19", "newest"}:
                    raise ValueError("may be 0.19 or newest")
                out.pose = word
            elif key == "text":
                out.text = _file(word[1:]) if word.startswith("@") else value
            elif key == "fault":
                out.faults += [_fault(part) for part in word.split("+")]
            elif key in {"seed", "eog", "reason", "reset", "arms"}:
                setattr(out, key, int(word))
            elif key in {"tok_s", "burn_mib", "arm_effect"}:
                setattr(out, key, _positive(word))
            elif key in {"load_s", "prefill_s", "noise", "majflt"}:
                setattr(out, key, max(0.0, float(word)))
            elif key in {"burn", "pin", "hook", "device_idle"}:
                setattr(out, key, _flag(word))
            elif key in {"think_ctl", "copy"}:
                setattr(out, key, word)
            else:
                raise ValueError("is no setting of the simulator")
        except (ValueError, OSError) as e:
            raise SettingsError(f"BMOE_SIM: {entry!r}: {e}") from None
    return out


def _file(path: str) -> bytes:
    with open(path, "rb") as f:
        return f.read()


def _fault(text: str) -> Fault:
    match = _FAULT.match(text)
    if not match or match.group(1) not in FAULTS:
        raise ValueError(f"a fault is KIND@AT[:ARG] with KIND one of {' '.join(sorted(FAULTS))}")
    return Fault(match.group(1), match.group(2), float(match.group(3)) if match.group(3) else None)
