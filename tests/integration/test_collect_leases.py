"""Two collectors on one Postgres and one phone: never both draining, and the second takes over from a killed one."""

import contextlib
import time
import urllib.request
from pathlib import Path

from support.adb import free_even_port
from support.agents import agent, wait_for
from support.host import Host


def state(port: int) -> str:
    """The one phone's state as a collector's metrics page has it; empty while there is no page."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        for line in page.read().decode().splitlines():
            if line.startswith("bmoe_phones{") and line.endswith(" 1"):
                return line.split('"')[1]
    return ""


def test_the_second_collector_takes_over_when_the_first_is_killed(postgres_url: str, tmp_path: Path) -> None:
    with agent(tmp_path / "phone") as phone, contextlib.ExitStack() as stack:
        phone.start()
        host = Host(tmp_path / "host")
        host.env |= {"BMOE_DB": postgres_url, "BMOE_ARTIFACTS": str(tmp_path / "artifacts")}
        where = f"local:{phone.socket}"
        host.pair(phone, where)
        collectors = {}
        for port in (free_even_port(), free_even_port()):
            words = ["collect", "--device", where, "--lease", "3", "--metrics", str(port)]
            collectors[port] = stack.enter_context(host.background(*words))
        wait_for(lambda: sorted(map(state, collectors)) == ["held", "ready"], "one to drain and one to wait")
        first, second = sorted(collectors, key=state, reverse=True)
        for _ in range(20):  # over more than one lease the holder stays the holder
            assert (state(first), state(second)) == ("ready", "held")
            time.sleep(0.2)
        collectors[first].kill()
        wait_for(lambda: state(second) == "ready", "the other to take over")
