"""The simulator's parts: requests by text search, settings, the model file, routing and the cost of a start."""

import itertools
import json
import os
import subprocess
import sys
import threading

import pytest
from bmoe_sim import model as models
from bmoe_sim.argv import Options, RefusedError, known_flags, parse, usage
from bmoe_sim.burn import Burner
from bmoe_sim.makemodel import make_model
from bmoe_sim.requests import parse as parse_request
from bmoe_sim.router import Router
from bmoe_sim.row import escape
from bmoe_sim.settings import Settings, SettingsError
from bmoe_sim.settings import parse as parse_settings
from bmoe_sim.streamer import Streamer
from bmoe_sim.words import Pieces
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.agent


def test_requests_are_read_by_text_search():
    r = parse_request(
        '{"cmd":"generate","id":7,"think":false,"prompt":"naïve \\"x\\"\\n\\u00e9\\u20ac"}'.encode(), 9, think=True
    )
    assert (r.id, r.n_predict, r.think, r.clear_kv) == (7, 9, False, True)
    assert r.prompt == 'naïve "x"\n'.encode() + b"\xe9\xac"  # only the low byte of an escape
    # a prompt that stands first answers for the keys it holds
    r = parse_request(b'{"cmd":"generate","prompt":"say \\"id\\": 3","id":8}', 9, think=True)
    assert r.id == 8
    r = parse_request(b'{"prompt":"{\'\\"","x":"id","cmd":"generate"}', 9, think=True)
    assert r.cmd == "generate"
    assert parse_request(b'{"cmd":7}', 9, think=True) is None
    assert parse_request(b'{"cmd":"generate', 9, think=True) is None
    assert parse_request(b"", 9, think=True) is None
    assert parse_request(b'{"cmd":"decide","choices":["a, b","c\\"d"]}', 9, think=True).choices == [b"a, b", b'c"d']
    assert parse_request(b'{"cmd":"decide","choices":["a",3]}', 9, think=True).choices == []
    assert parse_request(b'{"cmd":"x","id": -12}', 9, think=True).id == -12
    assert parse_request(b'{"cmd":"x","id":"no"}', 9, think=True).id == 0


