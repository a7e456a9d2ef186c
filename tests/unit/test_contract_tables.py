"""Traces, sidecars, recognition by content, flags, and the tables themselves."""

import pytest
from bmoe_proto.contract.columns import COMPUTE, DECIDE, METRICS, PROGRESS, ROUTE
from bmoe_proto.contract.flags import BY_SPELLING, ENVIRONMENT, FLAGS, OUTPUTS, TRACES, read_argv
from bmoe_proto.contract.metrics import NotOursError
from bmoe_proto.contract.recognise import ENOUGH, recognise
from bmoe_proto.contract.sidecar import parse_sidecar
from bmoe_proto.contract.traces import parse_trace, read_header
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.agent

ROUTE_TRACE = b"""# route_trace v1
# model=/sdcard/my models/a=b c.gguf arch=qwen3moe n_layer=2 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=196608 dense_bytes=201984
# layer=1 expert_bytes=100 dense_bytes=200
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped
0,1,29,0,0,7,0.501306,0,196608,0
0,1,29,0,1,3,nan,1,0,1
"""
COMPUTE_TRACE = b"""# compute_trace v1
# model=a.gguf arch=qwen3moe n_layer=48 n_threads=4 io_threads=4 o_direct=1 overlap=0
turn,phase,step,seq,layer,op,name,wall_ns,majflt
0,1,29,0,-1,GET_ROWS,embd,428500,0
0,1,29,1,0,MUL_MAT,node_5 (view, copy),19500,3
"""
LAYERS_TRACE = COMPUTE_TRACE.replace(b"GET_ROWS,embd", b"LAYER,pre")
IO_TRACE = b"""# io_trace v1
turn,phase,step,layer,expert,proj,lane,spec,offset,req_bytes,read_bytes,latency_ns
0,1,29,0,87,1,0,0,1526304,65536,69632,416800
"""
SIDECAR = b"peak_rss_kb=3512340\nmem_avail_before_kb=\nbatt_temp_max_dC=412\ncpu_temp_max_mC=-71250\nvendor=x y\n"
CSV = b"step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct\n1,2,0.1,0.0,0.1,0,-1.00\n"


def test_a_route_trace():
    found = parse_trace(ROUTE_TRACE)
    assert (found.header.kind, found.header.version, len(found)) == ("route", 1, 2)
    assert found.header.preamble["model"] == "/sdcard/my models/a=b c.gguf"
    assert found.header.layers[1] == {"expert_bytes": 100, "dense_bytes": 200}
    assert ROUTE_TRACE[found.header.offset :].startswith(b"0,1,29,0,0,7")
    assert found.columns["weight"] == [0.501306, None]
    assert found.columns["dropped"] == [0, 1]
    assert list(found.columns) == list(ROUTE)


def test_a_route_trace_from_before_dropping():
    lines = [line.rsplit(b",", 1)[0] if line[:1] in b"0t" else line for line in ROUTE_TRACE.splitlines()]
    found = parse_trace(b"\n".join(lines) + b"\n")
    assert "dropped" not in found.columns
    assert found.columns["expert_bytes"] == [196608, 0]


def test_a_compute_trace_keeps_layer_minus_one_and_names_with_commas():
    found = parse_trace(COMPUTE_TRACE)
    assert found.header.granularity == "nodes"
    assert found.columns["layer"] == [-1, 0]
    assert found.columns["name"] == ["embd", "node_5 (view, copy)"]
    assert found.columns["majflt"] == [0, 3]
    assert found.problems == []
    assert read_header(LAYERS_TRACE).granularity == "layers"
    assert list(found.columns) == list(COMPUTE)


def test_an_io_trace_without_preamble():
    found = parse_trace(IO_TRACE)
    assert (found.header.kind, found.header.preamble, found.columns["latency_ns"]) == ("io", {}, [416800])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_trace_from_elsewhere(encoding):
    found = parse_trace(ROUTE_TRACE.decode().replace("\n", "\r\n").encode(encoding))
    assert found.columns == parse_trace(ROUTE_TRACE).columns


def test_a_trace_cut_off_and_lines_that_are_no_rows():
    found = parse_trace(IO_TRACE + b"# odd\nnonsense\n" + b"0,1,29,0,88,1,0,0,15263")
    assert found.columns["expert"] == [87]
    assert [p.line for p in found.problems] == [4, 6, 5]


@pytest.mark.parametrize(
    "data", [b"", b"# route_trace v1\n", b"# route_trace v1\n# model=x\n0,1,2\n", CSV, b"\xff\x00\x80"]
)
def test_what_is_no_trace_is_refused(data):
    with pytest.raises(NotOursError):
        parse_trace(data)


def test_a_sidecar():
    found = parse_sidecar(SIDECAR)
    assert found.values == {
        "peak_rss_kb": 3512340,
        "mem_avail_before_kb": None,
        "batt_temp_max_dC": 412,
        "cpu_temp_max_mC": -71250,
        "vendor": "x y",
    }
    assert parse_sidecar(SIDECAR.replace(b"\n", b"\r\n")).values == found.values
    odd = parse_sidecar(SIDECAR + b"peak_rss_kb=many\nword\n")
    assert (odd.values["peak_rss_kb"], [p.line for p in odd.problems]) == (None, [6, 7])
    with pytest.raises(NotOursError):
        parse_sidecar(b"a=1\nb=2\n")


