"""Residency against what the kernel really has in its page cache, and the arithmetic of the sample."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from bmoe_agent.residency.look import Residency, cells
from bmoe_agent.residency.mincore import Mapped, MincoreError
from bmoe_agent.residency.model import Extent, Layout
from bmoe_agent.residency.strata import Estimate, PageRange, Pages, draw, estimate, shares, together

pytestmark = pytest.mark.agent
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def disk(tmp_path):
    """A folder whose files can be dropped from the page cache (a tmpfs keeps everything)."""
    for folder in (tmp_path, Path.cwd()):
        probe = folder / f".probe-{os.getpid()}-{random.random()}"
        probe.write_bytes(b"\1" * PAGE * 64)
        try:
            drop(probe)
            with Mapped(str(probe)) as mapped:
                if mapped.count(0, 64) == 0:
                    yield tmp_path if folder == tmp_path else folder
                    return
        finally:
            probe.unlink()
    pytest.skip("no file here can be dropped from the page cache")


def drop(path):
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_pages(path, first, last):
    """Bring pages in without the kernel reading ahead."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), (last - first) * PAGE, first * PAGE)


def layout_of(path, *parts):
    extents, at = [], 0
    for part, layer, pages in parts:
        extents.append(Extent(0, at, pages * PAGE, part, layer))
        at += pages * PAGE
    return Layout((str(path),), (at,), tuple(extents), (None,))


def test_what_was_read_is_resident_part_by_part(disk):
    path = disk / f"m{random.random()}.bin"
    try:
        path.write_bytes(b"\1" * PAGE * 400)
        drop(path)
        read_pages(path, 0, 100)
        model = layout_of(path, ("dense", 0, 100), ("expert", 0, 100), ("expert", 1, 200))
        with Residency(model) as residency:
            sweep = residency.look(sweep=True, layers=True)
            sample = residency.look(layers=True)
        found = {part.part: part for part in sweep.parts}
        assert found["whole"].pages == 400
        assert found["dense"].fraction == 1.0
        assert found["expert"].fraction == 0.0
        assert found["layer:0"].fraction == 0.5
        assert found["layer:1"].fraction == 0.0
        assert all(part.standard_error == 0 for part in sweep.parts)
        assert sweep.method == "sweep"
        # So few pages are all looked at, so the sample is exact too.
        assert [(part.part, part.fraction) for part in sample.parts] == [
            (part.part, part.fraction) for part in sweep.parts
        ]
        assert sample.took_ns > 0
    finally:
        path.unlink(missing_ok=True)


def test_a_sample_is_within_its_error_of_the_sweep(disk):
    path = disk / f"m{random.random()}.bin"
    try:
        path.write_bytes(b"\1" * PAGE * 6000)
        drop(path)
        for first in range(1000, 4000, 300):
            read_pages(path, first, first + 100)
        with Residency(
            layout_of(path, ("dense", None, 1500), ("expert", 0, 4500)), source=random.Random(7)
        ) as residency:
            exact = {part.part: part for part in residency.look(sweep=True).parts}
            looks = [residency.look() for _ in range(20)]
        assert exact["whole"].pages_resident == 1000
        for look in looks:
            for part in look.parts:
                assert part.pages_looked_at < part.pages
                assert part.standard_error > 0
                assert abs(part.fraction - exact[part.part].fraction) < 6 * part.standard_error + 0.01
        mean = sum(look.parts[0].fraction for look in looks) / len(looks)
        assert mean == pytest.approx(exact["whole"].fraction, abs=0.02)
    finally:
        path.unlink(missing_ok=True)


def test_larger_pages_than_the_kernels_count_when_all_of_them_is_there(disk):
    path = disk / f"m{random.random()}.bin"
    try:
        path.write_bytes(b"\1" * (PAGE * 16 + 100))
        drop(path)
        read_pages(path, 0, 6)
        read_pages(path, 16, 17)
        with Mapped(str(path), PAGE * 4) as mapped:
            assert (mapped.page_bytes, mapped.pages) == (PAGE * 4, 5)
            assert mapped.count(0, 5) == 2
            assert list(mapped.resident([0, 1, 3, 4])) == [1, 0, 0, 1]
    finally:
        path.unlink(missing_ok=True)


