"""Lines of the perf block: one line of text in, its name and its numbers out.

`REPORT` is the table of every line the contract ("End-of-run lines") or the field notes name: the name before the colon,
the shape of the line, and the name of each number in it. Names are the `BMOE_DONE` spellings where the number has one.
A known line with more behind it than the table says is still read; text after it stays in the report's `text`. Percent
signs and separators are the engine's; a number that is not finite is None.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
_FIELD = re.compile(r"<(\w+)(?::(\w+))?>")
_KINDS = {"int": r"[-+]?\d+", "float": _NUMBER, "word": r"[^\s,;()]+", "share": rf"-|{_NUMBER}"}


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of report line. `fields`: the names of its numbers and what they are, in order. `tail`: how it ends."""

    name: str
    template: str
    pattern: re.Pattern[str]
    fields: tuple[tuple[str, str], ...]
    tail: str
    doc: str


def _shape(name: str, template: str, doc: str = "", colon: bool = True) -> Shape:
    """A shape from its template: `<x>` is a float named x, `<x:int>` an int; `{...}` is optional; ` ~ ` is any dash.

    What follows `$` is how the line ends when it is whole; a line that ends otherwise is still read.
    """
    template, _, tail = template.partition("$")
    fields: list[tuple[str, str]] = []
    out = [re.escape(f"{name}: ")] if colon else []
    at = 0
    for found in _FIELD.finditer(template):
        out.append(_literal(template[at : found.start()]))
        field, kind = found.group(1), found.group(2) or "float"
        fields.append((field, kind))
        out.append(f"(?P<{field}>{_KINDS[kind]})")
        at = found.end()
    out.append(_literal(template[at:]))
    return Shape(name, template, re.compile("".join(out)), tuple(fields), tail, doc)


def _literal(text: str) -> str:
    # Dashes and arrows come as UTF-8, as ASCII from a console that has none, or as U+FFFD from one that mangled them.
    text = re.escape(text).replace(r"\ \~\ ", r" (?:\S{1,6}) ").replace(r"\{", "(?:").replace(r"\}", ")?")
    return text.replace(r"\|", "|") if "(?:" in text else text


_SPEC = (
    (
        (
            "<mtp_accepted:int>/<mtp_drafted:int> drafts accepted (<accepted_pct>%), <tokens_per_decode> tokens per verify "
            "decode (<mtp_decodes:int> decodes for <tokens:int> tokens)"
        ),
        "acceptance and amortisation",
    ),
    (
        (
            "drafting costs <mtp_draft_s_tok> s/token on top of decode ~ <effective_tok_s> tok/s effective "
            "(vs <tok_s> reported)"
        ),
        "what drafting cost: read it before believing a speculated run is faster",
    ),
    (
        "drafted on <drafted_steps:int> of <mtp_decodes:int> steps (<drafted_steps_pct>%)$; the rest decoded plainly",
        "coverage",
    ),
    (
        (
            "of <read_mib> MiB streamed, <draft_read_mib> MiB (<draft_read_pct>%) was the head's own routing, "
            "<verify_read_mib> MiB$ the widened verify batch"
        ),
        "flash bytes by cause",
    ),
)

