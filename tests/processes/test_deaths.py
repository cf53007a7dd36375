"""Somebody dies: the others notice, say who, and go on or end with the cause; nobody hangs, nothing is left."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios

import psutil
import pytest
from live import PACED, Bench, wait_until


def servers_of(launcher: int) -> list[psutil.Process]:
    running = [p for p in psutil.Process(launcher).children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in running if "polytempo.launcher.server_process" in p.cmdline()]


def saved_in(bench: Bench) -> list[str]:
    found = (bench.folder / "saved").glob("step-*/manifest.json")
    return sorted(path.parent.name for path in found if path.parent.suffix != ".partial")


def noticed_after(bench: Bench, worker: int) -> float:
    """Seconds from a worker's death, by its own clock, to the job's knowing; both read the host's monotonic clock."""
    died = next(t for kind, _, t in bench.clock(worker) if kind == "die")
    return next(e["t"] for e in bench.events() if e["kind"] == "fault" and e["worker"] == worker) - died


MODES = ["asp", "ssp:2", "dssp:1..3", "every:4", "bsp+backup:1", "delay:1", "bsp", "gossip:exp,overlap=1"]


@pytest.mark.parametrize("sync", MODES)
def test_the_others_go_on_without_a_killed_worker(sync: str, bench: Bench) -> None:
    flags = ["--min-workers", "2"] if sync == "bsp" else []
    command = ["run", "-n", "3", "--sync", sync, *flags, "--record", "record", PACED, ".", "steps=15", "die=1:5:kill"]
    done = bench.run(*command)
    assert done.returncode == 0, done.stderr
    assert "warning: worker 1 was killed by SIGKILL; going on with 2 of 3" in done.stderr
    assert noticed_after(bench, 1) < 2
    assert [worker["state"] for worker in bench.meta()["workers"]] == ["finished", "lost", "finished"]
    steps = [worker["steps"] + worker["discarded"] for worker in bench.meta()["workers"]]
    assert steps == [15, 5, 15]
    assert bench.run("check", "record").returncode == 0


@pytest.mark.new_interpreters
def test_bsp_ends_with_the_cause_when_a_worker_is_killed(bench: Bench) -> None:
    done = bench.run("run", "-n", "3", "--record", "record", PACED, ".", "steps=1000", "die=1:5:kill")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "polytempo: worker 1 was killed by SIGKILL; 2 of 3 workers are left, at least 3 are needed"
    assert bench.meta()["exit_status"] == 1
    assert bench.run("check", "record").returncode == 0


@pytest.mark.parametrize(("how", "words"), [("raise", "this worker was told to fail at step 3"), ("exit", "exit status 7")])
def test_the_first_cause_is_the_last_thing_printed(how: str, words: str, bench: Bench) -> None:
    done = bench.run("run", "-n", "2", PACED, ".", "steps=1000", f"die=1:3:{how}")
    assert done.returncode == 1
    end = "\n".join(done.stderr.splitlines()[-12:])
    assert words in end
    assert "worker 1 failed with exit status" in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == (how == "raise"), "once"
    assert "this worker ends" not in done.stderr, "worker 0 has nothing to say about it"


@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_server_ends_the_job_with_the_checkpoints_name(which: int, bench: Bench) -> None:
    """The launcher sleeps while the last checkpoint is made, so nobody can have told it: it must look at the disk."""
    flags = ["--servers", "2", "--checkpoint", "saved", "--checkpoint-every", "5", "--record", "record"]
    process = bench.start("run", "-n", "2", *flags, PACED, ".", "steps=100000", "pace=0.005")
    wait_until(lambda: saved_in(bench) != [])
    servers = servers_of(process.pid)
    process.send_signal(signal.SIGSTOP)
    told = saved_in(bench)[-1]
    wait_until(lambda: saved_in(bench)[-1] > told)
    servers[which].send_signal(signal.SIGKILL)
    wait_until(lambda: servers[which].status() == psutil.STATUS_ZOMBIE)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    expected = f"server {which} was killed by SIGKILL: its part of the model is lost; resume with --resume"
    assert f"{expected} saved/{saved_in(bench)[-1]}" in err.splitlines()[-1]
    assert list((bench.folder / "saved").glob("*.partial")) == []


