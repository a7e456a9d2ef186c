"""Sections of the terminal view, one function each: a record and what was derived in, something rich can print out.

`width` is the terminal's: below 110 columns there are fewer things side by side, shorter curves and no remarks. A section of which
nothing was measured is None: a run that never generated is not a page of dashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bmoe_collector.meaning.bars import Bars
from bmoe_collector.meaning.derive import Derived
from bmoe_collector.meaning.memory import State, difference, last_look
from bmoe_collector.meaning.numbers import number
from bmoe_collector.record import RunRecord
from bmoe_collector.show import words
from bmoe_collector.show.safe import clip, escape

Pairs = Sequence[tuple[str, str]]
WIDE = 110


def _section(title: str, *body: RenderableType) -> RenderableType:
    return Group(Text(f"\n{title}", style="bold"), *body)


def _nothing(pairs: Pairs) -> bool:
    """Whether no value of these was measured."""
    return all(value == words.NOTHING for _, value in pairs)


def _grid(pairs: Pairs, columns: int = 2) -> Table:
    """Name and value pairs, `columns` of them side by side."""
    table = Table.grid(padding=(0, 2))
    line: list[RenderableType] = []
    for name, value in pairs:
        line += [Text(name, style="dim"), Text(value)]
        if len(line) == 2 * columns:
            table.add_row(*line)
            line = []
    if line:
        table.add_row(*line, *([""] * (2 * columns - len(line))))
    return table


def configuration(record: RunRecord, derived: Derived, width: int) -> RenderableType | None:
    """What ran: resolved values, and the argv."""
    config = derived.config
    cache = words.NOTHING
    if config.cache_mb is not None:
        cache = "off" if config.cache_mb == 0 else words.mib(config.cache_mb) + (" (auto)" if config.cache_auto else "")
    elif config.cache_auto:
        cache = "auto"
    mode = (
        words.NOTHING if config.streaming is None else "expert streaming" if config.streaming else "mmap, not streaming"
    )
    reads = words.NOTHING if config.overlap is None else "overlap" if config.overlap else "serial"
    direct = words.NOTHING if config.o_direct is None else "achieved" if config.o_direct else "not achieved"
    if config.o_direct and "darwin" in str(record.run.get("device")).lower():
        direct = "uncached descriptor"  # what o_direct=1 means on a Mac (contract, "Run-parameter preamble")
    pairs = [
        ("mode", mode),
        ("cache", cache),
        ("reads", reads),
        ("dense weights", config.dense_weights or words.NOTHING),
        ("threads", words.number(config.threads, 0)),
        ("I/O lanes", words.number(config.io_threads, 0)),
        ("top-k", words.number(config.n_expert_used, 0)),
        ("O_DIRECT", direct),
        ("speculation", config.spec or words.NOTHING),
        ("temperature", "greedy" if config.temp == 0 else words.significant(config.temp)),
        ("context", words.number(config.n_ctx, 0)),
    ]
    argv = record.run.get("argv") or ()
    if _nothing(pairs) and not argv and not derived.unmeasured:
        return None
    pairs.append(("stall_ms means", derived.stall_meaning or "not known for this build"))
    body: list[RenderableType] = [_grid(pairs, 3 if width >= WIDE else 2)]
    if argv:
        body.append(Text(clip(" ".join(_quoted(str(part)) for part in argv), 400), style="dim"))
    if derived.unmeasured:
        body.append(Text(f"this platform does not report: {', '.join(derived.unmeasured)}", style="yellow"))
    return _section("Configuration", *body)


def _quoted(part: str) -> str:
    return f'"{part}"' if " " in part or not part else part


def speed(derived: Derived, width: int) -> RenderableType | None:
    """Headline with the effective rate beside it, TTFT, prefill, and how tokens were spread."""
    one = derived.speed
    first = derived.turns[0].prefill if derived.turns else None
    source = {"engine": "as the engine reports it", "rows": "from the token rows: there is no end record"}.get(
        one.source, ""
    )
    head = Text()
    head.append(f"{words.significant(one.tok_s)} tok/s", style="bold")
    head.append(f"   effective {words.significant(one.effective_tok_s)} tok/s")
    head.append(f"   {words.seconds(one.s_tok)} a token   {derived.tokens} tokens")
    body: list[RenderableType] = [head]
    if source:
        body.append(Text(source, style="dim"))
    drawn = derived.speculation
    pairs = [
        ("time to first token", words.seconds(first.ttft_s if first else None)),
        ("load", words.seconds(first.load_s if first else None)),
        ("prefill", words.seconds(first.prefill_s if first else None)),
        ("prefill rate", words.significant(first.prefill_tps if first else None, "tok/s")),
        ("between decodes", _per_token(one.loop_overhead_s_tok)),
        ("CPU occupancy", words.share(derived.occupancy)),
        ("CPU busy", words.share(derived.cpu_busy)),
    ]
    if drawn.source in {"mtp", "ngram"}:
        pairs += [
            ("drafting", _per_token(one.draft_s_tok)),
            ("after drafting", words.significant(one.drafting_tok_s, "tok/s")),
            ("drafts accepted", words.share(drawn.acceptance)),
            ("tokens a decode", words.significant(drawn.amortisation)),
            ("decodes drafted", words.share(drawn.coverage)),
        ]
    steady = derived.steady
    if steady.found:
        begin = f"after {steady.warmup_tokens} tokens" if steady.warmup_tokens else "from the first token"
        pairs.append(("steady state", f"{words.significant(steady.steady_tok_s)} tok/s {begin}"))
    spread = one.token_ms
    if one.tok_s is None and spread is None and _nothing(pairs):
        return None
    body.append(_grid(pairs))
    if spread is not None:
        names = ("mean", "median", "p5", "p95", "min", "max")
        line = "  ".join(f"{name} {words.significant(getattr(spread, name))}" for name in names)
        body.append(Text(f"ms a token  {line}"))
        costs = [cost for cost in derived.token_costs_ms if cost is not None]
        body.append(Text(f"            {words.sparkline(costs, min(60, width - 14))}"))
    return _section("Speed", *body)


def _per_token(value: float | None) -> str:
    return words.NOTHING if value is None else f"{words.seconds(value)} a token"


_PARTS = (
    ("cpu", "cpu_s", "CPU ÷ compute threads, an upper bound"),
    ("flash wait", "flash_s", "reads (serial) or stall (overlap)"),
    ("cache mgmt", "mgmt_s", ""),
    ("unattributed", "unattributed_s", "preemption, swap-in, throttling"),
)


def time_bars(derived: Derived, width: int) -> RenderableType | None:
    """The four bars of a token and, where the engine tells, of the prompt. Not rescaled: they may pass the whole."""
    prompt = derived.turns[0].prefill_bars if derived.turns else None
    if derived.bars.wall_s is None and (prompt is None or prompt.cpu_s is None):
        return None
    body: list[RenderableType] = [_bars(derived.bars, "a token", width)]
    if prompt is not None and prompt.cpu_s is not None:
        body.append(_bars(prompt, "the prompt", width))
    if past := [bars for bars in (derived.bars, prompt) if bars is not None and (whole_of(bars) or 0) > 1.005]:
        most = words.share(max(whole_of(bars) or 0 for bars in past), 0)
        said = f"together up to {most}, and not rescaled: CPU counts I/O lanes and other threads of the process too"
        body.append(Text(said, style="dim"))
    parts = [("drain", "drain"), ("ra_issue", "ra_issue"), ("ra_wd", "ra_wd")]
    named = [f"{name} {words.seconds(derived.terms[key])}" for name, key in parts if derived.terms.get(key)]
    residual = derived.terms.get("compute")
    if residual is not None:
        inside = f", of it {', '.join(named)}" if named else ""
        body.append(Text(f"compute residual {words.seconds(residual)} a token, not a measurement{inside}", style="dim"))
    if derived.terms.get("adopt"):
        body.append(Text(f"adopt {words.seconds(derived.terms['adopt'])} a token, inside cache mgmt", style="dim"))
    return _section("Where the time goes", *body)


def whole_of(parts: Bars) -> float | None:
    """The measured bars together, as a share of the wall time they are of."""
    values = [getattr(parts, field) for _, field, _ in _PARTS]
    return sum(value for value in values if value is not None) / parts.wall_s if parts.wall_s else None


def _bars(parts: Bars, of: str, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(Text(of), Text(words.seconds(parts.wall_s)), "", "", "")
    for name, field, remark in _PARTS:
        value = getattr(parts, field)
        table.add_row(
            Text(name, style="dim"),
            Text(words.seconds(value)),
            Text(words.share(None if value is None or not parts.wall_s else value / parts.wall_s, 0)),
            Text(words.bar(value, parts.wall_s, 30)),
            Text(remark if width >= WIDE else "", style="dim"),
        )
    return table


def turns(derived: Derived) -> RenderableType | None:
    """A session, turn by turn."""
    if not derived.turns:
        return None
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in (
        "turn",
        "tokens",
        "tok/s",
        "effective",
        "TTFT",
        "prefill tok/s",
        "cpu",
        "flash",
        "mgmt",
        "rest",
        "hit",
    ):
        table.add_column(name, justify="right")
    for one in derived.turns:
        hit = number(one.summary.get("cache_hit_pct"))
        table.add_row(
            str(one.turn.turn) + (" (cancelled)" if one.turn.cancelled else ""),
            words.number(one.speed.tokens, 0),
            words.significant(one.speed.tok_s),
            words.significant(one.speed.effective_tok_s),
            words.seconds(one.prefill.ttft_s),
            words.significant(one.prefill.prefill_tps),
            words.seconds(one.bars.cpu_s),
            words.seconds(one.bars.flash_s),
            words.seconds(one.bars.mgmt_s),
            words.seconds(one.bars.unattributed_s),
            words.number(hit, 1, "%"),
        )
    return _section("Turns", table)


def memory(record: RunRecord, derived: Derived, width: int) -> RenderableType | None:
    """Curves, and how much of the model is in memory."""
    body: list[RenderableType] = []
    curves = Table.grid(padding=(0, 2))
    for name, title in (
        ("rss_anon_mib", "anonymous"),
        ("rss_file_mib", "file"),
        ("rss_mib", "resident"),
        ("swap_mib", "swap"),
        ("mem_available_mib", "MemAvailable"),
        ("swap_free_mib", "swap free"),
    ):
        curve = derived.curves.get(name)
        if curve is None:
            curves.add_row(Text(title, style="dim"), words.NOTHING, "", "")
            continue
        low, high = min(curve.values), max(curve.values)
        curves.add_row(
            Text(title, style="dim"),
            Text(f"{words.mib(curve.first)} → {words.mib(curve.last)}"),
            Text(words.sparkline(curve.values, 40 if width >= WIDE else 20)),
            Text(
                f"{words.mib(low)} to {words.mib(high)}" + (f", {curve.source}" if width >= WIDE else ""), style="dim"
            ),
        )
    body.append(curves)
    looks = [(part, last_look(record.residency, part)) for part in ("whole", "dense", "expert")]
    if not derived.curves and not any(look for _, look in looks):
        return None
    for part, look in looks:
        if look is None:
            continue
        if look.fraction is None:
            body.append(Text(f"resident {part}: {escape(look.problem or 'not looked at')}"))
            continue
        error = "exact" if look.method == "sweep" else f"± {words.share(look.standard_error)}"
        cost = "" if look.cost_ms is None else f", cost {words.significant(look.cost_ms, 'ms')}"
        body.append(Text(f"resident {part}: {words.share(look.fraction)} ({error}) of {words.size(look.bytes)}{cost}"))
    own = [value for value in derived.rows.get("dense_resident_frac") if value is not None]
    if own:
        body.append(Text(f"dense weights resident by the engine's own sample: {words.share(own[-1])}", style="dim"))
    return _section("Memory", *body)


def cache(derived: Derived, width: int) -> RenderableType | None:
    """Hit rate with what moves it, counters, and flash bytes chosen against those the kernel forced."""
    one = derived.cache
    useful = None if not one.prefetched_experts else (one.prefetched_useful or 0) / one.prefetched_experts
    pairs = [
        ("hit rate", words.number(one.hit_pct, 1, "%")),
        ("dropped", words.share(one.drop_rate)),
        ("substituted", words.share(one.substitution_rate)),
        ("rerouted", words.share(one.reroute_rate)),
        ("evictions", words.number(one.evictions, 0)),
        ("re-reads", words.number(one.rereads, 0)),
        ("held", words.mib(one.resident_mib)),
        ("budget", words.mib(one.budget_mib)),
        ("one token routes", words.mib(one.token_demand_mib)),
        ("flash read", words.number(one.read_mib_tok, 2, "MiB a token")),
        ("faulted", words.significant(one.faulted_mib_tok, "MiB a token")),
        ("major faults", words.number(one.majflt_tok, 2, "a token")),
    ]
    rates = {"dropped", "substituted", "rerouted"}  # of what was routed: 0 by the settings alone
    if _nothing([pair for pair in pairs if pair[0] not in rates]):
        return None
    if one.prefetched_experts:
        pairs.append(("prefetch useful", words.share(useful)))
    return _section("Cache and flash", _grid(pairs, 3 if width >= WIDE else 2))


def phone(record: RunRecord, derived: Derived) -> RenderableType | None:
    """The phone before and after, and what the gates saw."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("", "entry", "exit"):
        table.add_column(name)
    before, after = derived.entry, derived.exit

    seen: set[str] = set()

    def row(name: str, show: Any) -> None:
        seen.update((show(before), show(after)))
        table.add_row(Text(name, style="dim"), Text(show(before)), Text(show(after)))

    row("CPU temperature", lambda state: words.number(state.cpu_temp_c, 1, "°C"))
    row("clock cap", lambda state: words.share(state.clock_cap_ratio, 0))
    row("MemAvailable", lambda state: words.mib(state.mem_available_mib))
    row("swap used", lambda state: words.mib(state.swap_used_mib))
    row("battery", _battery)
    row("awake", lambda state: escape(state.wakefulness) if state.wakefulness else words.yes(state.awake))
    row("allowed CPUs", lambda state: escape(state.cpus_allowed) if state.cpus_allowed else words.NOTHING)
    if seen == {words.NOTHING} and not record.gates and not before.refused:
        return None
    body: list[RenderableType] = [table]
    swapped = difference(after, before, lambda state: state.pswpin)
    if swapped is not None:
        out = difference(after, before, lambda state: state.pswpout)
        body.append(Text(f"swapped in {swapped:.0f} and out {words.number(out, 0)} pages over the run", style="dim"))
    for gate in record.gates:
        last = "nothing readable" if gate.last is None else f"{gate.last:g} {escape(gate.unit)}".strip()
        waited = f", waited {words.seconds(gate.waited_s)}" if gate.waited_s else ""
        body.append(
            Text(f"gate {escape(gate.asked)}: {escape(gate.state)}, last {last}{waited} ({escape(gate.policy)})")
        )
    if before.refused:
        body.append(Text(f"not readable: {clip(', '.join(sorted(before.refused)), 200)}", style="dim"))
    return _section("Phone", *body)


