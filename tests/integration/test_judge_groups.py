"""Facts and verdicts in the database: groups judged together, judged again with the same result, cells to run again named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bmoe_collector.cli import main
from bmoe_collector.judge import refresh
from bmoe_collector.plans.document import parse_plan
from bmoe_collector.plans.expand import expand
from bmoe_collector.store.engine import open_store
from bmoe_collector.store.schema import RUN_FACTS, RUNS, VERDICTS
from sqlalchemy import delete, select

TOKENS = 260


def metrics(width: int, compute_ms: float, wall_ms: float = 100.0, majflt: int = 1) -> str:
    """A whole metrics CSV of 0.19 with a trailer."""
    lines = [
        "# bmoe_metrics v2",
        "# engine=0.19.0",
        f"# model=qwen3 30b.gguf arch=qwen3moe n_layer=48 n_expert=128 n_expert_used={width} threads=4 n_ctx=2048 n_ubatch=0 chatml=1",
        "# moe_stream=1 cache_mb=2000 cache_auto=0 cache_floor_mb=1536 cache_ceil_mb=0 force_cache=0 load_all=0",
        "# io_threads=4 o_direct=1 overlap=0 dense_weights=anon drop_cold_frac=0",
        f"# temp=0 top_k=40 top_p=0.95 seed=4294967295 compute_trace_layers=0 spec=off # {compute_ms}",
        "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms,turn",
    ]
    lines += [
        f"{step},{TOKENS},{wall_ms:.3f},40.000,{compute_ms:.3f},{1 << 20},80.00,0.000,5.000,{majflt},150.000,0"
        for step in range(1, TOKENS + 1)
    ]
    lines.append(
        f"# summary tokens={TOKENS} s/tok={wall_ms / 1e3:.3f} tok/s={1e3 / wall_ms:.3f} n_prompt=20 load_s=1.0 prefill_s=0.5 "
        f"compute_s/tok={compute_ms / 1e3:.3f} io_s/tok=0.040 majflt/tok={majflt}.00 cpu_s/tok=0.1500 cache_hit_pct=80.0"
    )
    return "\n".join(lines) + "\n"


@pytest.fixture
def bmoe(store_url, tmp_path, monkeypatch, capsys):
    """The command in this process: JSON lines out; the store of this test."""
    monkeypatch.setenv("BMOE_ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.setenv("BMOE_HOME", str(tmp_path / "home"))

    def call(*arguments: object, code: int = 0) -> list[dict]:
        capsys.readouterr()
        found = main([*map(str, arguments), "--json", "--db", store_url])
        out, err = capsys.readouterr()
        assert found == code, err
        assert out.isascii()
        return [json.loads(line) for line in out.splitlines()]

    return call


def folder(tmp_path: Path, **cells: str) -> Path:
    place = tmp_path / "campaign"
    place.mkdir(exist_ok=True)
    for name, text in cells.items():
        (place / f"{name}.csv").write_text(text)
    return place


def contaminated(bmoe) -> dict[str, bool]:
    [found] = bmoe("judge", "--all")
    return {one["run"]: any(v["code"] == "contaminated" for v in one["verdicts"]) for one in found["judged"]}


def imported(bmoe, *paths: Path) -> dict[str, str]:
    """File stem to run id."""
    return {Path(one["files"][0]).stem: one["run"] for one in bmoe("import", *paths)}


def test_compute_rising_while_experts_fall_in_a_folder(bmoe, tmp_path):
    place = folder(tmp_path, k8=metrics(8, 50.0), k6=metrics(6, 62.0), k4=metrics(4, 71.0))
    ids = imported(bmoe, place)
    flagged = contaminated(bmoe)
    assert flagged == {ids["k8"]: False, ids["k6"]: True, ids["k4"]: True}
    [again] = bmoe("judge", ids["k6"])
    assert {one["run"] for one in again["rerun"]} == {ids["k6"], ids["k4"]}
    assert "active experts" in again["rerun"][0]["why"]


def test_a_sibling_that_comes_later_changes_the_verdict_of_the_one_before(bmoe, tmp_path):
    first = imported(bmoe, folder(tmp_path, k6=metrics(6, 62.0)))
    assert contaminated(bmoe) == {first["k6"]: False}
    both = imported(bmoe, folder(tmp_path, k8=metrics(8, 50.0)))
    [shown] = bmoe("show", first["k6"])
    assert "contaminated" in {verdict["code"] for verdict in shown["verdicts"]}
    [clean] = bmoe("show", both["k8"])
    assert "contaminated" not in {verdict["code"] for verdict in clean["verdicts"]}


def test_another_folder_is_another_campaign(bmoe, tmp_path):
    one = folder(tmp_path, k8=metrics(8, 50.0))
    other = tmp_path / "elsewhere" / "later"
    other.mkdir(parents=True)
    (other / "k6.csv").write_text(metrics(6, 62.0))
    imported(bmoe, one, other)
    assert not any(contaminated(bmoe).values())


def test_a_sidecar_beside_a_file_says_which_run_entered_hot(bmoe, tmp_path):
    place = folder(tmp_path, a=metrics(8, 50.0), b=metrics(8, 51.0), c=metrics(8, 52.0))
    for name, heat in (("a", 35000), ("b", 36000), ("c", 52000)):
        (place / f"{name}.metrics").write_text(f"peak_rss_kb=4000000\ncpu_temp_before_mC={heat}\ncpu_temp_max_mC=\n")
    ids = imported(bmoe, place)
    assert contaminated(bmoe) == {ids["a"]: False, ids["b"]: False, ids["c"]: True}
    [again] = bmoe("judge", ids["c"])
    assert "entered at 52 °C" in again["rerun"][0]["why"]


def test_judging_again_from_the_record_gives_the_same(bmoe, tmp_path, store_url):
    imported(bmoe, folder(tmp_path, k8=metrics(8, 50.0), k6=metrics(6, 62.0), hot=metrics(8, 50.0, majflt=200)))

    def stored(store):
        with store.read() as connection:
            facts = connection.execute(select(RUN_FACTS).order_by(RUN_FACTS.c.run_no)).all()
            verdicts = connection.execute(select(VERDICTS).order_by(VERDICTS.c.run_no, VERDICTS.c.at)).all()
            return facts, verdicts

    store = open_store(store_url)
    before = stored(store)
    assert len(before[0]) == 3
    assert {"contaminated", "dense_refaulting"} <= {row.code for row in before[1]}
    with store.write() as connection:
        connection.execute(delete(RUN_FACTS))
        connection.execute(delete(VERDICTS))
        ids = list(connection.execute(select(RUNS.c.run_id).order_by(RUNS.c.run_no)).scalars())
    refresh(store, ids)
    assert stored(store) == before
    store.close()


def test_the_plan_that_runs_them_again(bmoe, tmp_path):
    place = tmp_path / "cells"
    for name, width, compute in (("k8", 8, 50.0), ("k6", 6, 62.0)):
        (place / name).mkdir(parents=True)
        (place / name / "metrics.csv").write_text(metrics(width, compute))
        argv = [
            "bmoe-cli",
            "-m",
            "/m/qwen3 30b.gguf",
            "-p",
            "hi",
            "-n",
            str(TOKENS),
            "--moe-stream",
            "--n-expert-used",
            str(width),
        ]
        (place / name / "run.json").write_text(json.dumps({"argv": argv, "exit": 0}))
    bmoe("import", place)
    path = tmp_path / "again.toml"
    [found] = bmoe("judge", "--all", "--plan", path)
    assert found["plan"] == str(path)
    assert len(found["rerun"]) == 1
    [cell] = expand(parse_plan(path.read_text(), str(path), None)).cells
    assert cell.model == "qwen3 30b.gguf"
    assert list(cell.flags) == ["--moe-stream", "--n-expert-used", "6"]
    assert cell.n_predict == TOKENS
    bmoe("judge", "--all", "--plan", path)  # another morning
    path.write_text('name = "mine"')
    bmoe("judge", "--all", "--plan", path, code=2)
    assert path.read_text() == 'name = "mine"'


def test_a_plan_cannot_be_made_of_runs_that_do_not_tell_their_argv(bmoe, tmp_path, capsys):
    imported(bmoe, folder(tmp_path, k8=metrics(8, 50.0), k6=metrics(6, 62.0)))
    bmoe("judge", "--all", "--plan", tmp_path / "again.toml", code=3)
    assert not (tmp_path / "again.toml").exists()


def test_wrong_usage(bmoe):
    bmoe("judge", code=2)
    bmoe("judge", "deadbeef", code=2)
    bmoe("judge", "deadbeef", "--all", code=2)
