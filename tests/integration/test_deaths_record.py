"""Every way to die that can be produced here, for real, ends in the database with its cause and evidence; the next cell runs."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from bmoe_agent.roots import lay
from bmoe_proto.v1 import telemetry_pb2 as pb
from support.agent_records import add_engines, cell, client, plan
from support.agents import Agent, agent, make_engine, make_model, wait_for
from support.nights import Morning, morning, submit, told, wait_done

TREE = Path(__file__).parent.parent / "support" / "trees" / "thermal_readable_capped.toml"
SETTINGS = "tok_s=100,load_s=0.05,prefill_s=0.05"


def ends(found: Morning) -> dict[str, tuple[str, str]]:
    return {run["cell"]: (run["outcome"], run["cause"]) for run in found.runs}


def engine_of(phone: Agent, name: str, tokens: int = 3) -> int:
    """Pid of the engine once the cell of this name has some tokens."""
    with client(phone) as connected:

        def inside() -> bool:
            status = connected.status()
            return status.cell == name and status.tokens >= tokens

        wait_for(inside, f"tokens of {name}")
    for folder in (phone.home / "spool").glob("*/files/pid"):
        pid = int(folder.read_text().split()[0] or 0)
        with contextlib.suppress(OSError):
            if b"bmoe-sim" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return max(phone.engines())


def test_what_engine_and_model_do_to_themselves(tmp_path: Path) -> None:
    """Signals, refusals, the linker, an absent interpreter, and a hang in every phase, each with the next cell after it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here to make a program whose library is missing")
    with agent(tmp_path, SETTINGS) as phone:
        add_engines(
            phone,
            {
                "refuses": f"{SETTINGS},fault=exit@load:1",
                "hang_load": f"{SETTINGS},fault=hang@load",
                "hang_prefill": f"{SETTINGS},fault=hang@prefill",
                "hang_decode": f"{SETTINGS},fault=hang@3",
                "deaf": f"{SETTINGS},fault=hang@3",
            },
        )
        # It does not listen to SIGTERM.
        deaf = tmp_path / "deaf"
        deaf.write_text(deaf.read_text().replace("#!/bin/sh\n", "#!/bin/sh\ntrap '' TERM\n"))
        unlinked = tmp_path / "unlinked"
        source = "int missing(void); int main(void) { return missing(); }"
        library = tmp_path / "libmissing.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-x", "c", "-o", library, "-"],
            input=b"int missing(void) { return 0; }",
            check=True,
        )
        command = [compiler, "-x", "c", "-o", unlinked, "-", "-x", "none", f"-L{tmp_path}", "-lmissing"]
        subprocess.run(command, input=source.encode(), check=True)
        library.unlink()
        orphan = tmp_path / "orphan"
        orphan.write_text("#!/no/such/interpreter\n")
        orphan.chmod(0o755)
        noise = tmp_path / "models" / "noise.gguf"
        noise.write_bytes(b"this is no model at all" * 100)
        phone.run("init", "--engine", f"unlinked={unlinked}", "--engine", f"orphan={orphan}")
        cells = [
            cell("killed", n_predict=1900),
            cell("linker", engine="unlinked"),
            cell("interpreter", engine="orphan"),
            cell("flag the agent refuses", flags=["--no-such-flag"]),
            cell("flag the engine refuses", flags=["--no-such-flag"], allow_unknown_flags=True),
            cell("no model", model="absent"),
            cell("no model inside", model="noise"),
            *(cell(name, engine=name) for name in ("hang_load", "hang_prefill", "hang_decode", "deaf")),
            cell("total", n_predict=1900),
            cell("last"),
        ]
        for one in cells:
            one.watchdog.load_s = one.watchdog.prefill_s = one.watchdog.decode_s = 20
            one.watchdog.grace_s = 2
        for name in ("load", "prefill", "decode"):
            (wanted,) = [one for one in cells if one.name == f"hang_{name}"]
            setattr(wanted.watchdog, f"{name}_s", 2)
            if name != "decode":
                # A one-shot is silent until its first token: the longer of both bounds holds until then.
                wanted.watchdog.load_s = wanted.watchdog.prefill_s = 2
        next(one for one in cells if one.name == "deaf").watchdog.decode_s = 2
        next(one for one in cells if one.name == "total").watchdog.total_s = 3
        asked = plan(cells)
        phone.start()
        submit(phone, asked)
        os.kill(engine_of(phone, "killed"), signal.SIGKILL)
        assert wait_done(phone, asked) == "done"
        assert phone.engines() == []
        found = morning(phone, tmp_path)
    assert ends(found) == {
        "killed": ("killed", "signal:SIGKILL"),
        "linker": ("failed", "linker"),
        "interpreter": ("failed", "not_started"),
        "flag the agent refuses": ("failed", "refused:flags"),
        "flag the engine refuses": ("failed", "refused:flags"),
        "no model": ("failed", "refused:model"),
        "no model inside": ("failed", "refused:model"),
        "hang_load": ("aborted", "watchdog:load"),
        "hang_prefill": ("aborted", "watchdog:load"),
        "hang_decode": ("aborted", "watchdog:decode"),
        "deaf": ("aborted", "watchdog:decode"),
        "total": ("aborted", "watchdog:total"),
        "last": ("ok", "tokens"),
    }
    assert [run["cell_index"] for run in found.runs] == list(range(len(cells)))
    assert "libmissing.so" in told(found.of("linker"))
    assert "not found" in told(found.of("interpreter"))
    assert "--no-such-flag" in told(found.of("flag the agent refuses"))
    assert "unknown arg" in told(found.of("flag the engine refuses"))
    assert "noise.gguf" in told(found.of("no model inside"))
    assert "SIGKILL" in told(found.of("killed"))
    assert found.of("killed")["signal"] == signal.SIGKILL
    assert (found.of("linker")["exit_code"], found.of("linker")["launched"]) == (127, 1)
    for name in ("flag the agent refuses", "no model"):
        assert not found.of(name)["launched"]
    for name in ("hang_load", "hang_prefill", "hang_decode"):
        phase, rule = ("decode", "decode") if name == "hang_decode" else ("load or prefill", "load")
        run = found.of(name)
        assert f"no progress in {phase}" in told(run)
        assert "ended by SIGTERM" in told(run)
        (note,) = [note for note in found.table("notes", run) if note["code"] == "watchdog"]
        assert (note["facts"]["rule"], note["facts"]["bound"], note["facts"]["action"]) == (rule, 2, "sigterm")
        assert note["facts"]["seen"] >= 2
    assert "ended by SIGKILL" in told(found.of("deaf"))
    actions = [note["facts"]["action"] for note in found.table("notes", found.of("deaf")) if note["code"] == "watchdog"]
    assert actions == ["sigterm", "sigkill"]
    assert found.of("total")["n_tokens"] > 3
    for run in found.runs:
        assert run["ended"]
        if run["outcome"] != "ok":
            assert told(run), run["cell"]