INLINE = b"prompt and text\n\n" + b"generation: 2 tokens, 0.100 s/token (10.000 tok/s)\n"
PROGRESS_LINE = b'BMOE_PROGRESS {"step":1,"delta_text":"a"}\n'
KINDS = [
    (b"", "empty"),
    (b" \r\n\n", "empty"),
    (b"\xff\xfe", "empty"),
    (PROGRESS_LINE, "stdout"),
    (b"llama_model_loader: loaded\n" * 50 + PROGRESS_LINE, "stdout"),
    (b"=== answer ===\nx\n", "stdout"),
    (INLINE, "stdout"),
    (b"text " * 100000 + b"\n" + INLINE, "stdout"),
    (b"usage: ./bmoe-cli -m model\n", "stdout"),
    (b"llama_model_loader: loaded meta data\nprint_info: x\n", "stderr"),
    (b"config error: moe.cache_mb=500 is in the pathological band\n", "stderr"),
    (b'CANNOT LINK EXECUTABLE "./bmoe-cli": library "libc++_shared.so" not found\n', "stderr"),
    (CSV, "metrics"),
    (b"# bmoe_metrics v2\n# engine=1\n" + CSV, "metrics"),
    (ROUTE_TRACE, "route"),
    (COMPUTE_TRACE, "compute"),
    (LAYERS_TRACE, "compute_layers"),
    (IO_TRACE, "io"),
    (SIDECAR, "sidecar"),
    (b'{"argv":["bmoe-cli"],"exit":0}', "run.json"),
    (b'{"exit":-9}', "run.json"),
    (b'{"other":1}', "unknown"),
    (b'{"argv":', "unknown"),
    (b"[" * 100000, "unknown"),
    (b'"step","steps"\n"1","2"\n', "unknown"),
    (b"hello\n", "unknown"),
    (bytes(range(128, 256)) * 10, "unknown"),
    (b"# some notes\n", "unknown"),
]


@pytest.mark.parametrize(("data", "kind"), KINDS)
def test_recognised_by_content(data, kind):
    assert recognise(data) == kind


@pytest.mark.parametrize(("data", "kind"), [(d, k) for d, k in KINDS if k not in ("unknown", "empty")])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_recognised_in_other_encodings(data, kind, encoding):
    assert recognise(data.decode().replace("\n", "\r\n").encode(encoding)) == kind


@given(
    st.binary(max_size=200), st.sampled_from([b"", b"# ", b"{", b"\xff\xfe", b"# compute_trace v1\n"]), st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_recognising_never_raises(noise, start, long):
    assert recognise(start + noise + b"x\n" * (ENOUGH * long))


def test_flags_are_told_apart():
    assert len(BY_SPELLING) == sum(len(flag.spellings) for flag in FLAGS)
    assert {"--csv", "--route-trace", "--compute-trace", "--compute-trace-layers", "--io-trace"} == OUTPUTS
    assert OUTPUTS - {"--csv"} == TRACES
    assert {"BMOE_CACHE_MB", "BMOE_PROGRESS", "BMOE_N_EXPERT_USED"} <= set(ENVIRONMENT)
    assert [flag.name for flag in FLAGS if flag.since != "0.19"] == [
        "--row-stream",
        "--decide",
        "--decide-prefix-cache",
        "--expert-substitute",
        "--prefill-device",
        "--no-prefill-routed",
    ]


def test_an_argv_is_read():
    argv = read_argv(
        ["/x/bmoe-cli", "-m", "a.gguf", "-p", "--progress", "-n", "5", "--cache-mb", "auto", "-n", "6", "--overlap"]
    )
    assert argv.values == {
        "--model": "a.gguf", "--prompt": "--progress", "--n-predict": "6", "--cache-mb": "auto", "--overlap": None,
    }  # fmt: skip
    assert (argv.has("--progress"), argv.number("--cache-mb"), argv.number("--n-predict")) == (False, None, 6)
    assert (argv.get("--threads"), argv.get("--draft"), argv.get("--overlap")) == ("4", None, None)


def test_an_argv_with_what_the_table_does_not_know():
    argv = read_argv(["--new", "7", "--newer", "word", "--csv"], {"--new": 1})
    assert (argv.values, argv.unknown, argv.missing) == ({"--new": "7"}, ["--newer", "word"], ["--csv"])


def test_minus_one_is_a_sentinel_in_these_and_no_others():
    for table in (METRICS, PROGRESS, DECIDE, ROUTE, COMPUTE):
        named = {name for name, column in table.items() if column.minus_one}
        assert named <= {"cache_hit_pct", "dense_resident_frac", "resident_frac"}


def test_both_layouts_of_23_columns_are_known():
    assert {"loop_overhead_ms", "resident_frac"} <= set(METRICS)
    assert len(METRICS) == 30
