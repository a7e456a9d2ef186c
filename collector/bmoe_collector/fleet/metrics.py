"""The collector about itself, in the Prometheus text exposition format.

In: the board. Out: `text(board)`, and a small HTTP server on loopback that answers GET /metrics with it.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bmoe_collector.common import OutsideError
from bmoe_collector.fleet.phone import PhoneBoard, PhoneNow

STARTED = time.time()


def text(phones: Iterable[PhoneNow]) -> str:
    """The page, one family after another."""
    phones = list(phones)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    lines: list[str] = []

    def family(name: str, kind: str, about: str, rows: Iterable[tuple[str, float]]) -> None:
        lines.append(f"# HELP {name} {about}")
        lines.append(f"# TYPE {name} {kind}")
        lines.extend(f"{name}{labels} {value:g}" for labels, value in rows)

    family("bmoe_phones", "gauge", "Phones known to this collector, by state.", _by_state(phones))
    counters = (
        ("bmoe_batches_total", "Batches committed.", "batches"),
        ("bmoe_bytes_total", "Bytes of the record committed.", "bytes"),
        ("bmoe_runs_ended_total", "Runs whose every block was received.", "runs_ended"),
        ("bmoe_artifacts_total", "Files stored.", "artifacts"),
        ("bmoe_reconnects_total", "Connections that ended in trouble.", "reconnects"),
    )
    for name, about, attribute in counters:
        family(name, "counter", about, [(_labels(phone), getattr(phone, attribute)) for phone in phones])
    backlog = [(_labels(phone), float(phone.backlog_bytes)) for phone in phones if phone.backlog_bytes is not None]
    family("bmoe_backlog_bytes", "gauge", "What the phone still holds for this store.", backlog)
    heard = [(_labels(phone), phone.last_heard_wall_s) for phone in phones if phone.last_heard_wall_s is not None]
    family("bmoe_last_heard_seconds", "gauge", "Unix time when the phone was last heard.", heard)
    family("process_cpu_seconds_total", "counter", "CPU time used.", [("", usage.ru_utime + usage.ru_stime)])
    family("process_start_time_seconds", "gauge", "Unix time of the start.", [("", STARTED)])
    family("process_resident_memory_bytes", "gauge", "Resident memory.", [("", _resident_bytes())])
    family("process_open_fds", "gauge", "Open file descriptors.", [("", _open_files())])
    family("process_threads", "gauge", "Threads.", [("", threading.active_count())])
    return "\n".join(lines) + "\n"


def serve(board: PhoneBoard, port: int) -> ThreadingHTTPServer:
    """Answer on 127.0.0.1:`port` in a thread; `shutdown()` and `server_close()` end it."""

    class Page(BaseHTTPRequestHandler):
        """GET /metrics and nothing else."""

        def do_GET(self) -> None:
            """Answer with the page."""
            found = self.path.partition("?")[0] == "/metrics"
            body = text(board.all()).encode() if found else b"see /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
            """Say nothing: scrapes are not events."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Page)
    except OSError as error:
        raise OutsideError(f"--metrics {port}: {error.strerror}") from None
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


def _by_state(phones: list[PhoneNow]) -> list[tuple[str, float]]:
    states = sorted({phone.state for phone in phones})
    return [(f'{{state="{state}"}}', sum(phone.state == state for phone in phones)) for state in states]


def _labels(phone: PhoneNow) -> str:
    name = phone.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{phone="{phone.uuid}",name="{name}"}}'


def _resident_bytes() -> float:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _open_files() -> float:
    try:
        return float(len(os.listdir("/proc/self/fd")))
    except OSError:
        return float("nan")
