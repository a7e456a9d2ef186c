"""termux/install.sh for real in a clean root: first run, second run, upgrade, removal, and what goes wrong on phones."""

import json
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import wait_for
from support.termux import INSTALL, REPOSITORY, Termux, build_wheel

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture
def termux(tmp_path: Path) -> Iterator[Termux]:
    made = Termux(tmp_path / "t")
    try:
        yield made
    finally:
        made.destroy()


def tree(folder: Path) -> dict[str, str]:
    """Every file that an installation makes and a second one must leave as it is."""
    return {
        str(path.relative_to(folder)): path.read_text(errors="replace")
        for top in ("usr/bin", "usr/var/service", "home/.termux", "home/.bmoe-agent")
        for path in sorted((folder / top).rglob("*"))
        if path.is_file() and not path.is_symlink() and path.suffix not in {".log", ""} | {f".{n}" for n in range(20)}
    }


def serving(termux: Termux) -> bool:
    return json.loads(termux.run(termux.command("bmoe-agent"), "status", "--json", code=None).splitlines()[-1])[
        "running"
    ]


def test_a_phones_life(termux: Termux, wheel: Path, tmp_path: Path) -> None:
    # first run: nothing is there but the bootstrap
    engine, models = termux.home / "bmoe-cli", termux.home / "models"
    engine.write_text(f'#!{termux.prefix}/bin/sh\nexec {termux.prefix}/bin/bmoe-sim "$@"\n')
    engine.chmod(0o755)
    models.mkdir()
    sh = termux.command("sh")
    first = termux.run(
        sh, str(INSTALL), str(wheel), "--engine", str(engine), "--models", "~/models", "--name", "shelf-1"
    )
    secret = re.findall(r"\b(?:[0-9a-f]{64}|secret +\S+)\b", first)
    assert secret, first
    assert (termux.root / "pkg.log").read_text() == "pkg install -y python python-pip python-grpcio termux-services\n"
    settings = (termux.home / ".bmoe-agent/config.toml").read_text()
    assert 'name = "shelf-1"' in settings
    assert str(engine) in settings
    assert str(models) in settings
    wait_for(lambda: serving(termux), "the service's agent to answer")
    assert "python implementation" in termux.run(termux.command("bmoe-agent"), "doctor", code=None)
    boot = (termux.home / ".termux/boot/bmoe-agent").read_text()
    assert "termux-wake-lock" in boot
    assert "start-services.sh" in boot

    # the boot script does what it says
    termux.run(sh, str(termux.home / ".termux/boot/bmoe-agent"))
    assert "termux-wake-lock" in (termux.root / "wake.log").read_text()

    # second run, by the kept script: nothing changes, the secret is not shown again, the agent is not disturbed
    before, pid = tree(termux.root), (termux.prefix / "var/service/bmoe-agent/pid").read_text()
    second = termux.run(termux.command("bmoe-agent-setup"))
    assert "installed already" in second
    assert not set(secret) & set(re.findall(r"\b(?:[0-9a-f]{64}|secret +\S+)\b", second))
    assert tree(termux.root) == before
    assert (termux.prefix / "var/service/bmoe-agent/pid").read_text() == pid
    assert (termux.root / "pkg.log").read_text().count("\n") == 1

    # Python is upgraded under it: the service and the command say so, and do not start anything with orphaned packages
    termux.run(termux.command("sv"), "down", "bmoe-agent", SVDIR=str(termux.prefix / "var/service"))
    configured = termux.home / ".local/share/bmoe-fleet/venv/pyvenv.cfg"
    configured.write_text(re.sub(r"(?m)^version *=.*$", "version = 3.10.2", configured.read_text()))
    told = termux.run(termux.command("bmoe-agent"), "status", code=3)
    assert "bmoe-agent-setup --upgrade" in told
    termux.run(termux.command("sv"), "up", "bmoe-agent", SVDIR=str(termux.prefix / "var/service"))
    attention = termux.home / ".local/share/bmoe-fleet/attention"
    wait_for(attention.exists, "the service to notice")
    assert "installed for 3.10" in attention.read_text()
    wait_for(
        lambda: "--upgrade" in (termux.prefix / "var/service/bmoe-agent/run.log").read_text(),
        "the service's log to say so",
    )

    # upgrade: another wheel of the same number, a new environment, the same identity, the agent up again
    identity = (termux.home / ".bmoe-agent/uuid").read_text()
    newer = tmp_path / wheel.name
    shutil.copy(wheel, newer)
    with zipfile.ZipFile(newer, "a") as archive:
        archive.writestr("bmoe_agent/mark_of_the_newer_wheel.py", "")
    upgraded = termux.run(termux.command("bmoe-agent-setup"), "--upgrade", str(newer))
    assert "making it again" in upgraded
    assert "restarting the agent" in upgraded
    assert list((termux.home / ".local").rglob("mark_of_the_newer_wheel.py"))
    assert (termux.home / ".bmoe-agent/uuid").read_text() == identity
    wait_for(lambda: serving(termux), "the upgraded agent to answer")
    assert not attention.exists()

    # removal keeps the records unless told otherwise
    refused = termux.run(termux.command("bmoe-agent-setup"), "--remove", "--purge", code=2)
    assert "--yes" in refused
    setup = (termux.prefix / "bin/bmoe-agent-setup").read_text()
    removed = termux.run(termux.command("bmoe-agent-setup"), "--remove")
    assert "is kept" in removed
    assert (termux.home / ".bmoe-agent/uuid").read_text() == identity
    for gone in ("usr/bin/bmoe-agent", "usr/bin/bmoe-sim", "usr/bin/bmoe-agent-setup", "usr/var/service/bmoe-agent",
                 "home/.local/share/bmoe-fleet", "home/.termux/boot/bmoe-agent"):  # fmt: skip
        assert not (termux.root / gone).exists(), gone
    kept = termux.root / "setup"
    kept.write_text(setup)
    termux.run(sh, str(kept), "--remove", "--purge", "--yes")
    assert not (termux.home / ".bmoe-agent").exists()


