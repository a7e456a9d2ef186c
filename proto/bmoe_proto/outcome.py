"""What became of a run: end facts to an outcome, its cause and the evidence for it.

In: `EndFacts`, what was observed when the run ended. Out: `Outcome`. Pure, and called on both sides: on the phone when
a run is closed, on the host from the stored record, which must give the same answer.

Outcomes (design, "What a number means"): `started ok partial failed killed aborted skipped lost`.
Causes, short codes for grouping; `watchdog:` and `gate:` are followed by the rule or gate, `signal:` by the name:

    stopped            ended by the agent, for another reason than a watchdog
    exit               the engine ended by itself, exit code in the evidence
    eog, tokens        (ok) it ended at an end of generation, or with all tokens asked
    incomplete         exit 0 but something asked for is missing
    rejected           exit 0 and a request was refused that nobody expected to be
    cancelled          a turn, the cell or the plan was cancelled by us or the user
    refused:flags      the engine does not take these flags; refused:model it cannot use this model
    linker             the dynamic linker could not start it
    not_started        it could not be executed at all
    engine_error       a fatal error of the engine's own
    out_of_memory      killed for memory, or its own allocation failed
    phantom_killer, freezer, signal:NAME
    watchdog:RULE, gate:NAME, thermal, battery, disk_full
    abandoned          the phone restarted, or the record ends, and no engine is left to ask
    not_observed       it is gone and nobody saw how
"""

from __future__ import annotations

import re
import signal as signals
from dataclasses import dataclass, field

OUTCOMES = ("started", "ok", "partial", "failed", "killed", "aborted", "skipped", "lost")


@dataclass(frozen=True, slots=True)
class EndFacts:
    """What was observed of a run's end. A count that nobody could observe is None (law 5)."""

    ended: bool = True  # False: nothing says that it ended, it may still run
    launched: bool = True  # the engine was executed (or the attempt to execute it was made)
    exit_observed: bool = False
    exit_code: int | None = None
    signal: int | None = None
    ended_by: str = "unknown"  # "engine", "agent", "user", "gate", "unknown" (telemetry.proto RunEnded)
    cancelled: bool = False  # the cell or the plan was cancelled
    tokens_asked: int | None = None  # all turns together; None: not known
    tokens_got: int | None = None
    ended_by_eog: bool = False  # every generation that fell short ended at an end of generation
    end_record: bool | None = None  # one-shot: the perf block or trailer was seen; None: there is none to see
    fatal_error: str = ""  # BMOE_ERROR with fatal:true, its message
    turns_asked: int = 0  # sessions; 0 for a one-shot
    turns_sent: int = 0
    turns_ended: int = 0  # done, decided, or rejected as expected
    turns_rejected: int = 0  # rejected, and the plan did not expect it
    turns_cancelled: int = 0  # cancelled by us where the plan did not ask for it
    stderr_tail: bytes = b""
    watchdog: str = ""  # rule of the report that ended it: "load", "decode", "temperature" ...
    watchdog_detail: str = ""
    gate: str = ""  # gate that gave up so that nothing was launched
    gate_detail: str = ""
    launch_error: str = ""  # why it could not be executed
    disk_full: bool = False  # the engine's own files or the record met a full disk
    kill_evidence: tuple[str, ...] = field(default=())  # lines of the phone's log about this pid
    imported: bool = False  # files alone, without a record of the exit: the end records decide
    abandoned: bool = False  # the boot id changed, or the record stops, and no engine is left to ask


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on a run's end; `evidence` is sentences for people, most telling first."""

    outcome: str
    cause: str
    evidence: tuple[str, ...] = ()

    @property
    def retryable(self) -> bool:
        """Whether trying the same again could end otherwise: not when the flags or the model were refused.

        `partial`, `failed`, `killed` retry within the plan's bound and `lost` runs again. A cell that we ended
        ourselves follows its own rule, and one that the user cancelled or a gate skipped is done (design's table).
        """
        if self.outcome in ("partial", "killed", "lost"):
            return self.cause != "cancelled"
        return self.outcome == "failed" and not self.cause.startswith("refused:")


