"""`bmoe import`: what people have, of every age, recognised, grouped and stored once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bmoe_collector.importer import import_paths
from bmoe_collector.importer.grouping import Found, group, is_generic, stem
from bmoe_collector.importer.labels import from_name
from bmoe_collector.ingest import finish
from bmoe_collector.ingest.rebuild import reparse
from bmoe_collector.ingest.sink import Sink
from bmoe_collector.store import schema as tables
from bmoe_collector.store.artifacts import Artifacts
from bmoe_collector.store.engine import Store, open_store
from bmoe_collector.store.load import canonical, load_run
from bmoe_proto.contract.columns import METRICS
from sqlalchemy import func, select
from support.generations import GENERATIONS, Generation
from support.records import oneshot

OPEN: list[Store] = []


@pytest.fixture(autouse=True)
def _close_stores():
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def place(store_url, tmp_path):
    """An open store and its artifacts."""
    OPEN.append(open_store(store_url))
    return OPEN[-1], Artifacts(str(tmp_path / "artifacts"))


@pytest.fixture
def light(tmp_path):
    """The same on SQLite, for what does not depend on the database."""
    OPEN.append(open_store(str(tmp_path / "light.db")))
    return OPEN[-1], Artifacts(str(tmp_path / "artifacts"))


def put(folder: Path, **files: bytes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name.replace("__", ".")).write_bytes(data)
    return str(folder)


def test_every_generation_imports_with_every_value_right(place, tmp_path):
    store, artifacts = place
    for each in GENERATIONS:
        put(tmp_path / "years", **{f"run-{each.name}__csv": each.file()})
    result = import_paths(store, artifacts, [str(tmp_path / "years")])
    assert len(result.runs) == len(GENERATIONS)
    assert result.loose == []
    by_file = {os.path.basename(run.files[0]): run for run in result.runs}
    for each in GENERATIONS:
        run = by_file[f"run-{each.name}.csv"]
        assert (run.outcome, run.tokens, run.turns, run.problems) == ("ok", 3, 1, []), each.name
        found = load_run(store, run.run)
        check_rows(found.csv, each)
        assert found.run["exit_code"] is None
        assert not found.run["exit_observed"]
        assert found.run["engine_version"] == each.engine
        summary = found.turns[0].summary
        assert (summary["tok_s"], summary["read_mib"], summary["load_s"]) == (2.0, 38.4, 2.5)
        assert "cache_hit_pct" not in summary  # -1
        if each.preamble:
            assert found.preamble["model"] == "a model b.gguf"
            assert found.preamble["overlap"] == 1
            assert found.run["model_name"] == "a model b.gguf"
        else:
            assert found.preamble == {}
    check_kept(store, by_file)


def check_rows(csv, each: Generation) -> None:
    for name in each.header.split(","):
        wanted = [each.value(name, row) for row in (1, 2, 3)]
        assert csv.get(name) == wanted, (each.name, name)
    never = {name for name in METRICS if name not in each.header.split(",") and name != "turn"}
    assert not never & set(csv.columns), each.name


def check_kept(store: Store, by_file: dict) -> None:
    """What the contract does not know is there all the same, zeros are zeros and NULLs are NULL."""
    fork = load_run(store, by_file["run-fork.csv"].run)
    assert fork.trailers[0]["new_thing/tok"] == 1.5
    assert fork.turns[0].summary["new_thing_tok"] == 1.5
    assert load_run(store, by_file["run-0.19.csv"].run).preamble["dry_multiplier"] == 0.8
    with store.read() as connection:
        configs = tables.CONFIGS.c
        assert (
            connection.execute(select(func.count()).where(configs.cache_mb == 2000, configs.overlap == 1)).scalar() == 7
        )
        rows = tables.TOKENS_CSV.c
        total = 3 * len(GENERATIONS)
        assert connection.execute(select(func.count()).where(rows.cache_hit_pct.is_(None))).scalar() == total // 3
        assert connection.execute(select(func.count()).where(rows.majflt == 0)).scalar() == 3 * (len(GENERATIONS) - 3)
        for name, column in rows.items():
            if column.type.python_type in (int, float):
                assert connection.execute(select(func.count()).where(column == -1)).scalar() == 0, name


def test_the_same_again_changes_nothing_and_more_of_it_enriches(place, tmp_path):
    store, artifacts = place
    newest = GENERATIONS[-2].file()
    folder = tmp_path / "x"
    put(folder, cell__csv=newest)
    first = import_paths(store, artifacts, [str(folder)], {"who": "me"}).runs[0]
    assert not first.already
    before = canonical(load_run(store, first.run))
    again = import_paths(store, artifacts, [str(folder)]).runs[0]
    assert (again.run, again.already, again.added) == (first.run, True, [])
    assert canonical(load_run(store, first.run)) == before

    copy = tmp_path / "elsewhere"
    put(copy, other__csv=newest)
    assert import_paths(store, artifacts, [str(copy)]).runs[0].run == first.run

    put(folder, cell__metrics=b"peak_rss_kb=7\nbatt_temp_max_dC=\n", cell__json=b'{"argv": ["bmoe-cli"], "exit": -9}')
    more = import_paths(store, artifacts, [str(folder)]).runs[0]
    assert more.run == first.run
    assert {os.path.basename(name) for name in more.added} == {"cell.metrics", "cell.json"}
    found = load_run(store, first.run)
    assert found.sidecar == {"peak_rss_kb": 7, "batt_temp_max_dC": None}
    assert (found.run["outcome"], found.run["signal"], found.run["exit_code"]) == ("killed", 9, None)
    assert found.run["labels"]["who"] == "me"
    subset = import_paths(store, artifacts, [str(folder / "cell.metrics")]).runs[0]
    assert (subset.run, subset.already) == (first.run, True)
    made = canonical(load_run(store, first.run))
    reparse(store, artifacts, first.run)
    skip = ("changed_wall_ns",)
    assert without(canonical(load_run(store, first.run)), skip) == without(made, skip)
    with store.read() as connection:
        assert connection.execute(select(func.count()).select_from(tables.RUNS)).scalar() == 1


def without(text: str, names: tuple[str, ...]) -> str:
    found = json.loads(text)
    for name in names:
        found["run"].pop(name)
    return json.dumps(found, sort_keys=True)


def test_files_that_were_imported_apart_become_one_run(light, tmp_path):
    store, artifacts = light
    csv = GENERATIONS[-2].file()
    stdout = b'BMOE_PROGRESS {"step":1,"steps":9,"wall_ms":5.0,"delta_text":"x"}\n'
    one = import_paths(store, artifacts, [put(tmp_path / "a", k__csv=csv)]).runs[0].run
    two = import_paths(store, artifacts, [put(tmp_path / "b", k__stdout=stdout)]).runs[0].run
    assert one != two
    both = import_paths(store, artifacts, [put(tmp_path / "c", k__csv=csv, k__stdout=stdout)]).runs[0]
    assert both.run in (one, two)
    assert load_run(store, one).run_id == load_run(store, two).run_id == both.run


def test_two_processes_that_said_the_same_on_stderr_are_two_runs(light, tmp_path):
    store, artifacts = light
    stderr = b"config error: moe.cache_mb=500 is in the pathological band\n"
    for cache in (500, 600):
        put(tmp_path / str(cache), stderr__bin=stderr, run__json=b'{"argv": ["bmoe-cli", "%d"], "exit": 1}' % cache)
    result = import_paths(store, artifacts, [str(tmp_path / "500"), str(tmp_path / "600")])
    assert len({run.run for run in result.runs}) == 2
    assert [run.outcome for run in result.runs] == ["failed", "failed"]


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.replace("\n", "\r\n").encode("utf-16"),
        lambda text: text.replace("\n", "\r\n").encode(),
    ],
    ids=["bom", "utf-16", "crlf"],
)
def test_odd_encodings_are_read(light, tmp_path, encode):
    store, artifacts = light
    each = GENERATIONS[-2]
    run = import_paths(store, artifacts, [put(tmp_path / "x", cell__csv=encode(each.file().decode()))]).runs[0]
    assert (run.outcome, run.tokens) == ("ok", 3)
    check_rows(load_run(store, run.run).csv, each)


def test_a_killed_run_is_partial_and_what_was_cut_is_said(light, tmp_path):
    store, artifacts = light
    whole = GENERATIONS[-2].file(end=False)
    folder = put(tmp_path / "x", whole__csv=whole, torn__csv=whole[:-60])
    runs = {os.path.basename(run.files[0]): run for run in import_paths(store, artifacts, [folder]).runs}
    assert (runs["whole.csv"].outcome, runs["whole.csv"].tokens) == ("partial", 3)
    torn = runs["torn.csv"]
    assert (torn.outcome, torn.tokens) == ("partial", 2)
    assert any("cut off" in problem["what"] for problem in torn.problems)
    found = load_run(store, torn.run)
    assert found.run["exit_code"] is None
    assert not found.completeness["complete"]


def test_what_is_not_understood_is_told_and_kept(light, tmp_path):
    store, artifacts = light
    folder = tmp_path / "mixed"
    put(
        folder / "run",
        metrics__csv=GENERATIONS[-2].file() + b"garbage,row\n",
        run__json=b"{broken",
        notes__txt=b"my notes",
    )
    put(folder, photo__jpg=b"\xff\xd8\xff\xe0" * 9, quoted__csv=b'"step","wall"\n"1","2"\n', empty__csv=b"")
    result = import_paths(store, artifacts, [str(folder)])
    assert len(result.runs) == 1
    told = {(problem["file"], problem["what"][:20]) for problem in result.runs[0].problems}
    assert {name for name, _ in told} == {"metrics.csv", "run.json", "notes.txt"}
    assert {os.path.basename(path) for path, _ in result.loose} == {"photo.jpg", "quoted.csv", "empty.csv"}
    kept = {artifact.name: artifact.sha256 for artifact in load_run(store, result.runs[0].run).artifacts}
    assert artifacts.get(kept["notes.txt"]) == b"my notes"
    with store.read() as connection:
        loose = dict(connection.execute(select(tables.LOOSE_FILES.c.name, tables.LOOSE_FILES.c.sha256)).all())
    assert artifacts.get(loose["photo.jpg"]).startswith(b"\xff\xd8")
    assert set(loose) == {"photo.jpg", "quoted.csv"}


def test_labels_come_from_names_run_json_and_the_person(light, tmp_path):
    store, artifacts = light
    each = GENERATIONS[-2].file()
    put(
        tmp_path / "night3",
        **{"cache=2000_k4__csv": each, "cache=2000_k4__json": b'{"exit":0,"labels":{"k":"four","n":7}}'},
    )
    run = import_paths(store, artifacts, [str(tmp_path / "night3")], {"who": "me", "folder": "mine"}).runs[0]
    labels = load_run(store, run.run).run["labels"]
    assert labels["cache"] == "2000"
    assert labels["who"] == "me"
    assert labels["folder"] == "mine"
    assert labels["file"] == "cache=2000_k4"
    assert labels["n"] == "7"
    assert labels["night"] == "3"
    assert labels["k"] == "four"  # said outright, over what a name seems to say


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("cache=2000_overlap=1", {"cache": "2000", "overlap": "1"}),
        ("cache2000-k4-run2", {"cache": "2000", "k": "4", "run": "2"}),
        ("drop_0.5", {}),
        ("baseline", {}),
    ],
)
def test_labels_of_names(name, wanted):
    assert from_name(name) == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a.csv", "a"),
        ("a_route.csv", "a"),
        ("a.stdout.txt", "a"),
        ("a.metrics", "a"),
        ("run-0.19.csv", "run-0.19"),
        ("x-compute_layers.csv", "x"),
        ("stdout", "stdout"),
        ("b.route_trace.csv", "b"),
    ],
)
def test_stems(name, wanted):
    assert stem(name) == wanted


def test_generic_names():
    assert all(
        map(is_generic, ("stdout.bin", "metrics.csv", "route.csv", "stderr", "route_trace.csv", "run.json", "io.csv"))
    )
    assert not any(map(is_generic, ("cell1.csv", "metrics-a.csv", "cache2000.csv")))


def found(path: str, kind: str, sha: str = "") -> Found:
    return Found(path, os.path.dirname(path), kind, sha or path, 10)


def test_grouping_by_folder_and_by_stem():
    groups = group([
        found("d/run.json", "run.json"), found("d/stdout.bin", "stdout"), found("d/notes.txt", "unknown"),
        found("e/a.csv", "metrics"), found("e/a_route.csv", "route"), found("e/a.log", "stdout"),
        found("e/b.csv", "metrics"), found("e/README", "unknown"),
        found("f/metrics.csv", "metrics"), found("f/b.csv", "metrics"), found("f/b.log", "stderr"),
        found("g/old.csv", "metrics", "1"), found("g/old.metrics", "metrics", "2"),
    ])  # fmt: skip
    assert [(each.name, [file.name for file in each.files], each.is_run) for each in groups] == [
        ("d", ["notes.txt", "run.json", "stdout.bin"], True),
        ("a", ["a.csv", "a_route.csv", "a.log"], True),
        ("b", ["b.csv"], True),
        ("README", ["README"], False),
        ("f", ["metrics.csv"], True),
        ("b", ["b.csv", "b.log"], True),
        ("old", ["old.csv"], True),
        ("old", ["old.metrics"], True),
    ]


def test_every_capture_imports_with_its_values_and_once(place, captures):
    store, artifacts = place
    result = import_paths(store, artifacts, [str(captures)])
    names = {os.path.basename(os.path.dirname(run.files[0])): run for run in result.runs}
    folders = {folder.name for folder in captures.iterdir() if (folder / "run.json").exists()}
    assert set(names) == folders
    for name, run in names.items():
        told = json.loads((captures / name / "run.json").read_text())
        record = load_run(store, run.run)
        code = told["exit"]
        assert record.run["argv"] == told["argv"]
        assert (record.run["exit_code"], record.run["signal"]) == ((code, None) if code >= 0 else (None, -code))
        assert set(run.files) == {str(path) for path in (captures / name).iterdir()}
        stdout = (captures / name / "stdout.bin").read_bytes()
        assert len(record.stdout) == stdout.count(b"\nBMOE_PROGRESS {") + stdout.startswith(b"BMOE_PROGRESS {")
        assert len([turn for turn in record.turns if turn.state == "done" and turn.request_id]) == stdout.count(
            b"BMOE_DONE {"
        )
        metrics = captures / name / "metrics.csv"
        if metrics.exists():
            check_csv(record, metrics.read_text())
            assert run.tokens == max(len(record.csv), len(record.stdout))
        assert not run.problems
    assert names["session-turns"].turns == 4
    assert names["oneshot-killed"].outcome == "killed"
    assert names["error-cache-band"].outcome == names["session-missing-model"].outcome == "failed"
    before = {run.run: canonical(load_run(store, run.run)) for run in result.runs}
    again = import_paths(store, artifacts, [str(captures)])
    assert all(run.already and not run.added for run in again.runs)
    assert {run.run: canonical(load_run(store, run.run)) for run in again.runs} == before


def check_csv(record, text: str) -> None:
    """The stored rows against the file, read in the plainest way."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    header, rows = lines[0].split(","), [line.split(",") for line in lines[1:]]
    for at, name in enumerate(header):
        wanted = [float(row[at]) for row in rows]
        if name in ("cache_hit_pct", "dense_resident_frac"):
            wanted = [None if value == -1 else value for value in wanted]
        assert record.csv.get(name) == wanted, name


