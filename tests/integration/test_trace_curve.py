"""The cache curve of a run beside what its engine recorded: same lookups, same rate, the run's own budget among the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from bmoe_collector.cli import main
from bmoe_sim.makemodel import make_model


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A folder with a traced run of the stand-in engine, its prompt wide enough to ask for one expert many times."""
    folder = tmp_path_factory.mktemp("traced")
    model = make_model(str(folder / "tiny.gguf"), size_mib=16)[0]
    files = folder / "run"
    files.mkdir()
    argv = ["-m", model, "-p", "Write a long story about a lighthouse and the people who keep it burning", "-n", "40",
            "--moe-stream", "--cache-mb", "4", "--force-cache", "--csv", "metrics.csv", "--route-trace", "route.csv"]  # fmt: skip
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(sys.path),
        "BMOE_SIM": "tok_s=2000,load_s=0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "bmoe_sim.cli", *argv],
        cwd=files,
        env=environment,
        capture_output=True,
        check=True,
        timeout=60,
    )
    (files / "stdout").write_bytes(done.stdout)
    (files / "run.json").write_text(json.dumps({"argv": ["bmoe-sim", *argv], "exit": 0}))
    return files


def test_the_recorded_rate_is_the_engines_and_its_own_budget_is_in_the_curve(
    traced, store_url, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("BMOE_ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def asked(*words):
        capsys.readouterr()
        assert main([*words, "--json", "--db", store_url]) == 0
        return json.loads(capsys.readouterr().out)

    run = asked("import", str(traced))["run"]
    hit_pct = asked("sql", "SELECT cache_hit_pct FROM v_runs")[0]["cache_hit_pct"]
    found = asked("trace", "route", run, "--view", "curve")
    facts = found["facts"]
    assert facts["accesses"] < facts["routings"]
    assert facts["recorded_hit_rate"] == pytest.approx(hit_pct / 100, abs=0.0006)
    assert facts["own_budget_mib"] == 4
    own = next(row for row in found["rows"] if row["budget_mib"] == 4)
    assert own["lru"] == facts["lru_at_own_budget"]
    assert facts["recorded_minus_lru"] == pytest.approx(facts["recorded_hit_rate"] - own["lru"])
    file = asked("trace", "route", str(traced / "route.csv"), "--view", "curve")
    assert file["facts"]["recorded_hit_rate"] == facts["recorded_hit_rate"]
    assert "own_budget_mib" not in file["facts"]
    decode = asked("trace", "route", run, "--view", "curve", "--phase", "decode")
    assert any("begin empty where the selection begins" in note for note in decode["notes"])
