"""The points of the curves are where they are said to be, each with the limit of the machine."""

import pytest

from bayesbackprop_paper.bench import growth, report
from bayesbackprop_paper.bench.limits import step_work
from bayesbackprop_paper.bench.measuring import Config

pytestmark = pytest.mark.identities


def test_every_point_has_both_networks_and_their_limits() -> None:
    config = Config(report.this_run("growth", "", threads=1, rounds=2, seed=0))
    rows = growth.growth(config, growth.QUICK)
    ours = [row for row in rows if row.name == "bayesbackprop"]
    plain = [row for row in rows if row.name == "plain"]
    points = [(row.axis, row.units, row.batch, row.draws) for row in ours]
    assert points == [
        ("units", 2, 2, None),
        ("units", 4, 2, None),
        ("batch", 4, 1, None),
        ("batch", 4, 3, None),
        ("draws", 4, 1, 1),
        ("draws", 4, 1, 5),
    ]
    assert points == [(row.axis, row.units, row.batch, row.draws) for row in plain]
    for one, other in zip(ours, plain, strict=True):
        assert one.ratio == pytest.approx((one.milliseconds or 0) / (other.milliseconds or 0))
    for row in rows:
        assert min(row.limit or 0, row.gigaflops or 0, row.gigabytes or 0) > 0
    first = ours[0]
    work = step_work((784, 2, 2, 10), 2, 2)
    times = work.flops / (first.gigaflops or 0) / 1e6, work.moved / (first.gigabytes or 0) / 1e6
    assert first.limit == pytest.approx(max(times))
