"""Trace views against a plain reference written with loops, on random traces.

The traces have several turns, prefill whose last layer routes one token, dropped slots, unknown weights and missing columns.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from bmoe_collector.traces.curve import hits, next_uses
from bmoe_collector.traces.read import Selection, open_trace
from bmoe_collector.traces.views import VIEWS
from hypothesis import given, settings
from hypothesis import strategies as st

HEADER = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes,dropped"
BYTES = 1000


@st.composite
def routings(draw):
    """Rows of a route trace as dicts, in file order."""
    layers = draw(st.integers(1, 3))
    width = draw(st.integers(1, 3))
    experts = draw(st.integers(width, 6))
    choose = st.permutations(range(experts))
    rows = []
    start = 0
    for turn in range(draw(st.integers(1, 3))):
        prompt = draw(st.integers(1, 4))
        decode = draw(st.integers(0, 7))
        for phase, steps in ((0, range(start, start + prompt)), (1, range(start + prompt, start + prompt + decode))):
            for step in steps:
                for layer in range(layers):
                    if phase == 0 and layer == layers - 1 and step != start + prompt - 1:
                        continue  # the last layer routes only the token whose logits are asked for
                    picked = draw(choose)[:width]
                    for slot, expert in enumerate(picked):
                        residency = draw(st.sampled_from([0, 0, 1, 2]))
                        dropped = int(residency == 0 and draw(st.booleans()))
                        rows.append(
                            {
                                "turn": turn,
                                "phase": phase,
                                "step": step,
                                "layer": layer,
                                "slot": slot,
                                "expert": expert,
                                "weight": draw(st.sampled_from([0.5, 0.25, 0.125, None])),
                                "residency": residency,
                                "expert_bytes": BYTES * (layer + 1) if residency == 0 and not dropped else 0,
                                "dropped": dropped,
                            }
                        )
        start = draw(st.sampled_from([0, start + prompt + decode]))  # a new chat, or a continued one
    return rows


def written(folder, rows, layers_known=True, with_dropped=True):
    names = HEADER.split(",") if with_dropped else HEADER.split(",")[:-1]
    lines = ["# route_trace v1", "# model=/models/a b.gguf arch=x n_layer=3 n_expert=6 n_expert_used=2"]
    if layers_known:
        lines += [f"# layer={layer} expert_bytes={BYTES * (layer + 1)} dense_bytes=77" for layer in range(3)]
    lines.append(",".join(names))
    lines += [",".join("nan" if row[name] is None else str(row[name]) for name in names) for row in rows]
    path = folder / "route.csv"
    path.write_text("\n".join(lines) + "\n")
    return open_trace(path)


def cells_of(rows):
    cells = defaultdict(list)
    for row in rows:
        cells[row["turn"], row["phase"], row["step"], row["layer"]].append(row)
    return cells


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@given(rows=routings())
@settings(max_examples=40, deadline=None)
def test_cache_and_bytes_count_what_a_loop_counts(folder, rows):
    trace = written(folder, rows)
    expected = Counter()
    for row in rows:
        key = (row["turn"], {0: "prefill", 1: "decode"}[row["phase"]], row["layer"])
        kind = "dropped" if row["dropped"] else {0: "miss", 1: "hit", 2: "prefetched"}[row["residency"]]
        expected[(*key, kind)] += 1
        expected[(*key, "read_bytes")] += row["expert_bytes"]
    for row in VIEWS["route"]["cache"](trace, Selection()).rows:
        key = (row["turn"], row["phase"], row["layer"])
        for name in ("miss", "hit", "prefetched", "dropped", "read_bytes"):
            assert row[name] == expected[(*key, name)], (key, name)
        looked_up = row["miss"] + row["hit"] + row["prefetched"]
        assert row["hit_rate"] == (pytest.approx((row["hit"] + row["prefetched"]) / looked_up) if looked_up else None)
    view = VIEWS["route"]["bytes"](trace, Selection())
    assert view.facts["read_bytes"] == sum(row["expert_bytes"] for row in rows)
    assert view.facts["dense_bytes"] == 3 * 77
    for name, phase in (("prefill", 0), ("decode", 1)):
        per_step = Counter()
        for row in rows:
            if row["phase"] == phase:
                per_step[row["turn"], row["step"]] += row["expert_bytes"]
        if per_step:
            ordered = sorted(per_step.values())
            assert view.facts[name]["p50"] == ordered[math.ceil(len(ordered) / 2) - 1]
            assert view.facts[name]["max"] == ordered[-1]


@given(rows=routings(), phase=st.sampled_from([None, 1]))
@settings(max_examples=40, deadline=None)
def test_reuse_distances_are_places_between_two_routings_of_one_expert(folder, rows, phase):
    trace = written(folder, rows)
    kept = [row for row in rows if phase is None or row["phase"] == phase]
    order = sorted({(row["turn"], row["phase"], row["step"]) for row in kept})
    place = {key: at for at, key in enumerate(order)}
    seen = defaultdict(set)
    for row in kept:
        seen[row["layer"], row["expert"]].add(place[row["turn"], row["phase"], row["step"]])
    distances, never = [], 0
    for places in seen.values():
        ordered = sorted(places)
        distances += [b - a for a, b in pairwise(ordered)]
        never += len(ordered) == 1
    distances.sort()
    facts = VIEWS["route"]["reuse"](trace, Selection(phase=phase)).facts
    assert facts["reuses"] == len(distances)
    assert facts["never_reused"] == never
    if distances:
        assert facts["p50"] == distances[math.ceil(len(distances) * 0.5) - 1]
        assert facts["p90"] == distances[math.ceil(len(distances) * 0.9) - 1]
        assert facts["max"] == distances[-1]


@given(rows=routings())
@settings(max_examples=40, deadline=None)
def test_overlap_compares_cells_of_one_turn_and_phase(folder, rows):
    trace = written(folder, rows)
    cells = {key: {row["expert"] for row in cell} for key, cell in cells_of(rows).items()}
    facts = VIEWS["route"]["overlap"](trace, Selection()).facts
    for distance in (1, 2, 4, 8):
        shares = [
            len(experts & cells[turn, phase, step - distance, layer]) / len(experts)
            for (turn, phase, step, layer), experts in cells.items()
            if (turn, phase, step - distance, layer) in cells
        ]
        assert facts[f"pairs_{distance}"] == len(shares)
        assert facts[f"shared_{distance}"] == (pytest.approx(sum(shares) / len(shares)) if shares else None)


@given(rows=routings(), layers_known=st.booleans())
@settings(max_examples=30, deadline=None)
def test_working_set_grows_by_experts_never_touched_before(folder, rows, layers_known):
    trace = written(folder, rows, layers_known)
    seen = set()
    expected = []
    by_step = defaultdict(list)
    for row in rows:
        by_step[row["turn"], row["phase"], row["step"]].append(row)
    for key in sorted(by_step):
        seen |= {(row["layer"], row["expert"]) for row in by_step[key]}
        expected.append((len(seen), sum(BYTES * (layer + 1) for layer, _ in seen)))
    view = VIEWS["route"]["workset"](trace, Selection())
    assert [row["experts"] for row in view.rows] == [experts for experts, _ in expected]
    for row, (_, size) in zip(view.rows, expected, strict=True):
        assert row["bytes"] == size or (not layers_known and row["bytes"] is None)


@given(rows=routings())
@settings(max_examples=30, deadline=None)
def test_entropy_leaves_cells_with_an_unknown_weight_out(folder, rows):
    trace = written(folder, rows)
    by_layer = defaultdict(list)
    for (_, _, _, layer), cell in cells_of(rows).items():
        weights = [row["weight"] for row in cell]
        if None in weights:
            continue
        parts = [weight / sum(weights) for weight in weights]
        by_layer[layer].append((-sum(part * math.log2(part) for part in parts), max(parts)))
    for row in VIEWS["route"]["entropy"](trace, Selection()).rows:
        known = by_layer[row["layer"]]
        assert row["cells_known"] == len(known)
        if known:
            assert row["weight_bits"] == pytest.approx(sum(bits for bits, _ in known) / len(known), abs=1e-9)
            assert row["top1_share"] == pytest.approx(sum(top for _, top in known) / len(known))
        else:
            assert row["weight_bits"] is None
        counts = Counter(r["expert"] for r in rows if r["layer"] == row["layer"])
        total = sum(counts.values())
        bits = -sum(n / total * math.log2(n / total) for n in counts.values())
        assert row["usage_bits"] == pytest.approx(bits, abs=1e-9)


def plain_hits(policy, accesses, sizes, budget):
    """The policies as one would explain them, quadratic and obvious."""
    resident, uses, last, found = [], Counter(), {}, 0
    for at, entry in enumerate(accesses):
        if entry in resident:
            found += 1
        elif sizes[entry] <= budget:
            while sum(sizes[one] for one in resident) + sizes[entry] > budget:
                if policy == "lru":
                    gone = min(resident, key=lambda one: last[one])
                elif policy == "lfu":
                    gone = min(resident, key=lambda one: (uses[one], last[one]))
                else:
                    ahead = accesses[at + 1 :]
                    gone = max(resident, key=lambda one: (ahead.index(one) if one in ahead else len(ahead), one))
                resident.remove(gone)
                uses[gone] = 0
            resident.append(entry)
        else:
            continue
        uses[entry] += 1
        last[entry] = at
    return found


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 8))
@settings(max_examples=80, deadline=None)
def test_curve_policies_do_what_their_plain_form_does(accesses, budget):
    import numpy as np

    sizes = [1] * 7
    upcoming = next_uses(np.array(accesses, dtype=np.int64))
    for policy in ("lru", "lfu", "opt"):
        assert hits(policy, accesses, sizes, budget, upcoming) == plain_hits(policy, accesses, sizes, budget), policy
    best = hits("opt", accesses, sizes, budget, upcoming)
    assert best >= max(hits("lru", accesses, sizes, budget), hits("lfu", accesses, sizes, budget))


@given(
    st.lists(st.integers(0, 5), max_size=50), st.lists(st.integers(1, 4), min_size=6, max_size=6), st.integers(1, 12)
)
@settings(max_examples=60, deadline=None)
def test_curve_respects_the_budget_with_entries_of_several_sizes(accesses, sizes, budget):
    for policy in ("lru", "lfu"):
        assert hits(policy, accesses, sizes, budget) == plain_hits(policy, accesses, sizes, budget)


def plain_lookups(rows):
    """Each expert of a layer once a batch: a decode step, or a stretch of prefill in which the layer does not fall."""
    found, seen, before = [], set(), None
    for row in rows:
        if row["dropped"]:
            continue
        same = before is not None and (row["turn"], row["phase"]) == (before["turn"], before["phase"])
        same = same and (row["layer"] >= before["layer"] if row["phase"] == 0 else row["step"] == before["step"])
        if not same:
            seen = set()
        before = row
        if (row["layer"], row["expert"]) not in seen:
            seen.add((row["layer"], row["expert"]))
            found.append(row)
    return found


def as_the_engine_writes(rows):
    """Prefill layer by layer, as a batch goes through the graph."""
    return sorted(
        rows,
        key=lambda row: (
            row["turn"],
            row["phase"],
            *((row["layer"], row["step"]) if row["phase"] == 0 else (row["step"], row["layer"])),
        ),
    )


@given(rows=routings(), by_layer=st.booleans())
@settings(max_examples=40, deadline=None)
def test_curve_counts_lookups_leaves_dropped_routings_out_and_a_budget_for_all_misses_once(folder, rows, by_layer):
    rows = as_the_engine_writes(rows) if by_layer else rows
    view = VIEWS["route"]["curve"](written(folder, rows), Selection())
    asked = plain_lookups(rows)
    assert view.facts["accesses"] == len(asked)
    if asked:
        assert view.facts["recorded_hit_rate"] == pytest.approx(sum(row["residency"] > 0 for row in asked) / len(asked))
        entries = {(row["layer"], row["expert"]) for row in asked}
        for policy in ("lru", "lfu", "opt"):
            assert view.rows[-1][policy] == pytest.approx((len(asked) - len(entries)) / len(asked))
        sizes = {entry: BYTES * (entry[0] + 1) for entry in entries}
        places = {entry: at for at, entry in enumerate(sorted(entries))}
        accesses = [places[row["layer"], row["expert"]] for row in asked]
        for row in view.rows:
            plain = plain_hits("lru", accesses, [sizes[entry] for entry in sorted(entries)], row["budget_bytes"])
            assert row["lru"] == pytest.approx(plain / len(asked))


def test_a_prefill_of_two_batches_asks_twice(folder):
    rows = [
        {"turn": 0, "phase": 0, "step": step, "layer": layer, "slot": 0, "expert": 3, "weight": 0.5,
         "residency": int(step >= 2), "expert_bytes": BYTES if step == 0 else 0, "dropped": 0}
        for steps in ((0, 1), (2, 3)) for layer in (0, 1) for step in steps
    ]  # fmt: skip
    view = VIEWS["route"]["curve"](written(folder, rows), Selection())
    assert (view.facts["routings"], view.facts["accesses"], view.facts["recorded_hit_rate"]) == (8, 4, 0.5)


@given(rows=routings())
@settings(max_examples=15, deadline=None)
def test_a_file_without_the_dropped_column_has_nothing_dropped(folder, rows):
    for row in rows:
        row["dropped"] = 0
    trace = written(folder, rows, with_dropped=False)
    assert trace.absent == ("dropped",)
    whole = VIEWS["route"]["cache"](trace, Selection()).rows
    assert sum(row["dropped"] for row in whole) == 0
    assert sum(row["routed"] for row in whole) == len(rows)
