"""The engine's argv, read and refused as the engine does.

Comes in: argv, the environment, the settings. Goes out: `Options`, resolved; or `RefusedError` with the exit status, the
line for stderr and whether usage goes to stdout. Which flags exist is the contract's one table
(bmoe_proto.contract.flags); what is here is what the engine does about them.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from bmoe_proto.contract.flags import BY_SPELLING, ENVIRONMENT, FLAGS, Flag

from bmoe_sim.settings import Settings

CACHE_MIN_MB = 1500
_EXCLUSIVE = {"--mtp", "--ngram"}
_DENSE_ALIASES = {"--dense-odirect": "anon", "--no-warm-dense": "mmap"}


class RefusedError(Exception):
    """The engine will not run: exit status, a line on stderr, usage on stdout or not."""

    def __init__(self, status: int, reason: str, *, usage: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.usage = usage


@dataclass
class Options:
    """What this run is, the names those of the contract's preamble where it has one."""

    model: str = ""
    prompt: bytes = b""
    n_predict: int = 128
    threads: int = 4
    n_ctx: int = 2048
    n_ubatch: int = 0
    chatml: bool = False
    think: bool = True
    progress: bool = False
    session: bool = False
    csv: str = ""
    route_trace: str = ""
    compute_trace: str = ""
    compute_layers: bool = False
    io_trace: str = ""
    n_expert_used: int = 0
    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    seed: int = 4294967295
    spec: str = "off"
    draft: int = 0
    mtp_p_min: float = 0.0
    ngram_min_match: int = 0
    moe_stream: bool = False
    cache_mb: int = 0
    cache_auto: bool = False
    cache_floor_mb: int = 1536
    cache_ceil_mb: int = 0
    io_threads: int = 4
    odirect: bool = True
    dense_weights: str = "anon"
    load_all: bool = False
    force_cache: bool = False
    overlap: bool = False
    io_two_wave: bool = False
    prefetch: int = 0
    prefetch_sync: bool = False
    drop_cold: float = 0.0
    drop_renorm: bool = True
    drop_in_prefill: bool = False
    route_ahead: int = 0
    predict_log: bool = False
    predict_prefetch: bool = False
    predict_spec_max: int = 2
    row_stream: bool = False
    decide: bool = False
    decide_prefix_cache: str = "auto"
    substitute: float = 0.0
    prefill_device: str = ""
    prefill_routed: bool = True


def known_flags(settings: Settings) -> list[Flag]:
    """The flags the posed engine takes."""
    return [f for f in FLAGS if not settings.old or f.since == "0.19"]


def usage(name: str, settings: Settings) -> str:
    """The usage text, which every flag the posed engine takes is found in."""
    out = [f"usage: {name} -m <model.gguf> [options]", ""]
    for flag in known_flags(settings):
        short = next((a for a in flag.aliases if not a.startswith("--")), "")
        value = "" if not flag.arity else " " + ("|".join(flag.choices) or _hint(flag))
        spell = f"  {short + ',' if short else '   '} {flag.name}{value}"
        default = f" (default {flag.default})" if flag.default is not None else ""
        gap = "\n" + " " * 34 if len(spell) > 32 else ""  # a long spelling has its line to itself
        out.append(f"{spell}{gap}{'' if gap else ' ' * (34 - len(spell))}{flag.doc}{default}")
    out += ["", "  Env overrides (flag wins): " + ", ".join(sorted(ENVIRONMENT))]
    out += [f"  This is bmoe-sim, a simulator posing as {settings.pose}; it computes nothing.", ""]
    return "\n".join(out)


def _hint(flag: Flag) -> str:
    if flag.name == "--cache-mb":
        return "N|auto"
    return {"int": "N", "float": "F", "model": "PATH", "output": "PATH"}.get(flag.kind, "STR")


def info_asked(argv: list[str], settings: Settings) -> str:
    """`--help`, `--version` or `--list-archs` where the engine would come to it before refusing anything; else ''."""
    try:
        _words(argv, settings, stop_at_info=True)
    except _InfoAskedError as e:
        return str(e)
    return ""


class _InfoAskedError(Exception):
    pass


def _words(argv: list[str], settings: Settings, *, stop_at_info: bool = False) -> dict[str, str]:
    taken = {spelling: f for f in known_flags(settings) for spelling in f.spellings}
    values: dict[str, str] = {}
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        flag = taken.get(word)
        if flag is None:
            raise RefusedError(1, f"unknown arg: {word}", usage=True)
        if flag.kind == "info":
            if stop_at_info:
                raise _InfoAskedError(flag.name)
            continue
        value = ""
        if flag.arity:
            if at >= len(argv):
                raise RefusedError(1, f"missing value for {word}")
            value = argv[at]
            at += 1
            _check(flag, value, settings)
        rivals = _EXCLUSIVE & values.keys()
        if flag.name in _EXCLUSIVE and rivals - {flag.name}:
            raise RefusedError(
                2, f"bmoe: {rivals.pop()} and {flag.name} are alternatives (speculative drafting); choose one."
            )
        values[flag.name] = value
    return values


