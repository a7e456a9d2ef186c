"""Contamination: the spoiled cell is flagged, its clean siblings are not, and honest noise is nobody's fault."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from bmoe_collector.meaning import derive
from bmoe_collector.record import RunRecord
from bmoe_collector.verdicts import judge
from bmoe_collector.verdicts.rule import Sibling
from bmoe_collector.verdicts.siblings import contaminated
from support.run_records import ENTRY, clean, rows, run, sample, summary, turn, with_preamble


def cell(
    number: int, *, tok_s=10.0, majflt=1, compute_s=0.05, width=8, preamble=None, entry=None, **columns
) -> RunRecord:
    """A run of the same plan, its place in the order being its number."""
    base = with_preamble(n_expert_used=width, **(preamble or {}))
    return replace(
        base,
        run=run(run_id=f"{number:032x}", plan_id="p1", cell=f"k{width}", cell_index=number, **columns),
        csv=rows(majflt=majflt, compute_ms=compute_s * 1e3, wall_ms=1e3 / tok_s),
        turns=(turn(summary=summary(tok_s=tok_s, majflt_tok=float(majflt), compute_s_tok=compute_s)),),
        samples=(sample("entry", 1, **{**ENTRY, **(entry or {})}),),
    )


def flagged(records: list[RunRecord]) -> dict[int, str]:
    """Number to evidence of the flagged cells, judged as bmoe judge does."""
    people = [Sibling.of(record, derive(record)) for record in records]
    found = {}
    for me in people:
        for verdict in contaminated(me, people):
            found[int(me.run_id, 16)] = verdict.evidence
    return found


def test_major_faults_tenfold():
    found = flagged([cell(0, majflt=2), cell(1, majflt=3), cell(2, majflt=40)])
    assert list(found) == [2]
    assert "40.0 major faults per token against 2.0" in found[2]


def test_another_dense_policy_may_fault():
    assert flagged([cell(0, majflt=1), cell(1, majflt=300, preamble={"dense_weights": "mmap"})]) == {}


def test_faults_that_cannot_be_reported_are_no_reference():
    blind = cell(0)
    blind = replace(
        blind,
        csv=rows(majflt=0, cpu_ms=0.0, majflt_mib=0.0),
        turns=(turn(summary=summary(cpu_s_tok=0.0, majflt_tok=0.0)),),
    )
    assert flagged([blind, cell(1, majflt=9)]) == {}


def test_compute_rising_while_active_experts_fall_flags_the_narrow_cells_and_not_the_clean_one():
    folder = [
        cell(0, width=8, compute_s=0.050),
        cell(1, width=6, compute_s=0.062),
        cell(2, width=4, compute_s=0.071),
    ]
    found = flagged(folder)
    assert list(found) == [1, 2]
    assert "active experts" in found[1]
    assert "contaminated" not in {verdict.code for verdict in judge(folder[0], folder)}
    assert "contaminated" in {verdict.code for verdict in judge(folder[2], folder)}


def test_one_repeat_a_little_above_is_noise_and_far_above_is_not():
    wide = [cell(at, width=8, compute_s=0.05) for at in range(4)]
    narrow = [cell(10 + at, width=6, compute_s=0.048 + at / 1e4) for at in range(4)]
    assert flagged([*wide, *narrow, cell(20, width=6, compute_s=0.055)]) == {}
    assert list(flagged([*wide, *narrow, cell(20, width=6, compute_s=0.065)])) == [20]
    risen = [cell(30 + at, width=6, compute_s=0.055) for at in range(4)]
    assert list(flagged([*wide, *risen])) == [30, 31, 32, 33]


def test_cpu_rising_while_active_experts_fall_where_the_residual_hides_it():
    wide, narrow = cell(0, width=8), cell(1, width=6)
    end = summary(tok_s=10.0, compute_s_tok=0.05, cpu_s_tok=0.2)
    narrow = replace(narrow, csv=rows(cpu_ms=200.0), turns=(turn(summary=end),))
    found = flagged([wide, narrow])
    assert list(found) == [1]
    assert found[1].startswith("CPU 0.2000 s/token")


def test_compute_falling_with_the_experts_is_as_it_should_be():
    assert (
        flagged([cell(0, width=8, compute_s=0.05), cell(1, width=6, compute_s=0.041), cell(2, width=4, compute_s=0.03)])
        == {}
    )


def test_dropping_counts_as_fewer_active_experts():
    dropped = cell(1, compute_s=0.07, preamble={"drop_cold_frac": 0.5})
    end = summary(tok_s=10.0, compute_s_tok=0.07, experts_routed=1000, experts_dropped=300)
    found = flagged([cell(0, compute_s=0.05), replace(dropped, turns=(turn(summary=end),))])
    assert list(found) == [1]


def test_equal_work_with_unequal_time():
    found = flagged([cell(0, tok_s=10.0), cell(1, tok_s=10.2), cell(2, tok_s=9.9), cell(3, tok_s=7.0)])
    assert list(found) == [3]
    assert "equal bytes and hit rate" in found[3]


def test_unequal_work_explains_unequal_time():
    slow = cell(3, tok_s=7.0)
    slow = replace(slow, csv=rows(read_bytes=90 * 2**20, wall_ms=143.0))
    assert flagged([cell(0), cell(1, tok_s=10.2), cell(2, tok_s=9.9), slow]) == {}


def test_another_configuration_may_be_slower():
    assert (
        flagged([cell(0), cell(1, tok_s=10.2), cell(2, tok_s=9.9), cell(3, tok_s=7.0, preamble={"threads": 2})]) == {}
    )


def test_drift_with_the_position_in_the_order():
    # Two configurations interleaved, both 4 % slower with every place: neither alone is out of its spread.
    speeds = [10 / (1 + 0.04 * at) for at in range(10)]
    records = [
        cell(at, tok_s=speed, preamble={"cache_mb": 2000 if at % 2 else 3000}) for at, speed in enumerate(speeds)
    ]
    found = flagged(records)
    assert 0 not in found
    assert 9 in found
    assert "position in the order" in found[9]


def test_interleaved_noise_is_no_drift():
    noise = random.Random(3)
    spoiled = 0
    for _ in range(40):
        records = [
            cell(at, tok_s=10 * (1 + noise.gauss(0, 0.05)), preamble={"threads": 4 - at % 2}) for at in range(12)
        ]
        spoiled += bool(flagged(records))
    assert spoiled <= 4


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"cpu_temp_c": 55.0}, "entered at 55 °C"),
        ({"clock_cap_ratio": 0.7}, "capped at 70%"),
        ({"mem_available_kib": 1500 * 1024}, "1500 MiB available"),
    ],
)
def test_an_entry_worse_than_the_siblings(entry, words):
    found = flagged([cell(0), cell(1), cell(2, entry=entry)])
    assert list(found) == [2]
    assert words in found[2]


def test_a_cell_that_was_heated_on_purpose_is_judged_among_those_that_were_too():
    cold = [cell(at) for at in range(4)]
    warm = [cell(10 + at, entry={"cpu_temp_c": 60.0 + at}, asked={"preheat_s": 300.0}) for at in range(3)]
    assert flagged([*cold, *warm]) == {}
    hotter = cell(20, entry={"cpu_temp_c": 75.0}, asked={"preheat_s": 300.0})
    assert list(flagged([*cold, *warm, hotter])) == [20]


def test_traced_unfinished_and_warm_up_runs_are_no_reference_and_not_judged():
    slow = cell(3, tok_s=7.0)
    me = Sibling.of(slow, derive(slow))
    fine = [cell(at, tok_s=10 + at / 10) for at in range(3)]
    people = [Sibling.of(record, derive(record)) for record in fine]
    assert contaminated(me, people)
    assert contaminated(replace(me, codes=frozenset({"instrumented"})), people) == []
    assert contaminated(me, [replace(one, codes=frozenset({"incomplete"})) for one in people]) == []
    warm = replace(slow, run={**slow.run, "unmeasured": True})
    assert contaminated(Sibling.of(warm, derive(warm)), people) == []


def test_another_phone_another_model_and_a_simulation_are_no_siblings():
    fine = [cell(at, tok_s=10 + at / 10) for at in range(3)]
    for other in ({"agent_uuid": "0" * 32}, {"model_identity": "9" * 64}, {"simulated": True}):
        assert 3 not in flagged([*fine, cell(3, tok_s=7.0, **other)])


def test_a_lone_run_is_never_contaminated():
    assert flagged([clean()]) == {}
