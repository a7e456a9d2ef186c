"""End facts to outcomes: every row of the design's table, and the causes people group by."""

import pytest
from bmoe_proto.outcome import OUTCOMES, EndFacts, decide
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.agent

DONE = {"exit_observed": True, "exit_code": 0, "end_record": True, "tokens_asked": 64, "tokens_got": 64}
SESSION = {"exit_observed": True, "exit_code": 0, "turns_asked": 3, "turns_sent": 3, "turns_ended": 3}


def told(**facts):
    outcome = decide(EndFacts(**facts))
    return outcome.outcome, outcome.cause


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        # still running, or never said otherwise
        ({"ended": False}, ("started", "")),
        # ok
        (DONE, ("ok", "tokens")),
        (DONE | {"tokens_got": 10, "ended_by_eog": True}, ("ok", "eog")),
        (DONE | {"tokens_asked": None, "tokens_got": None}, ("ok", "tokens")),
        (SESSION, ("ok", "tokens")),
        # partial
        (DONE | {"tokens_got": 10}, ("partial", "incomplete")),
        (DONE | {"end_record": False}, ("partial", "incomplete")),
        (DONE | {"end_record": False, "disk_full": True}, ("partial", "disk_full")),
        (SESSION | {"turns_sent": 2, "turns_ended": 2}, ("partial", "incomplete")),
        (SESSION | {"turns_ended": 2}, ("partial", "incomplete")),
        (SESSION | {"turns_ended": 2, "turns_rejected": 1}, ("partial", "rejected")),
        (SESSION | {"turns_ended": 2, "turns_cancelled": 1}, ("partial", "cancelled")),
        (DONE | {"exit_observed": False, "exit_code": None}, ("partial", "not_observed")),
        ({"tokens_asked": 64, "tokens_got": 3, "end_record": False}, ("partial", "not_observed")),
        # failed
        (
            {"exit_observed": True, "exit_code": 1, "stderr_tail": b"error: unknown argument: --foo\n"},
            ("failed", "refused:flags"),
        ),
        ({"exit_observed": True, "exit_code": 2, "stderr_tail": b"--mtp with --ngram\n"}, ("failed", "refused:flags")),
        (
            {"exit_observed": True, "exit_code": 1, "stderr_tail": b"failed to open model 'x.gguf': No such file\n"},
            ("failed", "refused:model"),
        ),
        (
            {
                "exit_observed": True,
                "exit_code": 1,
                "stderr_tail": b'CANNOT LINK EXECUTABLE "bmoe-cli": library "libc++_shared.so" not found\n',
            },
            ("failed", "linker"),
        ),
        (
            {
                "exit_observed": True,
                "exit_code": 127,
                "stderr_tail": b"bmoe-cli: error while loading shared libraries: libfoo.so: cannot open shared object",
            },
            ("failed", "linker"),
        ),
        ({"exit_observed": True, "exit_code": 127, "stderr_tail": b"sh: not found"}, ("failed", "not_started")),
        (DONE | {"exit_code": 1, "stderr_tail": b"write: No space left on device"}, ("failed", "disk_full")),
        (DONE | {"exit_code": 1, "stderr_tail": b"something broke"}, ("failed", "exit")),
        (DONE | {"exit_code": 0, "fatal_error": "decode failed"}, ("failed", "engine_error")),
        ({"launched": False, "launch_error": "refused:flags --foo is not known"}, ("failed", "refused:flags")),
        ({"launched": False, "launch_error": "the prompt is too long"}, ("failed", "not_started")),
        ({"launched": False, "disk_full": True}, ("failed", "disk_full")),
        # killed
        ({"exit_observed": True, "signal": 9}, ("killed", "signal:SIGKILL")),
        ({"exit_observed": True, "signal": 11, "tokens_got": 3}, ("killed", "signal:SIGSEGV")),
        (
            {"exit_observed": True, "signal": 9, "kill_evidence": ("lowmemorykiller: Kill 'bmoe-cli' (12)",)},
            ("killed", "out_of_memory"),
        ),
        (
            {"exit_observed": True, "signal": 9, "kill_evidence": ("Killing PhantomProcessRecord {bmoe-cli}",)},
            ("killed", "phantom_killer"),
        ),
        ({"exit_observed": True, "signal": 9, "kill_evidence": ("freezer: unfreeze failed",)}, ("killed", "freezer")),
        (
            {"exit_observed": True, "signal": 6, "stderr_tail": b"terminate called after 'std::bad_alloc'\n"},
            ("killed", "out_of_memory"),
        ),
        ({"tokens_got": 3, "kill_evidence": ("memory cgroup out of memory",)}, ("killed", "out_of_memory")),
        ({"exit_observed": True, "exit_code": 159}, ("killed", "signal:SIGSYS")),
        # aborted: whatever the engine said on its way out
        (
            {"exit_observed": True, "signal": 15, "ended_by": "agent", "watchdog": "decode"},
            ("aborted", "watchdog:decode"),
        ),
        (DONE | {"watchdog": "temperature"}, ("aborted", "thermal")),
        ({"exit_observed": True, "signal": 9, "ended_by": "agent", "watchdog": "battery"}, ("aborted", "battery")),
        ({"exit_observed": True, "signal": 15, "cancelled": True}, ("aborted", "cancelled")),
        ({"exit_observed": True, "signal": 15, "ended_by": "user"}, ("aborted", "cancelled")),
        ({"exit_observed": True, "exit_code": 1, "ended_by": "agent"}, ("aborted", "stopped")),
        ({"launched": False, "cancelled": True}, ("aborted", "cancelled")),
        # skipped
        ({"launched": False, "gate": "cpu_temp_c"}, ("skipped", "gate:cpu_temp_c")),
        # lost
        ({"abandoned": True, "tokens_asked": 64, "tokens_got": 3}, ("lost", "abandoned")),
        ({"abandoned": True, "ended": False}, ("lost", "abandoned")),
        ({"abandoned": True, "launched": False}, ("lost", "abandoned")),
        ({"tokens_asked": 64, "tokens_got": 0}, ("lost", "not_observed")),
        # files without a record of the exit
        ({"imported": True, "end_record": True, "tokens_got": 5}, ("ok", "tokens")),
        ({"imported": True, "end_record": False, "tokens_got": 5}, ("partial", "incomplete")),
        ({"imported": True}, ("partial", "incomplete")),
        (DONE | {"imported": True, "exit_code": 1}, ("failed", "exit")),
    ],
)
def test_the_table(facts, expected):
    assert told(**facts) == expected


