"""`--link`: the token bucket and the emulated network, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytempo.errors import ClusterError
from polytempo.transport.link_emulation import AHEAD, EmulatedNetwork, Flow, LinkPlace, TokenBucket
from polytempo.units import parse_link, parse_links

RATES = st.floats(1e3, 1e9)
OFFERS = st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1)), min_size=1, max_size=60)


@given(RATES, st.floats(0.001, 1), OFFERS)
def test_no_window_passes_more_than_its_time_and_one_burst(rate: float, seconds: float, offers: list[tuple[float, float]]):
    """Offers: pauses, and parts of a full bucket. Every window between two passes is looked at, both ends included."""
    burst = rate * seconds
    bucket, now, passed = TokenBucket(rate, burst), 0.0, []
    for pause, share in offers:
        now += pause * seconds
        passed.append((bucket.ready_at(now, math.floor(share * burst)), math.floor(share * burst), now))
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            window = passed[last][0] - passed[first][0]
            assert sum(nbytes for _, nbytes, _ in passed[first : last + 1]) <= (rate * window + burst) * (1 + 1e-9)
    assert all(at >= came for at, _, came in passed)
    assert [at for at, _, _ in passed] == sorted(at for at, _, _ in passed)


@given(RATES, st.integers(1, 200))
def test_a_busy_bucket_passes_the_whole_rate(rate: float, count: int):
    """Chunks that are all there at once pass one after another without a gap: a reference that adds their times."""
    chunk = 1000
    bucket = TokenBucket(rate, 2 * chunk)
    times = [bucket.ready_at(5.0, chunk) for _ in range(count)]
    assert times == pytest.approx([5.0 + max(0, number - 1) * chunk / rate for number in range(count)], rel=1e-9)


def test_a_bucket_refuses_what_it_never_holds():
    with pytest.raises(ValueError, match="at most 100 bytes at once, got 101"):
        TokenBucket(1.0, 100).ready_at(0, 101)


class Traffic:
    """Greedy senders in virtual time: each flow sends its bytes as soon as it may; receivers take at once."""

    def __init__(self, network: EmulatedNetwork, wanted: Sequence[tuple[int | None, int | None, int]]) -> None:
        self.network = network
        self.left = {Flow(source, target): nbytes for source, target, nbytes in wanted}
        self.sent: dict[Flow, list[int]] = {flow: [] for flow in self.left}
        self.arrivals: list[tuple[float, Flow, int]] = []
        self.most_ahead = 0
        self.now = 0.0

    def fill(self, flow: Flow) -> None:
        while self.left[flow] and self.network.has_room(flow):
            nbytes = min(self.left[flow], self.network.chunk)
            self.left[flow] -= nbytes
            self.sent[flow].append(nbytes)
            self.network.send(flow, nbytes, self.now)
        self.most_ahead = max(self.most_ahead, flow.waiting)

    def run(self) -> float:
        """Until all is delivered; the time that took."""
        for flow in self.left:
            self.fill(flow)
        while (due := self.network.due()) is not None:
            self.now = due
            for place, flow in self.network.advance(due):
                if place is LinkPlace.DELIVERED:
                    nbytes = self.sent[flow].pop(0)
                    self.arrivals.append((self.now, flow, nbytes))
                    self.network.taken(flow, nbytes)
                self.fill(flow)
        assert not any(self.left.values())
        assert not any(self.sent.values())
        return self.now


ENDS = st.one_of(st.none(), st.integers(0, 3))


@given(
    st.floats(1e5, 1e9),
    st.floats(0, 0.1),
    st.lists(
        st.tuples(ENDS, ENDS, st.integers(1, 3_000_000)).filter(lambda wish: wish[0] != wish[1]), min_size=1, max_size=6
    ),
)
def test_a_network_carries_all_bytes_and_no_worker_more_than_its_rate(
    bandwidth: float, latency: float, wanted: list[tuple[int | None, int | None, int]]
):
    network = EmulatedNetwork(bandwidth, latency)
    wanted = [(source, target, min(nbytes, int(40 * network.chunk))) for source, target, nbytes in wanted]
    traffic = Traffic(network, wanted)
    seconds = traffic.run()
    burst = network._burst
    assert sum(nbytes for _, _, nbytes in traffic.arrivals) == sum(nbytes for _, _, nbytes in wanted)
    assert traffic.most_ahead <= AHEAD
    assert traffic.arrivals[0][0] >= latency
    for worker in range(4):
        received = [(at, nbytes) for at, flow, nbytes in traffic.arrivals if flow.target == worker]
        for first in range(len(received)):
            window = received[-1][0] - received[first][0]
            assert sum(nbytes for _, nbytes in received[first:]) <= (bandwidth * window + burst) * (1 + 1e-6)
        sent = sum(nbytes for source, _, nbytes in wanted if source == worker)
        assert sent <= bandwidth * (seconds - latency) * (1 + 1e-6) + burst * (1 + 1e-6)


@pytest.mark.parametrize("bandwidth", [125e3, 12.5e6, 125e6])
@pytest.mark.parametrize("latency", [0.0, 0.005, 0.1])
def test_a_transfer_takes_its_bytes_over_the_rate_and_one_latency(bandwidth: float, latency: float):
    """Between two workers, from a server, to a server: within 3 % of the ideal, by the network's own accounting."""
    nbytes = int(bandwidth * 4)
    for source, target in ((0, 1), (None, 1), (0, None)):
        seconds = Traffic(EmulatedNetwork(bandwidth, latency), [(source, target, nbytes)]).run()
        assert seconds == pytest.approx(4.0 + latency, rel=0.03)


