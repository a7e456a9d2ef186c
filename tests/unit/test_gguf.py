"""gguf headers: what is read of good ones, and that no hostile one costs memory or time."""

import struct
import time
import tracemalloc

import pytest
from bmoe_agent.residency import gguf, model
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.agent

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value):
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key, kind, body):
    return text(key) + struct.pack("<I", kind) + body


def tensor(name, dims, kind, offset):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(pairs=(), tensors=(), data=b"", version=3, alignment=32):
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


def moe(tmp_path, name="m.gguf", layers=2, page=4096, extra=()):
    """A model with dense and expert tensors of whole pages: f32 tensors of page // 4 elements times a factor."""
    tensors, offset = [], 0

    def add(label, pages):
        nonlocal offset
        tensors.append(tensor(label, [pages * page // 4], 0, offset))
        offset += pages * page

    add("token_embd.weight", 2)
    for layer in range(layers):
        add(f"blk.{layer}.attn_q.weight", 1)
        add(f"blk.{layer}.ffn_gate_inp.weight", 1)
        add(f"blk.{layer}.ffn_gate_exps.weight", 4)
        add(f"blk.{layer}.ffn_up_exps.weight", 4)
        add(f"blk.{layer}.ffn_down_exps.weight", 4)
        add(f"blk.{layer}.ffn_up_shexp.weight", 1)
    add("output.weight", 2)
    pairs = [
        pair("general.architecture", STRING, text("qwen3moe")),
        pair("general.alignment", U32, struct.pack("<I", page)),
        pair("qwen3moe.expert_count", U32, struct.pack("<I", 8)),
        pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("") + text("ccc")),
        pair("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ", F32, 2) + b"\0" * 8),
        pair("tokenizer.chat_template", STRING, text("x" * 5000)),
        pair("tokenizer.ggml.add_bos_token", BOOL, b"\1"),
        *extra,
    ]
    path = tmp_path / name
    path.write_bytes(gguf_bytes(pairs, tensors, b"\7" * offset, alignment=page))
    return path


def test_dense_and_expert_bytes_and_what_the_header_says(tmp_path):
    path = moe(tmp_path)
    facts = model.describe(path)
    assert facts.architecture == "qwen3moe"
    assert facts.dense_bytes == (2 + 2 * 3 + 2) * 4096
    assert facts.expert_bytes == 2 * 12 * 4096
    assert facts.metadata["qwen3moe.expert_count"] == "8"
    assert facts.metadata["tokenizer.ggml.add_bos_token"] == "true"
    assert "tokenizer.chat_template" not in facts.metadata
    assert (facts.problem, facts.size, len(facts.shards)) == ("", path.stat().st_size, 1)


def test_every_byte_is_in_one_extent(tmp_path):
    found = model.layout(moe(tmp_path))
    at = 0
    for extent in found.extents:
        assert extent.offset == at
        at += extent.size
    assert at == found.sizes[0]
    assert {(extent.part, extent.layer) for extent in found.extents} == {
        ("other", None), ("dense", None), ("dense", 0), ("dense", 1), ("expert", 0), ("expert", 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("blk.3.ffn_gate_exps.weight", True),
        ("blk.3.ffn_gate_up_exps.weight", True),
        ("blk.3.ffn_down.7.weight", True),
        ("blk.3.ffn_up_chexps.weight", True),
        ("blk.3.ffn_up_exps.bias", False),
        ("blk.3.ffn_up_shexp.weight", False),
        ("blk.3.ffn_gate_inp.weight", False),
        ("blk.3.ffn_gate.weight", False),
        ("output.weight", False),
    ],
)
def test_which_tensors_are_streamed(name, expert):
    assert gguf.Tensor(name, 0, 1, 0).expert is expert


def test_all_shards_are_one_model_and_a_missing_one_is_a_problem(tmp_path):
    for number in (1, 2, 3):
        moe(tmp_path, f"big-0000{number}-of-00003.gguf", extra=[pair("split.count", U32, struct.pack("<I", 3))])
    second = tmp_path / "big-00002-of-00003.gguf"
    facts = model.describe(second)
    assert len(facts.shards) == 3
    assert facts.expert_bytes == 3 * 2 * 12 * 4096
    second.unlink()
    facts = model.describe(tmp_path / "big-00001-of-00003.gguf")
    assert "big-00002-of-00003.gguf" in facts.problem
    assert facts.identity


def test_a_file_cut_by_a_download_is_not_whole(tmp_path):
    path = moe(tmp_path)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 4096 * 3)
    facts = model.describe(path)
    assert "12288 bytes of tensors lie past the end" in facts.problem
    assert facts.expert_bytes + facts.dense_bytes == (10 + 24 - 3) * 4096


