"""What a process sends while its interpreter ends: a script without `shutdown()` pushes its last local steps then."""

from __future__ import annotations

import subprocess
import sys

SENDS_AT_EXIT = """
import atexit
import numpy
import zmq
from polytempo.transport import zeromq

def send(place):
    context = zmq.Context.instance()
    out, into = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    into.bind(f"inproc://{place}")
    out.connect(f"inproc://{place}")
    out.send_multipart([b"head", numpy.ones(1 << 20, dtype="u1")], copy=False)
    print(len(into.recv_multipart()[1]))
    for socket in (out, into):
        socket.close()

atexit.register(send, "last")
send("first")
"""


def test_what_is_sent_while_the_interpreter_ends_is_sent_without_copies() -> None:
    done = subprocess.run([sys.executable, "-c", SENDS_AT_EXIT], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1048576\n" * 2, "")
