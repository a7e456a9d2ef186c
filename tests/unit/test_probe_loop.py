"""The loop on the phone in every shell that is here, and the parser of its answers."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from bmoe_collector.probe.frames import (
    LIMIT,
    Frame,
    FrameParser,
    FramesError,
    Greeting,
    refusal,
    split_files,
    split_tries,
)
from bmoe_collector.probe.script import LIMIT as COMMAND_LIMIT
from bmoe_collector.probe.script import command, request, script
from hypothesis import given, settings
from hypothesis import strategies as st

SHELLS = [
    pytest.param(
        [shutil.which(words[0]) or words[0], *words[1:], "-c"],
        id=words[0],
        marks=pytest.mark.skipif(shutil.which(words[0]) is None, reason=f"no {words[0]} here"),
    )
    for words in (["dash"], ["bash"], ["mksh"], ["busybox", "ash"])
]
TOKEN = "0123abcd"


def run_loop(
    shell: list[str], tmp_path: Path, *requests: bytes, agent: str = "aa" * 16, path: str = "/usr/bin:/bin"
) -> list[Greeting | Frame]:
    text = script(TOKEN, agent, "bb" * 16)
    done = subprocess.run(
        [*shell, text],
        input=b"".join(requests),
        capture_output=True,
        timeout=60,
        check=True,
        env={"PATH": path, "TMPDIR": str(tmp_path)},
    )
    assert done.stderr == b""
    return FrameParser(TOKEN).feed(done.stdout)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_loop_speaks_the_same_in_every_shell(shell: list[str], tmp_path: Path) -> None:
    text = tmp_path / "odd name.txt"
    text.write_bytes(b"no newline at the end")
    found = run_loop(
        shell,
        tmp_path,
        request(1, "files", "/proc/loadavg /proc/uptime /proc/absent"),
        request(2, "try", f"/proc/absent /proc/loadavg {tmp_path}"),
        request(3, "procs"),
        request(4, "cost"),
        request(5, "do", "dumpsys battery"),
        request(6, "do", command("printf", "%s", "a  'b' $HOME \\n;")),
        request(7, "nonsense"),
        request(8, "screen", "off"),
        request(9, "do", f"cat '{text}'"),
        request(10, "do", "cat"),  # asks for input: it must not get the requests
        request(11, "cost"),
    )
    greeting, *frames = found
    assert isinstance(greeting, Greeting)
    assert greeting.state == "ready"
    answers = {frame.number: frame for frame in frames if isinstance(frame, Frame)}
    assert list(answers) == list(range(1, 12))
    assert list(split_files(answers[1].data)) == ["/proc/loadavg", "/proc/uptime"]
    tries = split_tries(answers[2].data)
    assert tries["/proc/absent"] == "No such file or directory"
    assert tries[str(tmp_path)] == "Is a directory"
    assert isinstance(tries["/proc/loadavg"], bytes)
    assert re.fullmatch(rb"[\d. /]+\n", tries["/proc/loadavg"])
    assert f"\n{greeting.detail} (".encode() in answers[3].data
    assert answers[4].data.startswith(f"{greeting.detail} (".encode())
    assert answers[5].status == 127
    assert "not found" in refusal(answers[5].data.decode())
    assert (answers[6].status, answers[6].data) == (0, b"a  'b' $HOME \\n;")
    assert answers[7].status != 0
    assert answers[8].status == 0
    assert answers[9].data == b"no newline at the end"
    assert answers[10].data == b""
    uptimes = [time for frame in answers.values() for time in (frame.uptime_before_s, frame.uptime_after_s)]
    assert uptimes == sorted(uptimes)
    assert not list(tmp_path.glob(".bmoe-probe-*"))


@pytest.mark.skipif(shutil.which("toybox") is None, reason="no toybox here")
def test_android_commands_are_enough(tmp_path: Path) -> None:
    toybox = shutil.which("toybox")
    assert toybox is not None
    for name in ("head", "cat", "rm"):
        (tmp_path / name).symlink_to(toybox)
    found = run_loop(
        ["/bin/sh", "-c"],
        tmp_path,
        request(1, "files", "/proc/loadavg /proc/absent /proc/uptime"),
        request(2, "try", "/proc/absent /proc/loadavg"),
        request(3, "procs"),
        path=str(tmp_path),
    )
    files, tries, procs = (frame for frame in found if isinstance(frame, Frame))
    assert list(split_files(files.data)) == ["/proc/loadavg", "/proc/uptime"]
    assert split_tries(tries.data)["/proc/absent"] == "No such file or directory"
    assert procs.data.startswith(b"1 (")
    assert not list(tmp_path.glob(".bmoe-probe-*"))


@pytest.mark.parametrize("shell", SHELLS)
def test_the_screen_is_given_back_when_the_link_ends(shell: list[str], tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    for name, said in (("svc", ""), ("input", ""), ("settings", "echo 3")):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{calls}\n[ "$1" != get ] || {said or "true"}\n')
        path.chmod(0o755)
    text = script(TOKEN, "ac" * 16, "bb" * 16)
    subprocess.run(
        [*shell, text],
        input=request(1, "screen", "on asleep"),
        capture_output=True,
        timeout=60,
        check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path)},
    )
    assert calls.read_text().splitlines() == [
        "settings get global stay_on_while_plugged_in",
        "svc power stayon true",
        "input keyevent 224",
        "settings put global stay_on_while_plugged_in 3",
        "input keyevent 223",
    ]


def test_a_lock_of_a_process_that_is_gone_is_no_hindrance(tmp_path: Path) -> None:
    agent = "ad" * 16
    (tmp_path / f".bmoe-probe-{agent}").write_text("1 12345 " + "ff" * 16 + "\n")  # pid 1 was born at another time
    found = run_loop(["sh", "-c"], tmp_path, request(1, "cost"), agent=agent)
    assert isinstance(found[0], Greeting)
    assert found[0].state == "ready"


def test_the_command_fits_an_old_adbd_and_takes_nothing_but_hex() -> None:
    assert len(script("ab" * 8, "aa" * 16, "bb" * 16).encode()) < COMMAND_LIMIT
    with pytest.raises(ValueError, match="hex"):
        script("ab", "'; reboot; '", "bb" * 16)
    with pytest.raises(ValueError, match="one line"):
        request(1, "do", "a\nb")


NASTY = st.lists(
    st.sampled_from(
        [b"#bmoe-", b"#bmoe-0123abcd", b" 1 end 0 1.0\n", b"\n", b"\r\n", b"==> /x <==\n", b"<== 1\n", b"x"]
    ),
    max_size=12,
).map(b"".join)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=200) | NASTY, max_size=5), st.integers(1, 50))
def test_answers_survive_whatever_they_hold_and_however_they_are_cut(bodies: list[bytes], piece: int) -> None:
    bodies = [body for body in bodies if b"#bmoe-0123abcd " not in b"\n" + body]
    stream = b"motd\n#bmoe-0123abcd 0 ready 77\n"
    for number, body in enumerate(bodies, 1):
        stream += b"#bmoe-0123abcd %d 5.25\n%s\n#bmoe-0123abcd %d end 0 5.50\n" % (number, body, number)
    parser, found = FrameParser(TOKEN), []
    for at in range(0, len(stream), piece):
        found += parser.feed(stream[at : at + piece])
    assert found[0] == Greeting("ready", "77")
    assert [(frame.number, frame.uptime_before_s, frame.uptime_after_s) for frame in found[1:]] == [
        (number, 5.25, 5.5) for number in range(1, len(bodies) + 1)
    ]
    for frame, body in zip(found[1:], bodies, strict=True):
        assert frame.data in {body, body.removesuffix(b"\r")}


def test_what_is_not_the_loop_is_refused_and_a_flood_is_cut() -> None:
    with pytest.raises(FramesError, match="something else"):
        FrameParser(TOKEN).feed(b"y\n" * (LIMIT // 2 + 1))
    parser = FrameParser(TOKEN)
    parser.feed(b"#bmoe-0123abcd 0 ready 1\n#bmoe-0123abcd 1 1.0\n")
    for _ in range(3):
        parser.feed(b"y\n" * (LIMIT // 4))
    (frame,) = parser.feed(b"\n#bmoe-0123abcd 1 end 0 2.0\n")
    assert isinstance(frame, Frame)
    assert frame.cut
    assert len(frame.data) <= LIMIT