REPORT: tuple[Shape, ...] = (
    _shape(
        "generation", "<tokens:int> tokens, <s_tok> s/token (<tok_s> tok/s)", "the headline rate: decode time alone"
    ),
    _shape(
        "compute",
        "<cpu_occupancy_pct>% CPU occupancy (<cpu_s_tok> cpu-s/token over <threads:int> threads), "
        "<majflt_tok> major faults/token",
        "the residual, decomposed",
    ),
    _shape(
        "prefill",
        "<n_prompt:int> tokens, <prefill_s> s (<prefill_tps> tok/s) | model load <load_s> s | TTFT <ttft_s> s",
        "load_s + prefill_s is the time to first token",
    ),
    _shape(
        "moe-stream",
        "read <read_mib> MiB (<read_mib_tok> MiB/token), decode <s_tok> s/token (compute <compute_s_tok> + "
        "{cache mgmt <mgmt_s_tok> + }flash I/O <io_s_tok> s/token{, <read_mib_s> MiB/s})",
        "what streaming read and cost",
    ),
    _shape(
        "moe-cache",
        "<cache_hit_pct>% hit, resident <cache_resident_mib> MiB{, budget <cache_budget_mib> MiB}",
        "present only with a cache",
    ),
    _shape(
        "moe-cache",
        "<evictions:int> evictions, <rereads:int> re-reads (<rereads_tok>/token)$already paid for once",
        "cache churn",
    ),
    _shape(
        "moe-overlap",
        "stall <stall_s_tok> s/token$ (flash reads overlapped with FFN compute)",
        "wall time compute lost to reads",
    ),
    _shape(
        "moe-waits",
        "drain <drain_s_tok> s/token (inside compute), adopt <adopt_s_tok> s/token$ (inside mgmt)",
        "named waits",
    ),
    _shape(
        "moe-prefetch",
        "<spec_read_mib> MiB speculative, <spec_useful:int>/<spec_experts:int> experts useful (<spec_useful_pct>%)",
        "tagged [stale-gate] or [route-ahead] by its predictor",
    ),
    _shape(
        "moe-rows",
        "<row_table_mib> MiB of row-gathered table(s) off the resident set, <row_resident_mib> MiB resident"
        "{, <row_rows:int> rows gathered, <row_reads:int> reads (<row_read_mib> MiB)}",
        "row-gathered tables",
    ),
    _shape("moe-rows", "<row_io_errors:int> FAILED reads$not trustworthy", "the generated text is not trustworthy"),
    _shape(
        "moe-route-ahead",
        "<route_ahead:int> layers early ~ <ra_committed:int> routings committed, <ra_passthrough:int> passed through"
        "{; committed selection agreed with the router on <ra_agree_pct>% of slots}",
        "100 % minus the agreement is the routing perturbation",
    ),
    _shape(
        "moe-route-ahead",
        "prediction <ra_gemv_ms_tok> ms/token of worker CPU (<ra_gemv_jobs:int> GEMVs, <ra_gemv_ms> ms each) + "
        "<ra_issue_ms_tok> ms/token issuing the reads + <ra_wd_ms_tok> ms/token watchdog$, both on the eval thread",
        "the prediction's own cost",
    ),
    *(_shape(source, template, doc) for source in ("mtp", "ngram") for template, doc in _SPEC),
    _shape(
        "moe-drop",
        "<experts_dropped:int>/<experts_routed:int> routed experts dropped (<dropped_pct>%), threshold <threshold>$ x uniform",
        "what dropping discarded",
    ),
    _shape(
        "moe-substitute",
        "<experts_substituted:int>/<experts_reranked:int> reranked slots went to a resident expert (<substituted_pct>%)"
        "{, margin <margin>}$ x score range",
        "what substitution moved",
    ),
    _shape(
        "moe-predict",
        "stale-gate <stale_pct>% of routed slots (<stale_whole_pct>% whole routings) | prev-token <prev_pct>% "
        "(<prev_whole_pct>%) | fresh-gate control <ctrl_pct>% (<ctrl_whole_pct>%)",
        "three predictors against the router; read the first two against the control",
    ),
    _shape(
        "moe-predict",
        "stale-2 (two layers early) <stale2_pct>% of routed slots (<stale2_whole_pct>% whole routings)",
        "the horizon --predict-prefetch runs at",
    ),
    _shape(
        "moe-predict",
        "scored ~ stale-gate <stale_routings:int> routings/<stale_slots:int> slots, prev-token "
        "<prev_routings:int>/<prev_slots:int>, control <ctrl_routings:int>/<ctrl_slots:int>; <unranked:int> routings "
        "the stale-gate could not rank",
        "denominators",
    ),
    _shape("moe-predict", "the control is below 100%$raw-logit", "selection is not raw-logit ranking"),
    _shape(
        "plan",
        "predicted <predicted_s_tok> s/token, measured <s_tok> (<predicted_error_pct>%)"
        "{; cache hits credited <predicted_hit_pct>%, measured <cache_hit_pct>%}",
        "the engine's own plan against what it got",
    ),
    _shape("moe-spec-gate", "<recall_pct>% router prediction recall", "retired predictor"),
)
"""Every report line known. The first shape of a name that fits is the line's."""

# The layer table behind `moe-predict:`; a predictor without routings at a layer prints "-", which is None, never 0.0.
_TABLE_HEAD = re.compile(r"  layer +stale +prev +ctrl +routings\s*")
_TABLE_ROW = _shape(
    "moe-predict", "<layer:int> <stale_pct:share> <prev_pct:share> <ctrl_pct:share> <routings:int>", colon=False
)
_TABLE_PATTERN = re.compile(r"\s+" + r"\s+".join(rf"(?P<{f}>{_KINDS[k]})" for f, k in _TABLE_ROW.fields) + r"\s*")
# A long line may have been wrapped where the contract shows it wrapped.
_CONTINUATIONS = (
    _shape("moe-rows", "<row_rows:int> rows gathered, <row_reads:int> reads (<row_read_mib> MiB)", colon=False),
    _shape("moe-route-ahead", "committed selection agreed with the router on <ra_agree_pct>% of slots", colon=False),
)
_TAG = re.compile(r" \[([\w-]+)\]")
_STALL = re.compile(rf"stall_s/tok=({_NUMBER})")
_MODE = re.compile(r"mode: (?P<mode>expert streaming|mmap)(?P<rest>.*)")
_MODE_CACHE = re.compile(r", cache (?P<cache>auto|off|\d+ MiB)")
_MODE_DENSE = re.compile(r", dense (?P<dense>\w+)")