def _battery(state: State) -> str:
    if state.battery_pct is None and state.battery_temp_c is None:
        return words.NOTHING
    charging = "" if state.charging is None else ", charging" if state.charging else ", on battery"
    temperature = "" if state.battery_temp_c is None else f", {state.battery_temp_c:.1f} °C"
    return f"{words.number(state.battery_pct, 0, '%')}{temperature}{charging}"


def record_itself(record: RunRecord) -> RenderableType:
    """Whether the record is whole, what watching cost, and which files belong to it."""
    whole, cost = record.completeness, record.observer
    body: list[RenderableType] = []
    state = "complete" if whole.get("complete") else "not complete"
    counts = [f"{whole[name]} {name}" for name in ("frames", "segments", "gaps") if whole.get(name) is not None]
    body.append(Text(", ".join([state, *counts]), style="green" if whole.get("complete") else "yellow"))
    body.extend(Text(f"  {escape(reason)}") for reason in whole.get("reasons") or ())
    if cost:
        body.append(Text(_cost(cost, record)))
    if record.others:
        body.append(Text(f"{len(record.others)} lines that nothing understood, kept (--json)", style="dim"))
    notes: Sequence[Any] = [note for note in record.notes if note.code != "launched"]
    body.extend(Text(f"{escape(note.code)}: {clip(note.text, 160)}", style="dim") for note in notes[:10])
    files = Table.grid(padding=(0, 2))
    for one in record.artifacts:
        files.add_row(
            Text(escape(one.name)),
            Text(one.kind, style="dim"),
            Text(words.size(one.size)),
            Text(one.sha256[:12], style="dim"),
        )
    if record.artifacts:
        body.append(files)
    return _section("Record", *body)


def _cost(cost: Any, record: RunRecord) -> str:
    """What the agent itself cost (law 6), as a share of one core where the duration is known."""
    cpu = number(cost.get("cpu_ms"))
    begin, end = number(record.run.get("launched_boot_ns")), number(record.run.get("ended_boot_ns"))
    lasted_ms = None if begin is None or end is None or end <= begin else (end - begin) / 1e6
    of_core = "" if cpu is None or lasted_ms is None else f" ({100 * cpu / lasted_ms:.2f} % of a core)"
    parts = [f"observer: {words.seconds(None if cpu is None else cpu / 1e3)} CPU{of_core}"]
    for name, key in (("wake-ups", "wakeups"), ("samples", "samples")):
        if cost.get(key) is not None:
            parts.append(f"{words.number(number(cost.get(key)), 0)} {name}")
    if (written := number(cost.get("write_bytes"))) is not None:
        parts.append(f"{words.size(written)} written")
    if (slip := number(cost.get("max_timer_slip_ms"))) is not None:
        parts.append(f"worst timer slip {words.seconds(slip / 1e3)}")
    return ", ".join(parts)
