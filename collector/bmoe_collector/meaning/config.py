"""What a run was configured to do, from whichever source says so: a RunRecord in, one Config out.

The preamble holds the resolved values and is believed first (contract, "Run-parameter preamble"); where it is silent
or absent the report's `mode:` line, BMOE_READY and the argv speak, and where a build's default is known, the default.
None is "not known", which is not the same as off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bmoe_collector.meaning.argv import flags_of
from bmoe_collector.meaning.numbers import known, number
from bmoe_collector.meaning.semantics import Version, default_cache_mb, version_by_columns, version_of
from bmoe_collector.record import ReportLine, RunRecord

RANDOM_SEED = 4294967295
"""The seed that means "random and not recorded" (generations.md, Behaviour)."""


@dataclass(frozen=True, slots=True)
class Config:
    """The resolved configuration; None where no source tells."""

    version: Version | None
    session: bool
    streaming: bool | None
    streaming_asked: bool
    overlap: bool | None
    threads: int | None
    io_threads: int | None
    cache_mb: float | None  # 0: off
    cache_auto: bool | None
    cache_cycle_mb: float | None
    dense_weights: str | None
    o_direct: bool | None
    o_direct_asked: bool | None
    prefetch: float | None
    route_ahead: float | None
    drop_cold_frac: float | None  # a threshold, not a rate
    substitute_lambda: float | None
    load_all: bool
    temp: float | None
    seed: int | None
    spec: str | None  # "off", "mtp", "ngram"
    n_expert_used: int | None
    n_expert_used_asked: int | None
    n_predict: int | None
    n_ctx: int | None
    prefill_device: str | None
    no_think: bool
    flags: Mapping[str, Any]

    @property
    def busy_threads(self) -> int | None:
        """Compute threads, and the I/O lanes under overlap: CPU-busy's denominator (contract, "Per-token lines")."""
        if self.threads is None:
            return None
        if not self.overlap:
            return self.threads
        return None if self.io_threads is None else self.threads + self.io_threads


def config_of(record: RunRecord) -> Config:
    """Put the sources together."""
    preamble = record.preamble
    argv = [str(part) for part in record.run.get("argv") or ()]
    flags = flags_of(argv, record.run.get("environment") or {})
    has_argv = bool(argv)
    version = _version(record)
    mode = next((line for line in record.report if line.name == "mode"), None)
    mode_text = mode.text if mode else ""

    def value(key: str, *names: str, default: float | None = None, said: tuple[str, str] | None = None) -> float | None:
        """From the preamble, a flag, the report (line and name of its number), else the default."""
        told = number(preamble.get(key))
        if told is None:
            told = next((asked for name in names if (asked := _float(flags.get(name))) is not None), None)
        if told is None and said is not None:
            told = _reported(record, *said)
        return told if told is not None else default if has_argv else None

    def switch(key: str, name: str, *, default: bool | None = False) -> bool | None:
        told = number(preamble.get(key))
        if told is not None:
            return bool(told)
        if name in flags:
            return True
        return default if has_argv else None

    streaming = switch("moe_stream", "--moe-stream", default=None if mode else False)
    if streaming is None and mode:
        streaming = bool(number(mode.facts.get("moe_stream"))) or "expert streaming" in mode_text
    if streaming is None and any(line.name == "moe-stream" for line in record.report):
        streaming = True
    overlap = switch("overlap", "--overlap")
    if overlap is None:
        overlap = _overlap_by_rows(record, mode_text)
    cache_mb, cache_auto = _cache(preamble, flags, version, mode, has_argv=has_argv)
    lanes = value("io_threads", "--io-threads", default=4)
    threads = value("threads", "--threads", default=4, said=("compute", "threads"))
    no_direct = "--no-odirect" in flags
    width = number(preamble.get("n_expert_used"))
    if width is None:
        width = number(record.ready.get("n_expert_used"))
    asked_width = _float(flags.get("--n-expert-used"))
    seed = value("seed", "--seed", default=RANDOM_SEED)
    return Config(
        version=version,
        session="--session" in flags or bool(record.ready) or len(set(record.csv.get("turn"))) > 1,
        streaming=streaming,
        streaming_asked="--moe-stream" in flags,
        overlap=overlap,
        threads=_whole(threads),
        io_threads=_whole(lanes),
        cache_mb=cache_mb,
        cache_auto=cache_auto,
        cache_cycle_mb=number(preamble.get("cache_cycle_mb")),
        dense_weights=_dense(preamble, flags, mode_text, has_argv=has_argv),
        o_direct=None if number(preamble.get("o_direct")) is None else bool(preamble["o_direct"]),
        o_direct_asked=(not no_direct) if has_argv else None,
        prefetch=value("prefetch", "--prefetch", default=0),
        route_ahead=value("route_ahead", "--route-ahead", default=0, said=("moe-route-ahead", "route_ahead")),
        drop_cold_frac=value("drop_cold_frac", "--drop-cold-experts", default=0, said=("moe-drop", "threshold")),
        substitute_lambda=value(
            "substitute_lambda", "--expert-substitute", default=0, said=("moe-substitute", "margin")
        ),
        load_all=bool(number(preamble.get("load_all"))) or "--load-all" in flags,
        temp=value("temp", "--temp", default=0),
        seed=_whole(seed),
        spec=_spec(record, flags, has_argv=has_argv),
        n_expert_used=_whole(width if width is not None else asked_width),
        n_expert_used_asked=_whole(asked_width),
        n_predict=_whole(_float(flags.get("--n-predict"))) or (128 if has_argv else None),
        n_ctx=_whole(value("n_ctx", "--ctx-size")) or _whole(number(record.ready.get("n_ctx"))),
        prefill_device=_device(flags.get("--prefill-device")),
        no_think="--no-think" in flags,
        flags=flags,
    )


