"""What the phone told about a run, protobuf messages to columns of `runs` and plain JSON.

In: RunStarted, RunEnded, SegmentOpened and their parts. Out: dicts by column name. Text the phone may hold as arbitrary
bytes is decoded for people here; the message as it came stays in the block.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from bmoe_proto.v1 import telemetry_pb2 as pb
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from bmoe_collector.store.engine import view

_VERSION = re.compile(r"(\d+\.\d+(?:\.\d+)*\S*)")
_MODEL_PROPERTIES = ("ro.product.model", "getprop:ro.product.model", "ro.product.marketname")


def message(told: Message) -> dict[str, Any]:
    """A message as JSON with the names of the .proto; 64-bit numbers as numbers, bytes as hex."""
    return _numbers(MessageToDict(told, preserving_proto_field_name=True), told)


def _numbers(found: dict[str, Any], told: Message) -> dict[str, Any]:
    """Undo protobuf's JSON habits: strings for 64-bit numbers, base64 for bytes."""
    for field, value in told.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.message_type is not None:
            if field.is_repeated:
                found[field.name] = [_numbers(a, b) for a, b in zip(found[field.name], value, strict=True)]
            else:
                found[field.name] = _numbers(found[field.name], value)
        elif field.type in (field.TYPE_UINT64, field.TYPE_INT64):
            found[field.name] = list(value) if field.is_repeated else int(value)
        elif field.type == field.TYPE_BYTES:
            found[field.name] = [_bytes(item) for item in value] if field.is_repeated else _bytes(value)
    return found


def _bytes(value: bytes) -> str:
    """Ids and hashes as hex, everything else as text."""
    return value.hex() if len(value) in (16, 32) and not value.isascii() else view(value)


def signed(value: int) -> int | None:
    """A uint64 as the databases hold it."""
    return value if value < 1 << 63 else None


def bounded(value: int) -> int:
    """A number for a column of 31 bits: a count that a phone cannot have is the most there is."""
    return min(value, (1 << 31) - 1)


def without_nul(told: Message) -> None:
    """Show NUL in a message's texts as `view` does: no text column can hold it. The frame as it came stays in its block."""
    for field, value in told.ListFields():
        if field.type == field.TYPE_STRING:
            if field.is_repeated:
                for at, item in enumerate(value):
                    if "\0" in item:
                        value[at] = view(item)
            elif "\0" in value:
                setattr(told, field.name, view(value))
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            if any("\0" in f"{key}{item}" for key, item in value.items()):
                clean = {view(key): view(item) for key, item in value.items()}
                value.clear()
                value.update(clean)
        elif field.message_type is not None:
            for item in value if field.is_repeated else (value,):
                without_nul(item)


def clock(pair: pb.ClockPair, boot_ns: int) -> int | None:
    """The wall time of a boot time, by a pair of both; None without one."""
    if not pair.wall_ns:
        return None
    return signed(max(0, pair.wall_ns + boot_ns - pair.boot_ns))


def version(told: str) -> str | None:
    """The version in what `--version` printed."""
    found = _VERSION.search(told)
    return found[1].removesuffix(",") if found else (told.strip().splitlines()[0][:80] if told.strip() else None)


def device_model(device: pb.DeviceFacts) -> str | None:
    """What the phone's maker calls it."""
    return next((device.properties[key] for key in _MODEL_PROPERTIES if device.properties.get(key)), None)


def started(told: pb.RunStarted, boot_ns: int) -> dict[str, Any]:
    """Columns of `runs` that are known before the engine is launched."""
    cell, device, engine, model = told.cell, told.device, told.engine, told.model
    argv = [view(item) for item in told.argv]
    prompt = cell.prompt or None
    question = _json(told.question_json)
    return {
        "simulated": told.simulated or engine.simulated or device.simulated,
        "device_name": device.name or None,
        "device_model": device_model(device),
        "device": message(device),
        "engine_name": engine.name or None,
        "engine_version": version(engine.version_text),
        "engine_sha256": engine.sha256[:64] or None,
        "engine": message(engine),
        "model_name": model.name or None,
        "model_arch": model.architecture or None,
        "model_size": signed(model.size) if model.size else None,
        "model_identity": model.identity or None,
        "model": message(model),
        "argv": argv,
        "environment": {view(key): view(value) for key, value in told.environment.items()},
        "prompt": prompt,
        "prompt_sha256": prompt_hash(cell),
        "plan_id": told.plan_id[:64] or None,
        "plan_name": told.plan_name or None,
        "plan_sha256": told.plan_sha256[:64] or None,
        "plan_cells": bounded(told.plan_cells) or None,
        "cell": cell.name or None,
        "cell_index": bounded(cell.index),
        "repeat": bounded(cell.repeat),
        "block": bounded(cell.block),
        "attempt": bounded(told.attempt) or None,
        "asked": message(cell),
        "sampling": message(told.sampling),
        "question": question,
        "unmeasured": cell.unmeasured,
        "session": bool(cell.turns) or "--session" in argv,
        "started_boot_ns": signed(boot_ns),
        "started_wall_ns": clock(told.clock, boot_ns),
        "clock_uncertainty_ns": signed(told.clock.uncertainty_ns),
        "boot_id": told.clock.boot_id[:64] or None,
        "directory": told.directory or None,
    }


def prompt_hash(cell: pb.Cell) -> str | None:
    """sha256 of what was asked: the prompt's bytes, or the session's turns as JSON; None when nothing was."""
    if cell.prompt:
        return hashlib.sha256(cell.prompt).hexdigest()
    if not cell.turns:
        return None
    turns = [[turn.kind, turn.prompt, turn.prefix, turn.suffix, list(turn.choices)] for turn in cell.turns]
    return hashlib.sha256(json.dumps(turns, separators=(",", ":")).encode()).hexdigest()


def plan(told: pb.RunStarted) -> dict[str, Any] | None:
    """A row of `plans`, None when the run belongs to none."""
    if not told.plan_id:
        return None
    return {
        "plan_id": told.plan_id[:64],
        "name": view(told.plan_name),
        "text": view(told.plan_text),
        "sha256": told.plan_sha256[:64],
        "cells": bounded(told.plan_cells),
        "question": _json(told.question_json),
        "submitted_wall_ns": None,
    }


def observer(told: pb.ObserverCost) -> dict[str, Any]:
    """The agent's own cost, in ms, bytes and counts."""
    return {
        "cpu_ms": told.cpu_ns / 1e6,
        "wakeups": told.wakeups,
        "preemptions": told.preemptions,
        "read_bytes": told.read_bytes,
        "write_bytes": told.write_bytes,
        "max_timer_slip_ms": told.max_timer_slip_ns / 1e6,
        "samples": told.samples,
        "sampling_ms": told.sampling_ns / 1e6,
    }


def _json(text: str) -> Any:
    if not text.strip():
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {"unreadable": text}
    return found if shallow(found) else {"unreadable": text}


def shallow(value: Any, levels: int = 32) -> bool:
    """Whether JSON is nested no deeper than anything here can write again."""
    if not isinstance(value, dict | list):
        return True
    items = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(shallow(item, levels - 1) for item in items)


def facts(text: str) -> Mapping[str, Any]:
    """A note's facts; text that is no JSON object is kept under `text`."""
    found = _json(text)
    if found is None:
        return {}
    return found if isinstance(found, dict) else {"value": found}
