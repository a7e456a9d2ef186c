"""The phone's doctor: what each version of Android needs, where files lie, what an executable needs, and records."""

import contextlib
import json
import os
import struct
from pathlib import Path

import pytest
from bmoe_agent import initialise
from bmoe_agent.doctor import cli, elf
from bmoe_agent.doctor.check import run
from bmoe_agent.doctor.files import Files, mount_of, mounts
from bmoe_agent.doctor.phone import Phone
from bmoe_agent.doctor.record import Anonymous, describe, record
from bmoe_agent.roots import Roots, lay
from bmoe_agent.sampling import Sampler
from bmoe_proto import android, kernel

pytestmark = pytest.mark.agent
TREES = Path(__file__).parent.parent / "support" / "trees"


def states(checks, name):
    return [(check.state, check.seen) for check in checks if check.name == name]


@pytest.mark.parametrize(
    ("sdk", "settings", "state"),
    [
        (30, {}, "ok"),
        (31, {}, "unknown"),
        (31, {"max_phantom_processes": "null"}, "fail"),
        (31, {"max_phantom_processes": "2147483647", "sync_disabled": "none"}, "fail"),
        (31, {"max_phantom_processes": "2147483647", "sync_disabled": "persistent"}, "ok"),
        (32, {}, "unknown"),
        (33, {android.MONITOR: "null"}, "fail"),
        (33, {android.MONITOR: "false"}, "ok"),
        (33, {android.MONITOR: "null", "max_phantom_processes": "2147483647"}, "fail"),
        (34, {android.MONITOR_PROPERTY: "false"}, "ok"),
        (35, {android.MONITOR: "true", android.MONITOR_PROPERTY: "false"}, "fail"),
    ],
)
def test_phantom_limits_by_version(sdk, settings, state):
    assert android.phantom_state(sdk, settings)[0] == state


def test_each_version_gets_its_own_commands():
    assert android.phantom_fix(30) == []
    assert any("device_config put activity_manager max_phantom_processes" in line for line in android.phantom_fix(31))
    assert not any("device_config" in line for line in android.phantom_fix(33))
    assert "Developer options" in android.phantom_fix(34)[1]
    assert android.freezer_fix(29) == []


@pytest.mark.parametrize(
    ("sdk", "settings", "state"),
    [
        (29, {}, "ok"),
        (33, {}, "unknown"),
        (33, {android.FREEZER: "disabled", "use_freezer": "true"}, "ok"),
        (33, {android.FREEZER: "null", "use_freezer": "true"}, "warn"),
        (33, {android.FREEZER: "null", "use_freezer": "null"}, "warn"),
        (30, {android.FREEZER: "null"}, "unknown"),
    ],
)
def test_freezer_by_version(sdk, settings, state):
    assert android.freezer_state(sdk, settings)[0] == state


def phone(tree, tmp_path, answers=None):
    roots = lay(TREES / f"{tree}.toml", tmp_path / tree)
    return Phone(roots, roots.properties, tmp_path, lambda argv: (answers or {}).get(argv[-1]))


def test_a_phone_that_keeps_background_apps_off_its_big_cores_fails(tmp_path):
    (bad,) = phone("background_big_cores_excluded", tmp_path).fast_cores()
    assert bad.state == "fail"
    assert "0-3" in bad.seen
    assert any("set-standby-bucket" in line for line in bad.fix)
    (good,) = phone("thermal_readable_capped", tmp_path).fast_cores()
    assert (good.state, "0-7" in good.seen) == ("ok", True)


def test_what_an_app_may_not_ask_is_unknown_and_still_has_its_command(tmp_path):
    found = run(phone("thermal_readable_capped", tmp_path).lookers())
    assert [check.state for check in found if check.name == "phantom_processes"] == ["unknown"]
    battery = next(check for check in found if check.name == "battery_exemption")
    assert (battery.state, battery.fix[0]) == ("unknown", "adb shell dumpsys deviceidle whitelist +com.termux")


def test_settings_are_asked_one_word_at_a_time():
    answers = {android.MONITOR: "false", "use_freezer": "true"}
    asked = Phone(Roots(), {"ro.build.version.sdk": "33"}, None, lambda argv: answers.get(argv[-1]))
    assert asked.settings() == answers
    assert [check.state for check in asked.phantom()] == ["ok"]
    (frozen,) = asked.freezer()
    assert (frozen.state, frozen.fix[0]) == ("warn", android.freezer_fix(33)[0])