def _version(record: RunRecord) -> Version | None:
    """The build: what the file says, what the binary says, else what the file's layout settles."""
    told = version_of(record.preamble.get("engine")) or version_of(record.run.get("engine_version"))
    if told is not None or not len(record.csv):
        return told
    form = preamble_form(record)
    if form is None and record.preamble:
        return None
    return version_by_columns(set(record.csv.columns), form)


def preamble_form(record: RunRecord) -> int | None:
    """The 1 or 2 of `bmoe_metrics v1`, wherever the record keeps it; None without a preamble."""
    for key in ("format", "bmoe_metrics", "preamble_version"):
        told = record.preamble.get(key, record.run.get(key))
        found = re.search(r"(\d+)\s*$", str(told)) if told is not None else None
        if found:
            return int(found.group(1))
    return None


def _cache(
    preamble: Mapping[str, Any],
    flags: Mapping[str, Any],
    version: Version | None,
    mode: ReportLine | None,
    *,
    has_argv: bool,
) -> tuple[float | None, bool | None]:
    auto = number(preamble.get("cache_auto"))
    told = number(preamble.get("cache_mb"))
    asked = flags.get("--cache-mb")
    if told is not None:
        return told, bool(auto) if auto is not None else asked == "auto"
    if asked == "auto":
        return None, True
    if asked is not None:
        return _float(asked), False
    told_facts = mode.facts if mode is not None else {}
    if (said := told_facts.get("cache")) is not None:  # "auto", "off", "<n> MiB": whatever this build's default is
        return (None, True) if said == "auto" else (number(told_facts.get("cache_mb")) or 0.0, False)
    if not has_argv:
        return None, None
    return default_cache_mb(version), False if default_cache_mb(version) is not None else None


def _dense(preamble: Mapping[str, Any], flags: Mapping[str, Any], mode: str, *, has_argv: bool) -> str | None:
    told = preamble.get("dense_weights")
    if told:
        return str(told)
    found = re.search(r"\bdense (\w+)", mode)
    if found:
        return found.group(1)
    asked = flags.get("--dense-weights")
    if asked:
        return str(asked)
    return "anon" if has_argv else None


def _spec(record: RunRecord, flags: Mapping[str, Any], *, has_argv: bool) -> str | None:
    told = record.preamble.get("spec")
    if told in {"off", "mtp", "ngram"}:
        return str(told)
    if number(record.preamble.get("mtp")):
        return "mtp"
    for source in ("mtp", "ngram"):
        if f"--{source}" in flags or any(line.name == source for line in record.report):
            return source
    if any((number(value) or 0) > 1 for value in record.csv.get("mtp_batch")):
        return "mtp"
    return "off" if has_argv or record.preamble else None


def _overlap_by_rows(record: RunRecord, mode: str) -> bool | None:
    """For a file that does not say: under overlap `stall_ms` never reaches zero, in serial mode it is always zero."""
    if mode:
        return ", overlap" in mode
    stalls = known(record.csv.get("stall_ms") if len(record.csv) else record.stdout.get("stall_ms"))
    if any(stall > 0 for stall in stalls):
        return True
    rows = record.tokens()
    reads = [
        (wall, read) for wall, read in zip(rows.get("wall_ms"), rows.get("io_ms"), strict=True) if number(wall) and read
    ]
    if not reads:
        return None
    # Serial reads are a part of the token's time; lanes that add up to more ran beside the computation.
    return any(read > wall * 1.01 + 0.1 for wall, read in reads)


def _reported(record: RunRecord, line: str, name: str) -> float | None:
    """A number of the report, by its line and name."""
    found = (each.facts.get(name) for each in record.report if each.name == line)
    return next((value for told in found if (value := number(told)) is not None), None)


def _device(asked: Any) -> str | None:
    """The prefill device asked for, None for none."""
    return None if asked is None or str(asked).lower() in {"off", "none", "cpu", "0"} else str(asked)


def _float(text: Any) -> float | None:
    try:
        return number(float(text)) if not isinstance(text, bool) else None
    except (TypeError, ValueError):
        return None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
