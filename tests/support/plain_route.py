"""The views of route traces with nothing but `csv.DictReader` and loops: what tests compare with, and the bench's yardstick.

Each function takes a file and returns the rows the view of the same name has, and what of its facts is computed from rows.
Written as one would who wants the answer and knows the standard library; only the columns a view needs are converted.
"""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

PHASES = {0: "prefill", 1: "decode"}
Answer = tuple[list[dict[str, Any]], dict[str, Any]]


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    """The rows after the preamble."""
    with path.open() as lines:
        yield from csv.DictReader(line for line in lines if not line.startswith("#"))


def layer_sizes(path: Path) -> dict[int, tuple[int, int]]:
    """Bytes of an expert and of the dense weights, by layer, as the preamble has them."""
    found = {}
    with path.open() as lines:
        for line in lines:
            if not line.startswith("#"):
                break
            if line.startswith("# layer="):
                layer, expert, dense = (int(pair.split("=")[1]) for pair in line[2:].split())
                found[layer] = (expert, dense)
    return found


def rank(ordered: list[Any], quantile: float) -> Any:
    """The nearest-rank percentile of sorted values."""
    return ordered[max(1, math.ceil(quantile * len(ordered))) - 1] if ordered else None


def sanity(path: Path) -> Answer:
    """Counts by turn and phase, duplicates and promises."""
    routings: Counter[tuple[int, int]] = Counter()
    steps = defaultdict(set)
    layers = defaultdict(set)
    layer_steps = defaultdict(set)
    read: Counter[tuple[int, int]] = Counter()
    dropped: Counter[tuple[int, int]] = Counter()
    unknown: Counter[tuple[int, int]] = Counter()
    slots: Counter[tuple[int, int, int, int]] = Counter()
    seen = Counter()
    unattributed = residencies = without_miss = of_dropped = 0
    for row in rows_of(path):
        turn, phase, step, layer = int(row["turn"]), int(row["phase"]), int(row["step"]), int(row["layer"])
        residency, size = int(row["residency"]), int(row["expert_bytes"])
        key = (turn, phase)
        routings[key] += 1
        steps[key].add(step)
        layers[key].add(layer)
        layer_steps[turn, phase, layer].add(step)
        read[key] += size
        unknown[key] += math.isnan(float(row["weight"]))
        dropped[key] += row["dropped"] == "1"
        slots[turn, phase, step, layer] += 1
        seen[turn, phase, step, layer, row["slot"]] += 1
        unattributed += step < 0
        residencies += residency not in {0, 1, 2}
        without_miss += residency != 0 and size > 0
        of_dropped += row["dropped"] == "1" and size > 0
    rows = [
        {
            "turn": turn,
            "phase": PHASES[phase],
            "routings": routings[turn, phase],
            "steps": len(steps[turn, phase]),
            "first_step": min(steps[turn, phase]),
            "last_step": max(steps[turn, phase]),
            "layers": len(layers[turn, phase]),
            "last_layer_steps": len(layer_steps[turn, phase, max(layers[turn, phase])]),
            "read_bytes": read[turn, phase],
            "unknown_weights": unknown[turn, phase],
            "dropped": dropped[turn, phase],
        }
        for turn, phase in sorted(routings)
    ]
    widths = Counter(slots.values())
    facts = {
        "routings": routings.total(),
        "unattributed": unattributed,
        "unknown_residency": residencies,
        "bytes_without_miss": without_miss,
        "bytes_of_dropped": of_dropped,
        "duplicates": sum(count > 1 for count in seen.values()),
        "cells": len(slots),
        "widths": {str(width): count for width, count in sorted(widths.items())},
    }
    return rows, facts


def matrix(path: Path) -> Answer:
    """Every cell with its routings in the router's order."""
    cells = defaultdict(list)
    for row in rows_of(path):
        weight = float(row["weight"])
        cells[int(row["turn"]), int(row["phase"]), int(row["step"]), int(row["layer"])].append(
            (
                int(row["slot"]),
                int(row["expert"]),
                None if math.isnan(weight) else weight,
                int(row["residency"]),
                int(row["dropped"]),
            )
        )
    rows = []
    for (turn, phase, step, layer), cell in sorted(cells.items()):
        cell.sort()
        rows.append(
            {
                "turn": turn,
                "phase": PHASES[phase],
                "step": step,
                "layer": layer,
                "experts": [one[1] for one in cell],
                "weights": [one[2] for one in cell],
                "residency": [one[3] for one in cell],
                "dropped": [one[4] for one in cell],
            }
        )
    return rows, {"cells": len(rows)}