MOUNTS = r"""21 1 254:5 / / ro,relatime shared:1 - ext4 /dev/block/dm-5 ro
60 21 254:44 / /data rw,nosuid,nodev,noatime shared:40 - f2fs /dev/block/dm-44 rw,lazytime
77 21 0:90 / /storage/emulated rw,nosuid,nodev,noexec,noatime shared:61 - fuse /dev/fuse rw,user_id=0
78 21 0:91 / /mnt/with\040blank rw - tmpfs tmpfs rw
broken line
"""


def test_the_longest_mount_holds_a_path():
    table = mounts(MOUNTS)
    assert len(table) == 4
    assert mount_of("/data/data/com.termux/files/home", table).kind == "f2fs"
    assert mount_of("/storage/emulated/0/Download", table).kind == "fuse"
    assert "noexec" in mount_of("/storage/emulated/0/bmoe-cli", table).options
    assert mount_of("/storage/emulated2", table).where == "/"
    assert mount_of("/mnt/with blank/x", table).kind == "tmpfs"
    assert mount_of("/x", []) is None


def program(*, needed=(), runpath="", machine=183, alignment=16384, wide=True):
    """The smallest ELF file with a dynamic section: one PT_LOAD over all of it, one PT_DYNAMIC."""
    strings = b"\0"
    places = {}
    for text in (*needed, runpath):
        places[text] = len(strings)
        strings += text.encode() + b"\0"
    tags = [(1, places[name]) for name in needed] + ([(29, places[runpath])] if runpath else [])
    head, entry, pair = (64, 56, "<QQ") if wide else (52, 32, "<II")
    at = head + 2 * entry
    size = struct.calcsize(pair) * (len(tags) + 2)
    base = 0x10000
    tags += [(5, base + at + size), (0, 0)]
    dynamic = b"".join(struct.pack(pair, *tag) for tag in tags)
    total = at + size + len(strings)
    if wide:
        load = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, total, total, alignment)
        section = struct.pack("<IIQQQQQQ", 2, 6, at, base + at, base + at, size, size, 8)
        header = struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, head, 0, 0, head, entry, 2, 0, 0, 0)
    else:
        load = struct.pack("<IIIIIIII", 1, 0, base, base, total, total, 5, alignment)
        section = struct.pack("<IIIIIIII", 2, at, base + at, base + at, size, size, 6, 4)
        header = struct.pack("<HHIIIIIHHHHHH", 3, machine, 1, 0, head, 0, 0, head, entry, 2, 0, 0, 0)
    ident = b"\x7fELF" + bytes([2 if wide else 1, 1, 1]) + bytes(9)
    return ident + header + load + section + dynamic + strings


@pytest.mark.parametrize("wide", [True, False])
def test_an_executable_says_what_it_needs(tmp_path, wide):
    path = tmp_path / "engine"
    path.write_bytes(program(needed=("libc.so", "libc++_shared.so"), runpath="$ORIGIN:/x/lib", wide=wide))
    found = elf.read(path)
    assert (found.machine, found.needed) == ("aarch64", ("libc.so", "libc++_shared.so"))
    assert found.run_path == ("$ORIGIN", "/x/lib")
    assert found.search(path, ["/given"]) == ("/given", str(tmp_path), "/x/lib")
    assert found.smallest_alignment == 16384


def test_what_is_no_executable_is_said_and_never_crashes(tmp_path):
    whole = program(needed=("libc.so",))
    path = tmp_path / "file"
    end_of_dynamic = len(whole) - len(b"\0libc.so\0")
    for cut in range(end_of_dynamic):
        path.write_bytes(whole[:cut])
        with pytest.raises(elf.ElfError):
            elf.read(path)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        with contextlib.suppress(elf.ElfError):
            elf.read(path)
    path.write_bytes(b"#!/bin/sh\n")
    with pytest.raises(elf.ElfError, match="a script"):
        elf.read(path)


