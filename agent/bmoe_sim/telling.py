"""Tokens onto stdout: telemetry lines, or the bare text, and the faults that live in the lines themselves.

Comes in: rows and deltas from the engine. Goes out: bytes to the output.
"""

import signal

from bmoe_sim.faults import die
from bmoe_sim.output import Output
from bmoe_sim.row import Row
from bmoe_sim.settings import Settings


class Teller:
    """Writes each token of the process; it counts them, since faults name tokens of the process."""

    def __init__(self, output: Output, settings: Settings, *, lines: bool, streaming: bool) -> None:
        self._output, self._settings = output, settings
        self._lines = lines
        self._always = settings.old and streaming  # 0.19 prints BMOE_LOAD with zeros too
        self._token = 0

    def emit(self, row: Row, piece: bytes, text: bytes, reasoning: bytes, reset: bool) -> None:
        """One token."""
        self._token += 1
        fault = self._settings.fault
        overflow = fault("overflow", self._token)
        if overflow:
            self._output.write(b"x" * int(overflow.arg or (1 << 20)) + b"\n")
        if fault("noise", self._token):
            self._output.write(b"\xff\xfe\x80\x00garbage \xc3\x28\n")
        data = piece
        if self._lines:
            data = row.lines(text, reasoning, reset=reset, load_always=self._always)
        if fault("torn", self._token):
            self._output.write(data[: max(1, len(data) - 20)] if len(data) > 40 else data[:1])
            die(signal.SIGKILL)
        self._output.write(data)
