"""Asking a binary what it is, with scripts that answer as engines of several ages do."""

import os
import resource
import threading
import time

import pytest
from bmoe_agent import engine
from bmoe_agent.config import EngineConfig
from bmoe_agent.engine_facts import EngineFacts
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.agents import wait_for

pytestmark = pytest.mark.agent

HELP = """usage: bmoe-cli -m PATH [options]
  -m, --model PATH        the model
  -n, --n-predict N       tokens
  -t|--threads N
      --moe-stream        stream experts
      --cache-mb N|auto   cache
      --no-odirect
      --dense-weights mmap|warm|anon|ahwb
      --version
"""


def script(tmp_path, body, name="bmoe-cli"):
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\necho \"$@\" >> '{tmp_path}/asked'\n{body}\n")
    path.chmod(0o755)
    return path


def asked(tmp_path):
    return (tmp_path / "asked").read_text().split()


GOOD = f"case $1 in --version) echo 'bmoe-cli 0.19.0';; --help) cat <<'X'\n{HELP}X\n;; esac"


def test_version_and_help_are_asked_once_for_each_binary(tmp_path):
    path, cache = script(tmp_path, GOOD), tmp_path / "cache"
    facts = engine.describe(path, cache, "main")
    assert (facts.name, facts.version_text, facts.simulated) == ("main", "bmoe-cli 0.19.0\n", False)
    assert facts.help_text == HELP
    assert (facts.size, len(facts.sha256)) == (path.stat().st_size, 64)
    assert engine.describe(path, cache, "main") == facts
    assert asked(tmp_path) == ["--version", "--help"]
    path.write_text(path.read_text().replace("0.19.0", "0.24.0"))
    assert engine.describe(path, cache).version_text == "bmoe-cli 0.24.0\n"
    assert engine.describe(path, cache).sha256 != facts.sha256


def test_a_torn_cache_is_asked_again(tmp_path):
    path, cache = script(tmp_path, GOOD), tmp_path / "cache"
    facts = engine.describe(path, cache)
    for kept in cache.iterdir():
        kept.write_text("{")
    assert engine.describe(path, cache) == facts


def test_usage_on_stderr_counts_and_a_simulator_is_one(tmp_path):
    path = script(
        tmp_path,
        "case $1 in --version) echo 'bmoe-cli 0.24.0-simulator';; *) echo 'usage: --moe-stream' >&2; exit 1;; esac",
    )
    facts = engine.describe(path, tmp_path / "cache")
    assert facts.simulated
    assert engine.flags_of(facts.help_text) == {"--moe-stream"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            'echo \'CANNOT LINK EXECUTABLE "bmoe-cli": library "libc++_shared.so" not found\' >&2; exit 1',
            "libc\\+\\+_shared.so",
        ),
        ("echo 'bmoe-cli: error while loading shared libraries: libggml.so: cannot open' >&2; exit 127", "RUNPATH"),
        ("kill -SEGV $$", "signal 11"),
        ("exit 3", "exit 3 and no text"),
    ],
)
def test_why_it_does_not_start_reaches_the_user_and_is_not_kept(tmp_path, body, said):
    path, cache = script(tmp_path, body), tmp_path / "cache"
    for _ in range(2):
        with pytest.raises(engine.EngineError, match=said):
            engine.describe(path, cache)
    assert len(asked(tmp_path)) == 2


def test_a_binary_that_hangs_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_TIMEOUT_S", 0.2)
    with pytest.raises(engine.EngineError, match="no end after"):
        engine.describe(script(tmp_path, "exec sleep 60"), tmp_path / "cache")


def test_what_is_no_program(tmp_path):
    with pytest.raises(engine.EngineError, match="No such file"):
        engine.describe(tmp_path / "none", tmp_path)
    (tmp_path / "data").write_text("x")
    (tmp_path / "data").chmod(0o644)
    with pytest.raises(engine.EngineError, match="not an executable"):
        engine.describe(tmp_path / "data", tmp_path)
    (tmp_path / "elf").write_bytes(b"\x7fELF\x02\x01\x01" + b"\0" * 60)
    (tmp_path / "elf").chmod(0o755)
    with pytest.raises(engine.EngineError, match="built for this machine"):
        engine.describe(tmp_path / "elf", tmp_path)


