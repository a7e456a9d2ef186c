"""Rules about what kind of number a run is, and about what was asked for and did not happen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bmoe_collector.meaning.config import RANDOM_SEED
from bmoe_collector.meaning.numbers import known
from bmoe_collector.verdicts.rule import Case, Rule, Verdict, info, warn


def device_idle(case: Case) -> Iterator[Verdict]:
    """`--prefill-device` was asked for and no node computed there (contract, `prefill_dev_nodes`)."""
    asked = case.derived.config.prefill_device
    if asked is None:
        return
    nodes = known(turn.summary.get("prefill_dev_nodes") for turn in case.record.turns)
    nodes += known(keys.get("prefill_dev_nodes") for keys in case.record.trailers)
    # A decision does not count nodes; its tokens on the device are the nearest thing.
    nodes += known((turn.decide or {}).get("prefill_dev_tokens") for turn in case.record.turns)
    if nodes and not any(nodes):
        yield warn("device_idle", f"--prefill-device {asked}, and no graph node was computed on it")


def think_ignored(case: Case) -> Iterator[Verdict]:
    """`think:false` on a model that cannot be asked not to reason (contract, `think_ctl`)."""
    if case.record.ready.get("think_ctl") != "none":
        return
    asked = [turn for turn in case.record.turns if (turn.request or {}).get("think") is False]
    if asked:
        which = ", ".join(str(turn.turn if turn.turn is not None else turn.request_id) for turn in asked)
        yield warn(
            "think_ignored", f"think:false in turn {which}, and think_ctl is none: the model reasons all the same"
        )
    elif case.derived.config.no_think:
        yield warn("think_ignored", "run with --no-think, and think_ctl is none: the model reasons all the same")


def not_streaming(case: Case) -> Iterator[Verdict]:
    """Without `--moe-stream` the engine is plain llama.cpp on mmap: a baseline."""
    config = case.derived.config
    if config.streaming is not False:
        return
    if config.streaming_asked:
        yield warn("not_streaming", "--moe-stream was asked for and the engine ran on mmap")
    else:
        yield info("not_streaming", "a baseline: the engine on mmap, without expert streaming")


def stochastic(case: Case) -> Iterator[Verdict]:
    """`temp>0` is not comparable token for token and reproducible only through the seed."""
    config = case.derived.config
    if not config.temp:
        return
    if config.seed is None or config.seed == RANDOM_SEED:
        yield warn("stochastic", f"temp={config.temp:g} with a seed that was not recorded: it cannot be reproduced")
    else:
        yield info("stochastic", f"temp={config.temp:g}, seed={config.seed}")


def lossy(case: Case) -> Iterator[Verdict]:
    """Dropping, substitution, route-ahead or a narrower top-k: another computation than the model's own."""
    config, cache = case.derived.config, case.derived.cache
    said: list[str] = []
    if config.drop_cold_frac or cache.experts_dropped:
        rate = "rate not measured" if cache.drop_rate is None else f"{cache.drop_rate:.1%} of routed experts dropped"
        said.append(f"drop threshold {_setting(config.drop_cold_frac)} × uniform, {rate}")
    if config.substitute_lambda or cache.experts_substituted:
        rate = (
            "rate not measured" if cache.substitution_rate is None else f"{cache.substitution_rate:.1%} of slots moved"
        )
        said.append(f"substitution {_setting(config.substitute_lambda)}, {rate}")
    if config.route_ahead or cache.rerouted_early:
        rate = "agreement not measured" if cache.reroute_rate is None else f"{cache.reroute_rate:.1%} of slots rerouted"
        said.append(f"routing committed early (layers: {_setting(config.route_ahead)}), {rate}")
    own, used = _own_width(case), config.n_expert_used
    if own and used and used < own:
        said.append(f"top-{used} where the model's own is {own}")
    if said:
        yield info("lossy", "; ".join(said))


def _setting(value: float | None) -> str:
    """A setting as it was told; counts can show a policy at work whose setting no source tells."""
    return f"{value:g}" if value else "not recorded"


def _own_width(case: Case) -> int | None:
    """The model's own top-k: from its header, else from siblings that ran it without an override."""
    model = case.record.run.get("model")
    metadata = model.get("metadata") if isinstance(model, Mapping) else None
    for key, value in (metadata or {}).items():
        if str(key).endswith("expert_used_count"):
            try:
                return int(value)
            except (TypeError, ValueError):
                break
    if not case.derived.config.n_expert_used_asked:
        return None
    widths = known(
        sibling.facts.get("n_expert_used")
        for sibling in case.siblings
        if "--n-expert-used" not in [str(part) for part in sibling.run.get("argv") or ("--n-expert-used",)]
    )
    return int(max(widths)) if widths else None


def speculative(case: Case) -> Iterator[Verdict]:
    """Drafted and verified in groups: never averaged with plain rows (contract, `mtp=1`)."""
    drawn = case.derived.speculation
    if drawn.source not in {"mtp", "ngram"}:
        return
    said = [f"drafted by {drawn.source}"]
    if drawn.acceptance is not None:
        said.append(f"{drawn.acceptance:.1%} of {drawn.drafted} drafts accepted")
    elif drawn.drafted == 0:
        said.append("nothing was drafted")
    if drawn.coverage is not None:
        said.append(f"drafted on {drawn.coverage:.1%} of {drawn.decodes} decodes")
    yield info("speculative", ", ".join(said))


def simulated(case: Case) -> Iterator[Verdict]:
    """A stand-in engine or sensor tree: never comparable with a real run."""
    run = case.record.run
    if not run.get("simulated"):
        return
    device = run.get("device")
    tree = isinstance(device, Mapping) and bool(device.get("simulated"))
    engine = run.get("engine")
    stand_in = not isinstance(engine, Mapping) or bool(engine.get("simulated"))
    what = [name for name, there in (("a stand-in engine", stand_in), ("a stand-in sensor tree", tree)) if there]
    version = f" ({run['engine_version']})" if run.get("engine_version") and stand_in else ""
    yield info("simulated", f"{' and '.join(what) or 'marked simulated'}{version}: never comparable with a real run")


RULES: tuple[Rule, ...] = (
    device_idle, think_ignored, not_streaming, stochastic, lossy, speculative, simulated,
)  # fmt: skip
