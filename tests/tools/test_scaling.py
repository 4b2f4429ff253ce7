"""tools/benchmark/scaling.py: time of a ring all-reduce, scaling efficiency and predicted speeds."""

import pytest
from command import load_script

scaling = load_script("tools/benchmark/scaling.py")


def test_ring_all_reduce_time_matches_formula():
    links = scaling.Links("some", inside=100.0, between=10.0, latency=0.25)
    # 2 x 7/8 x 1000 bytes at 80 bytes/s plus 14 hops; between machines at 8 bytes/s plus 126 hops.
    assert scaling.all_reduce_seconds(1000, 8, links) == pytest.approx(2 * 7 / 8 * 1000 / 80 + 14 * 0.25)
    assert scaling.all_reduce_seconds(1000, 64, links) == pytest.approx(2 * 63 / 64 * 1000 / 8 + 126 * 0.25)
    assert scaling.all_reduce_seconds(2 * scaling.BUCKET, 2, links) > 2 * 2 * 0.25  # latency per bucket


def test_scaling_efficiency_with_overlap_hides_communication_in_backward_pass():
    assert scaling.efficiencies(0.3, 0.1) == pytest.approx((0.75, 1.0))
    assert scaling.efficiencies(0.3, 0.3) == pytest.approx((0.5, 0.75))


def test_scaling_prediction_has_two_rows_per_interconnect():
    assert scaling.prediction(0.1, 10**8, 64).count("\n") == 1 + 2 * len(scaling.LINKS)
