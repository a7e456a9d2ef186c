"""Makes a small, valid GGUF v3 model file: random weights, a few layers, experts and dense tensors.

Comes in: a path and the wished size, shards, layers, experts, architecture. Goes out: the file, or for K shards the
files `NAME-0000I-of-0000K.gguf`, and their paths.

The layout written here (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic `GGUF`, u32 version 3, u64
tensor count, u64 key count; keys as (string, u32 type, value); tensor infos as (string, u32 dimensions, u64 each,
u32 type, u64 offset into the data part); padding to the alignment; the data, each tensor padded to the alignment.
A string is a u64 length and its bytes. All little-endian. Shards carry `split.no`, `split.count`, `split.tensors.count`
and each is a whole GGUF file with its own tensors; the first holds the model's own keys.
"""

import os
import random
import struct
from dataclasses import dataclass

ALIGNMENT = 32
F16 = 1
F32 = 0
_BYTES = {F32: 4, F16: 2}
_U16, _U32, _F32, _BOOL, _STRING, _ARRAY = 2, 4, 6, 7, 8, 9
_MIB = 1 << 20


@dataclass(frozen=True)
class Tensor:
    """One tensor: its name, shape (fastest dimension first, as GGUF counts) and ggml type."""

    name: str
    shape: tuple[int, ...]
    kind: int

    @property
    def size(self) -> int:
        """Bytes of its data."""
        n = _BYTES[self.kind]
        for extent in self.shape:
            n *= extent
        return n


def shard_paths(path: str, shards: int) -> list[str]:
    """The file names of a model: one as given, or llama.cpp's split naming."""
    if shards <= 1:
        return [path]
    stem = path.removesuffix(".gguf")
    return [f"{stem}-{i + 1:05d}-of-{shards:05d}.gguf" for i in range(shards)]