# Text of the dynamic linkers: bionic's, then glibc's and musl's.
_LINKER = re.compile(
    rb"CANNOT LINK EXECUTABLE|error while loading shared libraries|Error loading shared library|"
    rb"has unexpected e_type|has bad ELF magic|cannot locate symbol|symbol lookup error|\"[^\"]+\" not found: required by"
)
_NO_MEMORY = re.compile(
    rb"std::bad_alloc|[Oo]ut of memory|Cannot allocate memory|failed to allocate|ENOMEM|unable to allocate"
)
_NO_SPACE = re.compile(rb"No space left on device|ENOSPC")
_FLAGS = re.compile(
    rb"(?im)^.*(config error:|unknown (arg|argument|flag|option)\b|"
    rb"unrecogni[sz]ed (arg|argument|flag|option)\b|"
    rb"invalid (argument|value)|"
    rb"requires a(n argument| value)|missing (argument|value)|expected a value|mutually exclusive|"
    rb"cannot be (combined|used with)|incompatible with|needs --|requires --|--force-cache|without the hook).*$"
)
_MODEL = re.compile(
    rb"(?im)^.*(failed to (open|load|read|map)[^\n]{0,40}(model|gguf)|no such file[^\n]*|model[^\n]{0,80}"
    rb"(not found|does not exist|missing|cannot be (opened|read|loaded))|(cannot|could not|unable to|can't) "
    rb"(open|load|read|find)[^\n]{0,200}|invalid magic|not a gguf|error loading model|unsupported "
    rb"(architecture|model)|unknown (model )?architecture).*$"
)
_PHANTOM = re.compile(r"(?i)phantom|trimphantom|excessive cpu")
_MEMORY_KILLER = re.compile(r"(?i)lowmemorykiller|\blmkd\b|out of memory|oom[-_ ]?kill|memory cgroup|killed process")
_KILLER = re.compile(f"{_PHANTOM.pattern}|{_MEMORY_KILLER.pattern[4:]}", re.IGNORECASE)
_FREEZER = re.compile(r"(?i)freez|frozen")


_MOST_SAID = 2000  # characters of an engine's own message that are evidence
_NO_ROOM = "no space was left for the engine's files or the record"


def signal_name(number: int) -> str:
    """SIGKILL for 9; the number itself when it has no name here."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return str(number)


def decide(facts: EndFacts) -> Outcome:
    """The outcome of a run by the design's table; the first rule that applies, from who ended it to what is missing."""
    if not facts.ended and not facts.abandoned:
        return Outcome("started", "")
    if not facts.launched:
        return _never_launched(facts)
    # We ended it: whatever the engine said on its way out, the reason is ours.
    if facts.watchdog:
        return _watchdog(facts)
    if facts.cancelled or facts.ended_by == "user":
        return Outcome("aborted", "cancelled", ("cancelled by the user", *_exit_evidence(facts)))
    killed_unseen = not facts.exit_observed and bool(_KILLER.search("\n".join(facts.kill_evidence)))
    if (facts.signal is not None or killed_unseen) and facts.ended_by != "agent":
        return _signalled(facts, facts.signal if facts.signal is not None else signals.SIGKILL)
    if facts.fatal_error:
        return Outcome(
            "failed", _broken_cause(facts), (f"BMOE_ERROR: {facts.fatal_error[:_MOST_SAID]}", *_exit_evidence(facts))
        )
    if facts.ended_by == "agent" and (facts.signal is not None or facts.exit_code not in (None, 0)):
        return Outcome("aborted", "stopped", ("ended by the agent", *_exit_evidence(facts)))
    if facts.exit_observed and facts.exit_code not in (None, 0):
        return _refused_or_broke(facts)
    return _ended_quietly(facts)


