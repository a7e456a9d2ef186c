"""The numbers of a run that lists, filters and comparison use: Derived in, a flat dict out, documented by one table.

Every key of `facts()` has its row in `FACTS`: unit, formula and the section of the contract it comes from. None is "not
measured or not known", never zero. `counter` marks what does not depend on the clock and is compared exactly and first;
`better` says which way is better for a reader, 0 where neither is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bmoe_collector.meaning.derive import Derived, derive
from bmoe_collector.meaning.memory import beside, difference, hottest, last_look
from bmoe_collector.meaning.numbers import number
from bmoe_collector.record import RunRecord

LIMIT = 1 << 63
"""A count beyond 64 bits is damage in a file, and no database takes it."""

Getter = Callable[[RunRecord, Derived], Any]


@dataclass(frozen=True, slots=True)
class Fact:
    """One derived number: how it is called, what it is in, how it is made, where the contract says so."""

    name: str
    unit: str
    formula: str
    section: str
    get: Getter
    kind: str = "float"  # "float", "int", "str", "bool"
    counter: bool = False
    better: int = 0  # +1: more is better; -1: less is better


_LINES, _END, _CSV, _ROWS = "Per-token lines", "End-of-run lines", "CSV sink", "Per-token rows"
_PREAMBLE, _OUTSIDE, _SESSION = "Run-parameter preamble", "What tok/s does not include", "Session mode"
_DESIGN, _KERNEL = "design: What a number means", "design: On the phone"


def _first(name: str) -> Getter:
    """A prefill quantity of the first generation."""
    return lambda _record, derived: getattr(derived.turns[0].prefill, name) if derived.turns else None


def _cache(name: str) -> Getter:
    return lambda _record, derived: getattr(derived.cache, name)


def _speed(name: str) -> Getter:
    return lambda _record, derived: getattr(derived.speed, name)


def _config(name: str) -> Getter:
    return lambda _record, derived: getattr(derived.config, name)


def _term(name: str) -> Getter:
    return lambda _record, derived: derived.terms[name]


def _bar(name: str) -> Getter:
    return lambda _record, derived: getattr(derived.bars, name)


def _drawn(name: str) -> Getter:
    return lambda _record, derived: getattr(derived.speculation, name)


def _token(name: str) -> Getter:
    return lambda _record, derived: getattr(derived.speed.token_ms, name) if derived.speed.token_ms else None


def _entry(name: str) -> Getter:
    return lambda _record, derived: getattr(derived.entry, name)


def _exit(name: str) -> Getter:
    return lambda _record, derived: getattr(derived.exit, name)


def _peak(name: str, sidecar: str = "") -> Getter:
    """Highest of a curve; a sidecar's kilobytes where there is none."""

    def get(record: RunRecord, derived: Derived) -> Any:
        return max(derived.curves[name].values) if name in derived.curves else beside(record, sidecar, 1024.0)

    return get


def _lowest(name: str, sidecar: str) -> Getter:
    def get(record: RunRecord, derived: Derived) -> Any:
        return min(derived.curves[name].values) if name in derived.curves else beside(record, sidecar, 1024.0)

    return get


def _prompt(key: str) -> Getter:
    """A key of the first generation's end record."""
    return lambda _record, derived: number(derived.turns[0].summary.get(key)) if derived.turns else None


def _resident(part: str, name: str) -> Getter:
    def get(record: RunRecord, _derived: Derived) -> Any:
        look = last_look(record.residency, part)
        return None if look is None or look.fraction is None else getattr(look, name)

    return get


def _prefill_bar(name: str) -> Getter:
    return lambda _record, derived: getattr(derived.turns[0].prefill_bars, name) if derived.turns else None


def _swapped_in(_record: RunRecord, derived: Derived) -> float | None:
    return difference(derived.exit, derived.entry, lambda state: state.pswpin)


def _dense_engine(_record: RunRecord, derived: Derived) -> float | None:
    values = [value for value in derived.rows.get("dense_resident_frac") if value is not None]
    return float(values[-1]) if values else None