def _check(flag: Flag, value: str, settings: Settings) -> None:
    if flag.choices and value not in flag.choices:
        raise RefusedError(2, f"bmoe: {flag.name}: '{value}' is none of {', '.join(flag.choices)}")
    if settings.old or flag.kind not in {"int", "float"}:
        return  # 0.19 reads numbers with atoi: anything else is 0
    try:
        (int if flag.kind == "int" else float)(value)
    except ValueError:
        raise RefusedError(2, f"bmoe: {flag.name}: '{value}' is not a number") from None


def _number(value: str) -> float:
    """As C reads one: the longest numeric start, 0 where there is none."""
    for end in range(len(value), 0, -1):
        try:
            return float(value[:end])
        except ValueError:
            continue
    return 0.0


def parse(argv: list[str], env: Mapping[str, str], settings: Settings) -> Options:
    """Resolve argv (without the program's name) and the environment. Raises RefusedError."""
    values = _words(argv, settings)
    for variable, flag in ENVIRONMENT.items():
        told = env.get(variable, "")
        if told and flag.name not in values:
            if flag.arity:
                values[flag.name] = told
            elif _number(told):
                values[flag.name] = ""

    def text(name: str) -> str:
        return values.get(name, BY_SPELLING[name].default or "")

    def whole(name: str) -> int:
        return int(_number(text(name)))

    o = Options(
        model=text("--model"),
        prompt=os.fsencode(text("--prompt")),
        n_predict=whole("--n-predict"),
        threads=max(1, whole("--threads")),
        n_ctx=whole("--ctx-size"),
        n_ubatch=whole("--ubatch"),
        chatml="--chatml" in values,
        think="--no-think" not in values,
        progress="--progress" in values,
        session="--session" in values,
        csv=text("--csv"),
        route_trace=text("--route-trace"),
        compute_trace=text("--compute-trace-layers") or text("--compute-trace"),
        compute_layers="--compute-trace-layers" in values,
        io_trace=text("--io-trace"),
        n_expert_used=whole("--n-expert-used"),
        temp=_number(text("--temp")),
        top_k=whole("--top-k"),
        top_p=_number(text("--top-p")),
        seed=whole("--seed") & 0xFFFFFFFF,
        spec="mtp" if "--mtp" in values else "ngram" if "--ngram" in values else "off",
        mtp_p_min=_number(text("--mtp-p-min")),
        moe_stream="--moe-stream" in values,
        cache_floor_mb=whole("--cache-floor-mb"),
        cache_ceil_mb=whole("--cache-ceil-mb"),
        io_threads=max(1, whole("--io-threads")),
        odirect="--no-odirect" not in values,
        dense_weights=text("--dense-weights"),
        load_all="--load-all" in values,
        force_cache="--force-cache" in values,
        overlap="--overlap" in values,
        io_two_wave="--io-two-wave" in values,
        prefetch=whole("--prefetch"),
        prefetch_sync="--prefetch-sync" in values,
        drop_cold=_number(text("--drop-cold-experts")),
        drop_renorm="--drop-no-renorm" not in values,
        drop_in_prefill="--drop-in-prefill" in values,
        route_ahead=whole("--route-ahead"),
        predict_log="--predict-log" in values,
        predict_prefetch="--predict-prefetch" in values,
        predict_spec_max=whole("--predict-spec-max"),
        row_stream="--row-stream" in values,
        decide="--decide" in values,
        decide_prefix_cache=text("--decide-prefix-cache"),
        substitute=_number(text("--expert-substitute")),
        prefill_device=text("--prefill-device"),
        prefill_routed="--no-prefill-routed" not in values,
    )
    for alias, policy in _DENSE_ALIASES.items():
        if alias in values:
            o.dense_weights = policy
    if o.spec != "off":
        o.draft = whole("--draft") or 3
        o.ngram_min_match = (whole("--ngram-min-match") or 3) if o.spec == "ngram" else 0
    cache = values.get("--cache-mb")
    # Left out: 0 up to 0.23, auto in the newest build (generations, Standard output).
    o.cache_auto = cache == "auto" or (cache is None and o.moe_stream and not settings.old)
    o.cache_mb = 0 if o.cache_auto else int(_number(cache or "0"))
    _validate(o, settings)
    return o


def _validate(o: Options, settings: Settings) -> None:
    if not o.model:
        raise RefusedError(1, "", usage=True)
    if o.overlap and not settings.hook:
        raise RefusedError(1, "config error: moe.overlap needs a build with the overlap hook; this one has none")
    if 0 < o.cache_mb < CACHE_MIN_MB and not o.force_cache:
        raise RefusedError(
            1,
            f"config error: moe.cache_mb={o.cache_mb} is in the pathological band (< {CACHE_MIN_MB} MiB): a cache "
            "smaller than one token's routed working set thrashes and is slower than no cache. Use 0 to disable the "
            f"cache, a value >= {CACHE_MIN_MB}, or set force_cache to override.",
        )
    for name, value, low, high in (
        ("n_predict", o.n_predict, 0, 1 << 30),
        ("n_ctx", o.n_ctx, 1, 1 << 30),
        ("threads", o.threads, 1, 512),
        ("moe.io_threads", o.io_threads, 1, 64),
        ("moe.cache_mb", o.cache_mb, 0, 1 << 20),
        ("moe.prefetch", o.prefetch, 0, 64),
    ):
        if not low <= value <= high:
            raise RefusedError(1, f"config error: {name}={value} is out of range ({low}..{high})")
    if o.decide and not o.session:
        raise RefusedError(1, "config error: --decide needs --session")
