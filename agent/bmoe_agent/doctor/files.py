"""Where models, engines and the record lie, and whether that is good enough.

In: the agent's configuration. Out: checks of the kind of storage, ownership, free space, and of each engine: place, linking, start.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bmoe_agent import config as configuration
from bmoe_agent.doctor import elf
from bmoe_agent.doctor.check import FAIL, OK, UNKNOWN, WARN, Check, Looker
from bmoe_agent.roots import Roots

EMULATED = frozenset({"fuse", "sdcardfs", "esdfs", "vfat", "exfat", "fuseblk"})
NOT_DISK = frozenset({"tmpfs", "ramfs"})
_LITTLE_BYTES = 256 << 20
_FEW_MODELS = 16
_SYSTEM_LIBRARIES = (
    "/system/lib64", "/apex/com.android.runtime/lib64/bionic", "/vendor/lib64",
    "/system/lib", "/apex/com.android.runtime/lib/bionic",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo: where, what kind, with which options."""

    where: str
    kind: str
    options: frozenset[str]


def mounts(text: str) -> list[Mount]:
    """Parse mountinfo: `36 35 98:0 / /mnt rw,noexec ... - ext4 /dev/root rw`; blanks in paths are octal."""
    found = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        words, rest = before.split(), after.split()
        if dash and len(words) >= 6 and rest:
            where = words[4]
            for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
                where = where.replace(code, char)
            found.append(Mount(where, rest[0], frozenset(words[5].split(","))))
    return found


def mount_of(path: str, table: list[Mount]) -> Mount | None:
    """The mount a path is on: the longest that holds it, of equal ones the last, which lies on top."""
    best: Mount | None = None
    for mount in table:
        base = mount.where.rstrip("/") + "/"
        if (path.rstrip("/") + "/").startswith(base) and (best is None or len(mount.where) >= len(best.where)):
            best = mount
    return best