def test_identity_changes_with_size_header_and_sampled_blocks_and_with_nothing_else(tmp_path):
    path = moe(tmp_path)
    first = model.describe(path).identity
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    assert model.describe(copy).identity == first
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    copy.write_bytes(raw)
    assert model.describe(copy).identity != first
    copy.write_bytes(path.read_bytes().replace(b"qwen3moe", b"qwen3mof"))
    assert model.describe(copy).identity != first
    copy.write_bytes(path.read_bytes() + b"\0" * 4096)
    assert model.describe(copy).identity != first


def test_the_cache_is_used_until_the_file_changes(tmp_path, monkeypatch):
    path, cache = moe(tmp_path), tmp_path / "cache"
    first = model.describe(path, cache)
    monkeypatch.setattr(model, "_facts", {})
    monkeypatch.setattr(model, "layout", lambda _: pytest.fail("read again"))
    assert model.describe(path, cache) == first
    for torn in cache.iterdir():
        torn.write_text("{")
    monkeypatch.undo()
    monkeypatch.setattr(model, "_facts", {})
    assert model.describe(path, cache) == first


def test_a_file_that_is_no_gguf_still_has_size_and_identity(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"hello")
    facts = model.describe(path)
    assert "no gguf" in facts.problem
    assert (facts.size, len(facts.identity)) == (5, 64)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "no gguf"),
        (b"GGUF", "version needs"),
        (b"GGUF" + struct.pack("<I", 1) + b"\0" * 40, "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 40, "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "cannot be in"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "cannot be in"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 50) + b"\0" * 20, "claims"),
        (gguf_bytes([pair("a", ARRAY, struct.pack("<IQ", U64, 1 << 61))]), "needs"),
        (gguf_bytes([pair("a", ARRAY, struct.pack("<IQ", STRING, 1 << 61))]), "claims"),
        (
            gguf_bytes([pair("a", ARRAY, struct.pack("<IQ", STRING, 2) + text("ok") + struct.pack("<Q", 1 << 62))]),
            "needs",
        ),
        (gguf_bytes([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 9)]), "deeper"),
        (gguf_bytes([pair("a", 99, b"")]), "unknown value type"),
        (gguf_bytes([], [text("t") + struct.pack("<I", 1 << 30) + b"\0" * 30]), "dimensions"),
        (gguf_bytes([pair("general.alignment", U32, struct.pack("<I", 0))]), "power of two"),
        (gguf_bytes([pair("general.alignment", U32, struct.pack("<I", 24))]), "power of two"),
    ],
)
def test_hostile_headers_are_refused(tmp_path, raw, said):
    path = tmp_path / "h.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(gguf.GgufError, match=said):
            gguf.read(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_offsets_and_dimensions_beyond_all_bounds_stay_inside_the_file(tmp_path):
    path = tmp_path / "o.gguf"
    path.write_bytes(
        gguf_bytes(
            [],
            [
                tensor("blk.0.ffn_up_exps.weight", [1 << 62, 1 << 62], 0, 0),
                tensor("b", [4], 0, 1 << 63),
                tensor("c", [4], 250, 4),
            ],
            b"\0" * 64,
        )
    )
    found = model.layout(path)
    assert sum(extent.size for extent in found.extents) == path.stat().st_size
    assert "not whole" in found.problem


@given(st.binary(max_size=400), st.integers(0, 400))
@settings(max_examples=120)
def test_a_damaged_header_is_an_error_or_a_layout_that_adds_up(tmp_path_factory, junk, at):
    folder = tmp_path_factory.mktemp("g", numbered=True)
    raw = bytearray(moe(folder).read_bytes())
    raw[at : at + len(junk)] = junk
    path = folder / "d.gguf"
    path.write_bytes(raw)
    found = model.layout(path)
    assert sum(extent.size for extent in found.extents) == len(raw)


def test_a_vocabulary_of_a_real_size_is_walked_quickly(tmp_path):
    words = b"".join(text(b"token%d" % number) for number in range(250_000))
    path = tmp_path / "v.gguf"
    path.write_bytes(
        gguf_bytes(
            [
                pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 250_000) + words),
                pair("z", U32, b"\5\0\0\0"),
            ]
        )
    )
    began = time.process_time()
    assert gguf.read(path).pairs == {"z": 5}
    assert time.process_time() - began < 10


def test_the_filesystem_is_the_longest_mount(tmp_path):
    from bmoe_agent.roots import Roots

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text(
        "/dev/a / ext4 rw 0 0\n/dev/b /data f2fs rw 0 0\n/dev/fuse /storage/emulated fuse rw 0 0\nodd\n"
    )
    roots = Roots(tmp_path / "proc", tmp_path / "sys")
    assert model.filesystem("/data/local/m.gguf", roots) == "f2fs"
    assert model.filesystem("/storage/emulated/0/m.gguf", roots) == "fuse"
    assert model.filesystem("/database/m.gguf", roots) == "ext4"
