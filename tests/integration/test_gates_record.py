"""Every gate in a real agent: held, waited for, given up by each policy; and what of it a database holds afterwards."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bmoe_agent.gates import GATES, Gates
from bmoe_agent.roots import Roots, lay
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.agent_records import cell, client, plan
from support.agents import Agent, agent, wait_for
from support.nights import Morning, morning, submit, told, wait_done

TREE = Path(__file__).parent.parent / "support" / "trees" / "thermal_readable_capped.toml"
CPU = "sys/devices/system/cpu/cpufreq/policy7/scaling_max_freq"
# gate: where it is read, what is there when it does not hold and when it does, the condition, both values
NODES = {
    "cpu_temp_c": ("sys/class/thermal/thermal_zone5/temp", "63400", "41000", ("<=", 60), (63.4, 58.1)),
    "mem_available_mib": ("proc/meminfo", "MemAvailable: {} kB", "", (">=", 2000), (1000, 3000)),
    "swap_used_mib": ("proc/meminfo", "SwapTotal: {} kB", "", ("<=", 50), (100, 20)),
    "clock_cap_ratio": (CPU, "2092800", "3187200", (">=", 0.99), (2092800 / 3187200, 1.0)),
    "allowed_cpus": ("proc/self/status", "0-3", "0-7", (">=", 8), (4, 8)),
    "fastest_cpus_ratio": ("proc/self/status", "0-6", "0-7", (">=", 1), (0, 1)),
    "battery_pct": ("sys/class/power_supply/battery/capacity", "17", "78", (">=", 40), (17, 78)),
    "charging": ("sys/class/power_supply/battery/status", "Discharging", "Charging", ("==", 1), (0, 1)),
}
# Neighbours are read from different nodes: one is turned bad before the other holds.
QUICK = ("allowed_cpus", "cpu_temp_c", "mem_available_mib", "fastest_cpus_ratio", "swap_used_mib", "clock_cap_ratio")
IMPOSSIBLE = {"<=": -1e6, ">=": 1e9, "==": 7.5}


class Device:
    """A phone whose sensors a test turns."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        lay(TREE, self.tree)

    def put(self, node: str, text: str) -> Path:
        """Replace a node in one step: a reader sees the old or the new one."""
        path = self.tree / node
        new = path.with_name(f".{path.name}")
        new.write_text(text + "\n")
        new.replace(path)
        return path

    def turn(self, gate: str, *, good: bool) -> Path:
        node, bad, fine, _, values = NODES[gate]
        if node == "proc/meminfo":
            available = values[good] * 1024 if gate == "mem_available_mib" else 3000 * 1024
            used = values[good] * 1024 if gate == "swap_used_mib" else 20 * 1024
            lines = (f"MemTotal: 8000000 kB\nMemAvailable: {available} kB", f"SwapTotal: {used} kB\nSwapFree: 0 kB")
            return self.put(node, "\n".join(lines))
        if node == "proc/self/status":
            return self.put(node, f"Name:\tpython\nCpus_allowed_list:\t{fine if good else bad}")
        return self.put(node, fine if good else bad)

    def all_good(self) -> None:
        for gate in NODES:
            self.turn(gate, good=True)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


@pytest.fixture
def phone(tmp_path: Path, device: Device) -> Iterator[Agent]:
    with agent(tmp_path, "tok_s=200,load_s=0.02,prefill_s=0.02") as made:
        made.env["BMOE_AGENT_TREE"] = str(device.tree)
        yield made


def ask(gate: str, *, possible: bool, policy: str = "skip", timeout_s: int = 0) -> pb.GateAsk:
    comparison, bound = NODES[gate][3] if gate in NODES else (GATES[gate].comparison, 0.001)
    if gate == "screen":
        bound = 1
    bound = bound if possible else IMPOSSIBLE[comparison]
    return pb.GateAsk(gate=gate, comparison=comparison, bound=bound, policy=policy, timeout_s=timeout_s)


def tell_screen(phone: Agent, *, on: bool = True) -> None:
    with client(phone) as connected:
        connected.tell(b"", pb.Note(code="screen", text="told", facts_json=json.dumps({"screen_on": on})))


