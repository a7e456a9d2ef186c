"""What a phone's shell is asked for `bmoe doctor`, and its answers apart.

In: something that runs a shell command on the phone. Out: an `Answers`: text by question, and for those that were refused, why.
Each question is a command of its own with its own deadline, so that a service that hangs costs its answer only. adb's plain shell
gives no exit status: it is printed behind a random mark.

A phone without a command (a plain Linux adbd has none of Android's) answers "not found": that is a refusal, never an answer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bmoe_proto import android

from bmoe_collector.common import OutsideError

Shell = Callable[[str], bytes]
_AT_ONCE = 3  # a phone's shell is asked by few at a time: it may be measuring
_REFUSED = re.compile(
    r"not found|inaccessible|no such file|permission denial|permission denied|not permitted|can't find service|"
    r"java\.lang\.|securityexception|failure calling service|unknown command|error: ",
    re.IGNORECASE,
)

QUESTIONS: Mapping[str, str] = {
    "sdk": "getprop ro.build.version.sdk",
    "model": "getprop ro.product.model",
    android.MONITOR: f"settings get global {android.MONITOR}",
    android.MONITOR_PROPERTY: f"getprop {android.MONITOR_PROPERTY}",
    "max_phantom_processes": "/system/bin/device_config get activity_manager max_phantom_processes",
    "sync_disabled": "/system/bin/device_config get_sync_disabled_for_tests",
    android.FREEZER: f"settings get global {android.FREEZER}",
    "use_freezer": "/system/bin/device_config get activity_manager_native_boot use_freezer",
    "packages": f"pm list packages {android.PACKAGE}",
    "whitelist": "dumpsys deviceidle whitelist",
    "bucket": f"am get-standby-bucket {android.PACKAGE}",
    "background": f"cmd appops get {android.PACKAGE} RUN_ANY_IN_BACKGROUND",
    "power": "dumpsys power | head -n 400",
    "doze": "dumpsys deviceidle get deep",
    "battery": "dumpsys battery",
    "thermal": "dumpsys thermalservice",
    "cpusets": "head -n 4 /dev/cpuset/*/cpus",
    "clocks": "cd /sys/devices/system/cpu/cpufreq && head -n 1 policy*/cpuinfo_max_freq policy*/scaling_max_freq policy*/related_cpus",
    # the brackets keep this shell's own argv from being found
    "agents": "for f in $(grep -la '[b]moe-agent' /proc/[0-9]*/cmdline); do p=${f%/cmdline}; "
    "if tr '\\0' ' ' <$f | grep -q '[b]moe-agent serve'; then echo \"pid ${p#/proc/}\"; "
    'grep Cpus_allowed_list $p/status; echo "cpuset $(cat $p/cpuset)"; fi; done 2>/dev/null',
    "page": "getconf PAGE_SIZE",
    "storage": "df -k /data",
    "time": "date +%s",
}
# where an empty answer says something: a property that was never set, no agent, no package of that name
_MAY_BE_EMPTY = frozenset(
    {android.MONITOR_PROPERTY, "agents", "packages", "background", "use_freezer", "max_phantom_processes"}
)


@dataclass(frozen=True, slots=True)
class Answers:
    """Text by question; refusals by question."""

    text: Mapping[str, str]
    refused: Mapping[str, str]


def ask(shell: Shell, questions: Mapping[str, str] = QUESTIONS) -> Answers:
    """Ask all of them. Raises `OutsideError` when the shell answers none."""
    mark = f"bmoe-answer-{secrets.token_hex(4)}"
    text: dict[str, str] = {}
    refused: dict[str, str] = {}
    lost: list[OutsideError] = []

    def one(name: str) -> tuple[str, str, int | None] | OutsideError:
        try:
            # in a sub-shell: a command that ends its shell must not take the mark along
            got = shell(f"( {questions[name]} ) 2>&1; echo; echo {mark} $?")
        except OutsideError as error:
            return error
        body, _, status = got.decode("utf-8", "replace").replace("\r\n", "\n").rpartition(mark)
        code = status.strip()
        return name, body.strip(), int(code) if code.isdigit() else None

    with ThreadPoolExecutor(_AT_ONCE, "doctor") as pool:
        for name, answer in zip(questions, pool.map(one, questions), strict=True):
            if isinstance(answer, OutsideError):
                lost.append(answer)
                refused[name] = str(answer)
                continue
            _, body, code = answer
            reason = why_refused(name, body, code)
            if reason:
                refused[name] = reason
            else:
                text[name] = body
    if lost and len(lost) == len(questions):
        raise lost[0]
    return Answers(text, refused)


def why_refused(name: str, body: str, code: int | None) -> str:
    """Why this is no answer; empty when it is one."""
    first = next((line.strip() for line in body.splitlines() if line.strip()), "")
    short = len(body) < 2000  # a long dump may well hold such words
    if code is None:
        return "the answer was cut short"
    if short and _REFUSED.search(body):
        return first[:200]
    if code and short:
        return first[:200] or f"exit {code}"
    if not body and name not in _MAY_BE_EMPTY:
        return "nothing came"
    return ""
