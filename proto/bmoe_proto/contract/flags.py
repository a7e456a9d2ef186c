"""The one table of engine flags: spelling, arity, default, age and kind; and reading an argv by it.

In: an argv. Out: `Flag`s and `Argv`. Facts from generations.md ("Flags of 0.19") and the contract; a binary is still asked
for its own `--help` before it is launched, because builds in circulation differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["model", "prompt", "output", "switch", "int", "float", "choice", "str", "info"]
"""What a flag's value is. `output`: a path the engine writes; the agent alone chooses those. `info`: prints and ends."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `default` is what leaving it out means, None for a switch or when nothing is set."""

    name: str
    kind: Kind
    default: str | None = None
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    since: str = "0.19"
    env: str = ""
    key: str = ""  # the preamble key that tells the resolved value
    doc: str = ""

    @property
    def arity(self) -> int:
        """How many values follow the flag."""
        return 0 if self.kind in ("switch", "info") else 1

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every way to write it, its name first."""
        return (self.name, *self.aliases)


FLAGS: tuple[Flag, ...] = (
    Flag("--model", "model", aliases=("-m",), key="model", doc="gguf file"),
    Flag("--prompt", "prompt", aliases=("-p",), doc="prompt text"),
    Flag("--n-predict", "int", "128", aliases=("-n",), doc="tokens to generate"),
    Flag("--threads", "int", "4", aliases=("-t",), key="threads", doc="compute threads"),
    Flag("--ctx-size", "int", "2048", aliases=("-c",), key="n_ctx", doc="context size"),
    Flag("--ubatch", "int", "0", key="n_ubatch", doc="micro-batch"),
    Flag("--chatml", "switch", key="chatml", doc="apply the chat template"),
    Flag("--no-think", "switch", doc="ask for no reasoning"),
    Flag("--progress", "switch", env="BMOE_PROGRESS", doc="machine-readable lines"),
    Flag("--session", "switch", doc="serve requests from stdin"),
    Flag("--csv", "output", doc="metrics CSV"),
    Flag("--route-trace", "output", doc="routing trace"),
    Flag("--compute-trace", "output", doc="trace of every graph node"),
    Flag("--compute-trace-layers", "output", key="compute_trace_layers", doc="trace of every layer"),
    Flag("--io-trace", "output", doc="trace of every flash read"),
    Flag(
        "--n-expert-used", "int", "0", env="BMOE_N_EXPERT_USED", key="n_expert_used", doc="top-k; 0 is the model's own"
    ),
    Flag("--temp", "float", "0", key="temp", doc="sampling temperature; 0 is greedy"),
    Flag("--top-k", "int", "40", key="top_k", doc="sampling"),
    Flag("--top-p", "float", "0.95", key="top_p", doc="sampling"),
    Flag("--seed", "int", "4294967295", key="seed", doc="4294967295: random and not recorded"),
    Flag("--mtp", "switch", doc="draft with the model's own head"),
    Flag("--ngram", "switch", doc="draft from the text so far"),
    Flag("--draft", "int", key="spec_draft_max", doc="most tokens to draft"),
    Flag("--mtp-p-min", "float", key="mtp_p_min", doc="least probability of a draft"),
    Flag("--ngram-min-match", "int", key="ngram_min_match", doc="least match of a draft"),
    Flag("--moe-stream", "switch", key="moe_stream", doc="stream experts from flash"),
    Flag(
        "--cache-mb",
        "str",
        "0",
        env="BMOE_CACHE_MB",
        key="cache_mb",
        doc="MiB or auto; later builds may mean auto by default",
    ),
    Flag("--cache-floor-mb", "int", "1536", key="cache_floor_mb", doc="least cache of auto"),
    Flag("--cache-ceil-mb", "int", "0", key="cache_ceil_mb", doc="most cache of auto; 0 is none"),
    Flag("--io-threads", "int", "4", env="BMOE_IO_THREADS", key="io_threads", doc="read lanes"),
    Flag("--no-odirect", "switch", doc="buffered reads"),
    Flag(
        "--dense-weights",
        "choice",
        "anon",
        choices=("mmap", "warm", "anon", "ahwb"),
        key="dense_weights",
        doc="dense policy",
    ),
    Flag("--load-all", "switch", key="load_all", doc="read the whole expert set"),
    Flag("--force-cache", "switch", key="force_cache", doc="allow a cache of 1-1500 MiB"),
    Flag("--overlap", "switch", env="BMOE_OVERLAP", key="overlap", doc="read while computing"),
    Flag("--io-two-wave", "switch", key="io_two_wave", doc="reads in two waves"),
    Flag("--prefetch", "int", "0", env="BMOE_PREFETCH", key="prefetch", doc="layers to read ahead"),
    Flag("--prefetch-sync", "switch", key="prefetch_sync", doc="instrumented"),
    Flag(
        "--drop-cold-experts", "float", "0", key="drop_cold_frac", doc="threshold below which a cold expert is dropped"
    ),
    Flag("--drop-no-renorm", "switch", doc="leave weights as they are after dropping"),
    Flag("--drop-in-prefill", "switch", key="drop_prefill", doc="drop in the prompt phase too"),
    Flag("--route-ahead", "int", "0", key="route_ahead", doc="layers to commit the routing early"),
    Flag("--predict-log", "switch", env="BMOE_PREDICT_LOG", key="predict_log", doc="instrumented"),
    Flag(
        "--predict-prefetch",
        "switch",
        env="BMOE_PREDICT_PREFETCH",
        key="predict_prefetch",
        doc="read what the stale gate predicts",
    ),
    Flag("--predict-spec-max", "int", "2", key="predict_spec_max", doc="most experts to predict"),
    Flag("--dense-odirect", "switch", doc="old alias of --dense-weights anon"),
    Flag("--no-warm-dense", "switch", doc="old alias of --dense-weights mmap"),
    Flag("--list-archs", "info", doc="supported architectures"),
    Flag("--help", "info", aliases=("-h",), doc="usage"),
    Flag("--version", "info", doc="version"),
    Flag("--row-stream", "switch", since="0.24", doc="gather rows of large tables from flash"),
    Flag("--decide", "switch", since="0.24", doc="allow decide requests in a session"),
    Flag(
        "--decide-prefix-cache",
        "choice",
        "auto",
        choices=("auto", "on", "off"),
        since="0.24",
        doc="keep the prefix state",
    ),
    Flag("--expert-substitute", "float", "0", since="0.24", key="substitute_lambda", doc="prefer resident experts"),
    Flag("--prefill-device", "str", since="0.24", doc="device that runs wide prefill graphs"),
    Flag("--no-prefill-routed", "switch", since="0.24", doc="the device arena reads whole layers"),
)
"""Every flag known. `since` "0.24" are the contract's that 0.19 refuses."""

