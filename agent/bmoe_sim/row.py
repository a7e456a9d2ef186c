"""One token as the engine tells it, and the totals of a generation.

Comes in: numbers. Goes out: the texts of the contract: a CSV row ("Per-token rows"), a BMOE_LOAD and BMOE_PROGRESS
line ("Per-token lines"). Decimals are the engine's.
"""

from dataclasses import dataclass, field

from bmoe_sim.streamer import Counters
from bmoe_sim.timing import PrefillCost

COLUMNS = (
    "step,steps,wall_ms,io_ms,compute_ms,read_bytes,cache_hit_pct,stall_ms,mgmt_ms,majflt,cpu_ms,dense_resident_frac,"
    "turn,majflt_mib,cache_budget_mib,rss_mib,rss_anon_mib,rss_file_mib,swap_mib,mem_available_mib,mem_free_mib,"
    "swap_free_mib,loop_overhead_ms,mtp_batch,mtp_draft_ms,drain_ms,adopt_ms,ra_issue_ms,ra_wd_ms"
)
_MIB = 1 << 20


@dataclass(slots=True)
class Row:
    """The CSV's columns by name, zero where a later row of a speculative group carries zeros."""

    step: int
    steps: int
    cache_hit_pct: float
    turn: int
    cache_budget_mib: float
    wall_ms: float = 0.0
    io_ms: float = 0.0
    compute_ms: float = 0.0
    read_bytes: int = 0
    stall_ms: float = 0.0
    mgmt_ms: float = 0.0
    majflt: int = 0
    cpu_ms: float = 0.0
    dense_resident_frac: float = -1.0
    majflt_mib: float = 0.0
    rss_mib: float = 0.0
    rss_anon_mib: float = 0.0
    rss_file_mib: float = 0.0
    swap_mib: float = 0.0
    mem_available_mib: float = 0.0
    mem_free_mib: float = 0.0
    swap_free_mib: float = 0.0
    loop_overhead_ms: float = 0.0
    mtp_batch: int = 1
    mtp_draft_ms: float = 0.0
    drain_ms: float = 0.0
    adopt_ms: float = 0.0
    ra_issue_ms: float = 0.0
    ra_wd_ms: float = 0.0

    def csv(self, *more: int) -> str:
        """The CSV row; `more` are a patched engine's own columns."""
        own = "".join(f",{value}" for value in more)
        return (
            f"{self.step},{self.steps},{self.wall_ms:.3f},{self.io_ms:.3f},{self.compute_ms:.3f},{self.read_bytes},"
            f"{self.cache_hit_pct:.2f},{self.stall_ms:.3f},{self.mgmt_ms:.3f},{self.majflt},{self.cpu_ms:.3f},"
            f"{self.dense_resident_frac:.3f},{self.turn},{self.majflt_mib:.2f},{self.cache_budget_mib:.1f},"
            f"{self.rss_mib:.1f},{self.rss_anon_mib:.1f},{self.rss_file_mib:.1f},{self.swap_mib:.1f},"
            f"{self.mem_available_mib:.1f},{self.mem_free_mib:.1f},{self.swap_free_mib:.1f},"
            f"{self.loop_overhead_ms:.3f},{self.mtp_batch},{self.mtp_draft_ms:.3f},{self.drain_ms:.3f},"
            f"{self.adopt_ms:.3f},{self.ra_issue_ms:.3f},{self.ra_wd_ms:.3f}{own}\n"
        )

    def lines(self, text: bytes, reasoning: bytes, *, reset: bool, load_always: bool) -> bytes:
        """The BMOE_LOAD line where there is one, and the BMOE_PROGRESS line with its deltas."""
        out = b""
        if load_always or self.read_bytes or self.io_ms > 0:
            out = f'BMOE_LOAD {{"mb":{self.read_bytes / _MIB:.2f},"ms":{self.io_ms:.1f}}}\n'.encode()
        head = (
            f'BMOE_PROGRESS {{"step":{self.step},"steps":{self.steps},"wall_ms":{self.wall_ms:.1f},'
            f'"io_ms":{self.io_ms:.1f},"compute_ms":{self.compute_ms:.1f},"mgmt_ms":{self.mgmt_ms:.1f},'
            f'"stall_ms":{self.stall_ms:.1f},"read_mb":{self.read_bytes / _MIB:.2f},'
            f'"cache_hit_pct":{self.cache_hit_pct:.1f},"majflt":{self.majflt},"cpu_ms":{self.cpu_ms:.1f},'
            f'"dense_resident_frac":{self.dense_resident_frac:.3f},{chr(34) + "reset" + chr(34) + ":1," if reset else ""}'
        )
        return (
            out
            + head.encode()
            + b'"delta_reasoning":"'
            + escape(reasoning)
            + b'","delta_text":"'
            + escape(text)
            + b'"}\n'
        )


_ESCAPES = {ord('"'): b'\\"', ord("\\"): b"\\\\", ord("\n"): b"\\n", ord("\r"): b"\\r", ord("\t"): b"\\t"}
_TABLE = [_ESCAPES.get(i, b"\\u%04x" % i if i < 0x20 else bytes([i])) for i in range(256)]


def escape(text: bytes) -> bytes:
    """A JSON string's inside, bytes beyond ASCII left as they are, halves of characters too."""
    return b"".join([_TABLE[byte] for byte in text])


@dataclass
class Summary:
    """A generation's totals, from which trailer, BMOE_DONE and report are made."""

    n_prompt: int
    load_s: float
    turn: int
    tokens: int = 0
    n_past: int = 0
    cancelled: bool = False
    text: bytes = b""
    reasoning: bytes = b""
    wall_ms: float = 0.0
    io_ms: float = 0.0
    compute_ms: float = 0.0
    stall_ms: float = 0.0
    mgmt_ms: float = 0.0
    cpu_ms: float = 0.0
    majflt: int = 0
    read_bytes: int = 0
    overhead_ms: float = 0.0
    draft_ms: float = 0.0
    drain_ms: float = 0.0
    adopt_ms: float = 0.0
    ra_issue_ms: float = 0.0
    ra_wd_ms: float = 0.0
    decodes: int = 0
    drafted: int = 0
    drafted_steps: int = 0
    demand_bytes: int = 0
    widest_layer_bytes: int = 0
    hit_pct: float = -1.0
    resident_mib: float = 0.0
    budget_mib: float = 0.0
    count: Counters = field(default_factory=Counters)
    prefill: PrefillCost = field(default_factory=PrefillCost)
    dev_tokens: int = 0
    dev_nodes: int = 0
    dev_read_mib: float = 0.0
    dev_stall_s: float = 0.0
    row_table_mib: float = 0.0
    row_rows: int = 0
    row_reads: int = 0
    row_read_mib: float = 0.0
    row_errors: int = 0

    def add(self, row: Row) -> None:
        """Count a token in."""
        self.tokens += 1
        self.wall_ms += row.wall_ms
        self.io_ms += row.io_ms
        self.compute_ms += row.compute_ms
        self.stall_ms += row.stall_ms
        self.mgmt_ms += row.mgmt_ms
        self.cpu_ms += row.cpu_ms
        self.majflt += row.majflt
        self.read_bytes += row.read_bytes
        self.overhead_ms += row.loop_overhead_ms
        self.draft_ms += row.mtp_draft_ms
        self.drain_ms += row.drain_ms
        self.adopt_ms += row.adopt_ms
        self.ra_issue_ms += row.ra_issue_ms
        self.ra_wd_ms += row.ra_wd_ms

    def per_token_s(self, ms: float) -> float:
        """A total in milliseconds as seconds a token."""
        return ms / 1e3 / self.tokens if self.tokens else 0.0

    @property
    def tok_s(self) -> float:
        """The headline: decode time alone (contract: What tok/s does not include)."""
        return self.tokens * 1e3 / self.wall_ms if self.wall_ms > 0 else 0.0

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens a second."""
        return self.n_prompt / self.prefill.seconds if self.prefill.seconds > 0 else 0.0

    @property
    def read_mib(self) -> float:
        """Flash bytes of this generation's decodes, speculative ones too."""
        return self.read_bytes / _MIB

    @property
    def accepted(self) -> int:
        """Drafts that were confirmed."""
        return self.tokens - self.decodes if self.drafted else 0