@pytest.fixture
def home(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    (models / "m.gguf").write_bytes(b"GGUF")
    engine = tmp_path / "bmoe-cli"
    machine = {"x86_64": 62, "aarch64": 183}.get(os.uname().machine, 0)
    engine.write_bytes(program(needed=("libc++_shared.so",), machine=machine))
    engine.chmod(0o755)
    initialise.init(tmp_path / "home", engines=[str(engine)], models=[str(models)])
    return tmp_path / "home"


def test_an_engine_that_lacks_its_library_is_told_before_the_night(home, tmp_path):
    found = run(Files(Roots(), home, android=False).lookers())
    ((state, seen),) = states(found, "engine_linking")
    assert (state, "libc++_shared.so" in seen) == ("fail", True)
    (tmp_path / "libc++_shared.so").write_bytes(b"")
    text = (home / "config.toml").read_text().replace(
        f'bmoe = "{tmp_path}/bmoe-cli"\n', ""
    ) + f'\n[engines.bmoe]\npath = "{tmp_path}/bmoe-cli"\nld_library_path = "{tmp_path}"\n'
    (home / "config.toml").write_text(text)
    assert [state for state, _ in states(run(Files(Roots(), home, android=False).lookers()), "engine_linking")] == [
        "ok"
    ]


def test_an_engine_aligned_to_small_pages_does_not_suit_large_ones(home, tmp_path):
    (tmp_path / "bmoe-cli").write_bytes(
        program(machine={"x86_64": 62, "aarch64": 183}.get(os.uname().machine, 0), alignment=4096)
    )
    found = run(Files(Roots(page_bytes=16384), home, android=False).lookers())
    ((state, seen),) = states(found, "engine_linking")
    assert (state, "16384" in seen) == ("fail", True)


def test_models_on_emulated_storage_fail(home, tmp_path):
    tree = tmp_path / "tree"
    (tree / "proc/self").mkdir(parents=True)
    (tree / "proc/self/mountinfo").write_text(
        f"1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / {tmp_path}/models rw - fuse f rw\n"
    )
    found = run(Files(Roots(tree / "proc", tree / "sys"), home, android=False).lookers())
    ((state, seen),) = states(found, "model_storage")
    assert (state, "O_DIRECT" in seen) == ("fail", True)


def test_personal_details_go_and_the_rest_stays():
    anonymous = Anonymous(["R58N12ABCDE", "/data/data/com.termux/files/home"])
    clean = anonymous.clean(
        "serial R58N12ABCDE mac 02:11:22:aa:bb:cc ip 192.168.1.23 owner jane.d+x@example.org "
        "/storage/1A2B-3C4D/models /data/data/com.termux/files/home/bmoe-cli MemTotal: 15681024 kB 0::/uid_10312"
    )
    for word in ("R58N12", "aa:bb", "192.168", "jane", "1A2B", "files/home"):
        assert word not in clean
    for word in ("MemTotal: 15681024 kB", "bmoe-cli", "/uid_10312"):
        assert word in clean


def test_a_record_can_stand_in_for_its_phone(tmp_path):
    file = tmp_path / "record.toml"
    counts = record(file, Roots(), tmp_path)
    assert counts["text"] >= 5
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.uname().nodename not in file.read_text() or len(os.uname().nodename) < 3
    roots = lay(file, tmp_path / "laid")
    assert roots.substituted
    with Sampler(roots, 4242) as sampler:
        values = kernel.sample_values(sampler.sample("entry").text).values
    assert values["rss_anon_kib"] > 0
    assert values["mem_total_kib"] > 100_000


def test_a_record_of_a_tree_says_the_same_as_the_tree(tmp_path):
    first = lay(TREES / "thermal_readable_capped.toml", tmp_path / "one")
    described = describe(first, tmp_path)
    assert described["properties"]["ro.build.version.sdk"] == "34"
    assert described["refused"]["proc/stat"] == "EACCES"
    assert described["settings"][android.MONITOR] == "refused"
    assert described["text"]["sys/class/thermal/thermal_zone6/type"] == "cpu-hw-trip-0\n"


def test_the_command_answers_whole_on_a_bare_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("BMOE_AGENT_TREE", raising=False)
    assert cli.main(["--home", str(tmp_path / "none"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert {check["state"] for check in document["checks"]} <= {"ok", "warn", "fail", "unknown"}
    assert "failed itself" not in str(document)
    assert cli.main(["--home", str(tmp_path / "none")]) == 1
    assert "> bmoe-agent init" in capsys.readouterr().out
    assert cli.main(["--no-such-option"]) == 2


def test_a_check_that_breaks_does_not_stop_the_others():
    def breaks():
        raise RuntimeError("oh")
        yield

    assert [(check.name, check.state) for check in run([("one", breaks), ("two", breaks)])] == [
        ("one", "unknown"),
        ("two", "unknown"),
    ]
