"""Every view by kind of trace and name: the one table the command line, the documents and the tests go through."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bmoe_collector.traces import compute, curve, io, matrix, reuse, route
from bmoe_collector.traces.read import Selection, Trace, View

ViewOf = Callable[[Trace, Selection], View]

VIEWS: Mapping[str, Mapping[str, ViewOf]] = {
    "route": {
        "sanity": route.sanity,
        "matrix": matrix.matrix,
        "hot": route.hot,
        "reuse": reuse.reuse,
        "overlap": reuse.overlap,
        "workset": reuse.workset,
        "cache": route.cache,
        "entropy": route.entropy,
        "bytes": route.bytes_read,
        "curve": curve.curve,
    },
    "compute": {"ops": compute.ops, "layers": compute.layers, "faults": compute.faults},
    "io": {"latency": io.latency, "size": io.size, "lanes": io.lanes, "adjacency": io.adjacency},
}

ABOUT: Mapping[str, Mapping[str, str]] = {
    "route": {
        "sanity": "Does the file keep its format's promises: every count but routings and cells should be 0.",
        "matrix": "Which experts each layer routed at each step, in the router's order, with their weights;"
        " residency 0 missed, 1 resident, 2 first use of one read ahead.",
        "hot": "Concentration by layer: how many experts take 50, 80 and 90 % of the routings, and the share that the 1, 4, 16"
        " and 64 most routed cover.",
        "reuse": "Steps between two routings of one expert of a layer; percentiles are observed distances; never_reused counts"
        " the (layer, expert) pairs routed in one step only.",
        "overlap": "Mean share of a step's experts that the same layer routed 1, 2, 4 and 8 steps before; pairs: how many"
        " layers of steps each mean is over.",
        "workset": "Experts touched so far after each step, and what they weigh: what a cache that never evicts would hold.",
        "cache": "Misses, hits and first uses of what was read ahead. hit_rate is of what was looked up, as the engine counts;"
        " hit_rate_of_routed counts a dropped routing as the miss it faced.",
        "entropy": "How spread the routing is, in bits: of the experts a layer used (most_bits if all alike), and of the weights"
        " inside one step.",
        "bytes": "Flash bytes by layer, the dense ones a cold layer costs once beside them, and the bytes of a step by phase.",
        "curve": "The hit rate other cache budgets would have given: lru and lfu as a cache could, opt as none could (it knows"
        " the future), all from an empty cache; share is of the working set. recorded_minus_lru: how far the run itself is from"
        " what lru makes of its own budget, which is how far the curve may be trusted.",
    },
    "compute": {
        "ops": "Time and major faults by graph operation; part is a guess by the node's name.",
        "layers": "Time and major faults by layer, or by segment of a per-layer trace.",
        "faults": "Where major faults were served, most first, and the time of the nodes that had them.",
    },
    "io": {
        "latency": "Time of single reads, which overlap across lanes: percentiles are observed, MiB/s is of busy time.",
        "size": "Reads by the power of two their request fits in; waste is the share of the bytes read that nobody asked for.",
        "lanes": "What each lane read, and its share of the busy time.",
        "adjacency": "Reads of one step and layer that touch or overlap in the file: would_be is how many would have done.",
    },
}
"""What each view says, for eyes."""
