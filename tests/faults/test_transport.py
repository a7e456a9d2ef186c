"""Everything between a phone and the database is taken away in turn while two phones measure; nothing may be lost.

Two real adbd phones, a real adb server, `bmoe collect` as a process. Afterwards the database holds exactly what the
engines wrote (their own independent copies), every run's counts and hash agree, and no forward is left.
"""

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import wait_for
from support.host import Host, check_against_copies, check_no_forwards, terminate, wait_for_frames
from support.phones import Shelf, shelf

pytestmark = pytest.mark.serial

SETTINGS = "tok_s=25,load_s=0.1,prefill_s=0.1"
FLAGS = ["--", "--moe-stream", "--cache-mb", "4", "--force-cache"]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Shelf]:
    with shelf(tmp_path / "shelf", phones=2, settings=SETTINGS) as made:
        yield made


@pytest.fixture
def host(two: Shelf, tmp_path: Path) -> Host:
    made = Host(tmp_path / "host", two.env)
    for phone in two.phones:
        made.pair(phone.agent, phone.serial)
    return made


def frames(host: Host) -> int:
    with contextlib.suppress(sqlite3.OperationalError):
        return int(host.rows("select coalesce(sum(frames), 0) n from blocks")[0]["n"])
    return 0


def start(host: Host, tokens: int) -> None:
    asked = ["--model", "tiny.gguf", "-p", "faults", "-n", str(tokens), "--trace", "route", "--all", "--detach"]
    assert len(host.json("run", *asked, *FLAGS)["phones"]) == 2


def finish(host: Host, shelf_: Shelf) -> None:
    """Bring the rest, and compare."""
    host.json("collect", "--until-drained", timeout_s=90)
    check_against_copies(host, [phone.copies for phone in shelf_.phones])
    check_no_forwards(shelf_)


def test_forward_adbd_and_server_taken_away_while_measuring(two: Shelf, host: Host) -> None:
    with host.background("collect", "--log", "json") as collector:
        start(host, 250)
        wait_for_frames(host, 8, runs=2)
        two.server.adb("forward", "--remove-all")  # somebody else's tidying
        two.phones[0].kill_adbd()
        time.sleep(0.5)
        two.phones[0].start_adbd()
        seen = frames(host)
        wait_for(lambda: frames(host) >= seen + 4, "frames after the forwards went and an adbd was restarted")
        two.server.kill()
        seen = frames(host)
        # the collector starts a server again and calls both phones by itself
        wait_for(lambda: frames(host) >= seen + 4, "frames after the adb server was killed")
        wait_for(lambda: str(len(host.rows("select 1 from runs where ended"))) == "2", "both runs to end", 90)
        assert terminate(collector) == 0
    finish(host, two)
    assert {row["outcome"] for row in host.rows("select outcome from runs")} == {"ok"}


def test_agent_and_collector_killed_while_measuring(two: Shelf, host: Host) -> None:
    with host.background("collect", "--lease", "3"):
        start(host, 200)
        wait_for_frames(host, 8, runs=2)
        two.phones[1].agent.kill()
        time.sleep(1.0)
        two.phones[1].agent.start()
        seen = frames(host)
        wait_for(lambda: frames(host) >= seen + 4, "frames after an agent was killed")
    # leaving the block SIGKILLed the collector with the cells still measured
    seen = frames(host)
    with host.background("collect", "--lease", "3") as second:
        wait_for(lambda: frames(host) > seen, "the second collector to take over")
        second.kill()
    finish(host, two)
    runs = host.rows("select outcome, run_no from runs")
    assert len(runs) == 2
    assert {row["outcome"] for row in runs} == {"ok"}
    segments = host.rows("select run_no, count(*) n from segments group by run_no")
    assert sorted(row["n"] for row in segments) == [1, 2]  # the killed agent went on in a segment of its own


def test_a_frozen_phone_is_noticed_and_the_other_drained_meanwhile(two: Shelf, host: Host) -> None:
    import signal
    import urllib.request

    from support.adb import free_even_port

    port = free_even_port()

    def states() -> dict[str, int]:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            lines = [line for line in page.read().decode().splitlines() if line.startswith("bmoe_phones{")]
            return {line.split('"')[1]: int(line.split()[-1]) for line in lines}
        return {}

    with host.background("collect", "--metrics", str(port)) as collector:
        wait_for(lambda: states().get("ready") == 2, "both phones to be drained")
        two.phones[0].agent.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        wait_for(lambda: states().get("frozen") == 1, "the frozen phone to be noticed")
        noticed_s = time.monotonic() - stopped
        assert states().get("ready") == 1
        two.phones[0].agent.signal(signal.SIGCONT)
        wait_for(lambda: states().get("ready") == 2, "the phone to be back")
        assert terminate(collector) == 0
    assert noticed_s < 20  # 15 s at default settings, and what this machine's load adds
    check_no_forwards(two)
