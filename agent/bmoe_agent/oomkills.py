"""Whether the kernel's memory controller killed something in the engine's group: the one trace of it that an app may see.

In: the roots, a process. Out: `Kills`, a group and how many processes the controller has killed in it so far. Read when the
engine starts and when it was found killed; a difference is evidence, not proof, since a group may hold other processes.

    proc/<pid>/cgroup    lines `<number>:<controllers>:<path>`; `0::<path>` is the unified hierarchy
    memory.events        `oom_kill <n>` among other lines, in the unified hierarchy
    memory.oom_control   the same line, in the memory controller's own hierarchy (where it is mounted differs)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bmoe_agent.roots import Roots

_LINE = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Kills:
    """A group's counter."""

    node: str
    group: str
    count: int


def count(roots: Roots, pid: int) -> Kills | None:
    """The counter of this process's group now; None where there is none to read."""
    for line in (roots.text(f"proc/{pid}/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if ".." in group:
            continue
        if not controllers:
            nodes = [f"sys/fs/cgroup{group}/memory.events", f"sys/fs/cgroup/unified{group}/memory.events"]
        elif "memory" in controllers.split(","):
            nodes = [f"sys/fs/cgroup/{controllers}{group}/memory.oom_control"]
        else:
            continue
        for node in nodes:
            if (found := again(roots, Kills(node, group, 0))) is not None:
                return found
    return None


def again(roots: Roots, before: Kills) -> Kills | None:
    """The same group's counter now."""
    found = _LINE.search(roots.text(before.node) or "")
    return Kills(before.node, before.group, int(found[1])) if found else None


def evidence(roots: Roots, before: Kills | None) -> str:
    """One sentence when the counter has grown since; empty when it has not, or cannot be read any more."""
    after = again(roots, before) if before is not None else None
    if before is None or after is None or after.count <= before.count:
        return ""
    return f"memory cgroup {before.group}: oom_kill went from {before.count} to {after.count} during this run"
