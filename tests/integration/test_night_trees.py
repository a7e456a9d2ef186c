"""A cell on each kind of device that a tree stands for: what its sensors say and refuse is in the database."""

import json
import tomllib
from pathlib import Path

import pytest
from bmoe_agent.roots import lay
from support.agent_records import cell, client, plan
from support.agents import agent
from support.nights import morning, submit, wait_done

TREES = sorted((Path(__file__).parent.parent / "support" / "trees").glob("*.toml"))


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.stem)
def test_a_cell_under_another_devices_sensors(tree: Path, tmp_path: Path) -> None:
    described = tomllib.loads(tree.read_text())
    lay(tree, tmp_path / "tree")
    with agent(tmp_path, "tok_s=100,load_s=0.05,prefill_s=0.05") as phone:
        phone.env["BMOE_AGENT_TREE"] = str(tmp_path / "tree")
        phone.start()
        asked = plan([cell("cell")])
        submit(phone, asked)
        assert wait_done(phone, asked) == "done"
        with client(phone) as connected:
            status = connected.status()
        found = morning(phone, tmp_path)
    run = found.of("cell")
    assert (run["outcome"], run["simulated"], run["complete"]) == ("ok", 1, 1), run["completeness"]
    device = json.loads(run["device"])
    assert device["page_bytes"] == described.get("page_bytes", 4096)
    assert device["simulated"]
    assert run["device_model"] == described["properties"]["ro.product.model"]
    entry = found.table("samples", run)[0]
    assert entry["kind"] == "entry"
    refused, values = entry["refused"] or {}, entry["values"]
    for node, error in described.get("refused", {}).items():
        if node in refused:
            assert error in refused[node], (node, refused[node])
    # A value is there exactly when its file could be read.
    assert ("mem_available_kib" in values) == ("MemAvailable" in described["text"].get("proc/meminfo", ""))
    hot = "cpu_temp_c" in values
    assert hot == ("cpu_temp_c" in status.gates)
    assert hot or status.unreadable["cpu_temp_c"]
    assert ("battery_pct" in values) == ("battery_pct" in status.gates)
    whole = [look for look in found.table("residency", run) if look["part"] == "whole"]
    size = (tmp_path / "models" / "tiny.gguf").stat().st_size
    assert {(look["bytes"], look["pages"]) for look in whole} == {(size, -(-size // device["page_bytes"]))}
    limited = {gate for gate in ("allowed_cpus", "fastest_cpus_ratio") if gate in status.gates}
    assert "allowed_cpus" in limited


def test_there_are_four_kinds_of_device() -> None:
    """What the trees stand for between them: refusals, big pages, temperatures readable and not, big cores excluded."""
    described = [tomllib.loads(tree.read_text()) for tree in TREES]
    assert len(described) >= 4
    assert all(tree["written_for_purpose"] for tree in described)
    assert any(tree.get("page_bytes") == 16384 for tree in described)
    assert all(tree.get("refused") for tree in described)
    temperatures = [any("thermal_zone" in node for node in tree["text"]) for tree in described]
    assert any(temperatures)
    assert not all(temperatures)
    assert any("Cpus_allowed_list:\t0-3" in tree["text"]["proc/self/status"] for tree in described)
