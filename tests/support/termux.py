"""A clean root as Termux has one: a PREFIX with a Python of its own, a home, and nothing else on PATH.

What Termux' bootstrap brings is the host's own (sh, coreutils, grep, sed, find); `pkg`, `sv`, `sv-enable` and `termux-wake-lock` are
stubs. The stub of `pkg` puts in what the real one would (pip, grpcio, the supervisor); the stub of `sv` really runs the service's
`run`. pip has no index: protobuf comes, in pure Python as on a phone, from a folder of wheels made of what is installed here.
"""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALL = REPOSITORY / "termux" / "install.sh"
COMMANDS = [
    "sh",
    "cat",
    "cp",
    "mv",
    "rm",
    "mkdir",
    "ln",
    "ls",
    "chmod",
    "sed",
    "grep",
    "readlink",
    "sleep",
    "sha256sum",
    "head",
    "tail",
    "tr",
    "du",
    "cut",
    "dirname",
    "basename",
    "env",
    "uname",
    "id",
    "touch",
    "wc",
    "sort",
    "find",
    "date",
    "mktemp",
    "kill",
    "cmp",
]
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"

PKG = """#!@PREFIX@/bin/sh
# what `pkg install` would bring, from the folder the test laid ready
echo "pkg $*" >>"@ROOT@/pkg.log"
[ ! -e "@ROOT@/no-network" ] || { echo "E: no network" >&2; exit 100; }
[ "$1" = install ] || exit 1
for name in "$@"; do
    case $name in
        python) ln -sf python@VERSION@ "@PREFIX@/bin/python3" ;;
        python-pip) cp -Rn "@ROOT@"/ready/pip/. "@SITE@/" ;;
        python-grpcio) cp -Rn "@ROOT@"/ready/grpcio/. "@SITE@/" ;;
        termux-services) cp -R "@ROOT@"/ready/services/. "@PREFIX@/" ;;
    esac
done
"""
SV = """#!@PREFIX@/bin/sh
# sv up|down|stop|restart|status NAME: runs a service's `run` for real, with what it says in run.log
place=$SVDIR/$2
running() { [ -f "$place/pid" ] && kill -0 "$(cat "$place/pid")" 2>/dev/null; }
echo "sv $*" >>"@ROOT@/sv.log"
case $1 in
    up)
        [ -x "$place/run" ] && [ ! -e "$place/down" ] || exit 1
        running || { "$place/run" >>"$place/run.log" 2>&1 </dev/null & echo $! >"$place/pid"; }
        ;;
    down|stop)
        running || exit 0
        kill "$(cat "$place/pid")"
        while running; do sleep 0.05; done
        ;;
    restart) "$0" down "$2" && "$0" up "$2" ;;
    status) if running; then echo "run: $2: (pid $(cat "$place/pid"))"; else echo "down: $2"; exit 1; fi ;;
esac
"""
WAKE = """#!@PREFIX@/bin/sh
echo "${0##*/}" >>"@ROOT@/wake.log"
"""
SERVICES = """export SVDIR=$PREFIX/var/service
export LOGDIR=$PREFIX/var/log
"""


def build_wheel(into: Path) -> Path:
    """The product's wheel, made offline with the environment's own hatchling; skips where there is none."""
    if find_spec("hatchling") is None:
        pytest.skip("no hatchling in this environment: make venv installs it")
    into.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "-w", str(into), str(REPOSITORY)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = into.glob("*.whl")
    return wheel


def wheel_of_installed(name: str, into: Path) -> None:
    """A pure-Python wheel of an installed distribution: its .py files and metadata, without compiled parts."""
    found = metadata.distribution(name)
    files = [
        file
        for file in found.files or ()
        if not file.is_absolute()
        and ".." not in file.parts
        and "__pycache__" not in file.parts
        and file.suffix != ".so"
    ]
    stem = f"{found.metadata['Name'].replace('-', '_')}-{found.version}"
    into.mkdir(parents=True, exist_ok=True)
    rows = []
    with zipfile.ZipFile(into / f"{stem}-py3-none-any.whl", "w") as archive:
        for file in files:
            if file.parts[0].endswith(".dist-info") and file.name in {"RECORD", "WHEEL", "INSTALLER", "REQUESTED"}:
                continue
            data = Path(str(found.locate_file(file))).read_bytes()
            archive.writestr(str(file), data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{file},sha256={digest},{len(data)}")
        info = f"{stem}.dist-info"
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "\n".join([*rows, f"{info}/WHEEL,,", f"{info}/RECORD,,"]) + "\n")