def test_every_gate_holds_and_gives_up_by_each_policy(phone: Agent, device: Device, tmp_path: Path) -> None:
    Gates(Roots(), phone.home).record_baseline(passes=1)
    device.all_good()
    cells = [cell("all hold", gates=[ask(gate, possible=True) for gate in GATES])]
    cells += [cell(f"{gate} skips", gates=[ask(gate, possible=False)]) for gate in GATES]
    cells.append(
        cell("all flagged", gates=[ask(gate, possible=False, policy="run-flagged") for gate in GATES], retries=2)
    )
    cells.append(cell("waited in vain", gates=[ask("cpu_temp_c", possible=False, timeout_s=1)]))
    cells.append(cell("aborts", gates=[ask("mem_available_mib", possible=False, policy="abort")]))
    cells.append(cell("never reached"))
    asked = plan(cells)
    phone.start()
    tell_screen(phone)
    submit(phone, asked)
    assert wait_done(phone, asked) == "stopped"
    found = morning(phone, tmp_path)
    assert [run["cell"] for run in found.runs] == [one.name for one in cells]
    held = {gate["gate"]: gate for gate in found.table("gates", found.of("all hold"))}
    assert list(held) == list(GATES)
    for name, gate in held.items():
        assert (gate["state"], gate["policy"], gate["unit"]) == ("held", "skip", GATES[name].unit), name
        assert gate["last"] is not None, name
        assert gate["readings"][0]["text"], name
        if name in NODES:
            assert gate["last"] == pytest.approx(NODES[name][4][1]), name
    assert held["screen"]["source"] == "host"
    assert found.of("all hold")["outcome"] == "ok"
    for name in GATES:
        run = found.of(f"{name} skips")
        assert (run["outcome"], run["cause"], run["launched"]) == ("skipped", f"gate:{name}", 0), name
        (gate,) = found.table("gates", run)
        assert (gate["state"], gate["policy"]) == ("gave_up", "skip"), name
        assert gate["asked"] in told(run), name
        assert run["complete"], run["completeness"]
    flagged = found.of("all flagged")
    assert flagged["outcome"] == "ok"
    assert [gate["state"] for gate in found.table("gates", flagged)] == ["gave_up"] * len(GATES)
    verdicts = found.table("verdicts", flagged)
    evidence = [verdict["evidence"] for verdict in verdicts if verdict["code"] == "gate_gave_up"]
    assert all(any(gate in text for text in evidence) for gate in GATES)
    vain = found.of("waited in vain")
    (gate,) = found.table("gates", vain)
    assert (vain["outcome"], gate["state"]) == ("skipped", "gave_up")
    assert gate["waited_s"] >= 1
    assert len(gate["readings"]) >= 2
    aborting = found.of("aborts")
    assert (aborting["outcome"], aborting["cause"]) == ("skipped", "gate:mem_available_mib")
    assert found.table("gates", aborting)[0]["policy"] == "abort"
    unreached = found.of("never reached")
    assert (unreached["outcome"], unreached["cause"], unreached["launched"]) == ("skipped", "gate:abort", 0)
    assert told(unreached) == "gate:mem_available_mib gave up and its policy is abort"


def test_gates_that_cannot_be_read_say_so_and_their_policy_decides(tmp_path: Path) -> None:
    with agent(tmp_path, "tok_s=200,load_s=0.02,prefill_s=0.02") as phone:
        refusing = TREE.with_name("pages_16k_thermal_refused.toml")
        lay(refusing, tmp_path / "tree")
        phone.env["BMOE_AGENT_TREE"] = str(tmp_path / "tree")
        unread = ("cpu_temp_c", "battery_pct", "screen", "speed_probe_ratio")
        cells = [cell(f"{gate} skips", gates=[ask(gate, possible=True)]) for gate in unread]
        cells.append(cell("flagged", gates=[ask(gate, possible=True, policy="run-flagged") for gate in unread]))
        cells.append(cell("called off", gates=[ask("mem_available_mib", possible=False, timeout_s=600)]))
        asked = plan(cells)
        phone.start()
        warned = " ".join(submit(phone, asked).warnings)
        assert all(f"gate {gate} cannot be read on this phone" in warned for gate in unread)
        with client(phone) as connected:

            def waiting() -> bool:
                status = connected.status()
                return (status.cell, status.state) == ("called off", "gating")

            wait_for(waiting, "the gate that never holds")
            connected.cancel(asked.plan_id, only_current_cell=True)
        assert wait_done(phone, asked) == "done"
        found = morning(phone, tmp_path)
    for name in unread:
        run = found.of(f"{name} skips")
        assert (run["outcome"], run["cause"]) == ("skipped", f"gate:{name}")
        (gate,) = found.table("gates", run)
        assert (gate["state"], gate["last"]) == ("unreadable", None)
        assert len(gate["readings"][0]["text"]) > 20, "why it could not be read"
    assert found.of("flagged")["outcome"] == "ok"
    assert [gate["state"] for gate in found.table("gates", found.of("flagged"))] == ["unreadable"] * len(unread)
    off = found.of("called off")
    assert (off["outcome"], off["cause"], off["launched"]) == ("aborted", "cancelled", 0)
    assert found.table("gates", off)[0]["state"] == "gave_up"


