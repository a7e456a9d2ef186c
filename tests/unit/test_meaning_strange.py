"""Whatever a file or a phone says, derivation, verdicts and display give an answer and strict JSON."""

from __future__ import annotations

import io
import json

from bmoe_collector.common import plain
from bmoe_collector.meaning import derive, facts
from bmoe_collector.record import GateRecord, NoteRecord, ReportLine, Rows, RunRecord
from bmoe_collector.show.document import document
from bmoe_collector.show.view import render
from bmoe_collector.verdicts import Sibling, contaminated_among, judge_alone
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.run_records import ARGV, PREAMBLE, clean, rows, run, sample, summary, turn

NUMBERS = st.integers(-(2**63), 2**63) | st.floats(allow_nan=True) | st.booleans()
VALUES = st.none() | NUMBERS | st.text(max_size=6) | st.sampled_from(["0", "auto", "mtp", "0.19.0", "8"])
COUNTS = st.integers(0, 6)
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking a whole record takes minutes


def tables(names):
    return st.dictionaries(st.sampled_from(sorted(names)), VALUES, max_size=12)


@st.composite
def token_rows(draw):
    size = draw(COUNTS)
    names = draw(st.lists(st.sampled_from(sorted(rows(1).columns)), unique=True, max_size=12))
    column = st.lists(st.none() | NUMBERS, min_size=size, max_size=size)
    columns = {name: draw(column) for name in names}
    return Rows({**columns, "turn": [draw(st.integers(0, 1)) for _ in range(size)], "step": list(range(size))})


@st.composite
def records(draw):
    turns = [
        turn(
            draw(st.none() | st.integers(0, 2)),
            tokens=draw(st.none() | st.integers(0, 500)),
            summary=draw(tables(summary())),
            cancelled=draw(st.booleans()),
            state=draw(st.sampled_from(["done", "began", "not_run", "rejected"])),
            decide=draw(st.none() | tables({"best", "prefill_dev_tokens"})),
            error=draw(st.none() | tables({"fatal", "msg"})),
            request=draw(st.none() | tables({"think", "n_predict", "cancel_after_ms"})),
            text=draw(st.binary(max_size=8)),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    sensed = {"cpus_allowed", "policy0_max_khz", "policy0_cpus", "majflt", "awake", "doze", "clock_cap_ratio", "rss_kib",
              "foreign_cpu_share", "mem_available_kib", "wakefulness"}  # fmt: skip
    samples = [
        sample(
            draw(st.sampled_from(["entry", "fast", "exit", "idle"])),
            at,
            draw(st.sampled_from(["agent", "host"])),
            **draw(tables(sensed)),
        )
        for at in range(draw(COUNTS))
    ]
    return RunRecord(
        run=run(
            argv=draw(st.just([]) | st.lists(st.sampled_from([*ARGV, "--mtp", "--temp", "--cache-mb", "auto"]), max_size=8)),
            outcome=draw(st.sampled_from(["ok", "lost", "skipped", "started", "failed"])),
            engine_version=draw(st.none() | st.text(max_size=8)),
            device=draw(st.none() | st.just({"cpus": [{"cpu": 1, "max_khz": "x"}, {"max_khz": 5}]})),
            model=draw(st.none() | st.just({"metadata": {"a.expert_used_count": "many"}})),
        ),
        preamble=draw(tables(PREAMBLE)),
        csv=draw(token_rows()),
        stdout=draw(token_rows()),
        turns=turns,
        report=[ReportLine(draw(st.sampled_from(["mode", "compute", "moe-rows", "mtp"])), draw(tables({"threads", "tok_s"})), draw(st.text(max_size=9)))],
        trailers=[draw(tables({"row_io_errors", "prefill_dev_nodes"}))],
        ready=draw(tables({"load_s", "think_ctl", "n_expert_used"})),
        samples=samples,
        gates=[GateRecord(draw(st.sampled_from(["cpu_temp_c", "clock_cap_ratio", "x"])), "x", draw(st.none() | st.floats()), draw(st.none() | st.floats()), "", draw(st.sampled_from(["held", "gave_up", "unreadable"])), 1.0, "skip")],
        notes=[NoteRecord(0, draw(st.sampled_from(["baseline", "foreign_load", "frozen"])), "", draw(tables({"share", "slip_s", "cpu_temp_c"})))],
        observer=draw(tables({"cpu_ms", "max_timer_slip_ms", "wakeups"})),
    )  # fmt: skip


@settings(max_examples=40, deadline=None, phases=PHASES, suppress_health_check=[HealthCheck.too_slow])
@given(records())
def test_no_record_is_too_strange(record):
    derived = derive(record)
    verdicts = judge_alone(record, derived)
    json.dumps(facts(record), allow_nan=False)
    json.dumps(plain(document(record, derived, verdicts, tokens=True)), allow_nan=False)
    console = Console(file=io.StringIO(), width=80, color_system=None)
    render(console, record, derived, verdicts)
    me = Sibling.of(record, derived)
    contaminated_among([me, Sibling.of(clean(), derive(clean()))])
    assert derived.speed.tok_s is None or derived.speed.tok_s > 0
    assert derived.bars.unattributed_s is None or derived.bars.unattributed_s >= 0