def test_the_cost_does_not_grow_with_the_model(tmp_path):
    path = tmp_path / "sparse.bin"
    with open(path, "wb") as file:
        file.truncate(60 << 30)
    pages = (60 << 30) // PAGE
    with Residency(layout_of(path, ("dense", None, pages // 20), ("expert", 0, pages - pages // 20))) as residency:
        look = residency.look()
    assert look.method == "sample"
    assert sum(part.pages_looked_at for part in look.parts if part.part != "whole") <= 1100
    assert look.parts[0].fraction == 0
    assert 0 < look.parts[0].standard_error < 0.01
    assert look.cpu_ns < 10_000_000_000


def test_a_file_of_another_owner_is_unknown_not_resident(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    path = tmp_path / "shell.gguf"
    path.write_bytes(b"\1" * PAGE * 32)
    path.chmod(0o644)
    tmp_path.chmod(0o755)
    code = (
        "import os, sys\n"
        "from bmoe_agent.residency.look import Residency\n"
        "from bmoe_agent.residency.model import Extent, Layout\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"look = Residency(Layout(('shell.gguf',), ({PAGE * 32},), (Extent(0, 0, {PAGE * 32}, 'other', None),), (None,))).look()\n"
        "print(look.method, '|', look.problem, '|', len(look.parts))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert ran.stdout == "unavailable | unknown (not owner) | 0\n", ran.stderr


def test_a_missing_or_empty_file_is_said_not_raised(tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    with Residency(Layout((str(empty),), (0,), (), (None,))) as residency:
        assert residency.look().parts[0].pages == 0
    gone = Residency(Layout((str(tmp_path / "gone"),), (1,), (Extent(0, 0, 1, "other", None),), (None,))).look(
        sweep=True
    )
    assert gone.method == "unavailable"
    assert "No such file" in gone.problem


def test_a_closed_look_says_so_and_bad_pages_never_reach_the_kernel(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b"\1" * PAGE * 3)
    residency = Residency(layout_of(path, ("other", None, 3)))
    residency.close()
    assert residency.look().problem == "closed"
    with Mapped(str(path)) as mapped:
        for wrong in ([3], [-1]):
            with pytest.raises(IndexError):
                mapped.resident(wrong)
        with pytest.raises(IndexError):
            mapped.count(0, 4)
    with pytest.raises(MincoreError, match="No such file"):
        Mapped(str(tmp_path / "none"))


def test_every_page_is_in_one_cell_whatever_the_borders():
    extents = (
        Extent(0, 0, 100, "other", None),
        Extent(0, 100, 5000, "dense", 0),
        Extent(0, 5100, 90000, "expert", 0),
        Extent(0, 95100, 10, "dense", 1),
    )
    found = cells(Layout(("x",), (95110,), extents, (None,)), 4096, [-(-95110 // 4096)])
    pages = sorted((one.first, one.last) for part in found.values() for one in part.ranges)
    assert pages[0][0] == 0
    assert pages[-1][1] == 24
    assert all(left[1] == right[0] for left, right in itertools.pairwise(pages))


def test_places_lead_to_pages_over_several_ranges():
    pages = Pages([PageRange(0, 10, 12), PageRange(0, 5, 5), PageRange(1, 0, 3)])
    assert pages.count == 5
    assert [pages.at(place) for place in range(5)] == [(0, 10), (0, 11), (1, 0), (1, 1), (1, 2)]


def test_draws_are_distinct_inside_their_stratum_and_reach_every_page():
    source = random.Random(1)
    seen = set()
    for _ in range(400):
        for number, (first, second) in enumerate(draw(100, 20, source)):
            assert first != second
            assert {first // 10, second // 10} == {number}
            seen |= {first, second}
    assert seen == set(range(100))
    assert draw(5, 10, source) == [(0,), (1,), (2,), (3,), (4,)]


def test_the_stated_error_is_the_error_made():
    """Many samples of one known pattern: their spread is what each of them claims, within a third."""
    source = random.Random(3)
    pattern = [source.random() < 0.3 + 0.4 * (place > 6000) for place in range(10_000)]
    truth = sum(pattern) / len(pattern)
    found = [
        estimate(10_000, [[pattern[place] for place in places] for places in draw(10_000, 400, source)])
        for _ in range(400)
    ]
    errors = [one.fraction - truth for one in found]
    spread = (sum(error * error for error in errors) / len(errors)) ** 0.5
    claimed = (sum(one.variance for one in found) / len(found)) ** 0.5
    assert claimed == pytest.approx(spread, rel=0.33)
    assert abs(sum(errors) / len(errors)) < 4 * spread / 20


def test_none_found_is_not_certainly_none():
    one = estimate(1_000_000, [(0, 0)] * 200)
    assert one.fraction == 0
    assert 0.001 < one.standard_error < 0.005
    assert estimate(400, [(1,)] * 400) == Estimate(400, 400, 400, 1.0, 0.0)
    whole = together([one, estimate(1_000_000, [(1, 1)] * 200)])
    assert whole.fraction == pytest.approx(0.5)
    assert whole.standard_error < one.standard_error


def test_small_parts_get_their_share():
    dense, expert = shares([1000, 100_000], 1024, 32)
    assert 32 <= dense < expert
    assert dense + expert <= 1024
    assert shares([5, 100], 10, 32) == [5, 32]
