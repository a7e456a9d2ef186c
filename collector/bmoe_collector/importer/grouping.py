"""Which files are of one engine process: names and kinds in, groups out. Pure.

A directory with a `run.json` or with generic names (stdout, metrics, route, ...) is one run; otherwise files that share a
stem are. A stem is the name without its extensions and without a word at its end that only says which file it is
(`x_route.csv`, `x.stdout.txt`, `x.metrics` are all of `x`). Two files of a kind that a process writes once (its rows, its
stdout, its traces) are of two processes, unless their names are generic.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bmoe_proto.contract.text import readable_str

ONCE = frozenset({"metrics", "stdout", "route", "compute", "compute_layers", "io", "run.json", "sidecar"})
RUN_KINDS = ONCE | {"stderr"}
_ROLES = r"stdout|stderr|std|metrics|route|compute|layers|io|traces?|logs?|csv|perf|out|err|output|run|sidecar|progress"
_GENERIC = re.compile(rf"(?:(?:{_ROLES})[._-]?)+", re.IGNORECASE)
_ROLE_AT_END = re.compile(rf"[._ -](?:{_ROLES})$", re.IGNORECASE)
_EXTENSION = re.compile(
    r"\.(?:csv|tsv|txt|log|bin|out|err|metrics|json|jsonl|stdout|stderr|trace|dat|bak)$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Found:
    """A file: `path` as it is shown, its folder, and what its content says it is."""

    path: str
    folder: str
    kind: str
    sha256: str
    size: int
    mtime_ns: int = 0

    @property
    def name(self) -> str:
        """Its name inside the folder, as text: a name may hold bytes that are none."""
        return readable_str(os.path.basename(self.path))


@dataclass(slots=True)
class Group:
    """Files of one run; `name` is the stem, or the directory's name."""

    name: str
    folder: str
    files: list[Found] = field(default_factory=list)

    @property
    def is_run(self) -> bool:
        """Whether anything in it is of an engine; empty files alone say nothing."""
        return any(file.kind in RUN_KINDS and file.size for file in self.files)


def stem(name: str) -> str:
    """What names that belong together share."""
    while (shorter := _EXTENSION.sub("", name)) != name and shorter:
        name = shorter
    while (shorter := _ROLE_AT_END.sub("", name)) != name and shorter:
        name = shorter
    return name


def is_generic(name: str) -> bool:
    """Whether a name only says which file of a run it is."""
    while (shorter := _EXTENSION.sub("", name)) != name and shorter:
        name = shorter
    return _GENERIC.fullmatch(name) is not None


def group(files: Iterable[Found]) -> list[Group]:
    """Groups in the order of their first file."""
    folders: dict[str, list[Found]] = {}
    for file in files:
        folders.setdefault(file.folder, []).append(file)
    groups: list[Group] = []
    for folder, inside in folders.items():
        groups += _folder(folder, inside)
    return groups


def _folder(folder: str, files: Sequence[Found]) -> list[Group]:
    whole = any(
        file.name.lower() == "run.json" or (is_generic(file.name) and file.kind in {*RUN_KINDS, "empty"})
        for file in files
    )
    if not whole:
        return _by_stem(folder, files)
    # Generic names first: they are the directory's run, whatever else lies there.
    run = Group(readable_str(os.path.basename(folder) or folder), folder)
    rest: list[Found] = []
    taken: set[str] = set()
    for file in sorted(files, key=lambda file: not is_generic(file.name)):
        if file.kind in ONCE and file.kind in taken and not is_generic(file.name):
            rest.append(file)
            continue
        taken.add(file.kind)
        run.files.append(file)
    if rest:
        # What shares a stem with a file of another process is that one's.
        stems = {stem(file.name) for file in rest}
        for file in list(run.files):
            if not is_generic(file.name) and stem(file.name) in stems and file.kind != "run.json":
                run.files.remove(file)
                rest.append(file)
    run.files.sort(key=lambda file: file.path)
    return [run, *_by_stem(folder, sorted(rest, key=lambda file: file.path))]


def _by_stem(folder: str, files: Sequence[Found]) -> list[Group]:
    groups: dict[str, list[Group]] = {}
    for file in files:
        name = stem(file.name)
        mine = groups.setdefault(name, [])
        free = next((each for each in mine if not _clashes(each, file)), None)
        if free is None:
            free = Group(name, folder)
            mine.append(free)
        free.files.append(file)
    return [each for mine in groups.values() for each in mine]


def _clashes(have: Group, file: Found) -> bool:
    return file.kind in ONCE and any(each.kind == file.kind and each.sha256 != file.sha256 for each in have.files)
