"""The row that the engine's maintainers ask for, and whether two runs are by their protocol (generations.md, "The
community protocol").

In: two runs' records, the first pass and the one to report. Out: reasons why not, or a Markdown row. The row names a class
of hardware, never the phone: its model, maker's names, serial, account and file paths do not go in, and text a person adds is
refused when it holds any of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bmoe_collector.common import UserError
from bmoe_collector.meaning.derive import Derived, derive
from bmoe_collector.meaning.facts import facts_of
from bmoe_collector.query.tables import markdown_cell
from bmoe_collector.record import RunRecord
from bmoe_collector.verdicts import judge_alone

PROMPT = (
    "Write a long detailed essay about the history of computing including its origins its key milestones the people"
    " involved and the future directions of the field"
)
TOKENS, LANES, CONTEXT, UBATCH = 256, 4, 2048, 512
HEAD = (
    "Hardware", "Storage", "Model", "k", "Cache", "Decode tok/s", "Prefill tok/s", "Stall s/tok", "Flash MiB/tok", "Hit %",
    "Engine", "Second vs first",
)  # fmt: skip
_QUANT = re.compile(
    r"(?<![a-z0-9])(I?Q\d(?:_[A-Z0-9]+)*|MXFP4(?:_[A-Z0-9]+)*|BF16|F16|F32|TQ\d_\d)(?![a-z0-9])", re.IGNORECASE
)
_NAMING = ("ro.product.model", "ro.product.device", "ro.product.brand", "ro.product.manufacturer", "ro.product.board",
           "ro.build.display.id")  # fmt: skip
"""Properties that say which phone it is."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One of the two runs with what it means."""

    record: RunRecord
    derived: Derived
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, record: RunRecord) -> Pass:
        """Derive it."""
        derived = derive(record)
        return cls(record, derived, facts_of(record, derived))

    @property
    def name(self) -> str:
        """Start of its id."""
        return self.record.run_id[:12]


def why_not(one: Pass, *, reference_phone: bool = False) -> list[str]:
    """Every way in which a run is not by the protocol; what is not recorded cannot be vouched for."""
    record, config = one.record, one.derived.config
    cores = core_count(record)
    threads = 4 if reference_phone else None if cores is None else min(8, cores)
    flags = config.flags
    preamble = record.preamble
    wrong: list[str] = []

    def must(what: str, found: Any, wanted: Any) -> None:
        if found is None:
            wrong.append(f"{what} is not recorded; the protocol wants {_word(wanted)}")
        elif found != wanted:
            wrong.append(f"{what} is {_word(found)}; the protocol wants {_word(wanted)}")

    must("the outcome", record.run.get("outcome"), "ok")
    if record.run.get("simulated"):
        wrong.append("the engine or the phone is simulated")
    if one.derived.tokens < TOKENS:
        wrong.append(f"{one.derived.tokens} tokens were generated; the protocol wants {TOKENS}, never fewer")
    must("the number of tokens asked for", config.n_predict, TOKENS)
    must("the temperature", config.temp, 0.0)
    must("--chatml", _switch(preamble, flags, "chatml", "--chatml"), True)
    must("--moe-stream", config.streaming, True)
    must("--cache-mb auto", config.cache_auto, True)
    must("--overlap", config.overlap, True)
    must("--dense-weights", config.dense_weights, "anon")
    must("--io-threads", config.io_threads, LANES)
    must("--ubatch", _whole(preamble.get("n_ubatch"), flags.get("--ubatch")), UBATCH)
    must("the context size", config.n_ctx, CONTEXT)
    if threads is None:
        wrong.append("the number of cores is not recorded, and with it not how many threads it wants: min(8, cores)")
    else:
        must("the number of threads", config.threads, threads)
    for what, value in (
        ("expert dropping", config.drop_cold_frac),
        ("expert substitution", config.substitute_lambda),
        ("route-ahead", config.route_ahead),
        ("prefetch", config.prefetch),
    ):
        if value:
            wrong.append(f"{what} is on ({value:g}); the protocol has none")
    if config.spec not in {None, "off"}:
        wrong.append(f"speculation is on ({config.spec}); the protocol has none")
    if is_gpt_oss(record) and not config.no_think:
        wrong.append("--no-think is wanted for gpt-oss")
    prompt = prompt_of(record)
    if prompt is None:
        wrong.append("the prompt is not recorded")
    elif prompt.strip() != PROMPT:
        wrong.append("the prompt is not the reference prompt")
    if config.session:
        wrong.append("it is a session; the protocol is one-shot")
    wrong += [
        f"verdict {verdict.code}: {verdict.evidence}"
        for verdict in judge_alone(record, one.derived)
        if verdict.severity == "fail"
    ]
    return wrong


def why_not_together(first: Pass, second: Pass) -> list[str]:
    """What differs between two runs that should be one measurement done twice."""
    wrong = []
    for key, what in (
        ("agent_uuid", "phone"),
        ("engine_sha256", "engine"),
        ("engine_version", "engine version"),
        ("model_identity", "model file"),
        ("model_name", "model"),
        ("prompt_sha256", "prompt"),
    ):
        a, b = first.record.run.get(key), second.record.run.get(key)
        if a is not None and b is not None and a != b:
            wrong.append(f"the two runs have a different {what}")
    a, b = first.record.run.get("started_wall_ns"), second.record.run.get("started_wall_ns")
    if a is not None and b is not None and b < a:
        wrong.append(f"{second.name} ran before {first.name}: the second run is the one to report")
    if first.record.run_id == second.record.run_id:
        wrong.append("the protocol wants two runs, and this is one")
    return list(dict.fromkeys(wrong))


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _switch(preamble: Mapping[str, Any], flags: Mapping[str, Any], key: str, flag: str) -> bool | None:
    told = preamble.get(key)
    if told is not None:
        return bool(told)
    return True if flag in flags else None if not flags else False


