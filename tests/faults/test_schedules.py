"""A short fixed set of fault schedules, at a fifth of the default timers; `make test-faults` plays 300.

Together they have both databases, one phone and two, a Wi-Fi phone, a full disk, a reboot, a torn tail, and
every part killed or stopped.
"""

import itertools
from collections import Counter

import pytest
from faults.harness.actions import ACTIONS
from faults.harness.play import play
from faults.harness.schedule import KINDS, make, plan_text
from support.phones import need_phones
from support.postgres import binaries

SEEDS = (13, 16, 19, 40)
SCALE = 0.2


def test_a_seed_is_one_schedule_and_all_faults_come_up():
    drawn = [make(seed, SCALE) for seed in range(1, 301)]
    assert drawn == [make(seed, SCALE) for seed in range(1, 301)]
    counted = Counter(step.fault for schedule in drawn for step in schedule.steps)
    assert set(counted) == set(KINDS) == set(ACTIONS)
    assert min(counted.values()) >= 10
    assert Counter(schedule.database for schedule in drawn)["postgresql"] > 80
    for schedule in drawn:
        assert "[[cells]]" in plan_text(schedule)
        assert all(0 <= step.phone < schedule.phones or not KINDS[step.fault].of_phone for step in schedule.steps)


def test_two_faults_of_one_part_never_overlap():
    for seed in range(1, 301):
        spans: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for step in make(seed, SCALE).steps:
            for part in KINDS[step.fault].parts:
                spans.setdefault((part, step.phone), []).append((step.at_s, step.at_s + step.hold_s))
        for taken in spans.values():
            taken.sort()
            assert all(one[1] < other[0] for one, other in itertools.pairwise(taken)), seed


def test_the_fixed_set_has_what_it_says():
    chosen = [make(seed, SCALE) for seed in SEEDS]
    assert {schedule.database for schedule in chosen} == {"sqlite", "postgresql"}
    assert any(schedule.wifi for schedule in chosen)
    assert any(schedule.small for schedule in chosen)
    faults = {step.fault for schedule in chosen for step in schedule.steps}
    assert {
        "agent_kill",
        "adbd_kill",
        "server_kill",
        "collector_kill",
        "database_kill",
        "reboot",
        "tail_torn",
    } <= faults


@pytest.mark.serial
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", SEEDS)
def test_everything_is_there_once_and_nothing_leaks(seed):
    need_phones()
    schedule = make(seed, SCALE)
    if schedule.database == "postgresql" and binaries() is None:
        pytest.skip("no PostgreSQL server here: apt-get install postgresql")
    result = play(schedule)
    assert result.problems == [], result.as_dict()
    assert result.runs >= len(schedule.cells) * schedule.phones