def hot(path: Path) -> Answer:
    """How few experts take most of a layer's routings."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    for row in rows_of(path):
        counts[int(row["layer"])][int(row["expert"])] += 1
    rows = []
    for layer in sorted(counts):
        taken = sorted(counts[layer].items(), key=lambda pair: (-pair[1], pair[0]))
        total = counts[layer].total()
        row: dict[str, Any] = {"layer": layer, "routings": total, "experts": len(taken)}
        row |= {"top_expert": taken[0][0], "top_share": taken[0][1] / total}
        for percent in (50, 80, 90):
            so_far = 0
            for place, (_, count) in enumerate(taken, 1):
                so_far += count
                if so_far >= total * percent / 100:
                    row[f"experts_for_{percent}"] = place
                    break
        for count in (1, 4, 16, 64):
            row[f"cover_{count}"] = sum(number for _, number in taken[:count]) / total
        row["hottest"] = [{"expert": expert, "routings": number} for expert, number in taken[:8]]
        rows.append(row)
    return rows, {"layers": len(rows)}


def reuse(path: Path) -> Answer:
    """Steps between two routings of one expert."""
    seen = defaultdict(set)
    for row in rows_of(path):
        seen[int(row["layer"]), int(row["expert"])].add((int(row["turn"]), int(row["phase"]), int(row["step"])))
    places = {step: at for at, step in enumerate(sorted(set().union(*seen.values())))}
    distances = defaultdict(list)
    experts: Counter[int] = Counter()
    never: Counter[int] = Counter()
    for (layer, _), steps in seen.items():
        ordered = sorted(places[step] for step in steps)
        distances[layer] += [later - earlier for earlier, later in pairwise(ordered)]
        experts[layer] += 1
        never[layer] += len(ordered) == 1
    rows = []
    for layer in sorted(experts):
        spread = sorted(distances[layer])
        rows.append({"layer": layer, **_spread(spread), "experts": experts[layer], "never_reused": never[layer]})
    everything = sorted(distance for some in distances.values() for distance in some)
    return rows, {**_spread(everything), "pairs": experts.total(), "never_reused": never.total()}


def _spread(ordered: list[int]) -> dict[str, Any]:
    last = ordered[-1] if ordered else None
    return {"reuses": len(ordered), "p50": rank(ordered, 0.5), "p90": rank(ordered, 0.9), "max": last}


def overlap(path: Path) -> Answer:
    """What a cell shares with the same layer 1, 2, 4 and 8 steps before."""
    cells = defaultdict(set)
    for row in rows_of(path):
        cells[int(row["turn"]), int(row["phase"]), int(row["step"]), int(row["layer"])].add(int(row["expert"]))
    layers: dict[int, dict[str, Any]] = {layer: {"layer": layer} for layer in sorted({key[3] for key in cells})}
    facts = {}
    for distance in (1, 2, 4, 8):
        shares = defaultdict(list)
        for (turn, phase, step, layer), experts in cells.items():
            before = cells.get((turn, phase, step - distance, layer))
            if before is not None:
                shares[layer].append(len(experts & before) / len(experts))
        for layer, row in layers.items():
            row[f"shared_{distance}"] = sum(shares[layer]) / len(shares[layer]) if shares[layer] else None
        everything = [share for some in shares.values() for share in some]
        facts[f"shared_{distance}"] = sum(everything) / len(everything) if everything else None
        facts[f"pairs_{distance}"] = len(everything)
    return list(layers.values()), facts


def workset(path: Path) -> Answer:
    """Experts touched so far, and their bytes, after each step."""
    sizes = layer_sizes(path)
    steps = defaultdict(set)
    for row in rows_of(path):
        steps[int(row["turn"]), int(row["phase"]), int(row["step"])].add((int(row["layer"]), int(row["expert"])))
    seen: set[tuple[int, int]] = set()
    touched = 0
    rows = []
    for (turn, phase, step), routed in sorted(steps.items()):
        new = routed - seen
        seen |= new
        touched += sum(sizes[layer][0] for layer, _ in new)
        rows.append(
            {
                "turn": turn,
                "phase": PHASES[phase],
                "step": step,
                "new": len(new),
                "experts": len(seen),
                "bytes": touched,
            }
        )
    return rows, {"steps": len(rows), "experts": len(seen), "bytes": touched}


def cache(path: Path) -> Answer:
    """Hits, misses and prefetches."""
    table: dict[tuple[int, int, int], Counter[str]] = defaultdict(Counter)
    kinds = {"0": "miss", "1": "hit", "2": "prefetched"}
    for row in rows_of(path):
        counts = table[int(row["turn"]), int(row["phase"]), int(row["layer"])]
        counts["routed"] += 1
        counts["dropped" if row["dropped"] == "1" else kinds[row["residency"]]] += 1
        size = int(row["expert_bytes"])
        counts["reads"] += size > 0
        counts["read_bytes"] += size
    names = ("routed", "miss", "hit", "prefetched", "dropped", "reads", "read_bytes")
    rows = []
    for (turn, phase, layer), counts in sorted(table.items()):
        served = counts["hit"] + counts["prefetched"]
        rows.append(
            {
                "turn": turn,
                "phase": PHASES[phase],
                "layer": layer,
                **{name: counts[name] for name in names},
                "hit_rate": served / (served + counts["miss"]),
                "hit_rate_of_routed": served / counts["routed"],
            }
        )
    return rows, {}


def entropy(path: Path) -> Answer:
    """Bits of the experts used, and of the weights inside a cell."""
    counts: dict[int, Counter[int]] = defaultdict(Counter)
    cells = defaultdict(list)
    for row in rows_of(path):
        layer = int(row["layer"])
        counts[layer][int(row["expert"])] += 1
        cells[int(row["turn"]), int(row["phase"]), int(row["step"]), layer].append(float(row["weight"]))
    bits = defaultdict(list)
    tops = defaultdict(list)
    routed: Counter[int] = Counter()
    for (*_, layer), weights in cells.items():
        routed[layer] += 1
        total = sum(weights)
        if total > 0:  # not with nan
            parts = [weight / total for weight in weights]
            bits[layer].append(-sum(part * math.log2(part) for part in parts if part > 0))
            tops[layer].append(max(parts))
    rows = []
    for layer in sorted(counts):
        total = counts[layer].total()
        rows.append(
            {
                "layer": layer,
                "usage_bits": -sum(n / total * math.log2(n / total) for n in counts[layer].values()),
                "experts": len(counts[layer]),
                "weight_bits": sum(bits[layer]) / len(bits[layer]) if bits[layer] else None,
                "top1_share": sum(tops[layer]) / len(tops[layer]) if tops[layer] else None,
                "cells_known": len(bits[layer]),
                "cells": routed[layer],
            }
        )
    return rows, {}


def bytes_read(path: Path) -> Answer:
    """Bytes by layer and by step."""
    sizes = layer_sizes(path)
    by_layer: dict[int, Counter[str]] = defaultdict(Counter)
    by_step: Counter[tuple[int, int, int]] = Counter()
    for row in rows_of(path):
        phase, size = int(row["phase"]), int(row["expert_bytes"])
        found = by_layer[int(row["layer"])]
        found["read_bytes"] += size
        found[f"{PHASES[phase]}_bytes"] += size
        found["reads"] += size > 0
        by_step[int(row["turn"]), phase, int(row["step"])] += size
    names = ("read_bytes", "prefill_bytes", "decode_bytes", "reads")
    rows = [
        {
            "layer": layer,
            **{name: by_layer[layer][name] for name in names},
            "expert_bytes": sizes[layer][0],
            "dense_bytes": sizes[layer][1],
        }
        for layer in sorted(by_layer)
    ]
    facts: dict[str, Any] = {
        "read_bytes": sum(row["read_bytes"] for row in rows),
        "dense_bytes": sum(dense for _, dense in sizes.values()),
    }
    for phase, name in PHASES.items():
        taken = sorted(size for key, size in by_step.items() if key[1] == phase)
        facts[name] = {
            "steps": len(taken),
            "mean": sum(taken) / len(taken),
            "p50": rank(taken, 0.5),
            "p95": rank(taken, 0.95),
            "max": taken[-1],
        }
    return rows, facts
