"""`bmoe doctor [DEVICE]`: what a good night needs of this host and of a phone, and the commands that mend what is missing.

Without DEVICE this host and, in a line each, every phone in sight. With one (name, uuid, adb serial or `local:SOCKET`) the phone too:
how adb and its agent stand, and what Android may do to it. `--json`: `{"ok": bool, "host": [check], "devices": [{"where": [places],
"uuid": text or null, "state": text, "checks": [check]}]}`, a check being `{"name", "state": "ok|warn|fail|unknown", "seen", "fix"}`.
Exit 1 when something fails.
"""

from __future__ import annotations

import contextlib
import re
from typing import Annotated, Any

import typer

from bmoe_collector.common import BmoeError, DbOption, JsonOption, OutsideError, UserError, counted, emit, open_db
from bmoe_collector.doctor.check import FAIL, OK, UNKNOWN, WARN, Check
from bmoe_collector.host import HostHome

_MARKS = {OK: " ok ", WARN: "warn", FAIL: "FAIL", UNKNOWN: " ?  "}
_PERMISSIONS = [
    "apt install android-sdk-platform-tools-common   # udev rules",
    "sudo usermod -aG plugdev $USER",
    "adb kill-server",
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    device: Annotated[
        str | None, typer.Argument(metavar="[DEVICE]", help="Name, uuid, adb serial or local:SOCKET; none: this host.")
    ] = None,
    json: JsonOption = False,
    db: DbOption = None,
) -> None:
    """Check what a good night needs, and print the command for what is missing."""
    from bmoe_collector.doctor import machine

    host = HostHome()
    mine = machine.examine(db, host)
    devices = _devices(device, db, host, mine)
    checks = [*mine, *(check for line in devices for check in line["checks"])]
    ok = all(check.state != FAIL for check in checks)
    if json:
        shown = [{**line, "checks": [check.to_json() for check in line["checks"]]} for line in devices]
        emit({"ok": ok, "host": [check.to_json() for check in mine], "devices": shown})
    else:
        _show(mine, devices)
    if not ok:
        raise typer.Exit(1)


def _devices(word: str | None, db: str | None, host: HostHome, mine: list[Check]) -> list[dict[str, Any]]:
    """The phones asked for (all in sight without a word), each with its checks."""
    from bmoe_collector.commands.devices import look
    from bmoe_collector.commands.pairing import reach_for
    from bmoe_collector.reach.routes import LOCAL

    if any(check.name == "database" and check.state == FAIL for check in mine):
        if word:
            raise OutsideError("without the database phones cannot be told apart: mend it first (`bmoe doctor`)")
        return []
    with contextlib.closing(open_db(db)) as store, reach_for(host, store.store_id, [word] if word else []) as reach:
        if word and reach.adb and re.search(r":\d+$", word) and not word.startswith("local:"):
            with contextlib.suppress(OutsideError):  # its state says so below
                reach.adb.connect(word)
        lines = look(store, host, reach)
        if word is not None:
            lines = _chosen(word, lines)
        found = []
        for line in lines:
            checks = [_agent(line)]
            here = line["places"] and all(place.startswith(LOCAL) for place in line["places"])
            if word is not None and reach.adb is not None and not here:
                checks += _through_adb(reach.adb, line)
            found.append(
                {
                    "where": line["places"],
                    "uuid": line["uuid"],
                    "name": line["name"],
                    "state": line["state"],
                    "checks": checks,
                }
            )
        return found


def _chosen(word: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    exact = [line for line in lines if word in line["places"] or (line["name"] and line["name"] == word)]
    found = exact or [
        line
        for line in lines
        if line["uuid"] and re.fullmatch(r"[0-9a-f]{4,32}", word) and line["uuid"].startswith(word)
    ]
    if not found:
        places = sorted(place for line in lines for place in line["places"])
        raise UserError(f"no phone {word!r} is in sight; in sight: {', '.join(places) or 'none'}")
    uuids = {line["uuid"] for line in found}
    if len(uuids) > 1 and not exact:
        raise UserError(f"{word!r} means {len(uuids)} phones: {', '.join(sorted(uuid[:12] for uuid in uuids if uuid))}")
    return found


def _agent(line: dict[str, Any]) -> Check:
    """How the agent stands, as `bmoe devices` tells the states apart."""
    state, detail, advice = line["state"], line.get("detail") or "", line.get("advice") or ""
    if state == "ready":
        blind = ", ".join(sorted(line.get("unreadable") or {}))
        seen = f"version {line.get('agent_version')}, {line.get('doing')}, {counted(len(line.get('engines') or []), 'engine')}, "
        seen += counted(len(line.get("models") or []), "model")
        seen += f"; gates it cannot read alone: {blind}" if blind else ""
        return Check("agent", OK, seen)
    fix = [advice] if advice else []
    if state == "offline" and "adb says no" in detail:
        fix = _PERMISSIONS
    seen = f"{state}: {detail}" if detail else state
    return Check("agent", WARN if state in {"unpaired", "away", "held"} else FAIL, seen, fix)


def _through_adb(adb: Any, line: dict[str, Any]) -> list[Check]:
    """What the phone's shell says, over the first of its transports that is up."""
    from bmoe_collector.doctor import dumps
    from bmoe_collector.doctor.asking import ask

    try:
        transports = [item for item in adb.transports() if item.serial in line["places"]]
    except BmoeError as problem:
        return [Check("transport", FAIL, str(problem), ["adb kill-server && adb start-server"])]
    up = next((item for item in sorted(transports, key=lambda item: item.is_address) if item.state == "device"), None)
    if up is None:
        states = ", ".join(f"{item.serial} {item.state}" for item in transports) or "adb does not list it"
        return [Check("transport", FAIL, states, [line["advice"]] if line.get("advice") else [])]
    found = [Check("transport", OK, f"{up.serial} {'over the network' if up.is_address else 'over a cable'}")]
    try:
        answers = ask(lambda command: adb.shell(up.transport_id, command))
    except BmoeError as problem:
        return [*found, Check("shell", FAIL, f"the phone's shell does not answer: {problem}", ["adb reconnect"])]
    return found + dumps.examine(answers)


def _show(mine: list[Check], devices: list[dict[str, Any]]) -> None:
    from bmoe_collector.show.safe import escape

    groups = [("this host", mine)]
    groups += [
        (" ".join([line["name"] or line["uuid"] or "", *line["where"]]).strip() or "a phone", line["checks"])
        for line in devices
    ]
    width = max(len(check.name) for _, checks in groups for check in checks)
    for title, checks in groups:
        print(escape(title))
        for check in checks:
            print(f"  {_MARKS[check.state]}  {check.name:{width}}  {escape(check.seen)}")
            for command in check.fix:
                print(f"  {'':{width + 8}}> {escape(command)}")
    if not devices:
        print("no phone in sight: plug one in with USB debugging on, or `adb connect HOST:PORT`")
    elif all(len(line["checks"]) == 1 for line in devices):
        print("`bmoe doctor PHONE` asks one of them what Android may do to it")