def test_heat_and_an_empty_battery_end_a_cell(tmp_path: Path) -> None:
    lay(TREE, tmp_path / "tree")
    temperature = tmp_path / "tree/sys/class/thermal/thermal_zone5/temp"
    capacity = tmp_path / "tree/sys/class/power_supply/battery/capacity"
    with agent(tmp_path, SETTINGS) as phone:
        phone.env["BMOE_AGENT_TREE"] = str(tmp_path / "tree")
        cells = [cell("hot", n_predict=1900), cell("last"), cell("heats", preheat_s=600, n_predict=1900)]
        for one in cells:
            one.watchdog.max_cpu_temp_c = 90
        cells[2].watchdog.max_cpu_temp_c = 40  # the next hottest zone of the tree has 58.1
        asked = plan(cells)
        phone.start()
        submit(phone, asked)
        engine_of(phone, "hot")
        temperature.write_text("96500\n")
        wait_for(lambda: ended_cells(phone) >= 1, "the end of the hot cell")
        temperature.write_text("41000\n")
        assert wait_done(phone, asked) == "done"
        capacity.write_text("11\n")
        limited = plan([cell("empty"), cell("empty too")], limits=pb.Limits(min_battery_pct=20))
        submit(phone, limited)
        assert wait_done(phone, limited) == "stopped"
        found = morning(phone, tmp_path)
    assert ends(found) == {
        "hot": ("aborted", "thermal"),
        "last": ("ok", "tokens"),
        "heats": ("aborted", "thermal"),
        "empty": ("skipped", "gate:limit"),
        "empty too": ("skipped", "gate:limit"),
    }
    assert "3 readings in a row, in decode" in told(found.of("hot"))
    (note,) = [note for note in found.table("notes", found.of("hot")) if note["code"] == "watchdog"]
    assert (note["facts"]["rule"], note["facts"]["seen"]) == ("temperature", 96.5)
    assert "min_battery_pct: 11 % and not charging" in told(found.of("empty"))
    (note,) = [note for note in found.table("notes", found.of("heats")) if note["code"] == "preheat"]
    assert "no longer: 58.1 °C, the cell's bound is 40 °C" in note["text"]
    assert note["facts"]["s"] < 60


