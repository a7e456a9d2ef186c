"""Device facts of this machine and of four kinds of phone."""

import os
from pathlib import Path

import pytest
from bmoe_agent import device
from bmoe_agent.roots import Roots, lay

pytestmark = pytest.mark.agent
TREES = Path(__file__).parent.parent / "support" / "trees"


def test_this_machine():
    facts = device.describe(Roots(), b"u" * 16, "here", "9.9")
    assert (facts.agent_uuid, facts.name, facts.agent_version, facts.simulated) == (b"u" * 16, "here", "9.9", False)
    assert facts.page_bytes == os.sysconf("SC_PAGE_SIZE")
    assert facts.memory_total_kib > 100_000
    assert facts.properties["uname.machine"] == os.uname().machine
    assert len(facts.cpus) >= 1
    assert facts.protobuf_implementation in {"upb", "python", "cpp"}
    assert facts.protobuf_version
    assert facts.grpc_version


def test_a_phone_with_larger_pages_and_three_clusters(tmp_path):
    facts = device.describe(lay(TREES / "pages_16k_thermal_refused.toml", tmp_path))
    assert (facts.page_bytes, facts.simulated, facts.properties["system"]) == (16384, True, "android")
    assert facts.properties["ro.build.version.sdk"] == "35"
    assert "6.6.50" in facts.properties["proc.version"]
    assert [cpu.max_khz for cpu in facts.cpus] == [1950000] * 4 + [2600000] * 3 + [3105000]
    assert [cpu.policy for cpu in facts.cpus][6:] == ["policy4", "policy7"]
    assert not facts.cpus[0].HasField("package")  # the firmware says -1
    assert device.fastest_cpus(list(facts.cpus)) == {7}


def test_cpus_without_limits_are_there_without_limits(tmp_path):
    for cpu in (0, 1):
        (tmp_path / f"sys/devices/system/cpu/cpu{cpu}").mkdir(parents=True)
    facts = device.describe(Roots(tmp_path / "proc", tmp_path / "sys"))
    assert [(cpu.cpu, cpu.HasField("max_khz")) for cpu in facts.cpus] == [(0, False), (1, False)]
    assert device.fastest_cpus(list(facts.cpus)) == set()
    assert facts.memory_total_kib == 0
    assert facts.properties["system"] == "linux"


def test_getprop_is_read_and_what_names_a_person_is_left(tmp_path, monkeypatch):
    script = tmp_path / "getprop"
    script.write_text(
        "#!/bin/sh\nprintf '[ro.product.model]: [Seven]\\r\\n[ro.serialno]: [SECRET]\\r\\n[ro.soc.model]: []\\r\\nnoise\\r\\n'\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert device.getprop() == {"ro.product.model": "Seven", "ro.serialno": "SECRET", "ro.soc.model": ""}
    found = device.properties(Roots())
    assert found["ro.product.model"] == "Seven"
    assert "SECRET" not in found.values()
    assert "ro.soc.model" not in found
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(device, "_GETPROP_TIMEOUT_S", 0.2)
    assert device.getprop() == {}
