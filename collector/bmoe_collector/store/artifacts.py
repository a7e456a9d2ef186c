"""Files of runs behind fsspec: content-addressed, zstd, written whole or not at all, verified when read.

In: bytes or a local file. Out: the sha256 of the content, under which it is found again. An object lies at
`<base>/<first two digits>/<sha256>.zst` as one zstd frame. The same content is stored once, however many runs have it.
The base is any fsspec URL; a local folder is the default. A name appears only when its bytes are all there: local
files are written beside their place and renamed, object stores make a name visible when the upload has ended.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
from collections.abc import Iterator
from typing import Any, Protocol

import fsspec
import zstandard
from sqlalchemy import select

from bmoe_collector.store.engine import Store
from bmoe_collector.store.schema import ARTIFACTS

CHUNK = 1 << 20
LEVEL = 4


MOVED = "moved to "
"""Begins what an archived file's row says of where it is; the archive's URL follows."""


class Readable(Protocol):
    """What content is read from."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""


class _Stream:
    """Pieces as something that is read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks

    def read(self, _size: int, /) -> bytes:
        return next((chunk for chunk in self._chunks if chunk), b"")


class ArtifactError(Exception):
    """An object is missing, damaged or cannot be written; the message says which and where."""


class Artifacts:
    """The artifact store at one fsspec URL (or local path)."""

    def __init__(self, url: str) -> None:
        self.url = url
        options = {"auto_mkdir": True} if "://" not in url or url.startswith("file:") else {}
        self._fs: Any
        try:
            self._fs, root = fsspec.url_to_fs(url, **options)
        except (ValueError, ImportError) as error:  # no such protocol, or what speaks it is not installed
            raise ArtifactError(f"{url}: {error}") from error
        self._root = root.rstrip("/")
        self._local = "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))

    def path(self, sha256: str) -> str:
        """Where the content with this hash lies."""
        return f"{self._root}/{sha256[:2]}/{sha256}.zst"

    def has(self, sha256: str) -> bool:
        """Whether there is an object of that name (its content is verified when read)."""
        return bool(self._fs.exists(self.path(sha256)))

    def put(self, data: bytes) -> str:
        """Store bytes; returns their sha256 (hex)."""
        return self.put_stream(io.BytesIO(data), hashlib.sha256(data).hexdigest())

    def put_file(self, path: str, sha256: str | None = None) -> str:
        """Store a local file; with `sha256` (hex) given, refuse content that is not it."""
        if sha256 is None:
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        with open(path, "rb") as file:
            return self.put_stream(file, sha256)

    def put_stream(self, source: Readable, sha256: str) -> str:
        """Store what a stream holds under its hash; raises ArtifactError when the content is not what the hash says."""
        target = self.path(sha256)
        if self.has(sha256):
            return sha256
        place = f"{target}.{secrets.token_hex(6)}.part" if self._local else target
        digest = hashlib.sha256()
        try:
            if self._local:
                os.makedirs(os.path.dirname(target), exist_ok=True)
            with (
                self._fs.open(place, "wb") as out,
                zstandard.ZstdCompressor(level=LEVEL).stream_writer(out, closefd=False) as squeeze,
            ):
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    squeeze.write(chunk)
                if digest.hexdigest() != sha256:
                    raise ArtifactError(f"content for {sha256[:12]} has sha256 {digest.hexdigest()[:12]}: not stored")
                squeeze.flush(zstandard.FLUSH_FRAME)
                if self._local:
                    out.flush()
                    os.fsync(out.fileno())
            if self._local:
                os.replace(place, target)
                _sync_folder(os.path.dirname(target))
        except OSError as error:
            self._forget(place)
            raise ArtifactError(f"cannot store {sha256[:12]} in {self.url}: {error}") from error
        except BaseException:
            self._forget(place)
            raise
        return sha256

    def put_chunks(self, chunks: Iterator[bytes], sha256: str) -> str:
        """Store content that comes in pieces; as `put_stream`."""
        return self.put_stream(_Stream(chunks), sha256)

    def age_s(self, sha256: str, now_ns: int) -> float:
        """Seconds since an object was written; 0 where the file system does not tell."""
        try:
            return now_ns / 1e9 - float(self._fs.modified(self.path(sha256)).timestamp())
        except (NotImplementedError, FileNotFoundError):
            return 0.0

    def _forget(self, place: str) -> None:
        try:
            if self._fs.exists(place):
                self._fs.rm(place)
        except OSError:
            pass

    def chunks(self, sha256: str) -> Iterator[bytes]:
        """The content in pieces; raises ArtifactError at the end when it is not what its name says."""
        digest = hashlib.sha256()
        try:
            with (
                self._fs.open(self.path(sha256), "rb") as file,
                zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as grow,
            ):
                while chunk := grow.read(CHUNK):
                    digest.update(chunk)
                    yield chunk
        except FileNotFoundError as error:
            raise ArtifactError(f"artifact {sha256} is not in {self.url}") from error
        except (zstandard.ZstdError, OSError) as error:
            raise ArtifactError(f"artifact {self.path(sha256)} cannot be read: {error}") from error
        if digest.hexdigest() != sha256:
            raise ArtifactError(f"artifact {self.path(sha256)} is damaged: its content has another sha256")

    def get(self, sha256: str) -> bytes:
        """The content; raises ArtifactError when it is missing or damaged."""
        return b"".join(self.chunks(sha256))

    def remove(self, sha256: str) -> None:
        """Take an object away; no error when it is not there."""
        try:
            self._fs.rm(self.path(sha256))
        except FileNotFoundError:
            pass

    def all(self) -> Iterator[tuple[str, int]]:
        """Every stored sha256 with its compressed size."""
        if not self._fs.exists(self._root):
            return
        for path, facts in self._fs.find(self._root, detail=True).items():
            name = path.rsplit("/", 1)[-1]
            if name.endswith(".zst") and len(name) == 68:
                yield name.removesuffix(".zst"), int(facts["size"] or 0)


def default_artifacts(store: Store, url: str | None = None) -> Artifacts:
    """The artifact store of a database: `url`, else BMOE_ARTIFACTS, else `artifacts` beside the SQLite file.

    A shared database without BMOE_ARTIFACTS keeps them in this user's data directory, which other hosts cannot read.
    """
    named = url or os.environ.get("BMOE_ARTIFACTS")
    if named:
        return Artifacts(named)
    database = store.engine.url.database
    if store.dialect == "sqlite" and database and database != ":memory:":
        return Artifacts(os.path.join(os.path.dirname(os.path.abspath(database)), "artifacts"))
    from platformdirs import user_data_path

    return Artifacts(str(user_data_path("bmoe-fleet", appauthor=False) / "artifacts"))


def holder(store: Store, artifacts: Artifacts, sha256: str) -> Artifacts:
    """Where a content lies: where files are kept, else the archive that `vacuum` moved it to."""
    if artifacts.has(sha256):
        return artifacts
    query = select(ARTIFACTS.c.problem).where(ARTIFACTS.c.sha256 == sha256, ARTIFACTS.c.state == "archived")
    with store.read() as connection:
        places = {str(told).removeprefix(MOVED) for told in connection.execute(query).scalars()}
    archives = [Artifacts(place) for place in sorted(places)]
    return next((one for one in archives if one.has(sha256)), archives[0] if archives else artifacts)


def _sync_folder(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
