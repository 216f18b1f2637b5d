from __future__ import annotations

import pytest
from scipy import stats

from lineattn.analysis.runs import mean_std, paired_interval, verdict


def test_mean_and_spread():
    assert mean_std([1.0, 2.0, 6.0]) == (3.0, pytest.approx(7**0.5))
    assert mean_std([5.0]) == (5.0, None)


def test_one_image_more_with_every_seed_has_no_spread():
    """Accuracies are counts; rounding makes their equal differences unequal."""
    right = [401, 407, 399, 411, 405]
    _, low, high = paired_interval([100 * (k + 1) / 450 for k in right], [100 * k / 450 for k in right])
    assert low != high and verdict(low, high) == "within noise"


def test_paired_interval_is_that_of_a_paired_t_test():
    a, b = [97.1, 98.4, 96.9], [96.0, 98.6, 95.2]
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    centre, low, high = paired_interval(a, b)
    assert (low, high) == pytest.approx((expected.low, expected.high))
    assert centre == pytest.approx(sum(x - y for x, y in zip(a, b, strict=True)) / 3)