def bmoe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bmoe_collector.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_command_prints_one_object_a_run(tmp_path):
    db = str(tmp_path / "runs.db")
    folder = put(
        tmp_path / "x",
        stdout__bin=b'BMOE_ERROR {"id":0,"fatal":true,"msg":"no \xff model"}\n',
        metrics__csv=GENERATIONS[0].file(),
    )
    done = bmoe("import", folder, "--json", "--db", db, "--label", "a=b=c")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(objects) == 1
    assert {"run", "already", "outcome", "tokens", "turns", "files"} <= set(objects[0])
    assert objects[0]["outcome"] == "failed"
    assert all(name.startswith(folder) for name in objects[0]["files"])
    assert bmoe("import", str(tmp_path / "nowhere"), "--db", db).returncode == 2
    assert bmoe("import", folder, "--db", db, "--label", "novalue").returncode == 2
    checked = bmoe("db", "check", "--deep", "--json", "--db", db)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert json.loads(checked.stdout)["ok"]
    kept = next((tmp_path / "artifacts").glob("*/*.zst"))
    kept.unlink()
    assert bmoe("db", "check", "--db", db).returncode == 1


def test_names_that_are_no_text(place, tmp_path):
    """A folder of years holds names of other encodings: each is a run, and what is told of it is text."""
    store, artifacts = place
    folder = os.path.join(os.fsencode(tmp_path), b"caf\xe9")
    os.makedirs(folder)
    csv = GENERATIONS[-1].file()
    for name, data in (
        (b"run-\xff\xfe.csv", csv),
        (b"run-\xfd\xfc.csv", csv + b"# one more line\n"),
        (b"\xe9.txt", b"hello"),
    ):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)
    result = import_paths(store, artifacts, [os.fsdecode(folder)], {"who": os.fsdecode(b"caf\xe9")})
    assert len(result.runs) == 2
    for run in result.runs:
        told = json.dumps(run.to_json(), ensure_ascii=False).encode()  # no lone surrogates
        assert b"run-" in told
        labels = load_run(store, run.run).run["labels"]
        assert (labels["folder"], labels["who"]) == ("caf�", "caf�")
    assert [path for path, _ in result.loose] == [os.fsdecode(os.path.join(folder, b"\xe9.txt"))]
    again = import_paths(store, artifacts, [os.fsdecode(folder)])
    assert [run.already for run in again.runs] == [True, True]


