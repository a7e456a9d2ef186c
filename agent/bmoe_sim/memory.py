"""What the process and the machine say of memory, as the CSV's memory columns have it.

Comes in: nothing. Goes out: MiB by the contract's names ("Per-token rows", the trailing block), read from
/proc/self/status and /proc/meminfo; zeros where they cannot be read.
"""

import mmap
import os

_STATUS = {b"VmRSS": "rss_mib", b"RssAnon": "rss_anon_mib", b"RssFile": "rss_file_mib", b"VmSwap": "swap_mib"}
_MEMINFO = {b"MemAvailable": "mem_available_mib", b"MemFree": "mem_free_mib", b"SwapFree": "swap_free_mib"}


def anonymous(size: int) -> mmap.mmap:
    """Private anonymous memory (mmap's default is shared, which the kernel counts as shmem and not as RssAnon)."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Memory:
    """Opens the files once and reads them again from their start."""

    def __init__(self) -> None:
        self._files = [(_open("/proc/self/status"), _STATUS), (_open("/proc/meminfo"), _MEMINFO)]

    def read(self) -> dict[str, float]:
        """Current values in MiB."""
        out: dict[str, float] = {}
        for fd, names in self._files:
            if fd < 0:
                continue
            for line in os.pread(fd, 8192, 0).splitlines():
                key, _, rest = line.partition(b":")
                name = names.get(key)
                if name:
                    out[name] = int(rest.split()[0]) / 1024
        return out


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
