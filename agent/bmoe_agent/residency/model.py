"""What model a file is, and which of its bytes are dense and which experts.

In: the path of a model, or of any one of its shards. Out: `ModelFacts`, and a `Layout` of extents for looking at residency.
A model is identified by a hash over every shard's size, header and sampled blocks: reading all of it before a cell would take
minutes and put it into the page cache that is about to be measured.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from bmoe_proto.v1 import telemetry_pb2 as pb
from google.protobuf import json_format

from bmoe_agent.engine import write_atomically
from bmoe_agent.residency import gguf
from bmoe_agent.roots import Roots

_SAMPLED_BLOCKS = 16
_BLOCK_BYTES = 64 * 1024
_HEADER_LIMIT = 64 << 20
_PLAIN_HEADER = 1 << 20  # of a file that is no gguf

_facts: dict[str, bytes] = {}


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive bytes of one shard that belong together. `layer` is None outside the blocks."""

    shard: int
    offset: int
    size: int
    part: str  # "dense", "expert" or "other" (headers and padding)
    layer: int | None


@dataclass(frozen=True, slots=True)
class Layout:
    """All shards of a model and what their bytes are; `problem` when the header could not be read."""

    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    extents: tuple[Extent, ...]
    headers: tuple[gguf.Header | None, ...] = ()
    problem: str = ""

    def tensor_bytes(self, expert: bool) -> int:
        """Bytes of the expert or of the dense tensors over all shards, alignment not counted."""
        tensors = (tensor for header in self.headers if header for tensor in header.tensors)
        return sum(tensor.size for tensor in tensors if tensor.expert == expert)


def layout(path: str | os.PathLike[str]) -> Layout:
    """Where dense and expert weights lie. A file that is no gguf is one part, "other". Raises OSError when it is not there."""
    problems: list[str] = []
    try:
        paths = gguf.shards(path)
    except gguf.GgufError as problem:
        problems.append(str(problem))
        paths = [os.fspath(path)]
    sizes = [os.stat(name).st_size for name in paths]
    extents: list[Extent] = []
    headers: list[gguf.Header | None] = []
    for number, (name, size) in enumerate(zip(paths, sizes, strict=True)):
        try:
            header = gguf.read(name)
        except gguf.GgufError as problem:
            problems.append(f"{os.path.basename(name)}: {problem}")
            extents.append(Extent(number, 0, size, "other", None))
            headers.append(None)
            continue
        headers.append(header)
        problems += [f"{os.path.basename(name)}: {text}" for text in header.problems]
        extents += _extents(number, header, size)
    count = headers[0].pairs.get("split.count") if headers[0] else None
    if isinstance(count, int) and count > 1 and count != len(paths):
        problems.append(f"its header says {count} shards, {len(paths)} were found by name")
    return Layout(tuple(paths), tuple(sizes), tuple(extents), tuple(headers), "; ".join(problems))


def describe(
    path: str | os.PathLike[str], cache_dir: Path | None = None, name: str = "", roots: Roots | None = None
) -> pb.ModelFacts:
    """Facts of the model, from the cache when path, size, mtime and inode of every shard are as before. Raises OSError.

    What cannot be read of the header is said in `problem`; the size and the identity are there nevertheless.
    """
    try:
        paths = gguf.shards(path)
    except gguf.GgufError:
        paths = [os.fspath(path)]
    stats = [os.stat(shard) for shard in paths]
    mark = hashlib.sha256(
        repr(
            [(os.path.realpath(p), s.st_size, s.st_mtime_ns, s.st_ino) for p, s in zip(paths, stats, strict=True)]
        ).encode()
    ).hexdigest()
    known = _cached(mark, cache_dir)
    if known is None:
        known = _facts_of(layout(path))
        _facts[mark] = known.SerializeToString()
        if cache_dir is not None:
            write_atomically(
                cache_dir / f"model-{mark[:32]}.json", json_format.MessageToJson(known, indent=None).encode()
            )
    known.name = name or os.path.basename(os.fspath(path))
    del known.shards[:]
    for shard, stat in zip(paths, stats, strict=True):
        known.shards.add(
            path=shard,
            size=stat.st_size,
            mtime_ns=stat.st_mtime_ns,
            owner_uid=stat.st_uid,
            filesystem=filesystem(shard, roots or Roots()),
        )
    return known