def test_it_is_asked_in_a_clean_environment(tmp_path, monkeypatch):
    for name in ("BMOE_CACHE_MB", "LD_PRELOAD", "BMOE_OVERLAP"):
        monkeypatch.setenv(name, "" if name == "LD_PRELOAD" else "1")
    path = script(tmp_path, "env")
    text = engine.describe(path, tmp_path / "cache", environment={"LD_LIBRARY_PATH": "/lib/own"}).version_text
    names = {line.partition("=")[0] for line in text.splitlines()}
    assert not names & {"BMOE_CACHE_MB", "LD_PRELOAD", "BMOE_OVERLAP"}
    assert "LD_LIBRARY_PATH=/lib/own" in text


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert engine.describe(script(tmp_path, GOOD), blocked / "cache").version_text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], None),
        (["--moe-stream", "--cache-mb", "auto", "-t", "4", "--threads", "8"], None),
        (["-n", "-5"], None),
        (["--dense-weights", "anon", "--no-odirect"], None),
        (["--row-stream"], "--row-stream: this engine (bmoe-cli 0.19.0) does not take it"),
        (["--cache-floor-mb", "5"], "(it has --cache-mb)"),
        (["--cache-mb"], "needs a value"),
        (["stray"], "'stray' is no flag"),
        (["--moe-stream", "1"], "'1' is no flag"),
        (["--fork-only", "7", "--moe-stream"], "--fork-only"),
    ],
)
def test_flags_are_held_against_the_binarys_own_help(flags, said):
    facts = pb.EngineFacts(name="e", version_text="bmoe-cli 0.19.0\n", help_text=HELP)
    found = engine.check_flags(facts, flags)
    assert (found == []) if said is None else (len(found) == 1 and said in found[0])


def test_unknown_flags_pass_when_allowed_but_stray_words_never():
    facts = pb.EngineFacts(name="e", version_text="v\n", help_text=HELP)
    assert engine.check_flags(facts, ["--fork-only", "7", "--other"], allow_unknown=True) == []
    assert engine.check_flags(facts, ["stray"], allow_unknown=True) != []
    silent = pb.EngineFacts(name="e", help_text="nothing")
    assert "names no flags" in engine.check_flags(silent, ["--moe-stream"])[0]


def test_the_environment_keeps_what_programs_need(monkeypatch):
    monkeypatch.setenv("HOME", "/home/x")
    assert engine.clean_environment()["HOME"] == "/home/x"
    assert set(engine.clean_environment()) <= {"HOME", "PATH", "TMPDIR", "LANG", "ANDROID_ROOT", "ANDROID_DATA"}
    assert os.environ["PATH"] == engine.clean_environment()["PATH"]


def test_a_binary_that_never_stops_talking_costs_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_TIMEOUT_S", 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(engine.EngineError, match="no end after"):
        engine.describe(script(tmp_path, "exec yes a long line of nothing that helps anybody"), tmp_path / "cache")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


def test_what_a_binary_leaves_behind_is_neither_waited_for_nor_left_running(tmp_path):
    path = script(tmp_path, f"echo usage: -n; sleep 1000 & echo $! >>'{tmp_path}/left'")
    began = time.monotonic()
    assert engine.describe(path, tmp_path / "cache").help_text == "usage: -n\n"
    assert time.monotonic() - began < 10
    left = [int(line) for line in (tmp_path / "left").read_text().split()]
    assert len(left) == 2
    wait_for(lambda: not any(alive(pid) for pid in left), "its children's end")


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def configured(path):
    return EngineConfig(path.name, path)


def test_nobody_waits_for_an_engine_that_does_not_answer(tmp_path):
    """A host that asks what a phone has gets the others' facts at once, and that one's when there are some."""
    stop = threading.Event()
    hung = script(tmp_path, f"while [ ! -e '{tmp_path}/go' ]; do sleep 0.05; done; echo 'usage: -n'", "hung")
    facts = EngineFacts(tmp_path / "cache", stop.is_set)
    engines = [configured(script(tmp_path, GOOD, "good")), configured(hung)]
    good, silent = facts.of(engines, wait_s=1.0)
    assert (good.version_text, silent.version_text) == (
        "bmoe-cli 0.19.0\n",
        "cannot be asked: it has not answered yet",
    )
    assert [one.name for one in facts.of(engines, wait_s=0)] == ["good", "hung"]
    (tmp_path / "go").touch()
    assert facts.of(engines, wait_s=30)[1].version_text == "usage: -n\n"
    assert asked(tmp_path) == ["--version", "--help", "--version", "--help"]
    stop.set()


def test_asking_ends_with_the_agent_and_a_failure_is_not_asked_again_at_once(tmp_path):
    stop = threading.Event()
    facts = EngineFacts(tmp_path / "cache", stop.is_set)
    broken, hung = script(tmp_path, "exit 3", "broken"), script(tmp_path, "exec sleep 1000", "hung")
    for _ in range(3):
        (said,) = facts.of([configured(broken)], wait_s=30)
        assert "exit 3 and no text" in said.version_text
    assert asked(tmp_path) == ["--version"]
    script(tmp_path, GOOD, "broken")
    assert facts.of([configured(broken)], wait_s=30)[0].version_text == "bmoe-cli 0.19.0\n"
    assert facts.of([configured(hung)], wait_s=0.3)[0].help_text == ""
    stop.set()
    began = time.monotonic()
    facts.join()
    assert time.monotonic() - began < 10
