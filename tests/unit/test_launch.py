"""The launcher: nothing is text for a shell, everything is found again, and only our own process is signalled."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from bmoe_agent import launch, leftovers
from bmoe_agent.launch_argv import RefusedError, command, recorded_command
from bmoe_proto.asking import cell_problems
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.agents import wait_for

pytestmark = pytest.mark.agent

SHELL = b"/bin/sh"


def start(directory: Path, *argv: bytes, session: bool = False, **environment: str) -> launch.Launched:
    launch.prepare(directory)
    return launch.launch(argv, launch.clean_environment(environment), directory, session=session)


def finish(started: launch.Launched, within_s: float = 30) -> None:
    started.launcher.wait(within_s)
    if started.stdin is not None:
        started.stdin.close()


def test_arguments_arrive_as_they_are_and_output_is_in_files(tmp_path: Path) -> None:
    directory = tmp_path / "a run's directory"
    odd = b'-n \'"$HOME" `id` \n\\ \xff\xfe'
    started = start(directory, SHELL, b"-c", b'printf "%s" "$1"; echo word >&2; exit 7', b"x", odd)
    finish(started)
    assert (directory / "stdout").read_bytes() == odd
    assert (directory / "stderr").read_bytes() == b"word\n"
    assert launch.read_status(directory) == launch.ExitStatus(7, None)
    assert launch.read_pid(directory) == started.process
    assert not launch.alive(started.process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_is_recorded_as_one_and_stderr_stays_the_engines(tmp_path: Path, number: signal.Signals) -> None:
    started = start(tmp_path / "run", b"/bin/sleep", b"600")
    assert launch.alive(started.process)
    assert not launch.alive(launch.Process(started.process.pid, started.process.start_ticks + 1))
    assert launch.session_alive(started.process)
    assert launch.send_signal(started.process, number)
    finish(started)
    assert launch.read_status(tmp_path / "run") == launch.ExitStatus(None, number)
    assert not launch.send_signal(started.process, number)
    assert (tmp_path / "run" / "stderr").read_bytes() == b""


def test_engine_is_its_own_session_and_its_leftovers_are_swept(tmp_path: Path) -> None:
    """Those that left the session and the directory too, as daemons do."""
    run = tmp_path / "run"
    child = b"/bin/sleep 600 >/dev/null 2>&1 & echo $!; cd /; setsid /bin/sleep 600 & echo $!; exit 0"
    started = start(run, SHELL, b"-c", child)
    finish(started)
    assert started.process.session_id == started.launcher.pid != os.getsid(0)
    left = [int(line) for line in (run / "stdout").read_text().split()]
    with subprocess.Popen(["/bin/sleep", "600"], cwd=run) as bystander:
        try:
            wait_for(lambda: os.getsid(left[1]) == left[1], "the daemon's own session")
            assert [(process.pid, where) for process, where in leftovers.find_engines([], tmp_path)] == [
                (left[1], str(run))
            ]
            assert leftovers.sweep(started.process, run, just_ended=False) == [left[1]]
            assert leftovers.sweep(started.process, run) == [left[0]]
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_a_session_is_given_a_pipe_and_others_nothing(tmp_path: Path) -> None:
    started = start(tmp_path / "talk", b"/bin/cat", session=True)
    assert started.stdin is not None
    started.stdin.write(b"hello\n")
    started.stdin.close()
    finish(started)
    assert (tmp_path / "talk" / "stdout").read_bytes() == b"hello\n"
    finish(start(tmp_path / "shot", b"/bin/cat"))
    assert launch.read_status(tmp_path / "shot") == launch.ExitStatus(0, None)


def test_environment_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BMOE_CACHE_MB", "64")
    monkeypatch.setenv("LD_PRELOAD", "")
    finish(start(tmp_path / "run", b"/usr/bin/env", BMOE_SIM="seed=1"))
    seen = dict(line.split("=", 1) for line in (tmp_path / "run" / "stdout").read_text().splitlines())
    assert seen["BMOE_SIM"] == "seed=1"
    assert not {"BMOE_CACHE_MB", "LD_PRELOAD"} & set(seen)
    assert launch.clean_environment({}, ld_library_path="/x")["LD_LIBRARY_PATH"] == "/x"
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "PATH", "a b", ""):
        with pytest.raises(launch.LaunchError):
            launch.clean_environment({name: "x"})


def test_what_cannot_be_executed_says_so(tmp_path: Path) -> None:
    finish(start(tmp_path / "absent", b"/no/such/engine"))
    assert launch.read_status(tmp_path / "absent") == launch.ExitStatus(127, None)
    assert b"not found" in (tmp_path / "absent" / "stderr").read_bytes()
    with pytest.raises(launch.LaunchError, match="session turn") as caught:
        start(tmp_path / "long", SHELL, b"x" * launch.ARGUMENT_LIMIT)
    assert caught.value.code == "argv_too_long"
    with pytest.raises(launch.LaunchError, match="NUL"):
        launch.check_size([b"a\0b"], {})
    limit = launch.ARGUMENT_LIMIT - 1
    finish(start(tmp_path / "just", b"/bin/true", b"x" * limit))
    assert launch.read_status(tmp_path / "just") == launch.ExitStatus(0, None)


def test_no_status_is_not_a_status(tmp_path: Path) -> None:
    launch.prepare(tmp_path / "run")
    assert launch.read_status(tmp_path / "run") is None
    assert launch.read_pid(tmp_path / "run") is None
    assert launch.read_status(tmp_path / "absent") is None
    for torn in (b"exit 1", b"exit \n", b"\n", b"exit one\n"):
        (tmp_path / "run" / "status").write_bytes(torn)
        assert launch.read_status(tmp_path / "run") is None


def test_engines_are_found_by_where_they_work_or_what_they_run(tmp_path: Path) -> None:
    script = tmp_path / "engine"
    # a shell that waits without a child; this Python may itself be started by a script, through another loader
    script.write_text('#!/bin/sh\nmkfifo "$0.wait"\nread -r line <"$0.wait"\n')
    script.chmod(0o755)
    inside = start(tmp_path / "spool" / "run", b"/bin/sleep", b"600")
    outside = start(tmp_path / "elsewhere", os.fsencode(script))
    try:
        deadline = time.monotonic() + 30
        wanted = {inside.process.pid, outside.process.pid}
        while True:
            found = {process.pid: working for process, working in leftovers.find_engines([script], tmp_path / "spool")}
            if set(found) == wanted or time.monotonic() > deadline:
                break
        assert set(found) == wanted
        assert found[inside.process.pid] == str(tmp_path / "spool" / "run")
        assert launch.end(inside.process, grace_s=10)
    finally:
        for one in (inside, outside):
            launch.send_signal(one.process, signal.SIGKILL)
            finish(one)


# -------------------------------------------------------------------- from a cell to an argv

HELP = "-m --model -p --prompt -n --n-predict -t --threads --csv --io-trace --progress --session --decide --chatml --mtp --ngram"
FACTS = pb.EngineFacts(help_text=HELP, version_text="bmoe-cli 0.24.0")


def argv_of(**cell: object) -> list[bytes]:
    return list(command(pb.Cell(model="m", **cell), "/e/bmoe", FACTS, Path("/m/m.gguf")).argv)  # type: ignore[arg-type]


def test_paths_and_modes_are_the_agents_to_give() -> None:
    assert argv_of(prompt=b"--csv /x", flags=["-t", "4"], artifacts=["metrics", "io"], n_predict=9) == [
        b"/e/bmoe", b"-m", b"/m/m.gguf", b"-p", b"--csv /x",
        b"--csv", b"metrics.csv", b"--io-trace", b"io.csv", b"--progress", b"-n", b"9", b"-t", b"4",
    ]  # fmt: skip
    talk = argv_of(turns=[pb.Turn(prompt="a"), pb.Turn(kind="decide")], flags=["-n", "3"])
    assert talk == [b"/e/bmoe", b"-m", b"/m/m.gguf", b"--decide", b"--session", b"-n", b"3"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--csv", "x"], ["--csv=x"], ["-m", "y"], ["--prompt", "z"], ["--session"], ["--io-trace", "t"], ["--version"],
        ["-t", "/etc/passwd"], ["--unknown", "/x"], ["--unknown=/x"], ["stray"], ["-t", "4", "5"], ["--mtp", "--ngram"],
        ["--no-such-flag"], ["-t"], ["-t", "--csv"],
    ],
)  # fmt: skip
def test_flags_that_would_take_over_are_refused(flags: list[str]) -> None:
    with pytest.raises(RefusedError) as caught:
        argv_of(prompt=b"x", flags=flags)
    assert caught.value.cause == "refused:flags"


def test_cells_that_make_no_sense_are_refused() -> None:
    for cell in (
        pb.Cell(prompt=b"x"),
        pb.Cell(model="m"),
        pb.Cell(model="m", prompt=b"x", turns=[pb.Turn()]),
        pb.Cell(model="m", prompt=b"a\0b"),
        pb.Cell(model="m", prompt=b"x", artifacts=["metrics", "secrets"]),
        pb.Cell(model="m", turns=[pb.Turn(kind="sing")]),
    ):
        assert len(cell_problems(cell)) == 1


def test_a_prompt_too_long_for_an_argument_goes_through_a_session_or_is_refused() -> None:
    prompt = "é".encode() * launch.ARGUMENT_LIMIT
    moved = command(pb.Cell(model="m", prompt=prompt, flags=["--chatml"]), "/e", FACTS, Path("/m"))
    assert moved.session
    assert moved.turns[0].prompt.encode() == prompt
    assert moved.notes[0][0] == "prompt_in_session"
    assert recorded_command(pb.Cell(prompt=prompt), moved.argv).turns == moved.turns
    with pytest.raises(RefusedError, match="session turn"):
        argv_of(prompt=prompt)
    with pytest.raises(RefusedError, match="UTF-8"):
        argv_of(prompt=b"\xff" * launch.ARGUMENT_LIMIT, flags=["--chatml"])


def test_tokens_asked_are_known_or_not() -> None:
    def asked(**cell: object) -> int | None:
        return command(pb.Cell(model="m", **cell), "/e", FACTS, Path("/m")).tokens_asked  # type: ignore[arg-type]

    assert asked(prompt=b"x", n_predict=5) == 5
    assert asked(prompt=b"x", flags=["-n", "7"], n_predict=5) == 7
    assert asked(prompt=b"x") is None
    assert asked(prompt=b"x", flags=["-n", "²"], n_predict=5) is None
    assert asked(prompt=b"x", flags=["-n", "9" * 5000], n_predict=5) is None
    turns = [pb.Turn(n_predict=3), pb.Turn(), pb.Turn(kind="decide"), pb.Turn(n_predict=9, expect_rejected=True)]
    assert asked(turns=turns, n_predict=4) == 7
    assert asked(turns=[*turns, pb.Turn(cancel_after_ms=1)], n_predict=4) is None
