"""The metrics CSV of every generation, in every encoding, whole and cut: columns, preamble, trailers, problems."""

import csv
import io
import math

import pytest
from bmoe_proto.contract.columns import DONE, METRICS, TRAILER, done_spelling
from bmoe_proto.contract.metrics import NotOursError, parse_metrics
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.agent

OLD = "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct"
C9 = f"{OLD},stall_ms,mgmt_ms"
C11 = f"{C9},majflt,cpu_ms"
MEMORY = "rss_mib,rss_anon_mib,rss_file_mib,swap_mib,mem_available_mib,mem_free_mib,swap_free_mib"
C22 = f"{C11},dense_resident_frac,turn,majflt_mib,cache_budget_mib,{MEMORY}"
GENERATIONS = {
    7: OLD,
    8: f"{OLD},stall_ms",
    9: C9,
    11: C11,
    22: C22,
    "22+resident_frac": f"{C22},resident_frac",
    23: f"{C22},loop_overhead_ms",
    25: f"{C22},loop_overhead_ms,mtp_batch,mtp_draft_ms",
    29: f"{C22},loop_overhead_ms,mtp_batch,mtp_draft_ms,drain_ms,adopt_ms,ra_issue_ms,ra_wd_ms",
}
V1 = """# bmoe_metrics v1
# model=Qwen3 30B (my copy) v2=final.gguf arch=qwen3moe n_layer=48 n_expert=128 n_expert_used=8 threads=4 n_ctx=2048
# moe_stream=1 cache_mb=4000 cache_auto=0 overlap=1 prefetch=0 dense_weights=anon cache_policy=lru drop_cold_frac=0.5
"""
V2 = """# bmoe_metrics v2
# engine=0.24
# model=0123.gguf arch=qwen3moe n_layer=48 n_expert=128 n_expert_used=8 threads=4
  n_ctx=2048 n_ubatch=0 chatml=1
# moe_stream=1 cache_mb=4000 cache_cycle_mb=812.5 o_direct=0
  substitute_lambda=0.1 dry_multiplier=0.8 fork=yes
# temp=0 top_p=0.95 seed=4294967295 spec=off
"""


def row(header: str, step: int, **values: object) -> str:
    known = {"step": step, "steps": 48, "turn": 0, "cache_hit_pct": "50.00", "dense_resident_frac": "0.250"} | values
    names = header.split(",")
    ints = {name for name in names if name in METRICS and METRICS[name].type == "int"}
    return ",".join(str(known.get(name, 0 if name in ints else "1.500")) for name in names)


def file(header: str, *rows: str, above: str = "", below: str = "") -> bytes:
    return (above + "\n".join([header, *rows]) + "\n" + below).encode()


@pytest.mark.parametrize("columns", GENERATIONS)
def test_every_generation_is_read_by_name(columns):
    header = GENERATIONS[columns]
    found = parse_metrics(file(header, row(header, 1), row(header, 2)))
    assert found.names == header.split(",")
    assert found.unknown == []
    assert found.columns["step"] == [1, 2]
    assert (found.turns, found.problems, found.trailers, found.version) == ([0, 0], [], [], 0)
    for name, values in found.columns.items():
        assert {type(value) for value in values} == {int if METRICS[name].type == "int" else float}, name


def test_a_v1_preamble():
    found = parse_metrics(file(C22, row(C22, 1), above=V1))
    assert found.version == 1
    assert found.preamble["model"] == "Qwen3 30B (my copy) v2=final.gguf"
    assert (found.preamble["arch"], found.preamble["n_expert_used"], found.preamble["cache_policy"]) == (
        "qwen3moe",
        8,
        "lru",
    )
    assert (found.preamble["drop_cold_frac"], found.preamble["moe_stream"]) == (0.5, 1)
    assert "engine" not in found.preamble


def test_a_wrapped_v2_preamble_with_keys_from_forks():
    found = parse_metrics(file(C22, row(C22, 1), above=V2))
    pre = found.preamble
    assert (pre["engine"], pre["model"], pre["n_ctx"], pre["chatml"]) == ("0.24", "0123.gguf", 2048, 1)
    assert (pre["substitute_lambda"], pre["dry_multiplier"], pre["fork"]) == (0.1, 0.8, "yes")
    assert (pre["seed"], pre["temp"], pre["cache_cycle_mb"], pre["spec"]) == (4294967295, 0.0, 812.5, "off")
    assert found.problems == []