def test_what_it_cannot_do_is_said(termux: Termux, wheel: Path) -> None:
    sh = termux.command("sh")
    assert "not Termux" in termux.run(sh, str(INSTALL), code=3, PREFIX="")
    assert "no such option" in termux.run(sh, str(INSTALL), "--no-such", code=2)
    (termux.root / "no-network").touch()
    assert "there is no Python" in termux.run(sh, str(INSTALL), str(wheel), code=3)
    (termux.root / "no-network").unlink()
    assert "no such wheel" in termux.run(sh, str(INSTALL), "./absent.whl", code=3)
    # pip's index cannot be reached: the name of the distribution is all there is
    assert "pip cannot get it" in termux.run(sh, str(INSTALL), code=3)

    # piped in as when pasted, with somebody else's file in the way, a bad engine and no supervisor that answers
    (termux.home / ".termux/boot").mkdir(parents=True)
    (termux.home / ".termux/boot/bmoe-agent").write_text("#!/bin/sh\nmy own\n")
    (termux.prefix / "var/service/bmoe-agent").mkdir(parents=True)
    (termux.prefix / "var/service/bmoe-agent/run").write_text("#!/bin/sh\nmy own\n")
    shutil.copy(wheel, termux.home)
    told = termux.run(sh, "-s", "--", "--engine", "/nowhere/bmoe-cli", code=1, stdin=INSTALL.read_text())
    for words in ("could not: use /nowhere/bmoe-cli", "find models", "it is not this script's", "restart Termux"):
        assert words in told, told
    assert re.search(r"secret +\S+", told), told
    assert (termux.home / ".termux/boot/bmoe-agent").read_text().endswith("my own\n")
    assert (termux.prefix / "bin/bmoe-agent-setup").exists()

    # pip has no newer grpcio to build, and says so instead of trying
    shutil.rmtree(termux.home / ".local")
    shutil.rmtree(termux.wheels)
    termux.wheels.mkdir()
    assert "pip cannot install what" in termux.run(sh, str(INSTALL), "--no-service", "--no-boot", code=3)


def test_shellcheck_is_clean() -> None:
    found = shutil.which("shellcheck")
    if found is None:
        pytest.skip("no shellcheck here: make lint installs it on Debian")
    scripts = [*REPOSITORY.glob("termux/*.sh")]
    done = subprocess.run([found, *map(str, scripts)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout
