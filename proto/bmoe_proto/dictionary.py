"""The preset dictionary of codec 2 (framing.py): kernel text as phones print it, with unlikely digits.

A block of two seconds holds few samples, and most of each is the kernel's own words, the same for ever. Given to
zlib beforehand they cost nothing: blocks come out at about half the size, which is what keeps a night small
(tests/bench). Codec 2 means these very bytes: they are never edited; another text is another codec.
"""

from __future__ import annotations

from typing import Final

# zlib finds what is at the end cheapest, so what is in every sample comes last, in the order the sampler writes it.
_VMSTAT: Final = """\
nr_free_pages 0
nr_zone_inactive_anon 0
nr_zone_active_anon 0
nr_zone_inactive_file 0
nr_zone_active_file 0
workingset_refault_anon 0
workingset_refault_file 0
workingset_activate_file 0
pgpgin 0
pgpgout 0
pswpin 0
pswpout 0
pgfault 0
pgmajfault 0
pgscan_kswapd 0
pgscan_direct 0
pgsteal_kswapd 0
pgsteal_direct 0
oom_kill 0
"""
_STDOUT: Final = """\
BMOE_PROGRESS {"step":1,"steps":256,"wall_ms":0.0,"io_ms":0.0,"compute_ms":0.0,"mgmt_ms":0.0,"stall_ms":0.0,\
"read_mb":0.0,"cache_hit_pct":0.0,"majflt":0,"cpu_ms":0.0,"dense_resident_frac":-1,"delta_reasoning":"","delta_text":"
BMOE_LOAD {"mb":0.0,"ms":0.0}
"""
_PRESSURE: Final = """\
some avg10=0.00 avg60=0.00 avg300=0.00 total=0
full avg10=0.00 avg60=0.00 avg300=0.00 total=0
"""
_MEMINFO: Final = """\
MemTotal:        0 kB
MemFree:          0 kB
MemAvailable:    0 kB
Buffers:            0 kB
Cached:          0 kB
SwapCached:        0 kB
Active:          0 kB
Inactive:        0 kB
Active(anon):    0 kB
Inactive(anon):   0 kB
Active(file):    0 kB
Inactive(file):  0 kB
Unevictable:      0 kB
Mlocked:          0 kB
SwapTotal:       0 kB
SwapFree:        0 kB
Dirty:               0 kB
Writeback:             0 kB
AnonPages:       0 kB
Mapped:           0 kB
Shmem:             0 kB
KReclaimable:     0 kB
Slab:             0 kB
SReclaimable:     0 kB
SUnreclaim:       0 kB
KernelStack:       0 kB
ShadowCallStack:   0 kB
PageTables:        0 kB
SecPageTables:         0 kB
NFS_Unstable:          0 kB
Bounce:                0 kB
WritebackTmp:          0 kB
CommitLimit:     0 kB
Committed_AS:   0 kB
VmallocTotal:   263061440 kB
VmallocUsed:      0 kB
VmallocChunk:          0 kB
Percpu:            0 kB
AnonHugePages:         0 kB
ShmemHugePages:        0 kB
ShmemPmdMapped:        0 kB
FileHugePages:         0 kB
FilePmdMapped:         0 kB
CmaTotal:         0 kB
CmaFree:               0 kB
HugePages_Total:       0
HugePages_Free:        0
HugePages_Rsvd:        0
HugePages_Surp:        0
Hugepagesize:       2048 kB
Hugetlb:               0 kB
DirectMap4k:       0 kB
"""
_IO: Final = """\
rchar: 0
wchar: 0
syscr: 0
syscw: 0
read_bytes: 0
write_bytes: 0
cancelled_write_bytes: 0
"""
_STAT: Final = """\
 (bmoe-cli) S 1 0 0 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 0 0 0 18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 17 0 0 0 \
0 0 0 0 0 0 0 0 0 0
"""
_STATUS: Final = """\
Name:	bmoe-cli
Umask:	0077
State:	R (running)
State:	S (sleeping)
Tgid:	0
Ngid:	0
Pid:	0
PPid:	0
TracerPid:	0
Uid:	10000	10000	10000	10000
Gid:	10000	10000	10000	10000
FDSize:	64
Groups:	3003 9997 20000 50000
NStgid:	0
NSpid:	0
NSpgid:	0
NSsid:	0
Kthread:	0
VmPeak:	 0 kB
VmSize:	 0 kB
VmLck:	       0 kB
VmPin:	       0 kB
VmHWM:	 0 kB
VmRSS:	 0 kB
RssAnon:	 0 kB
RssFile:	 0 kB
RssShmem:	       0 kB
VmData:	 0 kB
VmStk:	    8192 kB
VmExe:	       0 kB
VmLib:	    0 kB
VmPTE:	    0 kB
VmSwap:	       0 kB
HugetlbPages:	       0 kB
CoreDumping:	0
THP_enabled:	1
untag_mask:	0xffffffffffffff
Threads:	0
SigQ:	0/0
SigPnd:	0000000000000000
ShdPnd:	0000000000000000
SigBlk:	0000000000000000
SigIgn:	0000000000000000
SigCgt:	0000000000000000
CapInh:	0000000000000000
CapPrm:	0000000000000000
CapEff:	0000000000000000
CapBnd:	0000000000000000
CapAmb:	0000000000000000
NoNewPrivs:	0
Seccomp:	2
Seccomp_filters:	1
Speculation_Store_Bypass:	vulnerable
SpeculationIndirectBranch:	unknown
Cpus_allowed:	ff
Cpus_allowed_list:	0-7
Mems_allowed:	1
Mems_allowed_list:	0
voluntary_ctxt_switches:	0
nonvoluntary_ctxt_switches:	0
"""


def _entry(name: str, text: str) -> bytes:
    """A file as sample_text.py lays it out: kind and length of the name in one varint, the name, length, bytes."""
    path, data = name.encode("ascii"), text.encode("ascii")
    return b"".join((_varint(len(path) << 2), path, _varint(len(data)), data))


def _varint(value: int) -> bytes:
    return bytes((value,)) if value < 128 else bytes((value & 127 | 128, value >> 7))


def _dictionary() -> bytes:
    cpufreq = "sys/devices/system/cpu/cpufreq/policy"
    parts = [
        _STDOUT.encode("ascii"),
        _entry("proc/vmstat", _VMSTAT),
        _entry("sys/class/power_supply/battery/type", "Battery\n"),
        *(_entry(f"sys/class/thermal/thermal_zone{zone}/type", "cpu-0-0-usr\n") for zone in (10, 1)),
        *(_entry(f"{cpufreq}{policy}/cpuinfo_max_freq", "0000000\n") for policy in (4, 0)),
        *(_entry(f"sys/class/thermal/thermal_zone{zone}/temp", "00000\n") for zone in range(31)),
        *(_entry(f"{cpufreq}{policy}/scaling_cur_freq", "0000000\n") for policy in range(8)),
        _entry("proc/engine/status", _STATUS),
        _entry("proc/engine/stat", _STAT),
        _entry("proc/engine/io", _IO),
        _entry("proc/engine/schedstat", "000000000000 0000000000 00000\n"),
        _entry("proc/engine/cpuset", "/top-app\n"),
        _entry("proc/meminfo", _MEMINFO),
        _entry("proc/pressure/cpu", _PRESSURE),
        _entry("proc/pressure/memory", _PRESSURE),
        _entry("proc/pressure/io", _PRESSURE),
    ]
    for policy in (0, 2, 4, 6, 7):
        parts.append(_entry(f"{cpufreq}{policy}/scaling_cur_freq", "0000000\n"))
        parts.append(_entry(f"{cpufreq}{policy}/scaling_max_freq", "0000000\n"))
    parts.extend(_entry(f"sys/class/thermal/thermal_zone{zone}/temp", "00000\n") for zone in range(10))
    parts.append(_entry("sys/class/power_supply/battery/capacity", "00\n"))
    parts.append(_entry("sys/class/power_supply/battery/temp", "000\n"))
    parts.append(_entry("sys/class/power_supply/battery/status", "Discharging\n"))
    parts.append(_entry("sys/class/power_supply/battery/current_now", "-000000\n"))
    parts.append(b"\x0a\x04fast\x12")
    return b"".join(parts)


KERNEL_TEXT: Final[bytes] = _dictionary()
"""The dictionary, as bytes."""
