"""One look at how much of a model is in memory.

In: the model's layout. Out: a `Residency` message: whole file, dense, expert, what is neither, and single layers on request, each
with its standard error, and what the look cost. The cost is bounded by the number of pages looked at, not by the model's size.

It stands beside the engine's own `dense_resident_frac`, never in place of it: with `--dense-weights anon` (the default) the page cache
holds little of the model while the weights sit in the engine's anonymous memory.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_agent.residency.mincore import Mapped, MincoreError
from bmoe_agent.residency.model import Layout
from bmoe_agent.residency.strata import Estimate, PageRange, Pages, draw, estimate, shares, together

PAGES_A_LOOK = 1024
_LEAST = 32
_LEAST_LAYER = 16

_Key = tuple[str, int | None]


class Residency:
    """Looks at one model again and again; holds a mapping of every shard until closed."""

    def __init__(self, model: Layout, page_bytes: int | None = None, source: random.Random | None = None) -> None:
        """Never raises for what the file or the kernel refuses: every look then says so."""
        self._model = model
        self._source = source or random.Random()
        self._mapped: list[Mapped] = []
        self._problem = ""
        self.page_bytes = 0
        try:
            for path in model.paths:
                self._mapped.append(Mapped(path, page_bytes))
                self._problem = self._problem or self._mapped[-1].why_unknown()
            self.page_bytes = self._mapped[0].page_bytes
        except MincoreError as problem:
            self._problem = str(problem)
        self._cells = cells(model, self.page_bytes, [one.pages for one in self._mapped]) if self.page_bytes else {}
        self._sizes: dict[_Key, int] = {}
        for extent in model.extents:
            key = (extent.part, extent.layer)
            self._sizes[key] = self._sizes.get(key, 0) + extent.size

    def look(self, sweep: bool = False, layers: bool = False) -> pb.Residency:
        """Look now: at a sample, or at every page."""
        began_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        report = pb.Residency(method="sweep" if sweep else "sample", page_bytes=self.page_bytes)
        if self._problem:
            report.method, report.problem = "unavailable", self._problem
        else:
            try:
                found = self._sweep() if sweep else self._sample(layers)
                self._report(report, found, layers)
            except MincoreError as problem:
                report.method, report.problem = "unavailable", str(problem)
                del report.parts[:]
        report.took_ns = time.perf_counter_ns() - began_ns
        report.cpu_ns = time.thread_time_ns() - cpu_ns
        return report

    def close(self) -> None:
        """Unmap everything."""
        for one in self._mapped:
            one.close()
        self._mapped.clear()
        self._problem = self._problem or "closed"

    def __enter__(self) -> Residency:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sweep(self) -> dict[_Key, Estimate]:
        found: dict[_Key, Estimate] = {}
        for key, pages in self._cells.items():
            resident = sum(self._mapped[one.shard].count(one.first, one.last) for one in pages.ranges)
            found[key] = Estimate(pages.count, pages.count, resident, resident / pages.count, 0.0)
        return found

    def _sample(self, layers: bool) -> dict[_Key, Estimate]:
        """Cells of one part share its strata unless layers are asked for: then each has its own."""
        groups: dict[_Key, Pages] = self._cells
        if not layers:
            by_part: dict[_Key, list[PageRange]] = {}
            for (part, _), pages in self._cells.items():
                by_part.setdefault((part, None), []).extend(pages.ranges)
            groups = {
                key: Pages(sorted(ranges, key=lambda one: (one.shard, one.first))) for key, ranges in by_part.items()
            }
        least = _LEAST_LAYER if layers else _LEAST
        budgets = shares([pages.count for pages in groups.values()], PAGES_A_LOOK, least)
        return {
            key: self._estimate(pages, budget) for (key, pages), budget in zip(groups.items(), budgets, strict=True)
        }

    def _estimate(self, pages: Pages, budget: int) -> Estimate:
        strata = draw(pages.count, budget, self._source)
        wanted: list[list[int]] = [[] for _ in self._mapped]
        order: list[int] = []
        for places in strata:
            for place in places:
                shard, page = pages.at(place)
                wanted[shard].append(page)
                order.append(shard)
        told = [iter(one.resident(asked)) for one, asked in zip(self._mapped, wanted, strict=True)]
        seen = iter([next(told[shard]) for shard in order])
        answers: list[Sequence[int]] = [[next(seen) & 1 for _ in places] for places in strata]
        return estimate(pages.count, answers)

    def _report(self, report: pb.Residency, found: dict[_Key, Estimate], layers: bool) -> None:
        self._part(report, "whole", list(found.values()), sum(self._model.sizes))
        for part in ("dense", "expert", "other"):
            mine = [value for key, value in found.items() if key[0] == part]
            if mine:
                self._part(report, part, mine, sum(size for key, size in self._sizes.items() if key[0] == part))
        if layers:
            for layer in sorted({key[1] for key in found if key[1] is not None}):
                mine = [value for key, value in found.items() if key[1] == layer]
                self._part(
                    report, f"layer:{layer}", mine, sum(size for key, size in self._sizes.items() if key[1] == layer)
                )

    def _part(self, report: pb.Residency, name: str, estimates: list[Estimate], size: int) -> None:
        whole = together(estimates)
        report.parts.add(
            part=name,
            bytes=size,
            pages=whole.pages,
            pages_looked_at=whole.looked_at,
            pages_resident=whole.resident,
            fraction=min(1.0, whole.fraction),
            standard_error=whole.standard_error,
        )


def cells(model: Layout, page_bytes: int, pages: Sequence[int]) -> dict[_Key, Pages]:
    """Every page of the model in exactly one (part, layer): a page on a border goes to the side that has more of it."""
    ranges: dict[_Key, list[PageRange]] = {}
    for number, size in enumerate(model.sizes):
        mine = [extent for extent in model.extents if extent.shard == number]
        first = 0
        for extent in mine:
            end = extent.offset + extent.size
            last = pages[number] if end >= size else min(pages[number], (end + page_bytes // 2) // page_bytes)
            if last > first:
                ranges.setdefault((extent.part, extent.layer), []).append(PageRange(number, first, last))
                first = last
    return {key: Pages(found) for key, found in ranges.items()}
