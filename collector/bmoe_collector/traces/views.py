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