def test_a_ring_is_full_duplex_and_a_meeting_point_is_shared():
    """Four workers in a ring: as long as one transfer. Three that send to one: three times as long."""
    ring = [(rank, (rank + 1) % 4, 50_000_000) for rank in range(4)]
    assert Traffic(EmulatedNetwork(12.5e6, 0.0), ring).run() == pytest.approx(4.0, rel=0.03)
    into_one = [(rank, 0, 10_000_000) for rank in (1, 2, 3)]
    assert Traffic(EmulatedNetwork(12.5e6, 0.0), into_one).run() == pytest.approx(2.4, rel=0.03)


def test_a_small_message_passes_beside_a_large_one():
    """A worker sends 100 MB to one server and a few bytes to another: those wait for two chunks at most, not for 8 s."""
    network = EmulatedNetwork(12.5e6, 0.0)
    traffic = Traffic(network, [(0, None, 100_000_000), (0, None, 100)])
    traffic.run()
    arrived = next(at for at, flow, nbytes in traffic.arrivals if nbytes == 100)
    assert arrived <= (AHEAD + 1) * network.chunk / 12.5e6


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"),
    [("100Mb/s", 12.5e6, 0.0), ("100Mb/s,5ms", 12.5e6, 0.005), ("1GB/s, 200us", 1e9, 0.0002), ("50Mbit/s", 6.25e6, 0.0)],
)
def test_a_link_is_parsed(text: str, bandwidth: float, latency: float):
    assert parse_link(text) == pytest.approx((bandwidth, latency))


@pytest.mark.parametrize(
    "text", ["", "fast", "0Mb/s", "100", "-1Mb/s", "100Mb/s,", "100Mb/s,fast", "1Mb/s,5ms,2", "100MB", "1Mb/s,1min"]
)
def test_nonsense_is_refused_in_one_line(text: str):
    with pytest.raises(ClusterError, match="--link") as caught:
        parse_link(text)
    assert "\n" not in str(caught.value)


def test_a_worker_may_have_a_link_of_its_own():
    assert parse_links("1Gb/s") == (parse_link("1Gb/s"), {})
    assert parse_links("1Gb/s,5ms,3:20Mb/s,1:8Mb/s") == (parse_link("1Gb/s,5ms"), {3: 2.5e6, 1: 1e6})
    for wrong in ("1Gb/s,x:20Mb/s", "3:20Mb/s", "1Gb/s,3:1kb/s"):
        with pytest.raises(ClusterError):
            parse_links(wrong)
    network = EmulatedNetwork(1e7, 0.0, {1: 1e5})
    times = {}
    for worker in (0, 1):
        flow, sent, now = Flow(worker, None), 0, 0.0
        while sent < 100_000:
            while network.has_room(flow):
                network.send(flow, network.chunk, now)
                sent += network.chunk
            now = network.due()
            for place, done in network.advance(now):
                if place is LinkPlace.DELIVERED:
                    network.taken(done, network.chunk)
        times[worker] = now
    assert times[0] < 0.05
    assert times[1] == pytest.approx(1.0, abs=0.15)
