"""A job that is told to end: whichever of its processes are told, how often, in which order, what was trained is saved."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from live import PACED, Bench, finished, wait_until
from test_deaths import saved_in, servers_of

from polytempo.checkpoints import find_checkpoint

#: A scheduler's way to end a job, and a terminal's that is closed.
ASKING = (signal.SIGTERM, signal.SIGHUP)


def trains(bench: Bench, *ranks: int) -> None:
    """Wait until these workers have made some steps."""
    wait_until(lambda: all((bench.folder / f"clock-{r}").exists() and len(bench.clock(r)) > 5 for r in ranks))


def is_saving(bench: Bench) -> bool:
    """Has server 0 written its part of a checkpoint, while server 1, which is stopped, has not?"""
    return list((bench.folder / "saved").glob("*.partial/shard-0.safetensors")) != []


def tell(processes: Sequence[psutil.Process], chance: random.Random) -> None:
    """Send a signal that asks to end to all of them, in any order, some of them twice."""
    for process in chance.sample([*processes, *chance.choices(processes, k=3)], len(processes) + 3):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(chance.choice(ASKING))


def has_ended(process: subprocess.Popen[str], seconds: float = 0.01) -> bool:
    """Has a command ended, at the latest in so many seconds?"""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def is_pending(process: int) -> bool:
    """Has a signal been sent to this process that it has not got yet? Two of a kind would count as one."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return any(int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd")))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_job_ends_cleanly(number: signal.Signals, bench: Bench) -> None:
    process = bench.start("run", "-n", "2", "--sync", "asp", PACED, ".", "steps=100000")
    trains(bench, 1)
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "going on" not in err, "ends that were asked for are no deaths"
    assert err.splitlines()[-1] == "polytempo: interrupted; all processes have ended"


def test_signals_to_every_process_never_cancel_a_save(bench: Bench) -> None:
    """Launcher, servers, workers, an agent and its worker get SIGTERM and SIGHUP again and again, from before the save until
    the last of them has ended. Server 1 sleeps meanwhile, so that the save is under way for as long as the test likes."""
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    print("seed", seed)
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--servers", "2", "--checkpoint", "saved", "--record", "record", "--grace", "60"]
    away = ["--listen", listen, "--expect", "1", "--insecure"]
    launcher = bench.start("run", "-n", "1", *flags, *away, PACED, ".", "steps=100000")
    wait_until(lambda: list(bench.temporary.glob("polytempo-*/server-1")) != [])
    agent = bench.start("worker", "--join", listen, "--insecure", PACED, ".", "steps=100000")
    trains(bench, 0, 1)
    everyone, (_, asleep) = bench.processes(), servers_of(launcher.pid)
    asleep.suspend()
    before = max(event["version"] for event in bench.events() if event["kind"] == "apply")
    tell(everyone, chance)
    wait_until(lambda: is_saving(bench) or has_ended(launcher))
    for _ in range(30):
        tell(everyone, chance)
        assert not has_ended(launcher, chance.uniform(0, 0.02)), "no number of them ends the wait for the save"
    asleep.resume()
    while not has_ended(launcher) or not has_ended(agent):
        tell(everyone, chance)
    done, left = finished(launcher), finished(agent)
    assert (done.returncode, left.returncode) == (130, 130), done.stderr
    (name,) = saved_in(bench)
    assert done.stderr.splitlines()[-1].endswith(f"all processes have ended; go on with --resume saved/{name}")
    step = int(name.removeprefix("step-"))
    assert before <= step <= len(bench.clock(0)), "it holds all that was applied when the first signal came"
    assert find_checkpoint(bench.folder / "saved")[1]["steps"] == 2 * step
    again = bench.run("run", "-n", "2", "--resume", "saved", PACED, ".", "steps=2")
    assert again.returncode == 0, again.stderr
    assert [step for kind, step, _ in bench.clock(0) if kind == "start"] == [step, step + 1]


@pytest.mark.parametrize(("sync", "told"), [("bsp", True), ("asp", False)])
def test_a_job_whose_workers_are_killed_saves_before_it_ends(sync: str, told: bool, bench: Bench) -> None:
    """The signal comes to the workers first; then it comes to the launcher, which has begun to save, or it does not."""
    flags = ["--sync", sync, "--servers", "2", "--checkpoint", "saved"]
    process = bench.start("run", "-n", "2", *flags, PACED, ".", "steps=100000")
    trains(bench, 0, 1)
    asleep = servers_of(process.pid)[1]
    asleep.suspend()
    for worker in psutil.Process(process.pid).children():
        if PACED in worker.cmdline():
            worker.terminate()
    wait_until(lambda: is_saving(bench) or has_ended(process))
    if told:
        process.terminate()
    asleep.resume()
    _, err = process.communicate(timeout=30)
    (name,) = saved_in(bench)
    resume = f"go on with --resume saved/{name}"
    if told:
        assert process.returncode == 130
        assert err.splitlines()[-1] == f"polytempo: interrupted; all processes have ended; {resume}"
    else:
        assert process.returncode == 1
        assert "was killed by SIGTERM" in err.splitlines()[-1]
        assert err.splitlines()[-1].endswith(resume)
    assert "saving a checkpoint to saved (at most 20 s; Ctrl-C three times, or SIGQUIT, ends at once, without it)" in err


@pytest.mark.parametrize(("last", "step"), [(signal.SIGINT, 4), (signal.SIGQUIT, 0)])
def test_a_person_who_insists_ends_the_save_and_is_told_what_is_lost(last: signal.Signals, step: int, bench: Bench) -> None:
    flags = ["-n", "1", "--servers", "2", "--checkpoint", "saved", "--grace", "3600"]
    if step:
        assert bench.run("run", *flags, PACED, ".", f"steps={step}").returncode == 0
        flags += ["--resume", "saved"]
        (bench.folder / "clock-0").unlink()
    process = bench.start("run", *flags, PACED, ".", "steps=100000")
    trains(bench, 0)
    servers_of(process.pid)[1].send_signal(signal.SIGSTOP)
    for number in (signal.SIGINT, signal.SIGINT):
        process.send_signal(number)
        wait_until(lambda: not is_pending(process.pid))
    wait_until(lambda: is_saving(bench) or has_ended(process))
    process.send_signal(last)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "the job is ending, servers write what is left; Ctrl-C three times, or SIGQUIT, ends at once" in err
    lost = f"polytempo: interrupted; all processes have ended; the checkpoint was not finished: steps {step} to "
    assert err.splitlines()[-1].startswith(lost)
    resume = f"go on with --resume saved/step-{step:08d}" if step else "there is no checkpoint to go on from"
    assert err.splitlines()[-1].endswith(f" are lost; {resume}")
    assert list((bench.folder / "saved").glob("*.partial")) == []


@pytest.mark.new_interpreters
def test_signals_to_every_process_of_a_job_that_starts_are_an_interruption(bench: Bench) -> None:
    """Servers that are still loading torch do not die of them, and are no cause of anything."""
    process = bench.start("run", "-n", "1", "--checkpoint", "saved", PACED, ".", "steps=100000")
    wait_until(lambda: list(bench.temporary.glob("polytempo-*/job.json")) != [])
    servers = servers_of(process.pid)
    assert len(servers) == 1
    tell(servers, random.Random(0))
    process.terminate()
    while not has_ended(process):
        tell([*servers, psutil.Process(process.pid)], random.Random(0))
    _, err = process.communicate()
    assert process.returncode == 130, err
    last = "polytempo: interrupted; all processes have ended; there is no checkpoint to go on from"
    assert err.splitlines()[-1] == last
