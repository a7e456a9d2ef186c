"""`bmoe-agent` as a person meets it: what is told where nothing runs yet, and what a status says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from bmoe_agent.cli import _status_lines, main

pytestmark = pytest.mark.agent


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int) -> str:
    assert main(words) == code
    out, err = capsys.readouterr()
    return out + err


@pytest.mark.parametrize("words", [("serve",), ("status",), ("gates",), ("run", "-m", "tiny", "-p", "hello")])
def test_where_no_agent_lives_the_way_to_one_is_told(capsys, tmp_path, words):
    said = told(capsys, *words, "--home", str(tmp_path / "none"), code=2)
    assert said == f"bmoe-agent: {tmp_path / 'none'}: no agent lives here: run bmoe-agent init\n"


def test_a_prompt_without_an_end_is_refused(capsys, tmp_path):
    said = told(capsys, "run", "-m", "tiny", "--prompt-file", "/dev/zero", "--home", str(tmp_path), code=2)
    assert said.startswith("bmoe-agent: /dev/zero: more than the ")


def test_an_agent_that_does_not_run_says_how_to_start_it(capsys, tmp_path):
    home = ("--home", str(tmp_path / "agent"))
    told(capsys, "init", "--name", "shelf-1", *home, code=0)
    lines = dict(line.split(maxsplit=1) for line in told(capsys, "status", *home, code=1).splitlines())
    assert lines["agent"].startswith("shelf-1  ")
    assert lines["running"].endswith("nothing answers there (Connection refused); `bmoe-agent serve` starts it")


def test_a_status_says_what_there_is_to_say():
    idle = {
        "name": "shelf-1", "uuid": "ab" * 16, "socket": "s", "paired": True, "running": True, "state": "idle", "plan": "",
        "cell": "", "tokens": 0, "tok_s": None, "backlog_bytes": 0, "spool_bytes": 5 << 20, "free_bytes": 3 << 30, "runs": 12,
        "plans": [{"plan": "a" * 32, "name": "night", "cells": 12, "done": 12, "state": "done"}],
    }  # fmt: skip
    assert dict(_status_lines(idle)) == {
        "agent": f"shelf-1  {'ab' * 16}",
        "socket": "@s",
        "paired": "yes",
        "running": "yes, idle",
        "record": "12 runs, 5 MiB here, 0 B of it not yet collected; 3,072 MiB free",
        "plans": "1 ended",
    }
    busy = idle | {
        "state": "measuring", "plan": "night", "cell": "a", "tokens": 40, "tok_s": 9.5,
        "plans": [{"plan": "a" * 32, "name": "night", "cells": 12, "done": 3, "state": "running"}],
    }  # fmt: skip
    lines = dict(_status_lines(busy))
    assert lines["now"] == "night, cell a, 40 tokens, 9.50 tok/s"
    assert lines["plan"] == "aaaaaaaa  night  running, 3 of 12"


def test_a_reader_that_left_is_no_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    program = "from bmoe_agent.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "gates", "--home", str(tmp_path)]
    (tmp_path / "config.toml").touch()
    (tmp_path / "uuid").write_text("ab" * 16)
    (tmp_path / "secret").write_text("ab" * 32)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("number", ["-5", "abc", "1.5", "4294967296", "²"])
def test_a_number_of_tokens_that_is_none_is_told(capsys, number):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "-m", "tiny", "-n", number])
    assert f"argument -n: {number}: a number of tokens is wanted, 0 or more" in capsys.readouterr().err
