"""What processes write, as lines and as bars: nothing is lost, nothing grows."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from polytempo.launcher.display import PLAIN_EVERY, Bars
from polytempo.launcher.terminal_output import LONGEST, MOST_ROWS, Screen

#: As tqdm writes them: an outer bar, an inner one below it that is wiped, a line in between, then a bar of its own.
NESTED = (
    "\repoch:   0%|  | 0/2\n\rbatch:   0%|  | 0/2\x1b[A\n\rbatch:  50%|# | 1/2\x1b[A\r                   \r\n\r"
    "                   \r\x1b[Ahello\n\repoch:   0%|  | 0/2\n\rbatch:  50%|# | 1/2\x1b[A\n\rbatch: 100%|##| 2/2\x1b[A"
    "\n\r                   \x1b[A\repoch:  50%|# | 1/2\n\rbatch:   0%|  | 0/2\x1b[A\n\r                   \x1b[A"
    "\repoch: 100%|##| 2/2\repoch: 100%|##| 2/2\n\rafter:   0%|  | 0/2\rafter:  50%|# | 1/2\rafter: 100%|##| 2/2\n"
)


def test_lines_are_what_they_were() -> None:
    screen = Screen()
    assert screen.feed(b"a\nb\r\n\nc") == ["a", "b", ""]
    assert screen.rows == ("c",)
    assert not screen.drawing
    assert screen.feed(b"d\r") == []
    assert screen.feed(b"\n\x1b[31mred\x1b[0m\n") == ["cd", "\x1b[31mred\x1b[0m"]
    assert screen.feed("é".encode()[:1]) == []
    assert screen.feed("é".encode()[1:] + b"\xff") == []
    assert screen.feed(b"", last=True) == ["é\ufffd"]


def test_a_bar_is_one_row_that_changes_and_a_line_at_its_end() -> None:
    screen = Screen()
    for done in range(0, 101, 10):
        assert screen.feed(f"\r{done:3d}%".encode()) == []
        assert screen.rows == (f"{done:3d}%",)
    assert screen.drawing
    assert screen.feed(b"\nnext\n") == ["100%", "next"]
    assert screen.rows == ()
    assert screen.feed(b"longer\rab\x1b[K\rc\n") == []
    assert screen.feed(b"1\b2", last=True) == ["cb", "2"]


@given(st.lists(st.integers(1, len(NESTED) - 1)))
def test_bars_below_bars_wherever_reading_stops(cuts: list[int]) -> None:
    screen, lines, data = Screen(), [], NESTED.encode()
    places = [0, *sorted(cuts), len(data)]
    for begin, end in pairwise(places):
        lines += screen.feed(data[begin:end])
        assert len(screen.rows) <= 3
    lines += screen.feed(b"", last=True)
    assert lines == ["epoch:   0%|  | 0/2", "hello", "epoch:   0%|  | 0/2", "epoch: 100%|##| 2/2", "after: 100%|##| 2/2"]


@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([b"\n", b"\r", b"\x1b[A", b"\x1b[3B", b"\x1b[2K", b"\b"]), max_size=200
    )
)
def test_whatever_comes_what_is_kept_is_bounded(parts: list[bytes]) -> None:
    screen = Screen()
    for part in parts:
        screen.feed(part)
        assert len(screen.rows) <= MOST_ROWS
    screen.feed(b"", last=True)
    assert screen.rows == ()


def test_a_line_without_end_and_a_flood_of_returns_are_bounded_and_none_is_lost() -> None:
    screen = Screen()
    lines = [line for _ in range(50) for line in screen.feed(b"x" * 10_000)]
    assert len(screen.rows[0]) <= LONGEST
    lines += screen.feed(b"", last=True)
    assert (len("".join(lines)), max(map(len, lines))) == (500_000, LONGEST)
    screen = Screen()
    flood = "".join(f"\r{number}" for number in range(100_000)).encode()
    assert [screen.feed(flood[at : at + 65536]) for at in range(0, len(flood), 65536)] == [[]] * 9
    assert screen.rows == ("99999",)


def test_without_a_terminal_a_bar_is_a_line_now_and_then() -> None:
    bars, shown = Bars(), []
    for second in range(21):
        bars.draw("0", True, (f"{second}",), True, float(second))
        bars.draw("1", False, ("...",), False, float(second))
        shown += bars.due(float(second))
    assert shown == [("0", True, text) for text in ("5", "10", "15", "20")], f"each {PLAIN_EVERY} s; no line without its end"
    assert bars.due(100.0) == [], "it has not changed"
    assert bars.rows(9) == ["[0] 20", "[1] ..."]
    assert bars.rows(1) == ["... and 2 more"]
    assert bars.was_said("0", True, "20"), "the bar's last state was shown: not twice"
    bars.draw("0", True, (), True, 101.0)
    assert bars.rows(9) == ["[1] ..."]
