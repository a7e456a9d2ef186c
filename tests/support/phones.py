"""Phones for tests: a real adbd and an agent each, in a network namespace of its own, behind one private adb server.

Abstract sockets belong to a network namespace, so a phone's adbd reaches its own agent only, as on a real phone.
Where namespaces cannot be made (no root, a locked-down container) the phones share this machine's: each adbd then
sees every agent, which the host must cope with too. adbd gives a root shell to whoever connects; it listens in the
namespace only, or without one on a random port for the length of the test.
"""

import contextlib
import os
import random
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.adb import ADB, AdbServer, free_even_port
from support.agents import Agent, make_engine, make_model, wait_for

ADBD = Path(__file__).resolve().parents[2] / ".cache" / "debian" / "adbd.sh"


def need_phones() -> None:
    """Skip, with the reason, where adb or adbd are not."""
    if ADB is None:
        pytest.skip("no adb here: tests/setup/debian.sh services installs it")
    if not ADBD.exists():
        pytest.skip("no adbd here: tests/setup/debian.sh services unpacks it")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


class Namespace:
    """A network namespace joined to this one by a veth pair."""

    def __init__(self) -> None:
        tag = secrets.token_hex(4)
        self.name = f"bmoe-{tag}"
        self.link = f"bm{tag}"
        low = 4 * random.randrange(64)
        net = f"10.{random.randrange(200, 250)}.{random.randrange(256)}"
        self.here, self.there = f"{net}.{low + 1}", f"{net}.{low + 2}"
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            _ip("addr", "add", f"{self.here}/30", "dev", self.link)
            _ip("link", "set", self.link, "up")
            _ip("-n", self.name, "addr", "add", f"{self.there}/30", "dev", "eth0")
            _ip("-n", self.name, "link", "set", "eth0", "up")
            _ip("-n", self.name, "link", "set", "lo", "up")
        except BaseException:
            self.remove()
            raise

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def link_state(self, up: bool) -> None:
        """Take the cable out, or put it back: nothing is refused, nothing answers."""
        _ip("link", "set", self.link, "up" if up else "down")

    def remove(self) -> None:
        for arguments in (["link", "del", self.link], ["netns", "del", self.name]):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*arguments)


def make_namespace() -> Namespace | None:
    """A namespace, or None where they cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return None
    try:
        return Namespace()
    except (subprocess.CalledProcessError, OSError):
        return None


class Phone:
    """One adbd and one agent."""

    def __init__(self, folder: Path, number: int, settings: str, server: AdbServer) -> None:
        folder.mkdir(parents=True)
        self.server = server
        self.folder = folder
        self.namespace = make_namespace()
        self.port = free_even_port()
        self.serial = f"{self.namespace.there if self.namespace else '127.0.0.1'}:{self.port}"
        self.prefix = self.namespace.prefix if self.namespace else []
        self.adbd: subprocess.Popen[bytes] | None = None
        self.copies = folder / "copies"
        self.copies.mkdir()
        self.agent = Agent(folder / "home", self.prefix)
        model = make_model(folder / "models")
        engine = make_engine(folder, f"{settings},seed={number + 1},copy={self.copies}")
        self.agent.init(engine, model.parent, f"phone-{number}")

    def start_adbd(self) -> None:
        env = {**os.environ, "HOME": str(self.folder), "ADBD_PORT": str(self.port)}
        with (self.folder / "adbd.log").open("ab") as log:
            self.adbd = subprocess.Popen([*self.prefix, str(ADBD)], env=env, cwd=self.folder, stdout=log, stderr=log)

    def kill_adbd(self) -> None:
        if self.adbd is not None:
            self.adbd.kill()
            self.adbd.wait()
            self.adbd = None

    def connect(self) -> None:
        """`adb connect` until the server says the phone is there."""

        def there() -> bool:
            self.server.adb("connect", self.serial)
            return f"{self.serial}\tdevice" in self.server.adb("devices")

        wait_for(there, f"{self.serial} in adb devices")

    def destroy(self) -> None:
        self.agent.destroy()
        self.kill_adbd()
        if self.namespace is not None:
            self.namespace.remove()


class Shelf:
    """Some phones and the adb server that reaches them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = AdbServer(folder)
        self.phones: list[Phone] = []

    @property
    def env(self) -> dict[str, str]:
        """The environment for a host process that is to see this shelf only."""
        return {**self.server.env, "BMOE_HOME": str(self.folder / "host"), "XDG_RUNTIME_DIR": str(self.runtime)}

    @property
    def runtime(self) -> Path:
        """Where forwards' sockets lie: a short path, sun_path holds 107 bytes."""
        return Path("/tmp") / f"bmoe-{self.server.port}-{os.getpid()}"

    def add(self, settings: str) -> Phone:
        phone = Phone(self.folder / f"phone{len(self.phones)}", len(self.phones), settings, self.server)
        self.phones.append(phone)
        phone.start_adbd()
        phone.agent.start()
        phone.connect()
        return phone

    def destroy(self) -> None:
        for phone in self.phones:
            phone.destroy()
        self.server.destroy()
        shutil.rmtree(self.runtime, ignore_errors=True)


@contextlib.contextmanager
def shelf(folder: Path, phones: int = 1, settings: str = "tok_s=50,load_s=0.1,prefill_s=0.1") -> Iterator[Shelf]:
    """That many phones, connected, each with a serving agent, an engine of those settings and a model `tiny.gguf`."""
    need_phones()
    made = Shelf(folder)
    made.runtime.mkdir(mode=0o700)
    try:
        made.server.start()
        for _ in range(phones):
            made.add(settings)
        yield made
    finally:
        made.destroy()