def filesystem(path: str, roots: Roots) -> str:
    """Type of the mount that holds a path (`f2fs`, `fuse`, `ext4`), empty when the mounts cannot be read."""
    best, kind = -1, ""
    place = os.path.realpath(path)
    for line in (roots.text("proc/self/mounts") or roots.text("proc/mounts") or "").splitlines():
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        mount = parts[1].encode().decode("unicode_escape") if "\\" in parts[1] else parts[1]
        inside = mount in {"/", place} or place.startswith(mount + "/")
        if inside and len(mount) >= best:
            best, kind = len(mount), parts[2]
    return kind


def _facts_of(found: Layout) -> pb.ModelFacts:
    facts = pb.ModelFacts(
        size=sum(found.sizes),
        identity=identity(found),
        dense_bytes=found.tensor_bytes(expert=False),
        expert_bytes=found.tensor_bytes(expert=True),
        problem=found.problem,
    )
    if first := found.headers[0]:
        facts.architecture = first.architecture
        for key, value in first.pairs.items():
            facts.metadata[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return facts


def identity(found: Layout) -> str:
    """sha256 over each shard's size, header, and blocks sampled evenly over its data; hex.

    The recipe is fixed, since identities of different phones are compared: for every shard in order, its size as 8 bytes
    little endian, the header up to the data (at most 64 MiB; the first MiB of what is no gguf), then 16 blocks of 64 KiB that
    begin at data + i · (size - data - block) // 15, rounded down to whole blocks of 4096 bytes.
    """
    digest = hashlib.sha256()
    for path, size, header in zip(found.paths, found.sizes, found.headers, strict=True):
        digest.update(size.to_bytes(8, "little"))
        data = min(header.data_offset if header else _PLAIN_HEADER, _HEADER_LIMIT, size)
        with open(path, "rb", buffering=0) as file:
            at = 0
            while at < data and (part := os.pread(file.fileno(), min(1 << 20, data - at), at)):
                digest.update(part)
                at += len(part)
            span = max(0, size - data - _BLOCK_BYTES)
            for number in range(_SAMPLED_BLOCKS):
                offset = (data + number * span // (_SAMPLED_BLOCKS - 1)) & ~4095
                digest.update(os.pread(file.fileno(), _BLOCK_BYTES, offset))
    return digest.hexdigest()


def _cached(mark: str, cache_dir: Path | None) -> pb.ModelFacts | None:
    if (raw := _facts.get(mark)) is not None:
        return pb.ModelFacts.FromString(raw)
    if cache_dir is None:
        return None
    try:
        facts = json_format.Parse((cache_dir / f"model-{mark[:32]}.json").read_bytes(), pb.ModelFacts())
    except (OSError, ValueError, json_format.ParseError):
        return None  # no cache, or a torn one
    return facts if facts.identity else None


def _extents(shard: int, header: gguf.Header, size: int) -> list[Extent]:
    """Every byte of one file in exactly one extent: neighbours of one part and layer joined, what is between them "other"."""
    extents: list[Extent] = []
    at = 0
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        begin, end = max(tensor.offset, at), tensor.offset + tensor.size
        if end <= begin:
            continue
        # Alignment's few bytes go with what follows them; only the header and real holes are something else.
        if begin - at >= 4096 or (at == 0 and begin):
            extents.append(Extent(shard, at, begin - at, "other", None))
        else:
            begin = at
        part = "expert" if tensor.expert else "dense"
        last = extents[-1] if extents else None
        if last and (last.part, last.layer) == (part, tensor.layer) and last.offset + last.size == begin:
            extents[-1] = Extent(shard, last.offset, end - last.offset, part, tensor.layer)
        else:
            extents.append(Extent(shard, begin, end - begin, part, tensor.layer))
        at = end
    if at < size:
        extents.append(Extent(shard, at, size - at, "other", None))
    return extents