def _never_launched(facts: EndFacts) -> Outcome:
    if facts.gate:
        return Outcome("skipped", f"gate:{facts.gate}", _some(facts.gate_detail, f"gate {facts.gate} gave up"))
    if facts.cancelled or facts.ended_by == "user":
        return Outcome("aborted", "cancelled", ("cancelled before anything was launched",))
    if facts.disk_full:
        return Outcome("failed", "disk_full", _some(facts.launch_error, "no space left for the record"))
    if facts.launch_error:
        text = facts.launch_error
        if text.startswith("refused:"):
            cause, _, detail = text.partition(" ")
            return Outcome("failed", cause.rstrip(":,"), (detail or text,))
        return Outcome("failed", "not_started", (text,))
    if facts.abandoned:
        return Outcome("lost", "abandoned", ("the record ends before anything was launched",))
    return Outcome("failed", "not_started", ("nothing was launched and nothing says why",))


def _watchdog(facts: EndFacts) -> Outcome:
    cause = {"temperature": "thermal", "battery": "battery", "disk": "disk_full"}.get(
        facts.watchdog, f"watchdog:{facts.watchdog}"
    )
    evidence = _some(facts.watchdog_detail, f"watchdog rule {facts.watchdog}")
    return Outcome("aborted", cause, (*evidence, *_exit_evidence(facts)))


def _signalled(facts: EndFacts, number: int) -> Outcome:
    name = signal_name(number)
    evidence = (*facts.kill_evidence, *_exit_evidence(facts), *_tail(facts.stderr_tail))
    log = "\n".join(facts.kill_evidence)
    if name == "SIGKILL":
        if _PHANTOM.search(log):
            return Outcome("killed", "phantom_killer", evidence)
        if _MEMORY_KILLER.search(log):
            return Outcome("killed", "out_of_memory", evidence)
        if _FREEZER.search(log):
            return Outcome("killed", "freezer", evidence)
    if name == "SIGABRT" and (facts.fatal_error or _NO_MEMORY.search(facts.stderr_tail)):
        cause = "out_of_memory" if _NO_MEMORY.search(facts.stderr_tail) else "engine_error"
        return Outcome("killed", cause, evidence)
    return Outcome("killed", f"signal:{name}", evidence)


def _broken_cause(facts: EndFacts) -> str:
    text = facts.stderr_tail + b"\n" + facts.fatal_error.encode(errors="replace")
    if facts.disk_full or _NO_SPACE.search(text):
        return "disk_full"
    if _LINKER.search(text):
        return "linker"
    if _NO_MEMORY.search(text):
        return "out_of_memory"
    # A refusal comes before the engine has produced anything; later the same words mean something else.
    if not facts.tokens_got and not facts.turns_ended:
        if _FLAGS.search(text) or facts.exit_code == 2:
            return "refused:flags"
        if _MODEL.search(text):
            return "refused:model"
    return "engine_error" if facts.fatal_error else "exit"


def _refused_or_broke(facts: EndFacts) -> Outcome:
    cause = _broken_cause(facts)
    if facts.exit_code in (126, 127) and not facts.tokens_got and cause in ("exit", "refused:model"):
        # What a shell answers when it cannot execute a program, or cannot find it or its interpreter ("not found").
        cause = "not_started"
    if cause == "exit" and facts.exit_code == 159:
        return Outcome("killed", "signal:SIGSYS", (*_exit_evidence(facts), *_tail(facts.stderr_tail)))
    return Outcome("failed", cause, (*_exit_evidence(facts), *_tail(facts.stderr_tail)))


