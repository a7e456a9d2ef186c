"""Quantiles of t and shares of the normal distribution, against the library that has them."""

from __future__ import annotations

import pytest
from bmoe_collector.compare.student import below, normal_below, quantile
from scipy import special


@pytest.mark.parametrize("df", [1, 2, 3, 5, 11, 30, 98, 2000, 19_998])
@pytest.mark.parametrize("share", [1e-6, 0.025, 0.5, 0.8, 0.975, 0.9999])
def test_quantiles_are_the_library_s(df, share):
    assert quantile(df, share) == pytest.approx(float(special.stdtrit(df, share)), rel=1e-9, abs=1e-12)
    assert below(quantile(df, share), df) == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize("value", [-9.0, -3.0, -1.96, 0.0, 0.5, 4.0])
def test_shares_of_the_normal_distribution_are_the_library_s(value):
    assert normal_below(value) == pytest.approx(float(special.ndtr(value)), rel=1e-12)