def _whole(*values: Any) -> int | None:
    for value in values:
        try:
            return int(value)
        except (TypeError, ValueError):
            continue
    return None


def core_count(record: RunRecord) -> int | None:
    """Cores of the phone; None when its facts are not recorded."""
    cpus = _device(record).get("cpus") or ()
    return len(cpus) or None


def _device(record: RunRecord) -> Mapping[str, Any]:
    found = record.run.get("device")
    return found if isinstance(found, Mapping) else {}


def prompt_of(record: RunRecord) -> str | None:
    """What was asked of a one-shot run: as recorded by the agent, or in the argv of imported files."""
    prompt = record.run.get("prompt")
    if prompt:
        return bytes(prompt).decode("utf-8", "replace")
    from bmoe_collector.meaning.argv import flags_of

    asked = flags_of([str(part) for part in record.run.get("argv") or ()]).get("--prompt")
    return asked if isinstance(asked, str) else None


def is_gpt_oss(record: RunRecord) -> bool:
    """Whether the model is of the family that wants --no-think."""
    told = f"{record.preamble.get('arch') or record.run.get('model_arch') or ''} {record.run.get('model_name') or ''}"
    return bool(re.search(r"gpt[-_ ]?oss", told, re.IGNORECASE))


def hardware_class(record: RunRecord) -> str:
    """Cores with their clocks and memory: what speed depends on, shared by many phones."""
    device = _device(record)
    clusters: dict[int, int] = {}
    for cpu in device.get("cpus") or ():
        khz = _whole(cpu.get("max_khz") if isinstance(cpu, Mapping) else None)
        clusters[khz or 0] = clusters.get(khz or 0, 0) + 1
    parts = []
    if clusters and 0 not in clusters:
        parts.append(
            " + ".join(f"{count}×{khz / 1e6:.1f} GHz" for khz, count in sorted(clusters.items(), reverse=True))
        )
    elif clusters:
        parts.append(f"{sum(clusters.values())} cores")
    memory = _whole(device.get("memory_total_kib"))
    if memory:
        # What the kernel reports is below what is built in: up to the next size that is sold.
        gib = memory / (1 << 20)
        sold = next((size for size in (2, 3, 4, 6, 8, 12, 16, 18, 24, 32, 48, 64, 96, 128) if gib <= size), None)
        parts.append(f"{sold} GB RAM" if sold else f"{gib:.0f} GiB RAM")
    return ", ".join(parts) or "not known"


def identifying(record: RunRecord) -> list[str]:
    """Words that say which phone or whose it is."""
    properties = _device(record).get("properties") or {}
    words = [record.run.get("device_model"), record.run.get("device_name"), record.run.get("agent_uuid")]
    words += [properties.get(key) for key in _NAMING] if isinstance(properties, Mapping) else []
    return [str(word) for word in words if word and len(str(word)) > 2]


def checked_text(option: str, text: str, passes: Sequence[Pass]) -> str:
    """Text a person adds to the row; raises UserError when it says which phone it is."""
    for one in passes:
        for word in identifying(one.record):
            if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE):
                raise UserError(f"{option} {text!r} names the phone ({word}): say a class of hardware")
    return text


def model_and_quant(record: RunRecord) -> str:
    """The model's file name without folders, shards' numbers and suffix, and its quantisation where the name says it."""
    name = re.split(r"[/\\]", str(record.run.get("model_name") or record.preamble.get("model") or "not known"))[-1]
    name = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name, flags=re.IGNORECASE)
    quant = _QUANT.search(name)
    if quant is None:
        return name
    stem = (name[: quant.start()] + name[quant.end() :]).strip("-._ ")
    return f"{stem or name} {quant[0].upper()}"


def engine_version(record: RunRecord) -> str:
    """The number alone."""
    told = str(record.preamble.get("engine") or record.run.get("engine_version") or "")
    found = re.search(r"\d+\.\d+(?:\.\d+)?\S*", told)
    return found[0] if found else "not known"


def row(first: Pass, second: Pass, *, hardware: str = "", storage: str = "") -> dict[str, str]:
    """The row by its column's names."""
    record, facts = second.record, second.facts
    hit = f"{_number(facts.get('cache_hit_pct'), 1)}"
    before, after = first.facts.get("tok_s"), facts.get("tok_s")
    apart = f"{(after / before - 1) * 100:+.1f} %" if before and after else "not known"
    both = (first, second)
    budget = _number(facts.get("cache_budget_mib"), 0)
    values = (
        checked_text("--hardware", hardware, both) if hardware else hardware_class(record),
        checked_text("--storage", storage, both) if storage else "not known",
        checked_text("the model's name", model_and_quant(record), both),
        str(second.derived.config.n_expert_used or "not known"),
        f"auto ({budget} MiB)" if facts.get("cache_budget_mib") is not None else "auto",
        _number(after, 2),
        _number(facts.get("prefill_tps"), 2),
        _number(facts.get("stall_s_tok"), 3),
        _number(facts.get("read_mib_tok"), 1),
        hit,
        engine_version(record),
        apart,
    )
    return dict(zip(HEAD, values, strict=True))


def markdown(values: Mapping[str, str]) -> str:
    """A table of one row."""
    cells = [markdown_cell(value) for value in values.values()]
    return (
        "| " + " | ".join(values) + " |\n" + "|" + "|".join(["---"] * len(cells)) + "|\n| " + " | ".join(cells) + " |\n"
    )


def _number(value: Any, digits: int) -> str:
    return "not known" if value is None else f"{float(value):.{digits}f}"