def wait_through(phone: Agent, device: Device, tmp_path: Path, names: tuple[str, ...]) -> Morning:
    """Cells that each wait for one gate; the sensor is turned once the gate has read it."""
    device.all_good()
    asked = plan([cell(name, gates=[ask(name, possible=True, timeout_s=120)]) for name in names])
    device.turn(names[0], good=False)
    phone.start()
    submit(phone, asked)
    with client(phone) as connected:
        for at, name in enumerate(names):

            def gating(wanted: str = name) -> bool:
                status = connected.status()
                return (status.cell, status.state) == (wanted, "gating")

            wait_for(gating, f"the wait for {name}")
            node = device.turn(name, good=False)
            written_ns, began = node.stat().st_mtime_ns, time.monotonic()

            def read(node: Path = node, written_ns: int = written_ns, began: float = began) -> bool:
                # Where a file system keeps no times of reading, some seconds do.
                return node.stat().st_atime_ns > written_ns or time.monotonic() > began + 3

            wait_for(read, f"a reading of {name} while it does not hold")
            if at + 1 < len(names):
                device.turn(names[at + 1], good=False)
            device.turn(name, good=True)
    assert wait_done(phone, asked) == "done"
    return morning(phone, tmp_path)


def check_waited(found: Morning, names: tuple[str, ...]) -> None:
    for name in names:
        run = found.of(name)
        assert run["outcome"] == "ok", name
        (gate,) = found.table("gates", run)
        assert gate["state"] == "waited", (name, gate)
        assert gate["waited_s"] > 0, name
        bad, good = NODES[name][4]
        assert bad in [pytest.approx(reading.get("value")) for reading in gate["readings"]], name
        assert gate["last"] == pytest.approx(good), name
        assert run["launched_boot_ns"] >= gate["boot_ns"], name


def test_gates_wait_until_they_hold(phone: Agent, device: Device, tmp_path: Path) -> None:
    check_waited(wait_through(phone, device, tmp_path, QUICK), QUICK)


def test_a_gate_on_what_a_host_tells_waits_for_its_word(phone: Agent, tmp_path: Path) -> None:
    asked = plan([cell("screen", gates=[ask("screen", possible=True, timeout_s=120)])])
    phone.start()
    tell_screen(phone, on=False)
    submit(phone, asked)
    with client(phone) as connected:
        wait_for(lambda: connected.status().state == "gating", "the wait for the screen")
    began = time.monotonic()
    wait_for(lambda: time.monotonic() > began + 3, "the first look, which nobody sees from outside")
    tell_screen(phone)
    assert wait_done(phone, asked) == "done"
    found = morning(phone, tmp_path)
    (gate,) = found.table("gates", found.of("screen"))
    assert (found.of("screen")["outcome"], gate["state"], gate["source"]) == ("ok", "waited", "host")
    assert [reading["value"] for reading in gate["readings"]][:1] == [0]
    assert gate["last"] == 1


@pytest.mark.slow
def test_gates_that_are_read_seldom_wait_too(phone: Agent, device: Device, tmp_path: Path) -> None:
    names = ("battery_pct", "charging")
    check_waited(wait_through(phone, device, tmp_path, names), names)


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(300)
def test_the_speed_probe_waits_for_a_machine_slowed_by_half(tmp_path: Path) -> None:
    """A real CPU limit on the agent: the gate waits while it stands, and the cell runs once it is lifted. Wants an idle machine."""
    group = Path("/sys/fs/cgroup/cpu", f"bmoe-test-{secrets.token_hex(6)}")
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("50000")
    except OSError as error:
        pytest.skip(f"no control group with a CPU limit can be made here: {error}")
    with contextlib.ExitStack() as stack:
        stack.callback(wait_for, lambda: _removed(group), "the group's end")
        phone = stack.enter_context(agent(tmp_path, "tok_s=200,load_s=0.02"))
        Gates(Roots(), phone.home).record_baseline(passes=5)
        phone.start()
        assert phone.process is not None
        for task in os.listdir(f"/proc/{phone.process.pid}/task"):
            (group / "tasks").write_text(task)
        gate = pb.GateAsk(gate="speed_probe_ratio", comparison=">=", bound=0.6, timeout_s=300, policy="skip")
        asked = plan([cell("waits", gates=[gate])])
        began = time.monotonic()
        submit(phone, asked)
        # Two probes and more: one takes up to some seconds here, and there are ten between them.
        wait_for(lambda: time.monotonic() > began + 25, "time for some probes")
        with client(phone) as connected:
            assert connected.status().state == "gating"
        (group / "cpu.cfs_quota_us").write_text("-1")
        assert wait_done(phone, asked, 150) == "done"
        found = morning(phone, tmp_path)
        (row,) = found.table("gates", found.of("waits"))
        print(row)
        assert row["state"] == "waited"
        assert row["readings"][0]["value"] < 0.6
        assert row["last"] >= 0.6


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
