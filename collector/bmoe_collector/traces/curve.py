"""The hit rate other cache budgets would have given: LRU, LFU and the offline optimum over the routings of a trace.

The accesses are the engine's own lookups in its order (`lookups.py`), so that the recorded rate is the engine's `cache_hit_pct`; every
simulated cache begins empty, as the engine's does. A simulated LRU with the run's own budget should come near the recorded rate: how far
it does not is said, and is how far the curve may be trusted. An entry is one expert of one layer with that layer's bytes. LFU counts an entry's uses while it is resident
and evicts the least used, the longest unused among equals. The optimum evicts the entry whose next use lies furthest
away and, like the other two, must take in what it just read (Belady's rule, exact where all entries have one size; with
several sizes it is a bound only approximately, and a note says so). Memory is the accesses as integers, nothing grows with the budget.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bmoe_collector.traces.arrays import dense
from bmoe_collector.traces.lookups import lookups
from bmoe_collector.traces.read import Selection, Trace, View
from bmoe_collector.traces.reuse import layer_bytes

POLICIES = ("lru", "lfu", "opt")


def curve(
    trace: Trace,
    chosen: Selection,
    budgets_mib: Sequence[float] = (),
    policies: Sequence[str] = POLICIES,
    own_mib: float | None = None,
) -> View:
    """One row a budget: hit rate by policy, beside the rate the trace recorded.

    Without `budgets_mib` five budgets are taken: 10, 25, 50, 75 and 100 % of the working set. `own_mib` is the budget the run had:
    it gets a row too, and what LRU makes of it is compared with the recorded rate.
    """
    asked = lookups(trace, chosen)
    notes = list(trace.notes())
    if not len(asked):
        return View("curve", {"accesses": 0}, [], (*notes, "nothing was looked up in this selection"))
    if chosen != Selection():
        notes.append("the simulated caches begin empty where the selection begins; the engine's did not")
    layer, layers = dense(asked.layer)
    expert, experts = dense(asked.expert)
    ids, pairs = dense(layer * len(experts) + expert)
    recorded = int(asked.served.sum()) / len(asked)
    sizes_by_layer = layer_bytes(trace, layers.tolist())
    unknown = sorted(layer for layer, size in sizes_by_layer.items() if not size)
    if unknown:
        notes.append(f"bytes of an expert are unknown for layers {unknown}: each counted as one byte")
    sizes = [sizes_by_layer[layer] or 1 for layer in layers[pairs // len(experts)].tolist()]
    if len(set(sizes)) > 1:
        notes.append("layers have experts of several sizes: the offline rule is close to the optimum, not exactly it")
    accesses = array("q", ids.tobytes())
    working_set = sum(sizes)
    wanted = [int(mib * 1048576) for mib in budgets_mib] or [
        working_set * part // 100 for part in (10, 25, 50, 75, 100)
    ]
    own = None if own_mib is None else int(own_mib * 1048576)
    wanted = sorted({*wanted, *(() if own is None else (own,))})
    upcoming = next_uses(ids) if "opt" in policies else array("q")
    table: list[dict[str, Any]] = []
    for budget in wanted:
        row: dict[str, Any] = {"budget_bytes": budget, "budget_mib": budget / 1048576, "share": budget / working_set}
        for policy in policies:
            row[policy] = hits(policy, accesses, sizes, budget, upcoming) / len(accesses)
        table.append(row)
    facts: dict[str, Any] = {
        "routings": asked.routings,
        "accesses": len(accesses),
        "entries": len(sizes),
        "working_set_bytes": working_set,
        "compulsory_misses": len(sizes),
        "recorded_hit_rate": recorded,
    }
    if own is not None:
        own_lru = hits("lru", accesses, sizes, own, upcoming) / len(accesses)
        facts |= {"own_budget_mib": own_mib, "lru_at_own_budget": own_lru, "recorded_minus_lru": recorded - own_lru}
    return View("curve", facts, table, tuple(notes))


def hits(policy: str, accesses: Sequence[int], sizes: Sequence[int], budget: int, upcoming: Sequence[int] = ()) -> int:
    """How many accesses find their entry resident. `upcoming` is what `next_uses` gives, for `opt`."""
    if policy in POLICIES and budget >= sum(sizes):
        return len(accesses) - len(set(accesses))  # all fits: each entry is missed once
    if policy == "lru":
        return _lru(accesses, sizes, budget)
    if policy == "lfu":
        return _lfu(accesses, sizes, budget)
    if policy == "opt":
        return _opt(accesses, sizes, budget, upcoming)
    raise ValueError(f"no such policy: {policy}")


def next_uses(ids: Any) -> array[int]:
    """For each access the place of the next one to the same entry, or a place past the end."""
    count = len(ids)
    order = np.argsort(ids, kind="stable")
    following = np.full(count, count, dtype=np.int64)
    same = ids[order[:-1]] == ids[order[1:]]
    following[order[:-1][same]] = order[1:][same]
    return array("q", following.tobytes())


def _lru(accesses: Sequence[int], sizes: Sequence[int], budget: int) -> int:
    resident: OrderedDict[int, None] = OrderedDict()
    touch, evict = resident.move_to_end, resident.popitem
    free, found = budget, 0
    for entry in accesses:
        if entry in resident:
            found += 1
            touch(entry)
            continue
        size = sizes[entry]
        if size > budget:
            continue
        while free < size:
            free += sizes[evict(last=False)[0]]
        resident[entry] = None
        free -= size
    return found


def _lfu(accesses: Sequence[int], sizes: Sequence[int], budget: int) -> int:
    uses = [0] * len(sizes)  # 0: not resident
    ranks: list[OrderedDict[int, None]] = [OrderedDict(), OrderedDict()]  # by number of uses, longest unused first
    least, free, found = 1, budget, 0
    for entry in accesses:
        used = uses[entry]
        if used:
            found += 1
            del ranks[used][entry]
            uses[entry] = used = used + 1
            if used == len(ranks):
                ranks.append(OrderedDict())
            ranks[used][entry] = None
            continue
        size = sizes[entry]
        if size > budget:
            continue
        while free < size:
            while not ranks[least]:
                least += 1
            gone = ranks[least].popitem(last=False)[0]
            uses[gone] = 0
            free += sizes[gone]
        uses[entry] = least = 1
        ranks[1][entry] = None
        free -= size
    return found


def _opt(accesses: Sequence[int], sizes: Sequence[int], budget: int, upcoming: Sequence[int]) -> int:
    entries = len(sizes)
    # one integer says when an entry is used next, least for the furthest, and which entry it is
    keys = (len(accesses) - np.asarray(upcoming, np.int64)) * entries + np.asarray(accesses, np.int64)
    held = [-1] * entries  # key of what is resident
    furthest: list[int] = []  # a heap of keys; those that are not held any more are skipped when popped
    push, pop = heapq.heappush, heapq.heappop
    free, found = budget, 0
    for entry, key in zip(accesses, array("q", keys.tobytes()), strict=True):
        if held[entry] >= 0:
            found += 1
            held[entry] = key
            push(furthest, key)
            continue
        size = sizes[entry]
        if size > budget:
            continue
        while free < size:
            key_gone = pop(furthest)
            gone = key_gone % entries
            if held[gone] == key_gone:
                held[gone] = -1
                free += sizes[gone]
        held[entry] = key
        push(furthest, key)
        free -= size
        if len(furthest) > 4 * entries + 1024:
            furthest = [each for each in held if each >= 0]
            heapq.heapify(furthest)
    return found