_BY_NAME: dict[str, list[Shape]] = {}
for _each in REPORT:
    _BY_NAME.setdefault(_each.name, []).append(_each)

NAMES: frozenset[str] = frozenset(_BY_NAME) | {"mode"}
"""Every name a report line can have."""


@dataclass(frozen=True, slots=True)
class Line:
    """A report line read. `whole`: it ends as such a line ends, so it was not cut off."""

    name: str
    facts: dict[str, Any]
    whole: bool


def _facts(shape: Shape, found: re.Match[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field, kind in shape.fields:
        text = found[field]
        if text is not None:
            out[field] = _value(text, kind)
    return out


def _value(text: str, kind: str) -> int | float | None:
    if kind == "int" and len(text) < 19:
        return int(text)
    if text == "-":
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def read_line(line: str, previous: str = "") -> Line | None:
    """Read one line of the perf block, or None for a line the table does not know.

    `previous` is the name of the report line before it, which says whose table or continuation this is.
    """
    name, colon, _ = line.partition(": ")
    if colon and name in NAMES:
        if name == "mode":
            return _mode(line)
        for shape in _BY_NAME[name]:
            found = shape.pattern.match(line)
            if found is not None:
                facts = _facts(shape, found)
                rest = line[found.end() :]
                _extras(name, rest, facts)
                return Line(name, facts, _whole(shape, rest))
        return None
    if previous == "moe-predict" and line[:1] == " ":
        return _layer_table(line)
    for shape in _CONTINUATIONS:
        found = shape.pattern.fullmatch(line.strip()) if shape.name == previous else None
        if found is not None:
            return Line(shape.name, _facts(shape, found), True)
    return None


def _whole(shape: Shape, rest: str) -> bool:
    """Whether a line ends as its kind does: tags and remarks in brackets may follow where nothing must."""
    return rest.endswith(shape.tail) if shape.tail else (not rest or rest.endswith((")", "]")))


def _extras(name: str, rest: str, facts: dict[str, Any]) -> None:
    """What a line carries besides its template."""
    if name == "moe-prefetch" and (tag := _TAG.match(rest)):
        facts["tag"] = tag[1]
    elif name == "moe-stream" and (stall := _STALL.search(rest)):
        facts["stall_s_tok"] = _value(stall[1], "float")
    elif name == "moe-cache" and (resized := re.search(r"resized (\d+)", rest)):
        facts["cache_resizes"] = int(resized[1])


def _mode(line: str) -> Line | None:
    """`mode:` says what the run was: the first line to read. 0|1 as the preamble spells them."""
    found = _MODE.match(line)
    if found is None:
        return None
    streaming = found["mode"] == "expert streaming"
    facts: dict[str, Any] = {"mode": found["mode"], "moe_stream": int(streaming)}
    if not streaming:
        return Line("mode", facts, True)
    rest = found["rest"]
    if cache := _MODE_CACHE.search(rest):
        facts["cache"] = cache["cache"]
        if cache["cache"].endswith("MiB"):
            facts["cache_mb"] = int(cache["cache"][:-4])
    if dense := _MODE_DENSE.search(rest):
        facts["dense_weights"] = dense["dense"]
    facts["overlap"] = int(rest.rstrip().endswith(", overlap"))
    # Without overlap behind it nothing tells a whole line from one cut off before it.
    return Line("mode", facts, bool(facts["overlap"]))


def _layer_table(line: str) -> Line | None:
    if _TABLE_HEAD.fullmatch(line):
        return Line("moe-predict", {}, True)
    found = _TABLE_PATTERN.fullmatch(line)
    if found is not None:
        return Line("moe-predict", _facts(_TABLE_ROW, found), True)
    # The note on a control below 100 % runs over two more lines, indented as far as the name before it.
    return Line("moe-predict", {}, True) if line.startswith(" " * 13) and line[13:14].strip() else None
