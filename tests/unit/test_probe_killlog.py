"""Who killed it: lines as Android's sources and published logs have them (none was seen on a phone yet) to kills, causes, notes."""

import pytest
from bmoe_collector.probe import evidence, killlog
from bmoe_collector.probe.rows import KILL, SEARCHED, EndedRun
from bmoe_proto.outcome import EndFacts, decide
from hypothesis import given, settings
from hypothesis import strategies as st

PID = 12345
T = 1_700_000_000
CASES = [
    ("am_kill : [0,12345,bmoe-cli,900,Trimming phantom processes]", "phantom", "phantom_killer"),
    ("ActivityManager: Killing PhantomProcessRecord {3f2a1b 12345:6789:bmoe-cli/u0a123}: Excessive CPU usage", "phantom", "phantom_killer"),
    ("ActivityManager: Process PhantomProcessRecord {3f2a1b 12345:6789:bmoe-cli/u0a123} died", "phantom", "phantom_killer"),
    ("lowmemorykiller: Kill 'bmoe-cli' (12345), uid 10123, oom_score_adj 900 to free 412312kB rss, 0kB swap; reason: low watermark", "memory", "out_of_memory"),
    ("killinfo: [12345,10123,900,3,412312,0,0]", "memory", "out_of_memory"),
    ("kernel  : Out of memory: Killed process 12345 (bmoe-cli) total-vm:8123456kB, anon-rss:6123456kB", "memory", "out_of_memory"),
    ("kernel  : oom_reaper: reaped process 12345 (bmoe-cli), now anon-rss:0kB", "memory", "out_of_memory"),
    ("am_freeze: [12345,com.termux]", "freezer", "freezer"),
    ("ActivityManager: Killing 12345:com.termux/u0a123 (adj 900): remove task", "killed", "signal:SIGKILL"),
]  # fmt: skip


def epoch(text: str, at: float = T + 5, level: str = "I") -> str:
    tag, _, rest = text.partition(": ")
    return f"{at:17.3f}  1234  1256 {level} {tag}: {rest}"


@pytest.mark.parametrize(
    ("text", "kind", "cause"), CASES, ids=[case[0].split(":")[0] + "-" + case[1] for case in CASES]
)
def test_a_line_names_its_killer_and_the_outcome_follows(text: str, kind: str, cause: str) -> None:
    (kill,) = killlog.kills(killlog.lines(epoch(text)), {PID}, T * 10**9, (T + 10) * 10**9)
    assert (kill.kind, kill.pid) == (kind, PID)
    ended = EndFacts(exit_observed=True, signal=9, ended_by="engine", kill_evidence=(killlog.sentence(kill),))
    assert (decide(ended).outcome, decide(ended).cause) == ("killed", cause)
    unseen = EndFacts(abandoned=True, kill_evidence=(killlog.sentence(kill),))
    assert decide(unseen).outcome in {"killed", "lost"}


def test_lines_of_others_and_of_other_times_are_no_evidence() -> None:
    other = [epoch(text.replace("12345", "777").replace("com.termux", "com.example")) for text, _, _ in CASES]
    late = [epoch(text, T + 500) for text, _, _ in CASES]
    text = "\n".join(["--------- beginning of system", *other, *late])
    assert len(list(killlog.lines(text))) == 2 * len(CASES)
    assert killlog.kills(killlog.lines(text), {PID}, T * 10**9, (T + 10) * 10**9) == []


def test_the_apps_own_end_counts_and_a_line_in_two_buffers_counts_once() -> None:
    app = epoch("ActivityManager: Killing 4711:com.termux/u0a123 (adj 0): stop com.termux due to force-stop")
    found = killlog.kills(killlog.lines(f"{app}\n{app}"), {PID}, T * 10**9, (T + 10) * 10**9)
    assert [(kill.process, kill.kind) for kill in found] == [("com.termux", "killed")]


def test_kernel_lines_have_no_wall_clock_and_need_the_pid() -> None:
    dmesg = (
        "[ 4242.123456] Memory cgroup out of memory: Killed process 12345 (bmoe-cli) total-vm:1kB\n<6>[ 1.0] nothing"
    )
    (kill,) = killlog.kills(killlog.lines(dmesg), {PID}, 0, 0)
    assert (kill.kind, kill.process, kill.wall_ns) == ("memory", "bmoe-cli", None)
    assert killlog.kills(killlog.lines(dmesg), {1}, 0, 0) == []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.text(max_size=120) | st.sampled_from([epoch(case[0]) for case in CASES]).map(lambda line: line[:-7]),
        max_size=8,
    )
)
def test_whatever_a_log_holds_is_read(texts: list[str]) -> None:
    killlog.kills(killlog.lines("\n".join(texts)), {PID}, 0, 2**62)


RUN = EndedRun(1, "aa" * 16, "boot-1", T * 10**9, (T + 10) * 10**9, 777, (PID, 99))


def answering(log: str, status: str = "#rc log 0\n#rc kernel 1\n#rc dmesg 1\n", begins: int = T - 100):
    def ask(command: str) -> str:
        return epoch("system_server: boot", begins) if command == evidence.BEGINNING else log + status

    return ask


def test_a_search_leaves_the_evidence_and_what_could_be_read() -> None:
    log = "\n".join(["--------- beginning of events", epoch(CASES[0][0]), "dmesg: klogctl: Permission denied", ""])
    kill, search = evidence.search(RUN, "boot-1", answering(log))
    assert (kill.code, search.code) == (KILL, SEARCHED)
    assert "Trimming phantom" in kill.text
    assert kill.facts["kind"] == "phantom"
    assert search.facts["unreadable"] == ["dmesg", "kernel"]
    assert search.facts["problems"] == ["dmesg: klogctl: Permission denied"]


def test_a_search_says_why_it_found_nothing() -> None:
    (gone,) = evidence.search(RUN, "boot-2", answering(""))
    assert "restarted since" in gone.text
    (none,) = evidence.search(
        RUN, "boot-1", answering("sh: logcat: not found\n", "#rc log 127\n#rc kernel 127\n#rc dmesg 1\n")
    )
    assert "cannot be read" in none.text
    assert none.facts["problems"] == ["sh: logcat: not found"]
    (late,) = evidence.search(RUN, "boot-1", answering("", begins=T + 60))
    assert "begins after the run's end" in late.text
    (quiet,) = evidence.search(RUN, "boot-1", answering(""))
    assert quiet.text == "the phone's log names no killer of this run"