FACTS: tuple[Fact, ...] = (
    Fact("n_tokens", "tokens", "rows; without rows what the end records say", _LINES, lambda _r, d: d.tokens, "int"),
    Fact("n_turns", "turns", "generations that ended or began", _SESSION, lambda _r, d: len(d.turns), "int"),
    Fact("tok_s", "tokens/s", "the engine's rate; without an end record tokens / Σ wall_ms", _END, _speed("tok_s"), better=1),
    Fact("effective_tok_s", "tokens/s", "1 / (1/tok_s + loop_overhead_s_tok)", _OUTSIDE, _speed("effective_tok_s"), better=1),
    Fact("drafting_tok_s", "tokens/s", "1 / (1/tok_s + mtp_draft_s_tok)", _END, _speed("drafting_tok_s"), better=1),
    Fact("s_tok", "s/token", "1 / tok_s", _END, _speed("s_tok"), better=-1),
    Fact("loop_overhead_s_tok", "s/token", "time between decodes", _OUTSIDE, _speed("loop_overhead_s_tok"), better=-1),
    Fact("ttft_s", "s", "one-shot load_s + prefill_s; session prefill_s of the first turn", _END, _first("ttft_s"), better=-1),
    Fact("load_s", "s", "loading the model", _END, _first("load_s"), better=-1),
    Fact("prefill_s", "s", "prompt phase of the first generation", _SESSION, _first("prefill_s"), better=-1),
    Fact("prefill_tps", "tokens/s", "n_prompt / prefill_s", _SESSION, _first("prefill_tps"), better=1),
    Fact("n_prompt", "tokens", "tokens prefilled by the first generation", _SESSION, _first("n_prompt"), "int", counter=True),
    Fact("token_ms_median", "ms", "median cost of a token", _ROWS, _token("median"), better=-1),
    Fact("token_ms_p5", "ms", "5th percentile", _ROWS, _token("p5"), better=-1),
    Fact("token_ms_p95", "ms", "95th percentile", _ROWS, _token("p95"), better=-1),
    Fact("steady_tok_s", "tokens/s", "rate after the warm-up found from the data", _DESIGN, lambda _r, d: d.steady.steady_tok_s if d.steady.found else None, better=1),
    Fact("warmup_tokens", "tokens", "tokens before the steady state", _DESIGN, lambda _r, d: d.steady.warmup_tokens if d.steady.found else None, "int"),
    Fact("bar_cpu_s_tok", "s/token", "cpu_s_tok / compute threads (upper bound)", _LINES, _bar("cpu_s"), better=-1),
    Fact("bar_flash_s_tok", "s/token", "io_s_tok serial, stall_s_tok overlap", _LINES, _bar("flash_s"), better=-1),
    Fact("bar_mgmt_s_tok", "s/token", "mgmt_s_tok", _LINES, _bar("mgmt_s"), better=-1),
    Fact("bar_unattributed_s_tok", "s/token", "max(0, wall - cpu - flash - mgmt)", _LINES, _bar("unattributed_s"), better=-1),
    Fact("prefill_bar_cpu_s", "s", "prefill_cpu_s / compute threads", _SESSION, _prefill_bar("cpu_s"), better=-1),
    Fact("prefill_bar_flash_s", "s", "prefill_io_s serial, prefill_stall_s overlap", _SESSION, _prefill_bar("flash_s"), better=-1),
    Fact("prefill_bar_mgmt_s", "s", "prefill_mgmt_s", _SESSION, _prefill_bar("mgmt_s"), better=-1),
    Fact("prefill_bar_unattributed_s", "s", "max(0, wall - cpu - flash - mgmt) of the prompt phase", _SESSION, _prefill_bar("unattributed_s"), better=-1),
    Fact("prefill_read_mib", "MiB", "flash read by the prompt phase, the device's arena apart", _SESSION, _prompt("prefill_read_mib"), counter=True),
    Fact("prefill_dev_tokens", "tokens", "prompt tokens whose graph ran on the prefill device", _ROWS, _prompt("prefill_dev_tokens"), "int", counter=True),
    Fact("prefill_dev_read_mib", "MiB", "experts the device's arena read from flash", _ROWS, _prompt("prefill_dev_read_mib"), counter=True),
    Fact("prefill_dev_stall_s", "s", "time the device's graph waited for its arena; inside the unattributed rest", _ROWS, _prompt("prefill_dev_stall_s"), better=-1),
    Fact("cpu_s_tok", "s/token", "process CPU of all threads", _LINES, _term("cpu"), better=-1),
    Fact("io_s_tok", "s/token", "flash reads: wall in serial mode, summed lanes under overlap", _LINES, _term("io"), better=-1),
    Fact("stall_s_tok", "s/token", "wall time compute waited for reads; read with stall_meaning", _LINES, _term("stall"), better=-1),
    Fact("mgmt_s_tok", "s/token", "cache management", _LINES, _term("mgmt"), better=-1),
    Fact("compute_residual_s_tok", "s/token", "clamped rest of the wall time, not a measurement", _LINES, _term("compute"), better=-1),
    Fact("drain_s_tok", "s/token", "part of the compute residual", _ROWS, _term("drain"), better=-1),
    Fact("ra_issue_s_tok", "s/token", "issuing route-ahead's reads, part of the compute residual", _ROWS, _term("ra_issue"), better=-1),
    Fact("ra_wd_s_tok", "s/token", "route-ahead's watchdog, part of the compute residual", _ROWS, _term("ra_wd"), better=-1),
    Fact("adopt_s_tok", "s/token", "part of cache management", _ROWS, _term("adopt"), better=-1),
    Fact("occupancy", "fraction", "cpu_s_tok / (s_tok × compute threads)", _END, lambda _r, d: d.occupancy),
    Fact("cpu_busy", "fraction", "cpu_s_tok / (s_tok × busy threads, lanes included under overlap)", _LINES, lambda _r, d: d.cpu_busy),
    Fact("cache_hit_pct", "%", "cumulative; read with drop_rate and substitution_rate", _LINES, _cache("hit_pct"), counter=True),
    Fact("drop_rate", "fraction", "experts_dropped / experts_routed; 0 when off", _LINES, _cache("drop_rate"), counter=True),
    Fact("substitution_rate", "fraction", "experts_substituted / experts_reranked; 0 when off", _LINES, _cache("substitution_rate"), counter=True),
    Fact("reroute_rate", "fraction", "1 - ra_agree_pct / 100", _END, _cache("reroute_rate"), counter=True),
    Fact("active_experts", "experts", "n_expert_used × (1 - drop_rate)", _PREAMBLE, _cache("active_experts")),
    Fact("experts_routed", "slots", "routed while generating", _ROWS, _cache("experts_routed"), "int", counter=True),
    Fact("experts_dropped", "slots", "dropped while generating", _ROWS, _cache("experts_dropped"), "int", counter=True),
    Fact("experts_reranked", "slots", "looked at by substitution", _ROWS, _cache("experts_reranked"), "int", counter=True),
    Fact("experts_substituted", "slots", "moved to a resident expert", _ROWS, _cache("experts_substituted"), "int", counter=True),
    Fact("evictions", "entries", "cache entries evicted", _ROWS, _cache("evictions"), "int", counter=True),
    Fact("rereads", "reads", "reads of what the cache had held before", _ROWS, _cache("rereads"), "int", counter=True),
    Fact("read_bytes", "bytes", "Σ read_bytes: reads we chose", _ROWS, _cache("read_bytes"), "int", counter=True),
    Fact("read_mib_tok", "MiB/token", "read_bytes / tokens", _ROWS, _cache("read_mib_tok"), better=-1),
    Fact("faulted_mib_tok", "MiB/token", "Σ majflt_mib / tokens: reads the kernel forced", _ROWS, _cache("faulted_mib_tok"), better=-1),
    Fact("majflt_tok", "faults/token", "major faults inside the decode", _LINES, _cache("majflt_tok"), better=-1),
    Fact("prefetched_experts", "experts", "read ahead", _END, _cache("prefetched_experts"), "int", counter=True),
    Fact("prefetched_useful", "experts", "read ahead and then hit", _END, _cache("prefetched_useful"), "int", counter=True),
    Fact("cache_budget_mib", "MiB", "budget in effect", _ROWS, _cache("budget_mib")),
    Fact("cache_resident_mib", "MiB", "held at the end", _SESSION, _cache("resident_mib")),
    Fact("token_demand_mib", "MiB", "expert bytes one token routes, measured", _ROWS, _cache("token_demand_mib")),
    Fact("acceptance", "fraction", "mtp_accepted / mtp_drafted", _END, _drawn("acceptance"), counter=True, better=1),
    Fact("amortisation", "tokens/decode", "tokens / mtp_decodes", _SESSION, _drawn("amortisation"), counter=True, better=1),
    Fact("coverage", "fraction", "drafted_steps / mtp_decodes", _END, _drawn("coverage"), counter=True, better=1),
    Fact("rss_peak_mib", "MiB", "highest rss_mib", _ROWS, _peak("rss_mib", "peak_rss_kb")),
    Fact("rss_anon_peak_mib", "MiB", "highest rss_anon_mib: the expert cache lives here", _ROWS, _peak("rss_anon_mib")),
    Fact("swap_peak_mib", "MiB", "highest swap_mib", _ROWS, _peak("swap_mib"), better=-1),
    Fact("mem_available_min_mib", "MiB", "lowest mem_available_mib", _ROWS, _lowest("mem_available_mib", "mem_avail_floor_kb")),
    Fact("dense_resident_frac", "fraction", "the engine's own sample, last", _ROWS, _dense_engine),
    Fact("resident_fraction", "fraction", "mincore over the whole model, last look", _KERNEL, _resident("whole", "fraction")),
    Fact("resident_fraction_error", "fraction", "its standard error", _KERNEL, _resident("whole", "standard_error")),
    Fact("resident_dense_fraction", "fraction", "of the dense weights", _KERNEL, _resident("dense", "fraction")),
    Fact("resident_expert_fraction", "fraction", "of the experts", _KERNEL, _resident("expert", "fraction")),
    Fact("entry_cpu_temp_c", "°C", "hottest CPU zone before the launch", _KERNEL, _entry("cpu_temp_c")),
    Fact("entry_clock_cap", "fraction", "lowest scaling_max / cpuinfo_max before the launch", _KERNEL, _entry("clock_cap_ratio")),
    Fact("entry_mem_available_mib", "MiB", "MemAvailable before the launch", _KERNEL, _entry("mem_available_mib")),
    Fact("entry_swap_used_mib", "MiB", "swap in use before the launch", _KERNEL, _entry("swap_used_mib")),
    Fact("entry_battery_pct", "%", "charge before the launch", _KERNEL, _entry("battery_pct")),
    Fact("cpu_temp_max_c", "°C", "hottest CPU zone seen during the run", _KERNEL, lambda r, _d: hottest(r)),
    Fact("exit_cpu_temp_c", "°C", "hottest CPU zone at the end", _KERNEL, _exit("cpu_temp_c")),
    Fact("exit_clock_cap", "fraction", "lowest cap at the end", _KERNEL, _exit("clock_cap_ratio")),
    Fact("swapped_in_pages", "pages", "pswpin of the phone over the run", _KERNEL, _swapped_in, better=-1),
    Fact("text_sha256", "", "over every generation's reasoning and answer", _DESIGN, lambda _r, d: d.text_sha256, "str", counter=True),
    Fact("stall_meaning", "", "what stall_ms means in this build; empty: not known", _LINES, lambda _r, d: d.stall_meaning, "str"),
    Fact("unmeasured", "", "groups this platform cannot report", _ROWS, lambda _r, d: ",".join(d.unmeasured) or None, "str"),
    Fact("engine", "", "version the numbers are read by", _PREAMBLE, lambda _r, d: ".".join(map(str, d.config.version)) if d.config.version else None, "str"),
    Fact("session", "", "several prompts in one process", _SESSION, _config("session"), "bool"),
    Fact("streaming", "", "experts are streamed", _PREAMBLE, _config("streaming"), "bool"),
    Fact("overlap", "", "reads run beside the computation", _PREAMBLE, _config("overlap"), "bool"),
    Fact("threads", "threads", "compute threads", _PREAMBLE, _config("threads"), "int"),
    Fact("io_threads", "threads", "I/O lanes", _PREAMBLE, _config("io_threads"), "int"),
    Fact("cache_mb", "MiB", "cache size, resolved; 0: off", _PREAMBLE, _config("cache_mb")),
    Fact("cache_auto", "", "sized by the engine", _PREAMBLE, _config("cache_auto"), "bool"),
    Fact("dense_weights", "", "policy for the dense weights", _PREAMBLE, _config("dense_weights"), "str"),
    Fact("o_direct", "", "achieved; on macOS: uncached", _PREAMBLE, _config("o_direct"), "bool"),
    Fact("n_expert_used", "experts", "effective top-k", _PREAMBLE, _config("n_expert_used"), "int"),
    Fact("drop_cold_frac", "", "threshold, not a rate", _PREAMBLE, _config("drop_cold_frac")),
    Fact("substitute_lambda", "", "", _PREAMBLE, _config("substitute_lambda")),
    Fact("route_ahead", "layers", "", _PREAMBLE, _config("route_ahead")),
    Fact("prefetch", "experts", "", _PREAMBLE, _config("prefetch")),
    Fact("spec", "", "off, mtp or ngram", _PREAMBLE, _config("spec"), "str"),
    Fact("temp", "", "0: greedy", _PREAMBLE, _config("temp")),
    Fact("n_predict", "tokens", "asked of each generation", _PREAMBLE, _config("n_predict"), "int"),
)  # fmt: skip

BY_NAME: Mapping[str, Fact] = {fact.name: fact for fact in FACTS}


def facts_of(record: RunRecord, derived: Derived) -> dict[str, Any]:
    """Every fact of a run that was derived already."""
    return {fact.name: _plain(fact.get(record, derived), fact.kind) for fact in FACTS}


def facts(record: RunRecord) -> dict[str, Any]:
    """Every fact of a run, in the order of the table."""
    return facts_of(record, derive(record))


def _plain(value: Any, kind: str) -> Any:
    """A value JSON and a database take: no NaN, whole numbers whole."""
    if value is None:
        return None
    if kind == "int":
        whole = int(value)
        return whole if -LIMIT <= whole < LIMIT else None
    if kind == "bool":
        return bool(value)
    if kind == "str":
        return str(value)
    number = float(value)
    return number if number - number == 0 else None


__all__ = ["BY_NAME", "FACTS", "Fact", "facts", "facts_of"]