@given(st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_no_request_line_raises(line):
    parse_request(line, 9, think=True)
    parse_request(b'{"cmd":"decide","choices":[' + line, 9, think=True)


@given(st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"])), st.integers(0, 1 << 40), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_request_written_unescaped_with_the_prompt_last_is_read_as_meant(prompt, number, think):
    line = json.dumps({"cmd": "generate", "id": number, "think": think, "prompt": prompt}, ensure_ascii=False)
    r = parse_request(line.encode(), 9, think=not think)
    assert (r.cmd, r.id, r.think, r.prompt) == ("generate", number, think, prompt.encode())


def test_settings_are_read_or_refused_with_the_entry():
    s = parse_settings("pose=0.19, seed=4,tok_s=7.5,text=a%2Cb%00,fault=hang@3+oom@load:12,,burn=1")
    assert (s.old, s.seed, s.tok_s, s.text, s.burn) == (True, 4, 7.5, b"a,b\0", True)
    assert s.fault("oom", "load").arg == 12
    assert s.fault("hang", 4) is None
    for bad in ("pose=0.20", "tok_s=0", "fault=sneeze@3", "fault=hang", "speed=3", "seed=x", "text=@/nonexistent/f"):
        with pytest.raises(SettingsError, match=bad.split("=")[0]):
            parse_settings(bad)


def test_argv_resolves_as_the_engine_does():
    newest, old = Settings(), Settings(pose="0.19")
    assert parse(["-m", "x", "--moe-stream"], {}, newest).cache_auto
    assert not parse(["-m", "x", "--moe-stream"], {}, old).cache_auto
    assert parse(["-m", "x", "--moe-stream", "--cache-mb", "0"], {}, newest).cache_mb == 0
    assert not parse(["-m", "x", "--cache-mb", "0"], {"BMOE_CACHE_MB": "auto"}, newest).cache_auto
    assert parse(["-m", "x"], {"BMOE_CACHE_MB": "auto"}, newest).cache_auto
    assert parse(["-m", "x", "-n", "12abc"], {}, old).n_predict == 12  # atoi
    assert parse(["-m", "x", "-t", "2", "-t", "3"], {}, newest).threads == 3
    assert parse(["-m", "x", "--no-warm-dense"], {}, newest).dense_weights == "mmap"
    assert parse(["-m", "x", "-p", os.fsdecode(b"\xff")], {}, newest).prompt == b"\xff"
    assert parse(["-m", "x"], {"BMOE_OVERLAP": "0", "BMOE_PREDICT_LOG": "2"}, newest).predict_log
    with pytest.raises(RefusedError, match="is none of"):
        parse(["-m", "x", "--dense-weights", "soft"], {}, newest)
    for pose in (newest, old):
        text = usage("bmoe-cli", pose)
        assert all(f" {spelling}" in text for flag in known_flags(pose) for spelling in flag.spellings)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_made_model_is_read_back(shards, tmp_path):
    paths = make_model(str(tmp_path / "m.gguf"), size_mib=6, shards=shards, layers=3, experts=8)
    assert len(paths) == shards
    total = sum(os.path.getsize(p) for p in paths)
    assert 4 << 20 < total < 8 << 20
    m = models.load(paths[0])
    assert (m.arch, m.n_layer, m.n_expert, m.n_expert_used, m.moe_layers) == ("qwen3moe", 3, 8, 4, [0, 1, 2])
    spans = m.all_spans()
    assert sum(s.size for s in spans) <= total
    by_shard = {}
    for span in spans:
        by_shard.setdefault(span.shard, []).append((span.offset, span.size))
    assert len(by_shard) == shards
    for shard, parts in by_shard.items():
        parts.sort()
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(parts))
        assert parts[-1][0] + parts[-1][1] <= os.path.getsize(paths[shard])
    m.open(direct=True)
    streamer = Streamer(m, Options(moe_stream=True, cache_mb=1, n_expert_used=4), 0)
    router = Router("s", m.moe_layers, m.n_expert, 4)
    batch = streamer.prefill([router.token() for _ in range(5)], 0)
    read = batch.reads[0]
    with open(paths[m.expert(read.layer, read.expert)[0].shard], "rb") as f:
        f.seek(read.offset)
        wanted = f.read(read.req_bytes)
    memory = memoryview(bytearray(1 << 20))
    # what a window holds at the span's place is the span
    start = read.offset % 4096
    m.close_fds()
    m.open(direct=False)
    m.read(m.expert(read.layer, read.expert)[read.proj], memory)
    assert bytes(memory[start : start + read.req_bytes]) == wanted
    m.close_fds()


def test_a_broken_model_is_refused_in_words(tmp_path):
    (path,) = make_model(str(tmp_path / "m.gguf"), size_mib=2)
    whole = (tmp_path / "m.gguf").read_bytes()
    for cut in (0, 3, 20, 200, 5000, len(whole) // 2):
        (tmp_path / "m.gguf").write_bytes(whole[:cut])
        with pytest.raises(models.ModelError, match="gguf_init_from_file"):
            models.load(path)
    (tmp_path / "m.gguf").write_bytes(whole[:8] + b"\xff" * 16 + whole[24:])
    with pytest.raises(models.ModelError):
        models.load(path)
    with pytest.raises(ValueError, match="at least"):
        make_model(path, experts=1)


def test_routing_depends_on_the_text_alone_and_has_favourites():
    def route(seed):
        router = Router(seed, [0, 3], 32, 4)
        return [router.token() for _ in range(200)]

    assert route("a") == route("a") != route("b")
    tokens = route("a")
    for token in tokens:
        for routing in token.values():
            assert len({e for e, _ in routing}) == 4
            assert sum(w for _, w in routing) == pytest.approx(1)
            assert [w for _, w in routing] == sorted((w for _, w in routing), reverse=True)
    counts = sorted(sum(any(e == x for e, _ in t[0]) for t in tokens) for x in range(32))
    assert counts[-1] > 3 * max(1, counts[0])


def test_pieces_join_to_whole_characters():
    for seed in map(str, range(20)):
        pieces = Pieces(seed, None)
        said = [pieces.next(last=i == 59) for i in range(60)]
        b"".join(said).decode()
    pieces = Pieces("", "été".encode())
    assert b"".join(iter(pieces.next, None)) == "été".encode()
    assert escape(b'\x00\x08\n"\\\xc3\x7f') == b'\\u0000\\u0008\\n\\"\\\\\xc3\x7f'


def test_starting_imports_neither_grpc_nor_protobuf():
    code = (
        "import sys, bmoe_sim.cli, bmoe_sim.engine, bmoe_sim.session\n"
        "heavy = {'grpc', 'google', 'numpy', 'argparse', 'asyncio', 'ctypes'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    env = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-S", "-c", code], env=env, timeout=60, check=True)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor is every thread's own")
def test_pinned_threads_have_a_processor_each():
    places = []

    def compute():
        burner = Burner(2, 0.1, pin=True)
        burner.token()
        others = [thread.native_id for thread in threading.enumerate() if thread.name == "compute-1"]
        places.extend(os.sched_getaffinity(each) for each in (0, others[-1]))

    everywhere = os.sched_getaffinity(0)
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert [len(place) for place in places] == [1, 1]
    assert places[0] != places[1]
    assert os.sched_getaffinity(0) == everywhere