BY_SPELLING: Mapping[str, Flag] = {spelling: flag for flag in FLAGS for spelling in flag.spellings}

OUTPUTS: frozenset[str] = frozenset(flag.name for flag in FLAGS if flag.kind == "output")
"""Flags whose value is a path the engine writes."""

TRACES: frozenset[str] = OUTPUTS - {"--csv"}
"""Flags that make a run an instrumented one (contract "Decode traces")."""

ENVIRONMENT: Mapping[str, Flag] = {flag.env: flag for flag in FLAGS if flag.env}
"""Variables that stand in for an absent flag, so a clean environment is part of a clean run."""

UNRECORDED_SEED = 4294967295


@dataclass(frozen=True, slots=True)
class Argv:
    """An argv read by the table. `values`: canonical flag to its value, None for a switch; the last one stands."""

    values: Mapping[str, str | None]
    unknown: Sequence[str]  # arguments that are no flag and no flag's value
    missing: Sequence[str]  # flags at the end without their value

    def has(self, name: str) -> bool:
        """Whether the flag was given, by its canonical name."""
        return name in self.values

    def get(self, name: str) -> str | None:
        """The flag's value as typed, its default where it was left out."""
        return self.values[name] if name in self.values else BY_SPELLING[name].default

    def number(self, name: str) -> float | None:
        """The value as a number, None where it is none (`auto`, a switch, nothing)."""
        try:
            return float(self.get(name) or "")
        except ValueError:
            return None


def read_argv(argv: Iterable[str], extra: Mapping[str, int] | None = None) -> Argv:
    """Read an engine's argv (without or with the program's own name first).

    `extra` gives the arity of flags this table does not know, as a binary's `--help` tells them.
    """
    values: dict[str, str | None] = {}
    unknown: list[str] = []
    missing: list[str] = []
    rest = list(argv)
    if rest and not rest[0].startswith("-"):
        rest = rest[1:]
    at = 0
    while at < len(rest):
        word = rest[at]
        at += 1
        flag = BY_SPELLING.get(word)
        arity = flag.arity if flag else (extra or {}).get(word)
        if arity is None:
            unknown.append(word)
            continue
        name = flag.name if flag else word
        if not arity:
            values[name] = None
        elif at < len(rest):
            values[name] = rest[at]
            at += 1
        else:
            missing.append(name)
    return Argv(values, unknown, missing)