def ended_cells(phone: Agent) -> int:
    with client(phone) as connected:
        return connected.listing().plans[-1].done


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group that may hold 256 MiB."""
    name = f"bmoe-test-{secrets.token_hex(6)}"
    for root, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root, name)
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / file).write_text(str(256 << 20))
            except OSError:
                group.rmdir()
                continue
            with contextlib.suppress(OSError):
                (group / "memory.swap.max").write_text("0")
            yield group
            wait_for(partial(_removed, group), "the group's end")
            return
    pytest.skip("no control group with a memory limit can be made here (needs root and the memory controller)")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def test_the_kernel_out_of_memory_killer_is_named(tmp_path: Path, memory_group: Path) -> None:
    """The agent and its engine share a group, as the processes of an app do; the kernel kills the engine."""
    with agent(tmp_path, SETTINGS) as phone:
        eater = make_engine(tmp_path, f"{SETTINGS},fault=oom@4:2000", "eater")
        phone.run("init", "--engine", f"eater={eater}")
        phone.prefix = ["sh", "-c", f'echo $$ >{memory_group}/cgroup.procs; exec "$@"', "sh"]
        asked = plan([cell("eats", engine="eater"), cell("last")])
        phone.start()
        submit(phone, asked)
        assert wait_done(phone, asked) == "done"
        found = morning(phone, tmp_path)
    assert ends(found) == {"eats": ("killed", "out_of_memory"), "last": ("ok", "tokens")}
    run = found.of("eats")
    assert run["signal"] == signal.SIGKILL
    assert f"memory cgroup /{memory_group.name}: oom_kill went from 0 to 1" in told(run)
    assert "kill_evidence" in found.notes(run)
    assert run["n_tokens"] == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_is_the_cause_and_the_next_cell_has_room(tmp_path: Path, small_disk: Path) -> None:
    phone = Agent(small_disk / "home")
    model = make_model(tmp_path / "models")
    phone.init(make_engine(tmp_path, SETTINGS), model.parent)
    flood = make_engine(tmp_path, f"{SETTINGS},fault=overflow@4:40000000", "flood")
    phone.run("init", "--engine", f"flood={flood}")
    watched = cell("watched", n_predict=1900)
    asked = plan([cell("fills", engine="flood"), cell("between"), watched, cell("last")])
    limited = plan([cell("limited", n_predict=1900)], limits=pb.Limits(min_free_bytes=6 << 20))
    try:
        phone.start()
        submit(phone, asked)
        engine_of(phone, "watched")
        with client(phone) as connected:
            connected.cancel(asked.plan_id, only_current_cell=True)
        assert wait_done(phone, asked) == "done"
        submit(phone, limited)
        engine_of(phone, "limited")
        filler = small_disk / "filler"
        free = shutil.disk_usage(small_disk).free
        filler.write_bytes(b"\0" * max(0, free - (4 << 20)))  # somebody else fills the disk
        assert wait_done(phone, limited) in {"done", "stopped"}
        filler.unlink()
        found = morning(phone, tmp_path)
    finally:
        phone.destroy()
    assert ends(found) == {
        "fills": ("partial", "disk_full"),
        "between": ("ok", "tokens"),
        "watched": ("aborted", "cancelled"),
        "last": ("ok", "tokens"),
        "limited": ("aborted", "disk_full"),
    }
    fills, limited_run = found.of("fills"), found.of("limited")
    assert "no space was left" in told(fills)
    assert fills["exit_code"] == 0  # as a program whose printf fails unheard
    assert "disk" in [note["facts"].get("rule") for note in found.table("notes", limited_run)]
    assert "readings in a row" in told(limited_run)
