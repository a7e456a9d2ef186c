"""What speaks against a plan before anything starts. In: a plan, and what is known of phones. Out: errors, warnings, an estimate.

Errors are contradictions: the plan is refused. Warnings are what its author should know. With a phone's facts (its status as
recorded) names of engines and models, flags of the binary and gates whose source it cannot read are checked too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from bmoe_proto.asking import ARTIFACT_OF, cell_problems, too_big, unwatched
from bmoe_proto.contract.flags import BY_SPELLING, read_argv
from bmoe_proto.gates import GATES
from bmoe_proto.v1 import telemetry_pb2 as pb

from bmoe_collector.compare.question import read_question
from bmoe_collector.compare.statistics import pairs_resolve
from bmoe_collector.plans.document import Document

ARGV_LIMIT = 128 * 1024  # bytes of one argument the kernel takes, its NUL included (generations.md)
AGENTS_OWN = {"--model", "--prompt", "--session", "--progress", "--n-predict"}
SUPPOSED_SD = 0.05
BETWEEN_CELLS_S = 20.0


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found; the plan is refused when there are errors."""

    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    estimate_s: float | None
    estimate_from: str
    facts: Mapping[str, object] = field(default_factory=dict)


def check(
    document: Document,
    plan: pb.Plan,
    phone: pb.StatusReply | None = None,
    seen: Mapping[str, Mapping[str, float]] | None = None,
) -> Checked:
    """Judge an expanded plan.

    `seen` has by model name what earlier runs took: `tok_s`, `load_s`, `prefill_s`.
    """
    errors: list[str] = []
    warnings: list[str] = []
    kinds = {cell.name: cell for cell in plan.cells}
    names = Counter((cell.name, cell.repeat) for cell in plan.cells)
    errors += [
        f"two cells are both called `{name}`" for (name, repeat), count in names.items() if count > 1 and repeat == 0
    ]
    for cell in kinds.values():
        # What a phone would refuse and nothing here says in the plan's own words.
        found = _cell(document, cell) or [*cell_problems(cell), *filter(None, [too_big(plan, cell)])]
        errors += [f"cell `{cell.name}`: {why}" for why in found]
        warnings += [f"cell `{cell.name}`: {why}" for why in _doubts(cell)]
        for gate in cell.gates:
            if gate.gate not in GATES:
                near = get_close_matches(gate.gate, GATES, n=1)
                errors.append(
                    f"no gate is called `{gate.gate}`"
                    + (f"; did you mean `{near[0]}`?" if near else f"; there are {', '.join(GATES)}")
                )
    errors += _question(document, kinds)
    errors += _order(document, plan)
    warnings += _resolution(document, plan, kinds)
    warnings += _unlike(document, kinds)
    if phone is not None:
        more_errors, more_warnings = _phone(plan, kinds, phone)
        errors += more_errors
        warnings += more_warnings
    seconds, source = estimate(plan, seen or {})
    total = plan.limits.total_s if plan.limits.HasField("total_s") else None
    if total and seconds and seconds > total:
        warnings.append(f"about {seconds / 3600:.1f} h are expected, the plan stops after {total / 3600:.1f} h")
    facts = {
        "cells": len(kinds),
        "runs": len(plan.cells),
        "order": plan.order,
        "seed": plan.seed,
        "sha256": plan.sha256,
    }
    return Checked(tuple(dict.fromkeys(errors)), tuple(dict.fromkeys(warnings)), seconds, source, facts)