def test_unmeasured_is_none_and_a_true_zero_is_zero():
    rows = [
        row(C22, 1, cache_hit_pct="-1.00", dense_resident_frac="-1.000", majflt=0),
        row(C22, 2, cache_hit_pct="0.00", dense_resident_frac="0.000"),
        row(C22, 3, cache_hit_pct="nan", wall_ms="-nan", io_ms="inf", rss_mib="-1.0", mem_free_mib=""),
    ]
    found = parse_metrics(file(C22, *rows)).columns
    assert found["cache_hit_pct"] == [None, 0.0, None]
    assert found["dense_resident_frac"] == [None, 0.0, 0.25]
    assert found["majflt"] == [0, 0, 0]
    assert (found["wall_ms"][2], found["io_ms"][2], found["mem_free_mib"][2]) == (None, None, None)
    assert found["rss_mib"] == [1.5, 1.5, -1.0]


def test_a_session_has_a_trailer_a_turn():
    rows = [row(C22, 1), row(C22, 2), "# summary tokens=2 s/tok=0.1", "# summary tokens=0 cache_hit_pct=-1.0"]
    rows += [row(C22, 1, turn=2), "# summary tokens=1 tok/s=9.5 read_MiB=1.5 majflt/tok=0.00 new_key=x"]
    found = parse_metrics(file(C22, *rows))
    assert [(t.turn, t.values["tokens"], t.line) for t in found.trailers] == [(0, 2, 4), (1, 0, 5), (2, 1, 7)]
    assert found.trailers[1].values["cache_hit_pct"] is None
    assert found.trailers[2].done == {"tokens": 1, "tok_s": 9.5, "read_mib": 1.5, "majflt_tok": 0.0, "new_key": "x"}
    assert found.turns == [0, 0, 2]


def test_turns_of_a_file_without_the_column():
    rows = [
        row(OLD, 1),
        row(OLD, 2),
        "# summary tokens=2",
        row(OLD, 1),
        "# summary tokens=1",
        row(OLD, 1),
        row(OLD, 2),
        row(OLD, 1),
    ]
    found = parse_metrics(file(OLD, *rows))
    assert found.turns == [0, 0, 1, 2, 2, 3]
    assert "turn" not in found.columns


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_encodings_and_line_ends(encoding, end):
    text = file(C22, row(C22, 1), row(C22, 2), above=V1, below="# summary tokens=2\n").decode()
    found = parse_metrics(text.replace("\n", end).encode(encoding))
    plain = parse_metrics(text.encode())
    assert (found.columns, found.preamble, found.trailers) == (plain.columns, plain.preamble, plain.trailers)


def test_a_killed_run_leaves_its_whole_rows():
    data = file(C22, row(C22, 1), row(C22, 2))
    cut = parse_metrics(data[:-20])
    assert cut.columns["step"] == [1]
    assert [(p.line, "cut off" in p.what) for p in cut.problems] == [(3, True)]
    assert parse_metrics(data[:-1]).columns["step"] == [1, 2]
    assert len(parse_metrics(file(C22))) == 0


def test_columns_nobody_knows_are_kept():
    header = f"{OLD},arm,tokens_since_switch,share"
    rows = ["1,9,1.0,0,1.0,0,5.0,A,3,0.5", "2,9,1.0,0,1.0,0,5.0,B,0,1", "3,9,1.0,0,1.0,0,5.0,,1,nan"]
    found = parse_metrics(file(header, *rows))
    assert found.unknown == ["arm", "tokens_since_switch", "share"]
    assert found.columns["arm"] == ["A", "B", None]
    assert found.columns["tokens_since_switch"] == [3, 0, 1]
    assert found.columns["share"] == [0.5, 1.0, None]
    assert found.columns["io_ms"] == [0.0, 0.0, 0.0]
    assert {type(value) for value in found.columns["io_ms"]} == {float}


