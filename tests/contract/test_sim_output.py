"""The simulator's one-shot output read back by the contract parser, and the identities between its files."""

import csv
import os
from collections import defaultdict

import pytest
from bmoe_proto.contract.events import Answer, Load, Other, Progress, Report
from bmoe_proto.contract.metrics import parse_metrics
from bmoe_proto.contract.stdout import parse
from bmoe_sim.makemodel import make_model
from support.simulator import PROMPT, STREAM, one_shot, sim

pytestmark = pytest.mark.agent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(str(tmp_path_factory.mktemp("model") / "tiny moe.gguf"), size_mib=8)[0]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return make_model(str(tmp_path_factory.mktemp("model") / "g.gguf"), size_mib=8, shards=2, arch="gemma4")[0]


def rows_of(path):
    with open(path, encoding="utf-8") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


SETS = {
    "mmap": [],
    "cache": STREAM,
    "no-cache": ["--moe-stream", "--cache-mb", "0"],
    "auto": ["--moe-stream", "--cache-mb", "auto"],
    "overlap": [*STREAM, "--overlap", "--io-threads", "3"],
    "ngram": [*STREAM, "--ngram", "--draft", "3"],
    "mtp": [*STREAM, "--mtp", "--draft", "2", "--overlap"],
    "drop": [*STREAM, "--drop-cold-experts", "0.8"],
    "substitute": [*STREAM, "--expert-substitute", "0.5"],
    "prefetch": [*STREAM, "--prefetch", "1"],
    "stale-gate": [*STREAM, "--predict-prefetch", "--predict-log"],
    "route-ahead": [*STREAM, "--route-ahead", "1", "--overlap"],
    "load-all": ["--moe-stream", "--cache-mb", "0", "--load-all"],
}


CASES = [(name, pose) for name in SETS for pose in ("newest", "0.19") if (name, pose) != ("substitute", "0.19")]


