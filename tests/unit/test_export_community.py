"""The community row: only by the protocol, never with the phone's name, and both runs told apart."""

from __future__ import annotations

import pytest
from bmoe_collector.common import UserError
from bmoe_collector.export.community import PROMPT, Pass, markdown, row, why_not, why_not_together
from support import run_records as records

PREAMBLE = {
    **records.PREAMBLE, "cache_auto": 1, "overlap": 1, "cache_mb": 2000, "io_threads": 4, "n_ctx": 2048, "threads": 8,
}  # fmt: skip
ARGV = ["bmoe-cli", "-m", "q.gguf", "-p", PROMPT, "-n", "256", "-t", "8", "--chatml", "--moe-stream", "--cache-mb", "auto",
        "--overlap", "--dense-weights", "anon", "--ubatch", "512", "-c", "2048"]  # fmt: skip
DEVICE = {
    "properties": {"ro.product.model": "Pixel 99 Pro", "ro.product.manufacturer": "Google", "ro.product.device": "husky"},
    "cpus": [{"cpu": at, "max_khz": "1700000" if at < 4 else "2900000"} for at in range(9)],
    "memory_total_kib": "11800000",
}  # fmt: skip


def a_pass(run_id="ab" * 16, start=1, preamble=None, argv=None, summary=None, **columns):
    told = {"run_id": run_id, "prompt": PROMPT.encode(), "argv": argv or ARGV, "device": DEVICE, "started_wall_ns": start,
            "device_model": "Pixel 99 Pro", "device_name": "anna-phone",
            "model_name": "/data/qwen3-30b-a3b-Q4_K_M-00001-of-00002.gguf", **columns}  # fmt: skip
    keys = {key: value for key, value in {**PREAMBLE, **(preamble or {})}.items() if value is not None}
    turn = records.turn(summary=records.summary(**(summary or {})))
    return Pass.of(
        records.clean(run=records.run(**told), preamble=keys, csv=records.rows(stall_ms=30.0), turns=(turn,))
    )


FIRST, SECOND = a_pass(), a_pass("cd" * 16, 2, summary={"tok_s": 10.4})


def test_the_row_of_two_runs_by_the_protocol():
    assert why_not(FIRST) == []
    assert why_not(SECOND) == []
    assert why_not_together(FIRST, SECOND) == []
    values = row(FIRST, SECOND, storage="UFS 4.0, 3100 MiB/s")
    assert values == {
        "Hardware": "5×2.9 GHz + 4×1.7 GHz, 12 GB RAM", "Storage": "UFS 4.0, 3100 MiB/s",
        "Model": "qwen3-30b-a3b Q4_K_M", "k": "8", "Cache": "auto (2000 MiB)", "Decode tok/s": "10.40",
        "Prefill tok/s": "25.00", "Stall s/tok": "0.030", "Flash MiB/tok": "50.0", "Hit %": "80.0", "Engine": "0.23.0",
        "Second vs first": "+4.0 %",
    }  # fmt: skip
    text = markdown(values)
    assert len(text.splitlines()) == 3
    for secret in ("Pixel", "Google", "husky", "anna", "/data", "abab", "cdcd"):
        assert secret not in text


@pytest.mark.parametrize(
    ("spoiled", "why"),
    [
        ({"outcome": "partial"}, "outcome"),
        ({"simulated": True}, "simulated"),
        ({"preamble": {"temp": 0.7}}, "temperature"),
        ({"preamble": {"chatml": 0}}, "--chatml"),
        ({"preamble": {"threads": 4}}, "number of threads is 4"),
        ({"preamble": {"io_threads": 8}}, "--io-threads"),
        ({"preamble": {"cache_auto": 0}}, "--cache-mb auto"),
        ({"preamble": {"overlap": 0}}, "--overlap"),
        ({"preamble": {"dense_weights": "mmap"}}, "--dense-weights"),
        ({"preamble": {"n_ubatch": 256}}, "--ubatch"),
        ({"preamble": {"n_ctx": 4096}}, "context size"),
        ({"preamble": {"drop_cold_frac": 0.5}}, "dropping"),
        ({"preamble": {"route_ahead": 2}}, "route-ahead"),
        ({"preamble": {"spec": "mtp"}}, "speculation"),
        ({"preamble": {"predict_log": 1}}, "verdict instrumented"),
        ({"preamble": {"arch": "gpt-oss"}}, "--no-think"),
        ({"prompt": b"Write a haiku"}, "reference prompt"),
        ({"argv": [*ARGV[:6], "128", *ARGV[7:]]}, "tokens asked for is 128"),
        ({"device": {}}, "cores is not recorded"),
    ],
)
def test_what_is_not_by_the_protocol_is_said(spoiled, why):
    assert any(why in reason for reason in why_not(a_pass(**spoiled)))


def test_the_reference_phone_has_four_threads_and_gpt_oss_no_think():
    four = a_pass(preamble={"threads": 4}, device={})
    assert why_not(four, reference_phone=True) == []
    assert why_not(a_pass(preamble={"arch": "gpt-oss"}, argv=[*ARGV, "--no-think"])) == []


def test_two_runs_must_be_one_measurement_twice():
    assert why_not_together(FIRST, FIRST) == ["the protocol wants two runs, and this is one"]
    assert "before" in why_not_together(SECOND, FIRST)[0]
    other = a_pass("ee" * 16, 3, engine_sha256="f" * 64, agent_uuid="99" * 16)
    assert why_not_together(FIRST, other) == [
        "the two runs have a different phone",
        "the two runs have a different engine",
    ]


def test_a_person_s_text_may_not_name_the_phone():
    for text in ("the new PIXEL 99 PRO", "anna-phone", "Google flagship"):
        with pytest.raises(UserError, match="names the phone"):
            row(FIRST, SECOND, hardware=text)
    assert row(FIRST, SECOND, hardware="2023 flagship, 12 GB")["Hardware"] == "2023 flagship, 12 GB"
