"""What an engine was asked to do by its command line: argv and environment in, canonical flags to values out.

The argv is read by the one table of flags, so text inside a prompt is never taken for a flag. Environment variables
stand in for absent flags (generations.md, Flags), and old spellings become the flag they were an alias of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bmoe_proto.contract.flags import ENVIRONMENT, read_argv

_ALIASES = {"--dense-odirect": "anon", "--no-warm-dense": "mmap"}
_OFF = {"", "0", "false", "off", "no"}


def flags_of(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, str | bool]:
    """Canonical flag to its value as typed, True for a switch."""
    found: dict[str, str | bool] = {
        name: True if value is None else value for name, value in read_argv(argv).values.items()
    }
    for alias, policy in _ALIASES.items():
        if alias in found:
            found.setdefault("--dense-weights", policy)
    for variable, value in (environment or {}).items():
        flag = ENVIRONMENT.get(variable)
        if flag is None or flag.name in found:
            continue
        if flag.arity:
            found[flag.name] = str(value)
        elif str(value).lower() not in _OFF:
            found[flag.name] = True
    return found
