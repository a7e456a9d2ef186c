"""The model file as the simulator uses it: really opened, mapped and read.

Comes in: the path of a GGUF file (or of the first shard). Goes out: `Model` with the architecture's numbers, where
every expert's bytes lie, and reads of them through O_DIRECT where the file system gives it.

Only what streaming needs is read of the header: see makemodel.py for the layout. A tensor's size is the distance to
the next one's offset, so every quantisation works without a table of block sizes; the padding of at most one
alignment unit that this adds is trimmed off where the tensor is divided among its experts.
"""

import errno
import mmap
import os
import re
import struct
from dataclasses import dataclass, field

PROJECTIONS = ("gate", "up", "down")
_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight$")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_HEADER_LIMIT = 1 << 30
_PAGE = 4096  # O_DIRECT alignment that every file system here accepts; windows are multiples of it


class ModelError(Exception):
    """The file is missing or is no model; the text is what the engine would say."""


@dataclass(frozen=True)
class Span:
    """A run of bytes in one shard."""

    shard: int
    offset: int
    size: int

    @property
    def window(self) -> tuple[int, int]:
        """The aligned (offset, size) a direct read has to pull to get it."""
        start = self.offset // _PAGE * _PAGE
        end = -(-(self.offset + self.size) // _PAGE) * _PAGE
        return start, end - start


@dataclass
class Model:
    """An open model: numbers from the header, spans of dense tensors and of experts, file descriptors."""

    paths: list[str]
    arch: str = "unknown"
    n_layer: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    n_keys: int = 0
    n_tensors: int = 0
    dense: list[Span] = field(default_factory=list)
    dense_bytes: dict[int, int] = field(default_factory=dict)  # by layer, -1 for what belongs to none
    experts: dict[int, list[Span]] = field(default_factory=dict)  # layer -> projections, each the whole tensor
    row_table_bytes: int = 0
    o_direct: bool = False
    fds: list[int] = field(default_factory=list)
    maps: list[mmap.mmap] = field(default_factory=list)

    @property
    def moe_layers(self) -> list[int]:
        """The layers that have experts, in order."""
        return sorted(self.experts)

    def expert(self, layer: int, expert: int) -> list[Span]:
        """Where one expert's projections lie."""
        out = []
        for whole in self.experts[layer]:
            size = whole.size // self.n_expert
            out.append(Span(whole.shard, whole.offset + expert * size, size))
        return out

    def expert_bytes(self, layer: int) -> int:
        """Bytes of one expert of a layer, all its projections."""
        return sum(whole.size // self.n_expert for whole in self.experts.get(layer, ()))

    def cycle_bytes(self, n_used: int) -> int:
        """One token's worst case: the aligned windows of its experts in every layer."""
        return n_used * sum(sum(s.window[1] for s in self.expert(layer, 0)) for layer in self.moe_layers)

    def slot_bytes(self) -> int:
        """Bytes a cache slot needs to take any expert's aligned windows."""
        return max(
            (sum(s.size // self.n_expert + 2 * _PAGE for s in self.experts[layer]) for layer in self.experts), default=0
        )

    def open(self, *, direct: bool) -> None:
        """Open the shards for expert reads; O_DIRECT is tried and, where refused, given up for all."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        self.o_direct = False
        if direct and hasattr(os, "O_DIRECT"):
            try:
                self.fds = [os.open(p, flags | os.O_DIRECT) for p in self.paths]
                probe = mmap.mmap(-1, _PAGE)
                for fd in self.fds:
                    os.preadv(fd, [probe], 0)
                self.o_direct = True
                return
            except OSError:
                self.close_fds()
        self.fds = [os.open(p, flags) for p in self.paths]

    def close_fds(self) -> None:
        """Close what open() opened."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def read(self, span: Span, into: memoryview) -> int:
        """Read a span's aligned window into page-aligned memory; the bytes read (short at the file's end)."""
        offset, size = span.window
        try:
            return os.preadv(self.fds[span.shard], [into[:size]], offset)
        except OSError as e:
            if e.errno != errno.EINVAL or not self.o_direct:
                raise
            # the open-time probe passed and a later read did not: serve it buffered, as the engine downgrades
            self.close_fds()
            self.open(direct=False)
            return os.preadv(self.fds[span.shard], [into[:size]], offset)

    def map(self) -> None:
        """Map every shard, as the engine does whatever its flags."""
        for path in self.paths:
            with open(path, "rb") as f:
                self.maps.append(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))

    def touch(self, spans: list[Span]) -> None:
        """Fault the spans' pages in through the mapping."""
        step = mmap.PAGESIZE
        for span in spans:
            mapped = self.maps[span.shard]
            for at in range(span.offset, span.offset + span.size, step):
                mapped[at]

    def all_spans(self) -> list[Span]:
        """Dense and expert tensors alike, whole."""
        return self.dense + [span for spans in self.experts.values() for span in spans]


def load(path: str) -> Model:
    """Read the header of a model, all shards. Raises ModelError with the engine's words."""
    match = _SPLIT.search(path)
    count = int(match.group(2)) if match else 1
    paths = [path]
    if match:
        stem = path[: match.start()]
        paths = [f"{stem}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    model = Model(paths)
    for shard, name in enumerate(paths):
        try:
            with open(name, "rb") as f:
                size = os.fstat(f.fileno()).st_size
                head = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as e:
            raise ModelError(
                f"gguf_init_from_file: failed to open GGUF file '{name}' ({os.strerror(e.errno or 0)})"
            ) from None
        try:
            _read_shard(model, shard, head, size)
        except (struct.error, IndexError, ValueError, KeyError, UnicodeDecodeError) as e:
            raise ModelError(f"gguf_init_from_file: failed to read '{name}': {e}") from None
        finally:
            if isinstance(head, mmap.mmap):
                head.close()
    return model


class _Cursor:
    def __init__(self, data: bytes | mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, fmt: str) -> tuple[int, ...]:
        size = struct.calcsize("<" + fmt)
        out = struct.unpack("<" + fmt, self.data[self.at : self.at + size])
        self.at += size
        return out

    def string(self) -> str:
        (n,) = self.take("Q")
        if n > _HEADER_LIMIT or self.at + n > len(self.data):
            raise ValueError("a string is longer than the file")
        self.at += n
        return bytes(self.data[self.at - n : self.at]).decode("utf-8", "replace")

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, n = self.take("IQ")
            if inner in _SCALARS:
                self.at += n * struct.calcsize("<" + _SCALARS[inner])
            else:
                for _ in range(n):
                    self.value(inner)
            return None
        return self.take(_SCALARS[kind])[0]


def _read_shard(model: Model, shard: int, data: bytes | mmap.mmap, size: int) -> None:
    if bytes(data[:4]) != b"GGUF":
        raise ValueError("invalid magic characters, this is no GGUF file")
    cursor = _Cursor(data)
    cursor.at = 4
    version, n_tensors, n_keys = cursor.take("IQQ")
    if version not in {2, 3}:
        raise ValueError(f"GGUF version {version} is not supported")
    keys: dict[str, object] = {}
    for _ in range(n_keys):
        name = cursor.string()
        (kind,) = cursor.take("I")
        keys[name] = cursor.value(kind)
    infos = []
    for _ in range(n_tensors):
        name = cursor.string()
        (dims,) = cursor.take("I")
        cursor.take(f"{dims}Q")
        _, offset = cursor.take("IQ")
        infos.append((offset, name))
    alignment = keys.get("general.alignment", 32)
    assert isinstance(alignment, int)
    start = -(-cursor.at // alignment) * alignment
    infos.sort()
    ends = [offset for offset, _ in infos[1:]] + [size - start]
    if infos and start + infos[-1][0] >= size:
        raise ValueError("tensor data is not within the file bounds, the model is corrupted or incomplete")
    if shard == 0:
        arch = str(keys.get("general.architecture", "unknown"))
        model.arch, model.n_keys = arch, n_keys

        def number(name: str) -> int:
            value = keys.get(f"{arch}.{name}", 0)
            return value if isinstance(value, int) else 0

        model.n_layer = number("block_count")
        model.n_expert = number("expert_count")
        model.n_expert_used = number("expert_used_count")
    model.n_tensors += n_tensors
    for (offset, name), end in zip(infos, ends, strict=True):
        span = Span(shard, start + offset, end - offset)
        match = _EXPERT.match(name)
        if match and model.n_expert:
            model.experts.setdefault(int(match.group(1)), []).append(span)
            continue
        block = _BLOCK.match(name)
        layer = int(block.group(1)) if block else -1
        model.dense_bytes[layer] = model.dense_bytes.get(layer, 0) + span.size
        model.dense.append(span)
        if name == "per_layer_token_embd.weight":
            model.row_table_bytes += span.size
