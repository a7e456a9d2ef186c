"""Engines that leave processes, pipes and thousands of files behind, print nonsense, or lose their model: the record says so,
nothing is left running, and the next cell runs."""

import os
from pathlib import Path

import pytest
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.agent_records import cell, end, of, plan, run_plan, stream
from support.agents import BIN, Agent, agent

pytestmark = pytest.mark.agent

ENGINES = {
    # a child in a session of its own that works elsewhere, and goes on writing
    "daemon": "{sim}\n(cd /; setsid sh -c 'while :; do echo still here; sleep 0.05; done' &)\nsleep 0.3",
    "digits": "printf '=== answer ===\\nx\\n=== perf ===\\ngeneration: '; head -c 6000 /dev/zero | tr '\\0' 9; echo ' tokens, x'",
    "pipe": "{sim}\nrm metrics.csv\nmkfifo metrics.csv",
    "files": "{sim}\ni=0; while [ $i -lt 300 ]; do i=$((i+1)); : >a$i; done",
    "model": "{sim}\ntruncate -s 1000 {models}/tiny.gguf",
    "flood": "head -c 60000000 /dev/zero | tr '\\0' e >&2\n{sim}",
}


def add(phone: Agent, folder: Path) -> None:
    words = []
    for name, body in ENGINES.items():
        script = folder / name
        sim = f'BMOE_SIM=tok_s=200,load_s=0,prefill_s=0 {BIN / "bmoe-sim"} "$@" || exit $?'
        asked = f'case $1 in --version|--help) exec {BIN / "bmoe-sim"} "$1" ;; esac'
        script.write_text(f"#!/bin/sh\n{asked}\n{body.format(sim=sim, models=folder / 'models')}\n")
        script.chmod(0o755)
        words += ["--engine", f"{name}={script}"]
    phone.run("init", *words)


def test_what_engines_leave_behind(tmp_path: Path) -> None:
    with agent(tmp_path) as phone:
        add(phone, tmp_path)
        # the one that cuts the model comes last
        runs = run_plan(phone, plan([cell(name, engine=name) for name in sorted(ENGINES, key="model".__eq__)]))
        assert phone.engines() == []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                assert b"still here" not in Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
        folders = {
            name.partition("/")[0]: phone.home / "spool" / frames[0].run_id.hex() for name, frames in runs.items()
        }
    assert sorted(runs) == sorted(f"{name}/1" for name in ENGINES)
    ended = {name.partition("/")[0]: end(frames) for name, frames in runs.items()}
    # what came of "digits" is anybody's guess; that it has an end is not
    assert {(found.outcome, found.cause) for name, found in ended.items() if name != "digits"} == {("ok", "tokens")}
    notes = {name.partition("/")[0]: [note.code for note in of(frames, "note")] for name, frames in runs.items()}
    assert "left_behind" in notes["daemon"]
    assert "model_changed" in notes["model"]
    assert not [name for name, codes in notes.items() if "agent_error" in codes]
    for name, found in ended.items():
        for facts in found.artifacts:
            if facts.sha256:
                assert (folders[name] / "files" / facts.name).stat().st_size == facts.size
    assert ("metrics.csv", "was not written") in [(facts.name, facts.problem) for facts in ended["pipe"].artifacts]
    kept = [facts.name for facts in ended["files"].artifacts]
    assert kept[0] == "metrics.csv"
    assert len(kept) == 200
    assert "files_left_out" in notes["files"]
    assert len(stream(runs["flood/1"], pb.STREAM_STDERR)) >= 60_000_000