@pytest.mark.parametrize(("name", "pose"), CASES)
def test_output_parses_whole_and_its_identities_hold(name, pose, model, tmp_path):
    flags = [*SETS[name], "--csv", "m.csv"]
    streams = "--moe-stream" in flags
    if streams:
        flags += ["--route-trace", "r.csv", "--io-trace", "i.csv"]
    done = one_shot(model, flags, f"pose={pose},seed=7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = parse(done.stdout)
    assert [e for e in events if isinstance(e, Other)] == []
    told = [e.to_json() for e in events if isinstance(e, Progress)]
    answer = next(e.to_json() for e in events if isinstance(e, Answer))
    assert "".join(t["delta_text"] for t in told) == answer["text"]
    reports = {}
    for e in events:
        if isinstance(e, Report):
            reports.setdefault(e.name, e)
    assert ("mode" in reports) == (pose == "newest")
    assert ("moe-stream" in reports) == streams

    metrics = parse_metrics((tmp_path / "m.csv").read_bytes())
    assert not metrics.problems
    assert not metrics.unknown
    assert len(metrics) == len(told) == 24
    assert len(metrics.columns) == 29
    assert "simulator" in metrics.preamble["engine"]
    assert metrics.preamble["moe_stream"] == int(streams)
    c = metrics.columns
    overlap = "--overlap" in flags
    for i in range(24):
        waited = c["stall_ms"][i] if overlap else c["io_ms"][i]
        residual = max(0.0, c["wall_ms"][i] - waited - c["mgmt_ms"][i])
        assert c["compute_ms"][i] == pytest.approx(residual, abs=0.0015)
        assert c["drain_ms"][i] + c["ra_issue_ms"][i] + c["ra_wd_ms"][i] <= c["compute_ms"][i] + 0.001
        assert c["adopt_ms"][i] <= c["mgmt_ms"][i] + 0.001
        assert c["mtp_draft_ms"][i] <= c["loop_overhead_ms"][i] + 0.001
        assert told[i]["wall_ms"] == pytest.approx(c["wall_ms"][i], abs=0.051)
        assert told[i]["step"] == c["step"][i] == i + 1
        if overlap and c["read_bytes"][i]:
            assert c["stall_ms"][i] > 0
    trailer = metrics.trailers[0].values
    assert trailer["tokens"] == 24
    assert trailer["s/tok"] == pytest.approx(sum(c["wall_ms"]) / 24e3, abs=0.00051)
    assert trailer["tok/s"] == pytest.approx(24e3 / sum(c["wall_ms"]), rel=1e-3)
    assert trailer["read_MiB"] == pytest.approx(sum(c["read_bytes"]) / 2**20, abs=0.051)
    assert trailer["cpu_s/tok"] == pytest.approx(sum(c["cpu_ms"]) / 24e3, abs=0.00006)
    assert trailer["loop_overhead_s/tok"] >= sum(c["loop_overhead_ms"]) / 24e3 - 0.00006

    # a verified group: its first row carries everything, all its rows its size
    at = decodes = 0
    while at < 24:
        size = c["mtp_batch"][at]
        assert c["mtp_batch"][at : at + size] == [size] * size
        for zero in ("wall_ms", "io_ms", "compute_ms", "read_bytes", "cpu_ms", "loop_overhead_ms"):
            assert not any(c[zero][at + 1 : at + size])
        decodes += 1
        at += size
    assert trailer["mtp_decodes"] == decodes
    if "--ngram" in flags or "--mtp" in flags:
        assert 24 - decodes == trailer["mtp_accepted"] <= trailer["mtp_drafted"]
        assert decodes < 24
    else:
        assert decodes == 24

    loads = [e for e in events if isinstance(e, Load)]
    assert len(loads) == (24 if pose == "0.19" and streams else sum(1 for b in c["read_bytes"] if b))
    if streams:
        check_traces(tmp_path, metrics, cached=metrics.preamble["cache_mb"] > 0 and name != "load-all", name=name)
    else:
        assert set(c["cache_hit_pct"]) == {None}


def check_traces(folder, metrics, *, cached, name):
    c = metrics.columns
    n_prompt = metrics.trailers[0].values["n_prompt"]
    groups = [i for i in range(24) if c["wall_ms"][i] > 0]
    spans = {}  # last trace step of each decode -> its first row
    for i in groups:
        spans[n_prompt + i + c["mtp_batch"][i] - 1] = i
    pulled, wanted, spec = defaultdict(int), defaultdict(int), defaultdict(int)
    latency = defaultdict(int)
    for r in rows_of(folder / "i.csv"):
        if r["phase"] == "1":
            i = spans[int(r["step"])]
            pulled[i] += int(r["read_bytes"])
            latency[i] += int(r["latency_ns"])
            if r["spec"] == "1":
                spec[i] += int(r["req_bytes"])
            else:
                wanted[i] += int(r["req_bytes"])
    routes = rows_of(folder / "r.csv")
    keys = [(r["turn"], r["phase"], r["step"], r["layer"], r["slot"]) for r in routes]
    assert len(keys) == len(set(keys))
    paid, by_decode, lookups, hits = defaultdict(int), defaultdict(list), 0, 0
    last_of = {}
    for last, i in spans.items():
        for step in range(n_prompt + i, last + 1):
            last_of[step] = i
    seen = set()
    for r in routes:
        step, phase = int(r["step"]), r["phase"]
        assert (r["dropped"] == "0") or (r["residency"] == "0" and r["expert_bytes"] == "0")
        assert (int(r["expert_bytes"]) == 0) or r["residency"] == "0"
        if phase == "1":
            paid[last_of[step]] += int(r["expert_bytes"])
            by_decode[last_of[step]].append(r)
        elif cached and r["dropped"] == "0" and (r["layer"], r["expert"]) not in seen:
            seen.add((r["layer"], r["expert"]))
            lookups += 1
            hits += r["residency"] != "0"
    for i in groups:
        assert pulled[i] == c["read_bytes"][i]
        if name != "load-all":
            assert wanted[i] == paid[i]
        lanes = metrics.preamble["io_threads"]
        expected = latency[i] / 1e6 if metrics.preamble["overlap"] else latency[i] / 1e6 / lanes
        assert c["io_ms"][i] == pytest.approx(expected, abs=0.001)
        unique = {(r["layer"], r["expert"]): r for r in reversed(by_decode[i]) if r["dropped"] == "0"}
        if cached:
            lookups += len(unique)
            hits += sum(r["residency"] != "0" for r in unique.values())
            assert c["cache_hit_pct"][i] == pytest.approx(100 * hits / lookups, abs=0.006)
        else:
            assert c["cache_hit_pct"][i] is None
    t = metrics.trailers[0].values
    if name == "drop":
        decode = [r for r in routes if r["phase"] == "1"]
        assert t["experts_routed"] == len(decode)
        assert t["experts_dropped"] == sum(r["dropped"] == "1" for r in decode) > 0
    if name in {"prefetch", "stale-gate", "route-ahead"}:
        assert sum(spec.values()) > 0
        assert sum(r["residency"] == "2" for r in routes) == t["spec_useful"] > 0
        assert t["spec_useful"] <= t["spec_experts"]
    if name == "route-ahead":
        assert t["ra_committed"] + t["ra_passthrough"] == 24 * metrics.preamble["n_layer"]
        assert 80 < t["ra_agree_pct"] < 100
    if name == "substitute":
        assert 0 < t["experts_substituted"] < t["experts_reranked"]


def test_the_same_seed_says_the_same_and_lossless_settings_keep_the_text(model, tmp_path):
    def said(flags, settings="seed=3"):
        events = parse(one_shot(model, flags, settings, cwd=tmp_path).stdout)
        return [(e.to_json()["wall_ms"], e.to_json()["delta_text"]) for e in events if isinstance(e, Progress)]

    base = said(STREAM)
    assert said(STREAM) == base
    assert said(STREAM, "seed=4") != base
    text = [t for _, t in base]
    assert [t for _, t in said([*STREAM, "--overlap"])] == text
    assert [t for _, t in said([*STREAM, "--drop-cold-experts", "0.5"])] != text


def test_compute_traces_add_up_at_both_granularities(model, tmp_path):
    for flag in ("--compute-trace", "--compute-trace-layers"):
        assert one_shot(model, [flag, "k.csv", "--csv", "m.csv"], "majflt=3", cwd=tmp_path).returncode == 0
        head = (tmp_path / "k.csv").read_text().splitlines()[:3]
        assert head[0] == "# compute_trace v1"
        rows = [r for r in rows_of(tmp_path / "k.csv") if r["phase"] == "1"]
        metrics = parse_metrics((tmp_path / "m.csv").read_bytes())
        assert metrics.preamble["compute_trace_layers"] == int(flag.endswith("layers"))
        per_step, faults = defaultdict(int), defaultdict(int)
        for r in rows:
            per_step[int(r["step"])] += int(r["wall_ns"])
            faults[int(r["step"])] += int(r["majflt"])
        first = metrics.trailers[0].values["n_prompt"]
        assert sorted(per_step) == list(range(first, first + 24))
        for i, compute in enumerate(metrics.columns["compute_ms"]):
            assert per_step[first + i] / 1e6 == pytest.approx(compute, abs=0.001)
            assert faults[first + i] == metrics.columns["majflt"][i]
        assert sum(metrics.columns["majflt"]) > 0
        names = {r["name"] for r in rows}
        if flag.endswith("layers"):
            assert {r["op"] for r in rows} == {"LAYER"}
            assert names == {"pre", "post", "blk.0", "blk.1", "blk.2", "blk.3"}
        else:
            assert {"embd", "ffn_moe_down-3", "result_output"} <= names


def test_memory_is_really_taken_and_the_file_really_read(model, tmp_path):
    def last(flags):
        assert one_shot(model, [*flags, "--csv", "m.csv"], cwd=tmp_path).returncode == 0
        c = parse_metrics((tmp_path / "m.csv").read_bytes()).columns
        return c["rss_anon_mib"][-1], c["rss_file_mib"][-1], c["rss_anon_mib"][0]

    small = last(["--moe-stream", "--cache-mb", "1", "--force-cache", "--dense-weights", "mmap"])
    big = last(["--moe-stream", "--cache-mb", "6", "--force-cache", "--dense-weights", "mmap"])
    dense = last(["--moe-stream", "--cache-mb", "1", "--force-cache", "--dense-weights", "anon"])
    mapped = last([])
    assert big[0] - small[0] > 3.5
    assert dense[0] - small[0] > 1.5
    assert mapped[1] - small[1] > 5


def test_row_streaming_and_shards_and_the_device(gemma, tmp_path):
    flags = [*STREAM, "--row-stream", "--prefill-device", "gpu", "--csv", "m.csv"]
    done = one_shot(gemma, flags, cwd=tmp_path)
    report = {e.name: e for e in parse(done.stdout) if isinstance(e, Report)}
    assert "moe-rows" in report
    assert b"shards=2" in done.stderr
    t = parse_metrics((tmp_path / "m.csv").read_bytes()).trailers[0].values
    assert t["row_rows"] > 24
    assert t["row_io_errors"] == 0
    assert t["prefill_dev_nodes"] > 0
    idle = one_shot(gemma, flags, "device_idle=1,fault=failrows@1:3", cwd=tmp_path)
    assert b"moe-rows: 3 FAILED reads" in idle.stdout
    assert not [e for e in parse(idle.stdout) if isinstance(e, Other)]
    t = parse_metrics((tmp_path / "m.csv").read_bytes()).trailers[0].values
    assert (t["row_io_errors"], t["prefill_dev_nodes"], t["prefill_dev_tokens"]) == (3, 0, 0)


def test_without_progress_the_text_stands_inline(model):
    done = sim(["-m", model, "-p", PROMPT, "-n", "6"])
    events = parse(done.stdout)
    assert done.stdout.startswith(PROMPT.encode())
    assert b"=== answer" not in done.stdout
    assert next(e.name for e in events if isinstance(e, Report)) == "generation"


def test_text_reasoning_reset_and_end_of_generation(model, tmp_path):
    text = '=== perf ===\nBMOE_PROGRESS {"step":1}\n\u00e9 \x07"quoted" \\'.encode()
    (tmp_path / "text").write_bytes(text)
    events = parse(one_shot(model, ["--chatml"], f"text=@{tmp_path}/text", n=400).stdout)
    assert not [e for e in events if isinstance(e, Other)]
    assert next(e for e in events if isinstance(e, Answer)).to_json()["text"].encode() == text
    told = [e for e in events if isinstance(e, Progress)]
    assert len(told) == -(-len(text) // 4)
    assert told[-1].to_json()["steps"] == 400

    events = parse(one_shot(model, ["--chatml"], "reset=5,eog=9").stdout)
    told = [e.to_json() for e in events if isinstance(e, Progress)]
    assert [bool(t.get("reset")) for t in told] == [i == 4 for i in range(9)]
    assert told[4]["delta_text"] == ""
    assert told[4]["delta_reasoning"].startswith("".join(t["delta_text"] for t in told[:4]))
    events = parse(one_shot(model, ["--chatml"], "reason=4,eog=9").stdout)
    told = [e.to_json() for e in events if isinstance(e, Progress)]
    assert all(not t["delta_text"] for t in told[:4])
    assert all(not t["delta_reasoning"] for t in told[4:])


def test_the_copies_hold_what_stdout_and_files_held(model, tmp_path):
    flags = [*STREAM, "--csv", f"{tmp_path}/m.csv", "--route-trace", f"{tmp_path}/r.csv"]
    done = one_shot(model, flags, f"copy={tmp_path}/copies")
    sim(["--version"], f"copy={tmp_path}/copies")  # what is only asked leaves none
    names = sorted(os.listdir(tmp_path / "copies"))
    assert [n.split(".", 1)[1] for n in names] == ["json", "m.csv", "r.csv", "stdout"]
    held = [(tmp_path / "copies" / name).read_bytes() for name in names]
    assert held[1:] == [(tmp_path / "m.csv").read_bytes(), (tmp_path / "r.csv").read_bytes(), done.stdout]


def test_burning_measures_what_it_does(model, tmp_path):
    flags = [*STREAM, "-t", "2", "--csv", "m.csv"]
    assert one_shot(model, flags, "burn=1,burn_mib=2", n=5, cwd=tmp_path).returncode == 0
    c = parse_metrics((tmp_path / "m.csv").read_bytes()).columns
    assert all(wall > 0.2 and cpu > 0.2 for wall, cpu in zip(c["wall_ms"], c["cpu_ms"], strict=True))


def test_environment_stands_in_for_absent_flags(model, tmp_path):
    env = {"BMOE_CACHE_MB": "3", "BMOE_IO_THREADS": "2", "BMOE_OVERLAP": "1", "BMOE_PREFETCH": "2"}
    flags = ["--moe-stream", "--force-cache", "--csv", "m.csv", "--io-threads", "3"]
    assert one_shot(model, flags, cwd=tmp_path, env=env).returncode == 0
    p = parse_metrics((tmp_path / "m.csv").read_bytes()).preamble
    assert (p["cache_mb"], p["io_threads"], p["overlap"], p["prefetch"]) == (3, 3, 1, 2)
    done = sim(["-m", model, "-p", PROMPT, "-n", "2"], env={"BMOE_PROGRESS": "1"})
    assert b"BMOE_PROGRESS" in done.stdout


def test_what_it_says_of_itself():
    for settings, version in (("", b"0.24.0-simulator"), ("pose=0.19", b"0.19.0-simulator")):
        assert sim(["--version"], settings).stdout == b"bmoe-cli " + version + b"\n"
        text = sim(["--help"], settings).stdout
        assert text.startswith(b"usage: ")
        assert (b"--row-stream" in text) == (not settings)
        assert b"--cache-mb N|auto" in text
    assert b"qwen3moe" in sim(["--list-archs"]).stdout


def test_a_patched_engine_alternates_and_says_so_in_its_own_words(model, tmp_path):
    done = one_shot(model, [*STREAM, "--csv", "m.csv"], "arms=4,arm_effect=0.5,noise=0", cwd=tmp_path)
    assert [e.text for e in parse(done.stdout) if isinstance(e, Other)] == ["arms: 2 settings in blocks of 4 tokens"]
    metrics = parse_metrics((tmp_path / "m.csv").read_bytes())
    assert metrics.unknown == ["arm", "tokens_since_switch"]
    assert metrics.preamble["arm_block"] == 4
    assert metrics.columns["arm"] == [0, 0, 0, 0, 1, 1, 1, 1] * 3
    assert metrics.columns["tokens_since_switch"] == [0, 1, 2, 3] * 6
    compute = metrics.columns["compute_ms"]
    assert compute[4] == pytest.approx(compute[3] / 2, abs=0.002)