@pytest.mark.parametrize(
    ("facts", "again"),
    [
        (DONE, False),
        (DONE | {"tokens_got": 1}, True),
        ({"exit_observed": True, "signal": 9}, True),
        ({"exit_observed": True, "exit_code": 1, "stderr_tail": b"unknown flag --x"}, False),
        ({"exit_observed": True, "exit_code": 1, "stderr_tail": b"cannot open model.gguf"}, False),
        ({"exit_observed": True, "exit_code": 1, "stderr_tail": b"broke"}, True),
        ({"abandoned": True}, True),
        ({"launched": False, "gate": "battery_pct"}, False),
        ({"exit_observed": True, "signal": 15, "cancelled": True}, False),
        ({"exit_observed": True, "signal": 15, "watchdog": "load"}, False),
    ],
)
def test_what_is_worth_another_try(facts, again):
    assert decide(EndFacts(**facts)).retryable is again


def test_the_same_words_after_the_first_token_are_no_refusal():
    assert told(exit_observed=True, exit_code=1, stderr_tail=b"invalid argument", tokens_got=9) == ("failed", "exit")


@pytest.mark.parametrize(
    ("capture", "cause", "line"),
    [
        ("error-cache-band", "refused:flags", "config error: moe.cache_mb=500"),
        ("session-missing-model", "refused:model", "gguf_init_from_file: failed to open GGUF file"),
    ],
)
def test_what_a_real_engine_says_when_it_refuses(captures, capture, cause, line):
    tail = (captures / capture / "stderr.bin").read_bytes()[-4096:]
    outcome = decide(EndFacts(exit_observed=True, exit_code=1, stderr_tail=tail))
    assert (outcome.outcome, outcome.cause, outcome.retryable) == ("failed", cause, False)
    assert any(text.startswith(line) for text in outcome.evidence)


def test_the_reason_comes_first_in_the_evidence():
    noise = b"\n".join(b"note %d" % at for at in range(20))
    outcome = decide(EndFacts(exit_observed=True, exit_code=1, stderr_tail=b"unknown argument: --zap\n" + noise))
    assert outcome.evidence[:2] == ("exit code 1", "unknown argument: --zap")
    unseen = decide(EndFacts(tokens_got=1, kill_evidence=("Out of memory: Killed process 12 (bmoe-cli)",)))
    assert unseen.evidence == ("Out of memory: Killed process 12 (bmoe-cli)", "exit not observed")


@settings(max_examples=150)
@given(
    st.builds(
        EndFacts,
        ended=st.booleans(),
        launched=st.booleans(),
        exit_observed=st.booleans(),
        exit_code=st.none() | st.integers(-64, 300),
        signal=st.none() | st.integers(0, 70),
        ended_by=st.sampled_from(["engine", "agent", "user", "gate", "unknown"]),
        cancelled=st.booleans(),
        tokens_asked=st.none() | st.integers(0, 9),
        tokens_got=st.none() | st.integers(0, 9),
        ended_by_eog=st.booleans(),
        end_record=st.none() | st.booleans(),
        turns_asked=st.integers(0, 3),
        turns_sent=st.integers(0, 3),
        turns_ended=st.integers(0, 3),
        stderr_tail=st.binary(max_size=60),
        watchdog=st.sampled_from(["", "load"]),
        gate=st.sampled_from(["", "battery_pct"]),
        imported=st.booleans(),
        abandoned=st.booleans(),
    )
)
def test_every_fact_has_an_outcome_and_ok_is_earned(facts):
    outcome = decide(facts)
    assert outcome.outcome in OUTCOMES
    assert outcome.outcome == "started" or (outcome.cause and outcome.evidence)
    if outcome.outcome == "ok":
        assert facts.launched
        assert not any((facts.watchdog, facts.cancelled, facts.signal))
        assert facts.exit_code in (0, None)
        assert facts.exit_observed or (facts.imported and facts.end_record)


def test_an_engine_that_says_a_megabyte_is_quoted_in_part():
    (said, *_) = decide(EndFacts(exit_observed=True, exit_code=1, fatal_error="m" * 1_000_000)).evidence
    assert len(said) < 3000