class Termux:
    """One such root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.prefix = root / "usr"
        self.home = root / "home"
        self.wheels = root / "wheels"
        self.env = {
            "PREFIX": str(self.prefix),
            "HOME": str(self.home),
            "PATH": str(self.prefix / "bin"),
            "TMPDIR": str(root / "tmp"),
            "LANG": "C.UTF-8",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_NO_CACHE_DIR": "1",
            "BMOE_SETUP_TRIES": "2",
        }
        for folder in (self.prefix / "bin", self.home, root / "tmp"):
            folder.mkdir(parents=True)
        for name in COMMANDS:
            found = shutil.which(name)
            assert found is not None, name
            (self.prefix / "bin" / name).symlink_to(found)
        self.site = self._python()
        for name, text in {"pkg": PKG, "termux-wake-lock": WAKE, "termux-wake-unlock": WAKE}.items():
            self._script(self.prefix / "bin" / name, text)
        self._ready()

    def _script(self, path: Path, text: str) -> None:
        for mark, value in (
            ("@PREFIX@", self.prefix),
            ("@ROOT@", self.root),
            ("@SITE@", self.site),
            ("@VERSION@", VERSION),
        ):
            text = text.replace(mark, str(value))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def _python(self) -> Path:
        """This machine's Python with a prefix of its own: a copied binary finds its library beside itself."""
        binary = self.prefix / "bin" / f"python{VERSION}"
        shutil.copy2(os.path.realpath(sys.executable), binary)
        shared = sysconfig.get_config_var("LIBDIR")
        library = self.prefix / "lib" / f"python{VERSION}"
        library.mkdir(parents=True)
        for entry in Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix})).iterdir():
            if entry.name not in {"site-packages", "dist-packages", "__pycache__", "sitecustomize.py"}:
                (library / entry.name).symlink_to(entry)
        self.env["LD_LIBRARY_PATH"] = str(shared)
        ask = "import site, sys; print(sys.prefix); print(site.getsitepackages()[-1])"
        done = subprocess.run(
            [binary, "-c", ask], env=self.env, capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode or not done.stdout.startswith(str(self.prefix)):
            pytest.skip(f"this machine's Python does not run from a copy: {done.stdout}{done.stderr[-300:]}")
        site = Path(done.stdout.splitlines()[1])
        site.mkdir(parents=True, exist_ok=True)
        return site

    def _ready(self) -> None:
        for package, distributions in {"pip": ["pip"], "grpcio": ["grpcio"]}.items():
            folder = self.root / "ready" / package
            folder.mkdir(parents=True)
            for name in distributions:
                found = metadata.distribution(name)
                for top in {file.parts[0] for file in found.files or () if file.parts[0] not in {"..", "/"}}:
                    (folder / top).symlink_to(found.locate_file(top))  # type: ignore[arg-type]
        services = self.root / "ready" / "services"
        self._script(services / "bin" / "sv", SV)
        self._script(services / "share/termux-services/svlogger", WAKE)
        self._script(services / "etc/profile.d/start-services.sh", SERVICES)
        for name in ("protobuf", "typing-extensions"):
            wheel_of_installed(name, self.wheels)

    def run(self, *arguments: str, code: int | None = 0, stdin: str | None = None, **env: str) -> str:
        """Run one command with nothing but this root around it; both streams together."""
        done = subprocess.run(
            arguments,
            env={**self.env, **env},
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
            **({"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}),  # type: ignore[call-overload]
        )
        assert code is None or done.returncode == code, f"{arguments}: exit {done.returncode}\n{done.stdout}"
        return str(done.stdout)

    def command(self, name: str) -> str:
        """The path of a command of this root."""
        return str(self.prefix / "bin" / name)

    def destroy(self) -> None:
        """End the service, whatever a test left."""
        if (self.prefix / "bin/sv").exists():
            self.run(self.command("sv"), "down", "bmoe-agent", code=None, SVDIR=str(self.prefix / "var/service"))