def test_what_is_not_understood_is_told_and_stops_nothing():
    rows = [
        row(OLD, 1),
        "garbage",
        "1,2,3",
        row(OLD, 2, wall_ms="fast", read_bytes="1.5"),
        row(OLD, 3, read_bytes=1 << 64),
    ]
    found = parse_metrics(file(OLD, *rows))
    assert found.columns["step"] == [1, 2, 3]
    assert found.columns["wall_ms"] == [1.5, None, 1.5]
    assert found.columns["read_bytes"] == [0, None, None]
    assert {p.line for p in found.problems} == {3, 4, 5, 6}


def test_two_files_in_one():
    found = parse_metrics(
        file(OLD, row(OLD, 1), above=V1) + file(C9, row(C9, 1), above="# bmoe_metrics v2\n# cache_mb=1\n")
    )
    assert found.columns["step"] == [1, 1]
    assert found.columns["stall_ms"] == [None, 1.5]
    assert found.preamble["cache_mb"] == 4000
    assert [p.what for p in found.problems] == ["cache_mb=1 after cache_mb=4000: the first one stands"]


def test_many_problems_are_counted_not_listed():
    found = parse_metrics(file(OLD, *["x"] * 1000))
    assert len(found.problems) + found.more_problems == 1000
    assert len(found.problems) == 100


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"\xff\xfe\x00", "begins"),
        (b'"step","steps","wall_ms"\n"1","2","3"\n', "quoted"),
        (b"time,value\n1,2\n", "begins 'time,value'"),
        (b"# bmoe_metrics v2\n# engine=1\n", "no header"),
        (bytes(range(256)) * 4, "begins"),
    ],
)
def test_what_is_not_ours_is_refused_with_the_reason(data, why):
    with pytest.raises(NotOursError, match=why):
        parse_metrics(data)


def test_trailer_keys_map_onto_the_done_spellings():
    spelled = {column.done for column in TRAILER.values()}
    in_no_csv = {"id", "cancelled", "n_past", "reasoning", "text"}
    assert set(DONE) - in_no_csv <= spelled
    assert done_spelling("ra_gemv_ms/tok") == "ra_gemv_ms_tok"
    for column in TRAILER.values():
        if column.done in DONE:
            assert (column.type, column.minus_one) == (DONE[column.done].type, DONE[column.done].minus_one), column.name


_CELL = (
    st.integers(-1, 10**6).map(str)
    | st.floats(-10, 1e6).map("{:.3f}".format)
    | st.sampled_from(["nan", "", "-1.00", "x"])
)


@given(st.sampled_from(list(GENERATIONS.values())), st.data())
@settings(max_examples=100, deadline=None)
def test_cells_equal_those_of_a_plain_reader(header, data):
    width = header.count(",") + 1
    rows = data.draw(st.lists(st.lists(_CELL, min_size=width, max_size=width), max_size=5))
    rows = [["1", *cells[1:]] for cells in rows]
    found = parse_metrics(file(header, *map(",".join, rows)))
    for name, texts in zip(header.split(","), zip(*rows, strict=True) if rows else [()] * width, strict=True):
        assert found.columns[name] == [_plain(name, text) for text in texts]


def _plain(name: str, text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    column = METRICS[name]
    if not math.isfinite(value) or (column.minus_one and value == -1):
        return None
    return None if column.type == "int" and value != int(value) else value


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
@settings(max_examples=200, deadline=None)
def test_no_bytes_break_it(noise):
    for data in (noise, V1.encode() + noise, file(OLD, row(OLD, 1)) + noise, file(OLD) + noise + file(C9, row(C9, 1))):
        try:
            found = parse_metrics(data)
        except NotOursError:
            continue
        assert {len(column) for column in found.columns.values()} == {len(found)}


def test_the_reader_agrees_with_csv_on_a_plain_file():
    rows = [row(C22, step) for step in range(1, 50)]
    found = parse_metrics(file(C22, *rows, above=V1))
    for at, record in enumerate(csv.DictReader(io.StringIO("\n".join([C22, *rows])))):
        assert {name: float(text) for name, text in record.items()} == {n: v[at] for n, v in found.columns.items()}
