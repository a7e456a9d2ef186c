"""The sampler: what it reads, what it tells of refusals, and whose files it reads."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bmoe_agent.roots import Roots, lay
from bmoe_agent.sampling import Observer, Sampler
from bmoe_proto import kernel
from bmoe_proto.sample_text import decode
from bmoe_proto.v1 import telemetry_pb2 as pb

pytestmark = pytest.mark.agent
TREES = Path(__file__).parent.parent / "support" / "trees"


def names(text):
    return [entry.name for entry in decode(text)]


def test_the_handmade_bytes_are_the_message(tmp_path):
    roots = lay(TREES / "thermal_readable_capped.toml", tmp_path)
    with Sampler(roots, 4242, clock_ns=lambda: 5) as by_hand, Sampler(roots, 4242, clock_ns=lambda: 5) as by_library:
        for kind in ("entry", "launch", "fast", "turn", "exit"):
            assert pb.Sample.FromString(by_hand.encoded(kind)) == by_library.sample(kind)


def test_text_is_as_read_and_each_fast_sample_can_be_read_alone(tmp_path):
    roots = lay(TREES / "thermal_readable_capped.toml", tmp_path)
    with Sampler(roots, 4242) as sampler:
        sampler.sample("entry")
        fast = decode(sampler.sample("fast").text)
        kept = {entry.name: entry.data for entry in fast}
        assert kept["proc/engine/stat"] == (tmp_path / "proc/4242/stat").read_bytes()
        values = kernel.values(fast).values
        assert values["cpu_temp_c"] == 63.4
        assert values["clock_cap_ratio"] == pytest.approx(0.6566, abs=1e-4)
        (tmp_path / "sys/class/thermal/thermal_zone5/temp").write_text("70100\n")
        assert kernel.sample_values(sampler.sample("fast").text).values["cpu_temp_c"] == 70.1


def test_page_tables_are_walked_only_around_the_measured_part(tmp_path):
    roots = lay(TREES / "pages_16k_thermal_refused.toml", tmp_path)
    with Sampler(roots, 4242) as sampler:
        walked = {
            kind: "proc/engine/smaps_rollup" in names(sampler.sample(kind).text)
            for kind in ("entry", "launch", "fast", "turn", "idle", "exit")
        }
    assert walked == {"entry": True, "launch": True, "fast": False, "turn": False, "idle": False, "exit": True}


def test_a_refusal_is_told_once_and_tried_again_at_the_ends(tmp_path):
    roots = lay(TREES / "old_kernel_much_refused.toml", tmp_path)
    with Sampler(roots, 4242) as sampler:
        told = [
            sum(entry.name == "proc/engine/io" for entry in decode(sampler.sample(kind).text))
            for kind in ("entry", "fast", "fast", "exit")
        ]
        assert told == [1, 0, 0, 1]
        assert sampler.refused["proc/4242/io"] == errno.EACCES


def test_what_was_refused_first_is_read_when_it_opens_later(tmp_path):
    laid = lay(TREES / "old_kernel_much_refused.toml", tmp_path)
    allowed = dict(laid.refused)
    roots = Roots(laid.proc, laid.sys, refused=allowed)
    with Sampler(roots, 4242) as sampler:
        sampler.sample("entry")
        del allowed["proc/4242/io"]
        (tmp_path / "proc/4242/io").write_text("read_bytes: 7\n")
        assert "io_read_bytes" not in kernel.sample_values(sampler.sample("fast").text).values
        assert kernel.sample_values(sampler.sample("turn").text).values["io_read_bytes"] == 7
        assert kernel.sample_values(sampler.sample("fast").text).values["io_read_bytes"] == 7


def test_a_real_process_that_ends_is_told_and_never_opened_again():
    engine = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"], stdin=-1, stdout=-1
    )
    try:
        assert engine.stdout.readline() == b"1\n"
        with Sampler(Roots()) as sampler:
            before = kernel.sample_values(sampler.sample("entry").text).values
            assert "rss_kib" not in before
            sampler.attach(engine.pid)
            alive = kernel.sample_values(sampler.sample("fast").text).values
            assert alive["rss_kib"] > 1000
            assert alive["start_ticks"] > 0
            engine.communicate()
            gone = kernel.sample_values(sampler.sample("fast").text)
            assert gone.refused["proc/engine/status"].startswith("ESRCH")
            assert "rss_kib" not in gone.values
            assert gone.values["mem_available_kib"] > 0
            last = kernel.sample_values(sampler.sample("exit").text)
            assert last.refused["proc/engine/status"].startswith("ESRCH")  # not ENOENT: it was not looked for again
            assert "rss_kib" not in last.values
    finally:
        engine.kill()
        engine.wait()
        engine.stdout.close()
        engine.stdin.close()


def test_descriptors_are_given_back(tmp_path):
    roots = lay(TREES / "thermal_readable_capped.toml", tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    sampler = Sampler(roots, 4242)
    sampler.sample("entry")
    assert len(os.listdir("/proc/self/fd")) > before
    sampler.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_longer_than_the_read_is_marked_cut(tmp_path):
    roots = lay(TREES / "pages_16k_thermal_refused.toml", tmp_path)
    (tmp_path / "proc/meminfo").write_bytes(b"MemFree: 1 kB\n" + b"x" * 40000)
    with Sampler(roots) as sampler:
        entry = next(one for one in decode(sampler.sample("fast").text) if one.name == "proc/meminfo")
    assert entry.cut
    assert entry.data.startswith(b"MemFree: 1 kB\n")


def test_the_observer_counts_itself(tmp_path):
    cpu = iter([1_000, 5_000])
    observer = Observer(cpu_ns=lambda: next(cpu))
    assert observer.slept(250_000_000, 240_000_000) == 0
    assert observer.slept(250_000_000, 3_250_000_000) == 3_000_000_000
    with Sampler(lay(TREES / "pages_16k_thermal_refused.toml", tmp_path), 4242) as sampler:
        sampler.sample("fast")
        cost = observer.cost(sampler)
    assert (cost.cpu_ns, cost.samples, cost.max_timer_slip_ns) == (4_000, 1, 3_000_000_000)
    assert cost.sampling_ns > 0


def test_what_an_agent_before_had_cost_is_not_forgotten():
    before = pb.ObserverCost(cpu_ns=7_000, wakeups=3, samples=9, sampling_ns=5, max_timer_slip_ns=2_000_000_000)
    cpu = iter([1_000, 5_000])
    observer = Observer(cpu_ns=lambda: next(cpu), carried=before)
    observer.slept(250_000_000, 260_000_000)
    cost = observer.cost()
    assert (cost.cpu_ns, cost.samples, cost.max_timer_slip_ns) == (11_000, 9, 2_000_000_000)
    assert cost.wakeups >= 3
