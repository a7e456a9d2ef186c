"""Real computing, for measuring what an observer costs an engine.

Comes in: threads and MiB a thread hashes for one token. Goes out: nothing but time spent: SHA-256 over a buffer, which
releases the interpreter's lock, on exactly that many threads, the calling one among them. They may be kept each on a
processor of its own, so that no two wait for one while another is idle.
"""

import hashlib
import os
import threading

_BLOCK = bytes(1 << 20)


class Burner:
    """A fixed amount of work per token on a fixed number of threads."""

    def __init__(self, threads: int, mib: float, *, pin: bool = False) -> None:
        self._rounds, rest = divmod(int(mib * (1 << 20)), len(_BLOCK))
        self._tail = _BLOCK[:rest]
        self._start = threading.Barrier(threads)
        self._end = threading.Barrier(threads)
        self._processors = sorted(os.sched_getaffinity(0)) if pin else []
        for number in range(1, threads):
            threading.Thread(target=self._work, args=(number,), name=f"compute-{number}", daemon=True).start()
        self._stay(0)

    def token(self) -> None:
        """Do one token's work; returns when every thread has done its share."""
        self._start.wait()
        self._share()
        self._end.wait()

    def _share(self) -> None:
        digest = hashlib.sha256()
        for _ in range(self._rounds):
            digest.update(_BLOCK)
        digest.update(self._tail)

    def _stay(self, number: int) -> None:
        if self._processors:
            os.sched_setaffinity(0, {self._processors[number % len(self._processors)]})

    def _work(self, number: int) -> None:
        self._stay(number)
        while True:
            self._start.wait()
            self._share()
            self._end.wait()