def make_model(
    path: str, *, size_mib: int = 16, shards: int = 1, layers: int = 4, experts: int = 16, arch: str = "qwen3moe"
) -> list[str]:
    """Write a model of about `size_mib` MiB, three quarters of it experts, and return the paths written.

    Raises ValueError for numbers no model can be made of, OSError where the files cannot be written.
    """
    if min(size_mib, shards, layers) < 1 or experts < 2:
        raise ValueError("a model needs a size, shards and layers of at least 1 and at least 2 experts")
    tensors = _tensors(size_mib, layers, experts, arch)
    keys = _keys(arch, layers, experts, tensors)
    paths = shard_paths(path, shards)
    per_shard: list[list[Tensor]] = [[] for _ in paths]
    total = sum(t.size for t in tensors)
    filled = 0
    for tensor in tensors:  # in order, so that a layer's tensors stay together as a splitter leaves them
        per_shard[min(filled * len(paths) // total, len(paths) - 1)].append(tensor)
        filled += tensor.size
    # Incompressible and not sparse: the file occupies what it says, and a read is a read.
    os.makedirs(os.path.dirname(os.path.abspath(paths[0])), exist_ok=True)
    noise = random.Random(0xB0E).randbytes(_MIB)
    for number, (name, part) in enumerate(zip(paths, per_shard, strict=True)):
        own: dict[str, tuple[int, object]] = dict(keys) if number == 0 else {"general.architecture": (_STRING, arch)}
        if shards > 1:
            own["split.no"] = (_U16, number)
            own["split.count"] = (_U16, shards)
            own["split.tensors.count"] = (_U32, len(tensors))
        temporary = f"{name}.{os.getpid()}.tmp"
        try:
            _write(temporary, own, part, noise)
            os.replace(temporary, name)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
    return paths


def _tensors(size_mib: int, layers: int, experts: int, arch: str) -> list[Tensor]:
    width = 128 if size_mib < 64 else 512 if size_mib < 512 else 2048
    per_layer = size_mib * _MIB * 3 // 4 // layers
    inner = max(32, per_layer // (3 * width * experts * _BYTES[F16]) // 32 * 32)
    attention = 4 * width * width * _BYTES[F16] * layers
    rest = max(0, size_mib * _MIB // 4 - attention)
    vocab = min(32768, max(256, rest // (2 * width * _BYTES[F16]) // 32 * 32))
    out = [Tensor("token_embd.weight", (width, vocab), F16)]
    if arch.startswith("gemma"):
        # A table gathered by rows: what --row-stream is for.
        out.append(Tensor("per_layer_token_embd.weight", (layers * 32, vocab), F16))
    for i in range(layers):
        block = f"blk.{i}."
        out.append(Tensor(block + "attn_norm.weight", (width,), F32))
        out += [Tensor(f"{block}attn_{p}.weight", (width, width), F16) for p in ("q", "k", "v", "output")]
        out.append(Tensor(block + "ffn_norm.weight", (width,), F32))
        out.append(Tensor(block + "ffn_gate_inp.weight", (width, experts), F32))
        out.append(Tensor(block + "ffn_gate_exps.weight", (width, inner, experts), F16))
        out.append(Tensor(block + "ffn_up_exps.weight", (width, inner, experts), F16))
        out.append(Tensor(block + "ffn_down_exps.weight", (inner, width, experts), F16))
    out.append(Tensor("output_norm.weight", (width,), F32))
    out.append(Tensor("output.weight", (width, vocab), F16))
    return out


def _keys(arch: str, layers: int, experts: int, tensors: list[Tensor]) -> dict[str, tuple[int, object]]:
    width, vocab = tensors[0].shape
    inner = next(t.shape[1] for t in tensors if t.name.endswith("ffn_gate_exps.weight"))
    return {
        "general.architecture": (_STRING, arch),
        "general.name": (_STRING, "bmoe-sim random weights"),
        "general.alignment": (_U32, ALIGNMENT),
        "general.file_type": (_U32, F16),
        f"{arch}.block_count": (_U32, layers),
        f"{arch}.context_length": (_U32, 32768),
        f"{arch}.embedding_length": (_U32, width),
        f"{arch}.feed_forward_length": (_U32, inner),
        f"{arch}.expert_feed_forward_length": (_U32, inner),
        f"{arch}.attention.head_count": (_U32, 4),
        f"{arch}.attention.head_count_kv": (_U32, 4),
        f"{arch}.attention.layer_norm_rms_epsilon": (_F32, 1e-6),
        f"{arch}.rope.freq_base": (_F32, 1e6),
        f"{arch}.expert_count": (_U32, experts),
        f"{arch}.expert_used_count": (_U32, min(4, experts)),
        "tokenizer.ggml.model": (_STRING, "gpt2"),
        "tokenizer.ggml.add_bos_token": (_BOOL, False),
        "tokenizer.ggml.tokens": (_ARRAY, [f"t{i}" for i in range(vocab)]),
    }


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: object) -> bytes:
    if kind == _STRING:
        return _string(str(value))
    if kind == _ARRAY:
        assert isinstance(value, list)
        return struct.pack("<IQ", _STRING, len(value)) + b"".join(_string(v) for v in value)
    return struct.pack({_U16: "<H", _U32: "<I", _F32: "<f", _BOOL: "<?"}[kind], value)


def _padded(n: int) -> int:
    return (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _write(path: str, keys: dict[str, tuple[int, object]], tensors: list[Tensor], noise: bytes) -> None:
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)))
    for name, (kind, value) in keys.items():
        head += _string(name) + struct.pack("<I", kind) + _value(kind, value)
    offset = 0
    for t in tensors:
        head += _string(t.name) + struct.pack("<I", len(t.shape))
        head += struct.pack(f"<{len(t.shape)}Q", *t.shape) + struct.pack("<IQ", t.kind, offset)
        offset += _padded(t.size)
    with open(path, "wb") as out:
        out.write(head.ljust(_padded(len(head)), b"\0"))
        for t in tensors:
            left = _padded(t.size)
            while left:
                left -= out.write(noise[:left])