def _cell(document: Document, cell: pb.Cell) -> list[str]:
    errors = []
    argv = read_argv(["engine", *cell.flags])
    errors += [f"{name} needs a value" for name in argv.missing]
    if argv.unknown and not cell.allow_unknown_flags:
        for word in argv.unknown:
            near = get_close_matches(word, BY_SPELLING, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; allow_unknown_flags = true passes it on"
            errors.append(f"unknown argument {word!r}{hint}")
    for name, value in argv.values.items():
        flag = BY_SPELLING[name]
        if name in AGENTS_OWN:
            errors.append(f"{name} is set from the plan's own keys, not among the flags")
        elif flag.kind == "output":
            errors.append(
                f'{name} names a path, which only the phone chooses: ask for artifacts = ["{ARTIFACT_OF[name]}"]'
            )
        elif flag.kind == "info":
            errors.append(f"{name} prints and ends: nothing would run")
        elif flag.kind == "int" and not re.fullmatch(r"-?\d{1,10}", value or ""):
            errors.append(f"{name} {value}: a whole number is wanted")
        elif flag.kind == "float" and argv.number(name) is None:
            errors.append(f"{name} {value}: a number is wanted")
        elif flag.kind == "choice" and value not in flag.choices:
            errors.append(f"{name} {value}: one of {', '.join(flag.choices)} is wanted")
    if argv.has("--mtp") and argv.has("--ngram"):
        errors.append("both --mtp and --ngram: an engine drafts from one source and refuses two")
    cache = argv.get("--cache-mb")
    if cache != "auto" and argv.has("--cache-mb"):
        mib = argv.number("--cache-mb")
        if mib is None or mib < 0:
            errors.append(f"--cache-mb {cache}: mebibytes or auto are wanted")
        elif 1 <= mib <= 1500 and not argv.has("--force-cache"):
            errors.append(f"--cache-mb {cache}: engines refuse a cache of 1 to 1500 MiB without --force-cache")
    traces = [name for name in cell.artifacts if name != "metrics"]
    if traces and not cell.unmeasured and not _traced(document, cell.name):
        errors.append(
            f"a traced run is not a benchmark run ({', '.join(traces)}): say `traced = true` where that is meant"
        )
    errors += _prompts(cell, argv.has("--decide"))
    if not cell.model:
        errors.append("no model is named")
    return errors


def _traced(document: Document, name: str) -> bool:
    own = next(
        (
            cell
            for cell in document.cells
            if name == cell["name"] or name.startswith((f"{cell['name']} @", f"{cell['name']} #"))
        ),
        {},
    )
    return bool(own.get("traced", document.get("traced", False)))


def _prompts(cell: pb.Cell, decides: bool) -> list[str]:
    errors = []
    if not cell.turns:
        if not cell.prompt:
            errors.append("no prompt is given")
        if len(cell.prompt) >= ARGV_LIMIT:
            errors.append(
                f"the prompt has {len(cell.prompt)} bytes, more than an argument can hold ({ARGV_LIMIT - 1}): make it a session's turn"
            )
        return errors
    for at, turn in enumerate(cell.turns):
        if turn.kind == "decide" and not decides and not turn.expect_rejected:
            errors.append(f"turn {at + 1} is a decide request: the cell needs --decide")
        if turn.kind == "decide" and not turn.choices and not turn.expect_rejected:
            errors.append(f"turn {at + 1} has no choices")
    if all(
        turn.kind == "generate" and turn.HasField("cancel_after_ms") and turn.cancel_after_ms == 0
        for turn in cell.turns
    ):
        errors.append("every turn is cancelled at once: nothing would be measured")
    return errors


def _doubts(cell: pb.Cell) -> list[str]:
    said = []
    argv = read_argv(["engine", *cell.flags])
    streaming = argv.has("--moe-stream")
    needs = [
        name
        for name in ("--cache-mb", "--io-threads", "--overlap", "--prefetch", "--drop-cold-experts", "--route-ahead")
        if argv.has(name)
    ]
    if needs and not streaming:
        said.append(f"{', '.join(needs)} without --moe-stream: the engine would run on mmap and measure a baseline")
    if not cell.turns and cell.n_predict < 256 and not cell.unmeasured:
        said.append(f"{cell.n_predict} tokens: runs of fewer than 256 time the cold head")
    if (argv.number("--temp") or 0) > 0 and not argv.has("--seed"):
        said.append("--temp above 0 without --seed cannot be repeated")
    if argv.has("--prefetch-sync") or argv.has("--predict-log"):
        said.append("--prefetch-sync and --predict-log make an instrumented run: its speed is not to be used")
    if argv.has("--load-all"):
        said.append("--load-all reads the whole expert set: its numbers mean something else")
    since = sorted({BY_SPELLING[name].since for name in argv.values if BY_SPELLING[name].since != "0.19"})
    if since:
        said.append(f"its flags need an engine from {since[-1]} on")
    return said


def _question(document: Document, kinds: Mapping[str, pb.Cell]) -> list[str]:
    table = document.tables.get("question")
    if not table:
        return []
    from bmoe_collector.common import UserError
    from bmoe_collector.meaning.facts import BY_NAME

    try:
        question = read_question(table)
    except UserError as error:
        return [f"[question] {error}"]
    errors = [
        f"[question] compare: no cell is called `{name}`; there are {', '.join(list(kinds)[:8])}"
        for pair in question.compare
        for name in pair
        if name not in kinds
    ]
    errors += [f"[question] compare: `{first}` with itself" for first, second in question.compare if first == second]
    errors += [
        f"[question] compare: `{name}` is marked as not measured"
        for pair in question.compare
        for name in pair
        if name in kinds and kinds[name].unmeasured
    ]
    if question.metric not in BY_NAME or BY_NAME[question.metric].kind not in {"float", "int"}:
        errors.append(f"[question] metric: no number is called `{question.metric}`")
    if question.smallest_effect is not None and not 0 < question.smallest_effect < 1:
        errors.append("[question] smallest_effect: a relative difference between 0 and 1 is wanted, 0.05 is 5 %")
    if not question.compare:
        errors.append("[question] needs `compare`: pairs of cell names")
    return errors


def _unlike(document: Document, kinds: Mapping[str, pb.Cell]) -> list[str]:
    """Cells that are to be compared and do not begin under the same conditions."""
    said = []
    for pair in document.tables.get("question", {}).get("compare", ()):
        cells = [kinds[name] for name in pair if name in kinds] if isinstance(pair, list) else []
        if len(cells) == 2 and list(cells[0].gates) != list(cells[1].gates):
            said.append(f"[question] `{pair[0]}` and `{pair[1]}` wait for different gates")
    return said


def _order(document: Document, plan: pb.Plan) -> list[str]:
    errors = []
    odd = {count for count in Counter(cell.name for cell in plan.cells).values() if count % 2}
    if plan.order == "abba" and odd:
        errors.append(f'order = "abba" needs an even number of repeats, not {", ".join(map(str, sorted(odd)))}')
    if plan.order == "random" and not document.get("seed"):
        errors.append('order = "random" needs a seed above 0, so that the order can be made again')
    if len(plan.cells) > 10_000:
        errors.append(f"{len(plan.cells)} runs: at most 10,000 are taken")
    return errors


def _resolution(document: Document, plan: pb.Plan, kinds: Mapping[str, pb.Cell]) -> list[str]:
    measured = [cell for cell in kinds.values() if not cell.unmeasured]
    if len(measured) < 2:
        return []
    if len({(cell.model, cell.engine, *cell.flags, cell.prompt, cell.preheat_s) for cell in measured}) == 1:
        return []  # the same thing twice, as in the community's protocol: there is no setting to resolve
    # A contrast has as many pairs as the cell that runs least often.
    repeats = min(Counter(cell.name for cell in plan.cells if not cell.unmeasured).values())
    if plan.order == "listed":
        return [
            'order = "listed": order and setting cannot be told apart; interleaved, reversed or abba can be compared in pairs'
        ]
    pairs = repeats // 2 if plan.order == "abba" else repeats
    least = pairs_resolve(pairs, SUPPOSED_SD / (2**0.5 if plan.order == "abba" else 1))
    if least is None:
        return [f"{pairs} pairs a contrast cannot resolve any difference: at least 6 are needed"]
    said = [
        f"{pairs} pairs a contrast resolve differences from about {least:.0%} when runs spread by {SUPPOSED_SD:.0%}"
    ]
    wanted = document.tables.get("question", {}).get("smallest_effect")
    if wanted and least > wanted:
        said.append(f"the question wants {wanted:.1%}: these repeats would show it in fewer than 8 of 10 campaigns")
    return said


def _phone(plan: pb.Plan, kinds: Mapping[str, pb.Cell], phone: pb.StatusReply) -> tuple[list[str], list[str]]:
    errors: list[str] = []
    warnings: list[str] = []
    name = phone.device.name or phone.device.agent_uuid.hex()[:8]
    for cell in kinds.values():
        if cell.engine and cell.engine not in phone.engines:
            errors.append(
                f"{name}: no engine `{cell.engine}` is configured there; there are {', '.join(phone.engines) or 'none'}"
            )
        if not cell.engine and not phone.engines:
            errors.append(f"{name}: no engine is configured there: `bmoe-agent init --engine PATH`")
        if cell.model and cell.model not in phone.models:
            near = get_close_matches(cell.model, phone.models, n=3, cutoff=0.4)
            errors.append(f"{name}: no model `{cell.model}` there" + (f"; there are {', '.join(near)}" if near else ""))
        facts = next((one for one in phone.engine_facts if not cell.engine or one.name == cell.engine), None)
        if facts is not None and facts.help_text and not cell.allow_unknown_flags:
            errors += [
                f"{name}: its engine `{facts.name}` does not know {flag}"
                for flag in cell.flags
                if flag.startswith("--") and not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", facts.help_text)
            ]
        for gate in cell.gates:
            if gate.gate in phone.unreadable:
                said = warnings if gate.policy == "run-flagged" else errors
                said.append(f"{name}: gate {gate.gate} cannot be read there: {phone.unreadable[gate.gate]}")
        warnings += _unwatched(name, "watchdog", cell.watchdog, phone)
    warnings += _unwatched(name, "limits", plan.limits, phone)
    minimum = plan.limits.min_free_bytes if plan.limits.HasField("min_free_bytes") else 0
    if phone.free_bytes and phone.free_bytes < minimum:
        errors.append(f"{name}: {phone.free_bytes >> 20} MiB are free, the plan wants {minimum >> 20}")
    return errors, warnings


def _unwatched(name: str, where: str, asked: pb.WatchdogAsk | pb.Limits, phone: pb.StatusReply) -> list[str]:
    return [
        f"{name}: {where}: {bound} cannot be watched there: {why}"
        for bound, why in unwatched(asked, phone.unreadable).items()
    ]


def estimate(plan: pb.Plan, seen: Mapping[str, Mapping[str, float]]) -> tuple[float | None, str]:
    """Seconds the plan takes without waiting at gates, from what earlier runs of its models took; None without any."""
    total = 0.0
    for cell in plan.cells:
        known: Mapping[str, float] = seen.get(cell.model, {})
        rate = known.get("tok_s")
        if not rate:
            return None, f"no earlier run of {cell.model or 'its model'} is stored"
        tokens = (
            sum(turn.n_predict or cell.n_predict for turn in cell.turns if turn.kind == "generate") or cell.n_predict
        )
        idle = sum(turn.idle_before_ms for turn in cell.turns) / 1000
        settle = max((gate.settle_s for gate in cell.gates), default=0)
        total += known.get("load_s", 0.0) + known.get("prefill_s", 0.0) * max(1, len(cell.turns)) + tokens / rate
        total += idle + cell.preheat_s + settle + BETWEEN_CELLS_S
    return total, "earlier runs of the same model"