def test_files_of_any_length_cost_a_bounded_part_of_memory(light, tmp_path, monkeypatch):
    store, artifacts = light
    held: list[int] = []
    flush = Sink.flush

    def counted(sink, connection):
        held.append(sum(map(len, sink.rows.values())))
        flush(sink, connection)

    monkeypatch.setattr(Sink, "flush", counted)
    monkeypatch.setattr(finish, "MOST_METRICS_BYTES", 1 << 20)
    noise = b"".join(b"moe-newer: line %d of what nobody knows yet\n" % at for at in range(60_000))
    long = oneshot(4).replace(b"=== answer ===", noise + b"=== answer ===", 1)
    csv = GENERATIONS[-1].file() + b"# a line that is none\n" * 60_000
    folder = put(tmp_path / "long", stdout=long, metrics__csv=csv)
    (run,) = import_paths(store, artifacts, [folder]).runs
    assert (run.outcome, run.tokens) == ("ok", 4)
    assert max(held) < 40_000
    found = load_run(store, run.run)
    with store.read() as connection:
        others = connection.execute(select(func.count()).select_from(tables.OTHER_LINES)).scalar()
    assert others >= 60_000
    assert any("kept, without rows" in str(problem) for problem in found.run["problems"])
    assert len(artifacts.get(hashlib.sha256(csv).hexdigest())) == len(csv)
