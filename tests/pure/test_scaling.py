"""What `--scaling` must show: the server saturates, more shards help, the ring stays flat."""

from __future__ import annotations

from polytempo.report.scaling import scaling
from polytempo.report.table import scaling_table
from polytempo.simulate.cluster import Cluster, Link
from polytempo.sync.spec import parse_spec


def test_server_saturates_shards_help_ring_stays_flat() -> None:
    cluster = Cluster(link=Link(0.0001, 1.25e8), model_bytes=1e8, batch=32)
    one, two, four, eight, ring = scaling(cluster, parse_spec("bsp"), steps_each=4)
    rates = {series.name: [p.samples_per_second for p in series.points] for series in (one, two, four, eight, ring)}
    assert rates["1 shard"][63] < 1.1 * rates["1 shard"][31]  # saturated: twice the workers, the same throughput
    for few, more in (("1 shard", "2 shards"), ("2 shards", "4 shards"), ("4 shards", "8 shards")):
        assert rates[more][63] > 1.7 * rates[few][63]
    efficiency = [point.efficiency for point in ring.points]
    assert min(efficiency[15:]) > 0.95 * max(efficiency[15:])  # flat from 16 to 64
    assert [len(series.points) for series in (one, ring)] == [64, 64]


def test_sizes_that_a_mode_refuses_are_left_out() -> None:
    (peers,) = scaling(
        Cluster(model_bytes=1.0), parse_spec("gossip:torus"), most=12, shards=(), rings=("peers",), steps_each=2
    )
    assert [point.workers for point in peers.points] == [1, 4, 6, 8, 9, 10, 12]
    (ps,) = scaling(Cluster(model_bytes=1.0), parse_spec("diloco:2,quorum=3"), most=5, shards=(1,), rings=(), steps_each=2)
    assert [point.workers for point in ps.points] == [3, 4, 5]
    assert "n = 4" in scaling_table([peers], "").markdown()
    assert "n = 2" not in scaling_table([peers], "").markdown()
