"""The short cut through usual progress lines gives just what the parser gives, wherever the input is cut."""

from __future__ import annotations

import pytest

pytest.importorskip("sqlalchemy", reason="needs the host's packages")

from bmoe_collector.ingest import stdout_rows
from bmoe_collector.ingest.sink import Sink
from hypothesis import given, settings
from hypothesis import strategies as st

NUMBER = st.floats(0, 1e6).map(lambda value: f"{value:.3f}")
RATE = st.one_of(st.just("-1"), st.just("-1.000"), NUMBER)
TEXT = st.sampled_from(["x", "", " a b", "\\n", "\\u00e9", "é", "\udcc3", "\udca9", '\\"', "=== perf ==="])


@st.composite
def progress(draw, step: int) -> str:
    values = {
        "step": str(draw(st.sampled_from([step, step, step, 1]))),
        "steps": "48",
        **{name: draw(NUMBER) for name in ("wall_ms", "io_ms", "compute_ms", "mgmt_ms", "stall_ms", "read_mb")},
        "cache_hit_pct": draw(RATE),
        "majflt": draw(st.sampled_from(["0", "7", "123456789012"])),
        "cpu_ms": draw(NUMBER),
        "dense_resident_frac": draw(RATE),
    }
    odd = draw(st.integers(0, 12))
    if odd == 0:
        values["novel"] = "3"
    if odd == 1:
        del values["cpu_ms"]
    if odd == 2:
        values["wall_ms"] = draw(st.sampled_from(["5", "nan", "1e3"]))
    inside = "".join(f'"{key}":{value},' for key, value in values.items())
    reset = '"reset":1,' if draw(st.integers(0, 9)) == 0 else ""
    end = draw(st.sampled_from(["\n"] * 9 + ["\r\n"]))
    return f'BMOE_PROGRESS {{{inside}{reset}"delta_reasoning":"{draw(TEXT)}","delta_text":"{draw(TEXT)}"}}{end}'


OTHER = st.sampled_from(
    [
        "a line of nothing\n",
        'BMOE_BEGIN {"id":1}\n',
        'BMOE_DONE {"id":1,"tokens":2,"text":"xx"}\n',
        "=== answer ===\nxx\n=== perf ===\ngeneration: 2 tokens, 0.005 s/token (200.000 tok/s)\n",
        'BMOE_LOAD {"mb":0.10,"ms":0.2}\n',
    ]
)


@st.composite
def outputs(draw) -> bytes:
    lines: list[str] = []
    for step in range(1, draw(st.integers(1, 12))):
        if draw(st.booleans()):
            lines.append(f'BMOE_LOAD {{"mb":{draw(NUMBER)},"ms":{draw(NUMBER)}}}\n')
        lines.append(draw(progress(step)))
        if draw(st.integers(0, 6)) == 0:
            lines.append(draw(OTHER))
    return "".join(lines).encode("utf-8", "surrogateescape")


def rows(data: bytes, cuts: list[int]) -> tuple[dict, tuple]:
    sink = Sink(1)
    reader = stdout_rows.StdoutRows(sink)
    at = 0
    for cut in [*sorted(cuts), len(data)]:
        reader.feed(data[at:cut], 5, 6)
        at = max(at, cut)
    reader.close()
    return sink.rows, (reader.tokens, reader.turns, reader.done, reader.steps_asked)


class Never:
    """A pattern that matches nothing: everything goes the long way."""

    @staticmethod
    def match(_data: bytes, _at: int) -> None:
        return None


@settings(max_examples=150)
@given(data=outputs(), cuts=st.lists(st.integers(0, 3000), max_size=5))
def test_quick_and_thorough_agree(data, cuts):
    cuts = [min(cut, len(data)) for cut in cuts]
    quick = rows(data, cuts)
    line, stdout_rows.LINE = stdout_rows.LINE, Never
    try:
        assert quick == rows(data, [])
    finally:
        stdout_rows.LINE = line


def test_the_short_cut_is_taken(monkeypatch):
    from support import records

    data = b"".join(records.progress(step) for step in range(1, 50))
    seen: list[int] = []
    real = stdout_rows.StdoutRows._quick

    def watched(self, data, at, boot_ns, uncertainty_ns):
        end = real(self, data, at, boot_ns, uncertainty_ns)
        seen.append(end - at)
        return end

    monkeypatch.setattr(stdout_rows.StdoutRows, "_quick", watched)
    found, _ = rows(data, [])
    assert len(found["tokens_stdout"]) == 49
    assert sum(seen) > len(data) * 0.9
