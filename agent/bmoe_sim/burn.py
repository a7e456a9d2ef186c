"""Real computing, for measuring what an observer costs an engine.

Comes in: threads and MiB a thread hashes for one token. Goes out: nothing but time spent: SHA-256 over a buffer, which
releases the interpreter's lock, on exactly that many threads, the calling one among them.
"""

import hashlib
import threading

_BLOCK = bytes(1 << 20)


class Burner:
    """A fixed amount of work per token on a fixed number of threads."""

    def __init__(self, threads: int, mib: float) -> None:
        self._rounds, rest = divmod(int(mib * (1 << 20)), len(_BLOCK))
        self._tail = _BLOCK[:rest]
        self._start = threading.Barrier(threads)
        self._end = threading.Barrier(threads)
        for number in range(1, threads):
            threading.Thread(target=self._work, name=f"compute-{number}", daemon=True).start()

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

    def _work(self) -> None:
        while True:
            self._start.wait()
            self._share()
            self._end.wait()