def _ended_quietly(facts: EndFacts) -> Outcome:
    """Exit 0, or an exit nobody observed: what is missing decides."""
    seen = facts.exit_observed and facts.exit_code == 0
    missing = _missing(facts)
    if not seen and not (facts.imported and not facts.exit_observed and not missing and facts.end_record):
        return _unseen(facts, missing)
    if facts.turns_cancelled:
        return Outcome("partial", "cancelled", (f"{facts.turns_cancelled} turns cancelled by us", *missing))
    if facts.turns_rejected:
        return Outcome("partial", "rejected", (f"{facts.turns_rejected} requests rejected unexpectedly", *missing))
    if missing and facts.disk_full:
        return Outcome("partial", "disk_full", (_NO_ROOM, *missing))
    if missing:
        return Outcome("partial", "incomplete", missing)
    evidence = "exit 0" if seen else "the end record is there; no exit was recorded"
    return Outcome("ok", "eog" if facts.ended_by_eog else "tokens", (evidence,))


def _unseen(facts: EndFacts, missing: tuple[str, ...]) -> Outcome:
    """The engine is gone and nobody saw how: `ok` needs an exit 0, so what is there makes it `partial` at best."""
    if _LINKER.search(facts.stderr_tail):
        return Outcome("failed", "linker", _tail(facts.stderr_tail))
    anything = bool(facts.tokens_got or facts.turns_ended or facts.end_record)
    why = "no exit was recorded" if facts.imported else "its exit was not observed"
    if facts.imported:
        return Outcome("partial", "incomplete", (why, *missing))
    if facts.abandoned and (missing or not anything):
        return Outcome("lost", "abandoned", ("the record ends here and no engine is left to ask", *missing))
    if not anything:
        return Outcome("lost", "not_observed", (f"{why}, and nothing of what was asked is there", *missing))
    if facts.turns_cancelled:
        return Outcome("partial", "cancelled", (why, *missing))
    if facts.disk_full:
        return Outcome("partial", "disk_full", (_NO_ROOM, why, *missing))
    if missing:
        return Outcome("partial", "not_observed", (why, *missing))
    return Outcome("partial", "not_observed", (f"{why}, though everything asked for is there",))


def _missing(facts: EndFacts) -> tuple[str, ...]:
    """What was asked for and is not there, a sentence each."""
    missing: list[str] = []
    if facts.end_record is False:
        missing.append("no end record")
    if facts.turns_asked:
        if facts.turns_sent < facts.turns_asked:
            missing.append(f"{facts.turns_asked - facts.turns_sent} of {facts.turns_asked} turns were not sent")
        ended = facts.turns_ended + facts.turns_rejected + facts.turns_cancelled
        if ended < facts.turns_sent:
            missing.append(f"{facts.turns_sent - ended} of {facts.turns_sent} turns sent have no end")
    short = facts.tokens_asked is not None and facts.tokens_got is not None and facts.tokens_got < facts.tokens_asked
    if short and not facts.ended_by_eog:
        missing.append(f"{facts.tokens_got} of {facts.tokens_asked} tokens, without an end of generation")
    return tuple(missing)


def _exit_evidence(facts: EndFacts) -> tuple[str, ...]:
    if facts.signal is not None:
        return (f"ended by {signal_name(facts.signal)}",)
    if facts.exit_observed and facts.exit_code is not None:
        return (f"exit code {facts.exit_code}",)
    return ("exit not observed",)


def _some(*texts: str) -> tuple[str, ...]:
    """The first text that says something."""
    return next(((text,) for text in texts if text), ())


def _tail(stderr: bytes, lines: int = 3) -> tuple[str, ...]:
    """The last lines of stderr that hold something, the linker's or a refusal's own line before them."""
    told = _LINKER.search(stderr) or _FLAGS.search(stderr) or _MODEL.search(stderr)
    all_lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    chosen = all_lines[-lines:]
    if told:
        for line in all_lines:
            if told.group(0).strip()[:200] in line or line in told.group(0):
                chosen = [line, *(other for other in chosen if other != line)]
                break
    return tuple(line[:400].decode("utf-8", "replace") for line in chosen)
