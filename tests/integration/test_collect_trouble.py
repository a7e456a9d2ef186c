"""A host that cannot keep what phones give says so once, ends when it was to end, and loses nothing of it."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agent_records import cell, plan
from support.agents import Agent, agent
from support.host import Host
from support.nights import submit, wait_done


@pytest.fixture(scope="module")
def phone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with agent(tmp_path_factory.mktemp("phone"), "tok_s=500,load_s=0,prefill_s=0") as made:
        made.start()
        yield made


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, to be filled or closed."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)


@pytest.mark.parametrize("what", ["BMOE_ARTIFACTS", "XDG_DATA_HOME", "BMOE_DB"])
def test_a_host_without_room_or_leave_to_write(phone: Agent, tmp_path: Path, disk: Path, what: str) -> None:
    host = Host(tmp_path / "host")
    host.env["BMOE_ARTIFACTS"] = str(tmp_path / "artifacts")
    if what == "BMOE_DB":
        host.db = disk / "runs.db"
    host.env[what] = str(host.db if what == "BMOE_DB" else disk)
    where = f"local:{phone.socket}"
    asked = plan([cell("a")])
    submit(phone, asked)
    assert wait_done(phone, asked) == "done"
    host.pair(phone, where)
    if what == "XDG_DATA_HOME":  # as far as it goes, so that nothing but what is written there is in the way
        (disk / "bmoe-fleet").mkdir(exist_ok=True)
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
    else:
        remount(disk, "ro")
    done = host.bmoe("collect", "--until-drained", "--device", where, "--lease", "3", code=3)
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "was not drained" in last
    assert ("readonly database" if what == "BMOE_DB" else str(disk)) in last
    assert done.stderr.count(" lost ") + done.stderr.count(" database ") <= 2
    remount(disk, "rw,size=64m")
    host.bmoe("collect", "--until-drained", "--device", where)
    assert [tuple(row) for row in host.rows("select cell, complete from runs order by run_no")] == [("a", 1)]