@dataclass(frozen=True, slots=True)
class Files:
    """Checks of one agent's files."""

    roots: Roots
    home: Path
    android: bool

    def lookers(self) -> list[tuple[str, Looker]]:
        """All checks of this module."""
        return [
            ("home", self.home_there),
            ("model_storage", self.model_storage),
            ("model_ownership", self.model_ownership),
            ("engine", self.engines),
            ("free_space", self.free_space),
            ("baseline", self.baseline),
        ]

    def _config(self) -> configuration.Config | None:
        try:
            return configuration.load(self.home)
        except configuration.ConfigError:
            return None

    def home_there(self) -> Iterator[Check]:
        """Whether an agent lives here, and its secret is its own."""
        try:
            settings = configuration.load(self.home)
        except configuration.ConfigError as problem:
            yield Check("home", FAIL, str(problem), ["bmoe-agent init --engine PATH --models DIR"])
            return
        mode = (self.home / "secret").stat().st_mode & 0o777
        if mode & 0o077:
            yield Check(
                "home", FAIL, f"{self.home / 'secret'} has mode {mode:o}", [f"chmod 600 {self.home / 'secret'}"]
            )
        elif not settings.kept_for_store:
            yield Check("home", WARN, f"{self.home}: not paired with a host yet", ["on the host: bmoe pair"])
        else:
            yield Check("home", OK, str(self.home))

    def model_storage(self) -> Iterator[Check]:
        """Whether models lie on real storage. Emulated storage opens with O_DIRECT and may return wrong data."""
        settings = self._config()
        if settings is None:
            return
        if not settings.model_dirs:
            yield Check("model_storage", FAIL, "no model directory", ["bmoe-agent init --models DIR"])
        table = mounts(self.roots.text("proc/self/mountinfo") or "")
        for directory in settings.model_dirs:
            real = os.path.realpath(directory)
            mount = mount_of(real, table)
            if not directory.is_dir():
                yield Check("model_storage", FAIL, f"{directory}: not there", ["bmoe-agent init --models DIR"])
            elif mount is None:
                yield Check("model_storage", UNKNOWN, f"{directory}: no mount table says what it is on")
            elif mount.kind in EMULATED:
                seen = (
                    f"{directory} is on {mount.kind}: reads go through another process, O_DIRECT can return wrong data"
                )
                yield Check("model_storage", FAIL, seen, [f"mkdir -p ~/models && mv {directory}/*.gguf ~/models/"])
            elif mount.kind in NOT_DISK:
                yield Check("model_storage", FAIL, f"{directory} is on {mount.kind}: it is memory, not flash")
            else:
                yield Check("model_storage", OK, f"{directory} is on {mount.kind}")

    def model_ownership(self) -> Iterator[Check]:
        """Whether mincore would tell the truth: only to a file's owner, or who could write it."""
        settings = self._config()
        if settings is None:
            return
        names = settings.models()
        if settings.model_dirs and not names:
            yield Check("model_ownership", WARN, "no gguf file in the model directories")
        own, foreign = 0, []
        for name in names[:_FEW_MODELS]:
            path = settings.model(name)
            if path.stat().st_uid == os.geteuid() or os.access(path, os.W_OK):
                own += 1
            else:
                foreign.append(path)
        for path in foreign:
            seen = f"{path} belongs to uid {path.stat().st_uid}: its residency will be `unknown (not owner)`"
            yield Check("model_ownership", WARN, seen, [f"cp {path} {path}.own && mv -f {path}.own {path}"])
        if own:
            yield Check("model_ownership", OK, f"{own} models are this uid's own")

    def engines(self) -> Iterator[Check]:
        """Each engine: where it lies, whether its libraries are found, whether it starts."""
        settings = self._config()
        if settings is None:
            return
        if not settings.engines:
            yield Check("engine", FAIL, "no engine is configured", ["bmoe-agent init --engine PATH"])
        for engine in settings.engines.values():
            yield from self._engine(engine)

    def _engine(self, engine: configuration.EngineConfig) -> Iterator[Check]:
        path = engine.path
        copy = f"cp {path} ~/ && chmod +x ~/{path.name} && bmoe-agent init --engine {engine.name}=$HOME/{path.name}"
        if not path.is_file():
            yield Check("engine", FAIL, f"{engine.name}: {path} is not there", ["bmoe-agent init --engine PATH"])
            return
        if not os.access(path, os.X_OK):
            yield Check("engine", FAIL, f"{engine.name}: {path} may not be executed", [f"chmod +x {path}", copy])
            return
        mount = mount_of(os.path.realpath(path), mounts(self.roots.text("proc/self/mountinfo") or ""))
        if mount is not None and (mount.kind in EMULATED or "noexec" in mount.options):
            yield Check("engine", FAIL, f"{engine.name}: {path} is on {mount.kind}, where nothing is executed", [copy])
            return
        if self.android and not os.path.realpath(path).startswith(("/data/data/", "/data/user/")):
            yield Check(
                "engine", WARN, f"{engine.name}: {path} is outside Termux's home: Android may refuse it", [copy]
            )
        yield from self._linking(engine)
        yield self._start(engine)

    def _linking(self, engine: configuration.EngineConfig) -> Iterator[Check]:
        try:
            found = elf.read(engine.path)
        except (elf.ElfError, OSError) as problem:
            yield Check("engine_linking", UNKNOWN, str(problem))
            return
        machine = platform.machine()
        if found.machine != {"armv8l": "arm", "armv7l": "arm", "i686": "x86", "amd64": "x86_64"}.get(machine, machine):
            yield Check("engine_linking", FAIL, f"{engine.name} is built for {found.machine}, this is {machine}")
            return
        page = self.roots.page_size
        if found.smallest_alignment and found.smallest_alignment < page:
            seen = (
                f"{engine.name}: aligned to {found.smallest_alignment} bytes, pages here are {page}: it will not load"
            )
            yield Check("engine_linking", FAIL, seen, ["build it with -Wl,-z,max-page-size=16384"])
            return
        extra = engine.ld_library_path.split(":") if engine.ld_library_path else []
        places = found.search(engine.path, extra)
        if "libc++_shared.so" in found.needed and not _in("libc++_shared.so", places):
            beside = f"pkg install libc++ patchelf && cp $PREFIX/lib/libc++_shared.so {engine.path.parent}/"
            fix = [
                f"{beside} && patchelf --set-rpath '$ORIGIN' {engine.path}",
                f'or in {self.home / "config.toml"}: [engines.{engine.name}] ld_library_path = "{engine.path.parent}"',
            ]
            where = ", ".join(places) or "no run path and no ld_library_path"
            yield Check("engine_linking", FAIL, f"{engine.name} needs libc++_shared.so, not found ({where})", fix)
            return
        missing = (
            [name for name in found.needed if not _in(name, (*places, *_SYSTEM_LIBRARIES))] if self.android else []
        )
        if missing:
            seen = f"{engine.name}: not found in its run path or the system: {', '.join(missing)}"
            yield Check(
                "engine_linking", WARN, seen, [f"put them beside {engine.path} and set its run path to $ORIGIN"]
            )
        else:
            seen = f"{engine.name}: {found.machine}, run path {':'.join(found.run_path) or 'none'}, needs "
            yield Check("engine_linking", OK, seen + (", ".join(found.needed) or "nothing"))

    def _start(self, engine: configuration.EngineConfig) -> Check:
        from bmoe_agent import engine as asking

        extra = {"LD_LIBRARY_PATH": engine.ld_library_path} if engine.ld_library_path else {}
        try:
            facts = asking.describe(engine.path, self.home / "cache", engine.name, extra)
        except asking.EngineError as problem:
            return Check("engine", FAIL, f"{engine.name}: {problem}")
        said = next((line.strip() for line in facts.version_text.splitlines() if line.strip()), "")
        simulated = " (a simulator)" if facts.simulated else ""
        return Check("engine", OK, f"{engine.name}: {engine.path} says {said!r}{simulated}")

    def free_space(self) -> Iterator[Check]:
        """Whether a night's record fits."""
        settings = self._config()
        there = self.home if self.home.is_dir() else self.home.parent
        stat = os.statvfs(there)
        free = stat.f_bavail * stat.f_frsize
        seen = f"{free >> 20} MiB free at {there}"
        if free < _LITTLE_BYTES:
            yield Check("free_space", FAIL, seen, ["drain the phone (`bmoe collect`), or remove models", "pkg clean"])
        elif settings is not None and free < settings.quota_bytes:
            quota = f"the record may grow to {settings.quota_bytes >> 20} MiB"
            fix = f"free space, or a smaller quota_mib in {self.home / 'config.toml'}"
            yield Check("free_space", WARN, f"{seen}; {quota}", [fix])
        else:
            yield Check("free_space", OK, seen)

    def baseline(self) -> Iterator[Check]:
        """Whether the speed probe has something to compare with."""
        from bmoe_agent.gates import baseline

        if self._config() is None:
            return
        try:
            baseline.load(self.home)
        except baseline.BaselineError as problem:
            yield Check("baseline", WARN, str(problem), ["bmoe-agent baseline   # idle, cool, on the charger"])
        else:
            yield Check("baseline", OK, "this phone's cold speed is recorded")


def _in(name: str, places: tuple[str, ...]) -> bool:
    return any(os.path.exists(os.path.join(place, name)) for place in places)
