"""Which draws of which sampler a push was made of: told by what happened since the push before."""

from __future__ import annotations

from polytempo.session.positions import Pass, Positions

from polytempo.protocol.values import Position


class Bench:
    """A worker's samplers, by name."""

    def __init__(self) -> None:
        self.positions = Positions()

    def draw(self, sampler: str, count: int, epoch: int = 0, end: bool = False, counts: bool = True) -> Pass:
        return self.more(self.positions.begin(sampler, epoch), count, end, counts)

    def more(self, one: Pass, count: int, end: bool = False, counts: bool = True) -> Pass:
        for _ in range(count):
            one.draw(counts)
        one.ended = end
        return one

    def push(self, samples: float | None = None) -> dict[str, tuple[int, int]]:
        return {p.sampler: (p.epoch, p.taken) for p in self.positions.pushed(samples)}


def test_without_a_sampler_there_is_no_position() -> None:
    assert Positions().pushed(8) == ()


def test_a_pass_that_goes_on_trains_and_one_that_has_ended_was_looked_at() -> None:
    bench = Bench()
    train = bench.draw("train", 4)
    bench.draw("check", 40, end=True)
    assert bench.push() == {"train": (0, 4)}
    bench.draw("check", 40, end=True)
    assert bench.push() == {"train": (0, 4)}, "a step on what the loader had already"
    bench.more(train, 4)
    assert bench.push() == {"train": (0, 8)}


def test_draws_without_gradients_do_not_train() -> None:
    bench = Bench()
    check = bench.draw("check", 8, counts=False)
    bench.draw("train", 4)
    assert bench.push(4) == {"train": (0, 4)}
    bench.more(check, 8, counts=False)
    assert bench.push(4) == {"train": (0, 4)}


def test_what_is_told_counts_and_never_more_than_was_drawn() -> None:
    bench = Bench()
    bench.draw("train", 12)
    assert [bench.push(4), bench.push(4)] == [{"train": (0, 4)}, {"train": (0, 8)}]
    assert bench.push(400) == {"train": (0, 12)}, "samples= may count something else, such as tokens"


def test_another_pass_of_the_sampler_that_trains_is_an_evaluation_until_the_first_is_used_up() -> None:
    bench = Bench()
    bench.draw("train", 12, end=True)  # read ahead to its end
    assert bench.push(4) == {"train": (0, 4)}
    bench.draw("train", 12, end=True)
    assert [bench.push(4), bench.push(4)] == [{"train": (0, 8)}, {"train": (0, 12)}]
    bench.draw("check", 40, end=True)
    bench.draw("train", 12, epoch=1, end=True)
    assert bench.push(4) == {"train": (1, 4)}


def test_a_new_epoch_takes_the_place_of_the_old_one() -> None:
    bench = Bench()
    train = bench.draw("train", 4)
    bench.push()
    bench.more(train, 0, end=True)
    bench.draw("train", 4, epoch=1)
    assert bench.push() == {"train": (1, 4)}


def test_several_samplers_may_train() -> None:
    bench = Bench()
    one, _ = bench.draw("one", 8), bench.draw("two", 2)
    assert bench.push(8) == {"one": (0, 8), "two": (0, 2)}
    bench.more(one, 8)
    assert bench.push(8) == {"one": (0, 16), "two": (0, 2)}


def test_passes_that_are_over_are_not_kept() -> None:
    bench = Bench()
    bench.draw("train", 4)
    for _ in range(100):
        bench.draw("check", 4, end=True)
        bench.push()
    assert len(bench.positions._passes) == 1


def test_names_are_the_same_for_the_same_data_and_tell_others_apart() -> None:
    positions, train, check, other = Positions(), list(range(9)), list(range(9)), [0] * 8

    def named(data: list[int], shuffled: bool = True, name: str = "", nameless: bool = False) -> str:
        return positions.identify(data, len(data), shuffled, name, nameless)

    names = [named(train), named(check), named(other), named(train, shuffled=False), named(train, name="mine")]
    assert len(set(names)) == 5
    assert named(train) == names[0]
    fresh = Positions()
    assert fresh.identify(other, 8, True, "", nameless=False) == names[2], "whatever else this worker makes first"
    assert Positions().identify(train, 9, True, "", nameless=True) == ""


def test_a_position_travels_without_its_samplers_name_too() -> None:
    assert Position(1, 2) == Position(1, 2, "")
