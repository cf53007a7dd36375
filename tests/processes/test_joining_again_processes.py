"""init() after shutdown(), in one process: a new world under another launcher. Under ours, where the servers went on without
this rank, its optimizers are refused in one line, and nothing stale is used."""

from __future__ import annotations

import socket
import sys

from live import SCRIPTS, Bench

AGAIN = str(SCRIPTS / "again.py")
OVER = "has finished its part of this job with shutdown()"


def lives(out: str) -> dict[tuple[int, int], str]:
    """What was said by each rank in each of its lives."""
    found = {}
    for line in out.splitlines():
        _, _, said = line.partition("life ")
        if said:
            life, _, rank, _ = said.split(maxsplit=3)
            found[int(life), int(rank)] = said.partition(": ")[2]
    return found


def test_under_another_launcher_each_life_is_a_new_world(bench: Bench) -> None:
    """Two ranks as torchrun starts them on two hosts: they meet through a store, which has the keys of all lives."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        here = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        way = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "POLYTEMPO_KEY_FILE": "insecure"}
        ranks.append(bench.popen([sys.executable, AGAIN, str(bench.folder)], **here, **way))
    outs = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outs
    said = lives("".join(out for out, _ in outs))
    assert len(said) == 6
    for (life, _), text in said.items():
        assert text.startswith(f"sum {2 * (1 + life)}, trained; arrays refused: arrays live on servers")


def test_under_the_command_an_optimizer_after_shutdown_is_refused_and_collectives_work(bench: Bench) -> None:
    done = bench.run("run", "-n", "2", "--via", "allreduce", AGAIN, str(bench.folder))
    assert done.returncode == 0, done.stderr
    said = lives(done.stdout)
    assert len(said) == 6
    for (life, rank), text in said.items():
        trained, arrays = text.split("; ")[0], text.partition("; arrays")[2]
        assert trained.startswith(f"sum {2 * (1 + life)}, " + (f"refused: rank {rank} {OVER}" if life else "trained"))
        assert arrays.startswith(f" refused: rank {rank} {OVER}") == (life > 0)
