"""`bmoe doctor` against a real adb server and a real adbd, whose Linux has none of Android's commands."""

from pathlib import Path

from support.host import Host
from support.phones import shelf


def test_a_phone_without_android_is_unknown_not_well(tmp_path: Path) -> None:
    with shelf(tmp_path / "shelf") as made:
        (phone,) = made.phones
        host = Host(tmp_path / "host", made.env)
        host.pair(phone.agent, phone.serial)
        document = host.json("doctor", phone.serial)
        states = {check["name"]: check["state"] for check in document["host"]}
        assert states == dict.fromkeys(("adb", "adb_server", "database", "artifacts", "secrets", "system"), "ok")
        (line,) = document["devices"]
        checks = {check["name"]: check for check in line["checks"]}
        assert (line["uuid"], line["state"]) == (phone.agent.uuid.hex(), "ready")
        assert checks["agent"]["state"] == checks["transport"]["state"] == checks["clock"]["state"] == "ok"
        for name in ("android", "phantom_processes", "freezer", "battery_exemption", "awake", "thermal_service"):
            assert checks[name]["state"] == "unknown", name
        assert "not found" in checks["android"]["seen"]
        assert str(phone.agent.process.pid if phone.agent.process else None) in checks["agent_cpus"]["seen"]
        told = host.bmoe("doctor", phone.agent.uuid.hex()[:8]).stdout
        assert "no Android's shell" in told
        phone.agent.kill()
        gone = host.json("doctor", phone.serial, code=1)
        assert gone["devices"][0]["checks"][0]["state"] == "fail"
        host.bmoe("doctor", "nobody", code=2)


def test_a_database_of_the_future_is_told_and_the_rest_still_checked(tmp_path: Path) -> None:
    host = Host(tmp_path / "host", {"ANDROID_ADB_SERVER_PORT": "1"})
    host.db.write_bytes(b"not a database at all, and long enough to be read as one" * 40)
    document = host.json("doctor", code=1)
    states = {check["name"]: check["state"] for check in document["host"]}
    assert (states["database"], states["secrets"], document["devices"]) == ("fail", "ok", [])
