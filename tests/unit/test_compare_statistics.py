"""What the statistics promise: a 5 % test that is one, intervals that cover, and no significance from too few runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from bmoe_collector.compare.statistics import drift, holm, jointly, paired, pairs_resolve, unpaired, within_run
from support.campaigns import called_different, rates


def test_five_hundred_equal_campaigns_are_called_different_at_most_37_times():
    called = sum(called_different(6 + seed % 5, 0.0, [seed]) for seed in range(500))
    assert 2 <= called <= 37


def test_unpaired_equal_groups_are_seldom_called_different():
    rng = np.random.default_rng(5)
    called = sum(
        unpaired(np.exp(rng.normal(0, 0.05, 5)).tolist(), np.exp(rng.normal(0, 0.05, 6)).tolist(), seed=seed).resolved
        for seed in range(200)
    )
    assert called <= 20


def test_power_at_five_percent_grows_with_the_pairs():
    seen = [called_different(pairs, 0.05, range(100)) for pairs in (6, 10, 20)]
    assert 5 <= seen[0] < seen[1] < seen[2]
    assert seen[2] >= 60


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    covered = 0
    for seed in range(200):
        effect = paired(*rates(10, 0.05, seed, walk=0.0))
        covered += effect.low <= 1.05 <= effect.high
    assert covered >= 180


@pytest.mark.parametrize("pairs", [2, 3, 4, 5])
def test_fewer_than_six_pairs_cannot_resolve_anything(pairs):
    effect = paired([1.0 + 0.001 * at for at in range(pairs)], [9.0 + 0.001 * at for at in range(pairs)])
    assert effect.can_resolve is False
    assert effect.resolved is False
    assert effect.smallest_resolvable is None
    assert effect.runs_needed >= 6


def test_three_runs_a_side_cannot_resolve_and_four_can():
    a, b = [1.0, 1.01, 1.02, 1.015], [2.0, 2.01, 2.02, 2.015]
    assert unpaired(a[:3], b[:3]).resolved is False
    assert unpaired(a, b).resolved is True


def test_the_p_value_of_six_pairs_is_the_exact_one():
    effect = paired([1.0] * 6, [1.1, 1.2, 1.3, 1.15, 1.05, 1.25])
    assert effect.p == pytest.approx(2 / 64)
    assert effect.ratio == pytest.approx(math.exp(np.mean(np.log([1.1, 1.2, 1.3, 1.15, 1.05, 1.25]))))


def test_runs_needed_falls_with_the_wanted_effect_and_is_none_past_reason():
    a, b = rates(8, 0.0, 3)
    assert paired(a, b, wanted=0.05).runs_needed > paired(a, b, wanted=0.20).runs_needed >= 6
    assert paired(a, b, wanted=1e-6).runs_needed is None


def test_the_same_numbers_give_the_same_answer():
    a, b = rates(20, 0.03, 9)
    assert paired(a, b) == paired(a, b)
    assert unpaired(a, b) == unpaired(a, b)


def test_a_block_bootstrap_is_wider_than_a_naive_interval_on_autocorrelated_tokens():
    rng = np.random.default_rng(2)
    series = []
    for _ in range(2):
        value, tokens = 0.0, []
        for _ in range(600):
            value = 0.6 * value + rng.normal(0, 0.1)
            tokens.append(math.exp(value))
        series.append(tokens)
    ratio, low, high = within_run(*series)
    shuffled = [list(rng.permutation(one)) for one in series]
    _, naive_low, naive_high = within_run(*shuffled)
    assert low < ratio < high
    assert (high - low) > 1.3 * (naive_high - naive_low)


def test_holm_never_lowers_and_skips_what_was_not_tested():
    assert holm([0.01, None, 0.04, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06), pytest.approx(0.06)]


@pytest.mark.parametrize("pairs", [True, False])
def test_of_many_equal_metrics_one_is_called_different_in_one_campaign_of_twenty(pairs):
    rng = np.random.default_rng(11)
    wrong = 0
    for _ in range(200):
        common = rng.normal(0, 0.03, (2, 1, 8))
        values = np.exp(common + rng.normal(0, 0.03, (2, 9, 8)))
        found = jointly([(a, b) for a, b in zip(values[0], values[1], strict=True)], pairs=pairs)
        wrong += min(found) <= 0.05
    assert wrong <= 20


def test_joint_p_values_are_never_below_the_metrics_own():
    rng = np.random.default_rng(3)
    metrics = [(np.exp(rng.normal(0, 0.05, 7)), np.exp(rng.normal(0.05, 0.05, 7))) for _ in range(6)]
    own = [unpaired(a, b).p for a, b in metrics], [paired(a, b).p for a, b in metrics]
    joint = jointly(metrics, pairs=False), jointly(metrics, pairs=True)
    for alone, together in zip(own, joint, strict=True):
        assert all(one >= other - 1e-9 for one, other in zip(together, alone, strict=True))
    assert jointly(metrics[:1], pairs=True)[0] == pytest.approx(own[1][0])
    assert jointly(metrics[:1], pairs=False)[0] == pytest.approx(own[0][0])
    assert jointly([], pairs=True) == []
    assert jointly([([1.0] * 6, [1.0] * 6)], pairs=True) == [1.0]


def test_drift_sees_a_monotone_fall_and_not_noise():
    assert drift([10, 9.8, 9.5, 9.1, 8.8, 8.4])[1] <= 0.05
    rng = np.random.default_rng(1)
    assert sum(drift(list(rng.normal(size=8)))[1] <= 0.05 for _ in range(100)) <= 12
    assert drift([1, 2, 3]) == (0.0, 1.0)


def test_six_pairs_of_runs_that_spread_by_five_percent_resolve_about_ten():
    assert pairs_resolve(5, 0.05) is None
    assert 0.08 < pairs_resolve(6, 0.05) < 0.14