@pytest.mark.parametrize(
    ("sync", "saving"),
    [
        ("bsp", "with --checkpoint DIR servers hold it, and save it"),
        ("gossip:ring", "let the script save it: torch.save() on one rank, after optimizer.consolidate()"),
    ],
)
def test_a_killed_server_that_holds_no_model_takes_none_with_it(sync: str, saving: str, bench: Bench) -> None:
    process = bench.start("run", "-n", "2", "--sync", sync, PACED, ".", "steps=100000", "pace=0.005")
    wait_until(lambda: all((bench.folder / f"clock-{rank}").exists() for rank in (0, 1)))
    servers_of(process.pid)[0].send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    was = "server 0 was killed by SIGKILL: it coordinated the job, which has ended"
    words = "the model was at the workers, and what the script has not saved is lost"
    assert err.splitlines()[-1] == f"polytempo: {was}; {words}; {saving}"


def test_a_server_killed_after_the_workers_have_finished_is_no_success(bench: Bench) -> None:
    """The last worker stops server 1, so that the last checkpoint cannot become whole; then it is killed."""
    flags = ["--servers", "2", "--sync", "asp", "--checkpoint", "saved", "--checkpoint-every", "2"]
    process = bench.start("run", "-n", "1", *flags, PACED, ".", "steps=5", "stop=1")
    wait_until(lambda: (bench.folder / "saved" / "step-00000005.partial" / "shard-0.safetensors").exists())
    servers_of(process.pid)[1].send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    words = "what was still to be written is missing; go on with --resume saved/step-00000004"
    assert err.splitlines()[-1] == f"polytempo: server 1 was killed by SIGKILL after the workers had finished: {words}"
    assert list((bench.folder / "saved").glob("*.partial")) == []


def test_a_closed_terminal_ends_the_job_and_leaves_no_key(bench: Bench) -> None:
    """SIGHUP, and nothing that is said from then on can be written."""
    terminal, inside = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "polytempo", "run", "-n", "1", "--servers", "1", PACED, ".", "steps=100000"],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        cwd=bench.folder,
        env=bench.environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(inside)
    wait_until(lambda: list(bench.temporary.glob("polytempo-*/job.json")) != [])
    os.close(terminal)
    assert process.wait(20) == 130


@pytest.mark.new_interpreters
def test_a_killed_launcher_takes_all_processes_and_its_folder_with_it(bench: Bench) -> None:
    process = bench.start("run", "-n", "2", "--servers", "2", PACED, ".", "steps=100000")
    wait_until(lambda: (bench.folder / "clock-1").exists() and len(bench.clock(1)) > 5)
    assert list(bench.temporary.glob("polytempo-*/job.json")) != []
    process.kill()
    _, err = process.communicate(timeout=20)
    assert (
        err.splitlines()[-1] == f"polytempo: the launcher (process {process.pid}) was killed; its processes have ended too"
    )


def test_who_hangs_is_given_up_after_the_timeout(bench: Bench) -> None:
    flags = ["--sync", "ssp:1", "--timeout", "1.5", "--record", "record"]
    done = bench.run("run", "-n", "2", *flags, PACED, ".", "steps=12", "die=1:4:hang")
    assert done.returncode == 0, done.stderr
    given_up = "worker 1 was given up: others had waited for it longer than 1.5 s (--timeout)"
    assert f"polytempo: warning: {given_up}; going on with 1 of 2" in done.stderr
    assert "SIGKILL" not in done.stderr
    assert [worker["state"] for worker in bench.meta()["workers"]] == ["finished", "lost"]
