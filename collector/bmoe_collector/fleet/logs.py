"""Structured logs: one line an event on stderr, as JSON or for reading.

In: `logging` records with `extra` fields. Out: lines. Secrets are never in a record: nothing here is given one.
"""

from __future__ import annotations

import json
import logging
import sys
import time

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One ASCII JSON object a record: time, level, event, then its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **fields(record),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


class Words(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        from bmoe_collector.show.safe import escape

        words = [time.strftime("%H:%M:%S", time.localtime(record.created)), escape(record.getMessage())]
        for name, value in fields(record).items():
            shown = value[:8] if name in {"phone", "run", "plan"} and isinstance(value, str) else value
            words.append(f"{name}={escape(shown)}")
        text = " ".join(words)
        return f"{text}\n{escape(self.formatException(record.exc_info), lines=True)}" if record.exc_info else text


def fields(record: logging.LogRecord) -> dict[str, object]:
    """What was given as `extra`."""
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


def set_up(form: str, *, verbose: bool = False) -> None:
    """Send this program's events to stderr; `form` is `json` or `text`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Words())
    logger = logging.getLogger("bmoe")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.propagate = False
