"""Large buffers from one process to another over loopback TCP: what each way to encrypt them costs, interleaved in one run.

`python benchmarks/wire.py [--quick]` prints a table and writes out/bench/wire.json. TLS and bare AES-GCM need the package
`cryptography` and are left out without it; it may stand beside the environment: PYTHONPATH=/where/it/is.
"""

import ctypes
import multiprocessing
import os
import socket
import ssl
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy
import zmq

from measure import save
from polytempo.report.table import TextTable
from polytempo.transport.buffer_pool import Pool
from polytempo.transport.keys import make_keys
from polytempo.transport.zeromq import ZmqChannel, ZmqEndpoint

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError:
    AESGCM = None

MB, SIZES = 1 << 20, (10, 100)
SUITES = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256") if AESGCM else ()
#: The only way to choose a suite of TLS 1.3: Python's `set_ciphers` is for older versions.
CONFIG = "openssl_conf=a\n[a]\nssl_conf=b\n[b]\nsystem_default=c\n[c]\nCiphersuites={}\n"


def stream(folder: Path | None, sock: Any, sending: bool) -> Any:
    """A socket: plain, or TLS where each side takes nothing but the one certificate it knows of the other."""
    if folder:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if sending else ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
        context.load_cert_chain(folder / ("worker" if sending else "server"))
        context.load_verify_locations(folder / ("server.crt" if sending else "worker.crt"))
        sock = context.wrap_socket(sock, server_side=not sending)
        assert sock.cipher()[0] == Path(os.environ["OPENSSL_CONF"]).name

    def move(data: memoryview) -> memoryview:
        rest = data
        while rest:
            rest = rest[sock.send(rest[:MB]) if sending else sock.recv_into(rest[:MB]) :]
        return data

    return move


def sealed(key: bytes, sock: Any, sending: bool) -> Any:
    """Each piece encrypted by itself, its number the nonce. The key is given: no handshake, no authentication."""
    cipher, box, numbers = AESGCM(key), memoryview(bytearray(MB + 16)), iter(range(1 << 62))
    move_box = stream(None, sock, sending)

    def move(data: memoryview) -> memoryview:
        for start in range(0, len(data), MB):
            piece, nonce = data[start : start + MB], next(numbers).to_bytes(12, "big")
            if sending:
                cipher.encrypt_into(nonce, piece, None, box)
            move_box(box)
            if not sending:
                cipher.decrypt_into(nonce, box, None, piece)
        return data

    return move


def zeromq(setting: tuple[Any, bool], address: str, sending: bool) -> Any:
    """The library's own `ZmqChannel` and `ZmqEndpoint`; if wanted, malloc keeps what ZeroMQ frees: fewer page faults."""
    (keys, keep), pool, poller = setting, Pool(), zmq.Poller()
    for option, value in ((-3, 32 * MB), (-1, 2**31 - 1)) if keep else ():  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        assert ctypes.CDLL(None).mallopt(option, value)
    if sending:
        channel = ZmqChannel(address, b"sender", keys and keys.workers, pool, 1 << 40)
        return lambda data: channel.send(b"header", [numpy.frombuffer(data, numpy.uint8)])
    endpoint = ZmqEndpoint(address, keys, pool, 1 << 40)
    endpoint.attach(poller)

    def fill(_: memoryview) -> Any:
        while not (events := endpoint.handle(dict(poller.poll()))):
            pass
        pool.give(events[0].buffers[0])
        return events[0].buffers[0].data

    return fill


def work(way: Any, secret: Any, where: Any, sending: bool, pipe: Any, bell: Any) -> None:
    """A process: moves a number of bytes repeatedly, and reports seconds, and seconds of a core, per GB."""
    move, right = way(secret, where, sending), numpy.random.default_rng(0).bytes(SIZES[-1] * MB)
    memory = memoryview(bytearray(right) if sending else bytearray(len(right)))
    pipe.send("ready")
    for size, rounds in iter(pipe.recv, None):
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            got = move(memory[:size])
            bell.recv() if sending else bell.send(None)  # a transfer ends when the receiver has it all
        seconds = time.perf_counter() - start, time.process_time() - cpu
        if not sending:
            assert got == right[:size]
            got[:] = bytes(size)  # the next must really come
        pipe.send([second / (size * rounds / 1e9) for second in seconds])


def start(way: Any, secret: Any) -> list[Any]:
    """The pipes to a sender and a receiver."""
    context, pipes = multiprocessing.get_context("spawn"), []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        places: list[Any] = [f"tcp://127.0.0.1:{listener.getsockname()[1]}"] * 2
        if way is not zeromq:
            places = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    for where, sending, bell in zip(places, (True, False), context.Pipe(), strict=True):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(way, secret, where, sending, theirs, bell), daemon=True).start()
        pipes.append(ours)
    assert [pipe.recv() for pipe in pipes] == ["ready", "ready"]
    return pipes


def start_encrypted(folder: Path) -> dict[str, list[Any]]:
    """TLS with each suite, between two certificates made here; and bare AES-GCM."""
    for side in ("server", "worker"):
        key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name.from_rfc4514_string(f"CN={side}")
        facts = name, name, key.public_key(), x509.random_serial_number(), datetime(2020, 1, 1), datetime(9999, 12, 31)
        public = x509.CertificateBuilder(*facts).sign(key, hashes.SHA256()).public_bytes(form.Encoding.PEM)
        (folder / f"{side}.crt").write_bytes(public)
        secret = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        (folder / side).write_bytes(secret + public)
    ways = {"AES-256-GCM pieces": start(sealed, os.urandom(32))}
    for suite in SUITES:
        (folder / suite).write_text(CONFIG.format(suite))
        os.environ["OPENSSL_CONF"] = str(folder / suite)
        ways[suite] = start(stream, folder)
    return ways


def main(quick: bool, folder: Path) -> None:
    ways = {"plain TCP": start(stream, None)}
    for name, keys in (("ZeroMQ plain", None), ("ZeroMQ CURVE", make_keys())):
        ways |= {name: start(zeromq, (keys, False)), f"{name}, memory kept": start(zeromq, (keys, True))}
    ways |= start_encrypted(folder) if AESGCM else {}
    results: dict[str, list[Any]] = {way: [[] for _ in SIZES] for way in ways}
    for turn in range(len(SIZES) * (3 if quick else 7)):
        place = turn % len(SIZES)
        for way, pipes in ways.items():
            for pipe in pipes:
                pipe.send((SIZES[place] * MB, (100 if quick else 200) // SIZES[place]))
            (seconds, sender), (_, receiver) = (pipe.recv() for pipe in pipes)
            results[way][place].append((1 / seconds, sender, receiver))
    for pipe in (pipe for pipes in ways.values() for pipe in pipes):
        pipe.send(None)
    found = {way: numpy.median(samples, 1) for way, samples in results.items()}
    figures = {way: numpy.hstack((one, one[:, :1] / found["ZeroMQ CURVE"][:, :1])).flat for way, one in found.items()}
    rows = [(way, *(f"{value:.2f}" for value in values)) for way, values in figures.items()]
    heads = (f"{size} MB: {what}" for size in SIZES for what in ("GB/s", "CPU s/GB: sender", "receiver", "GB/s to CURVE"))
    save(
        Path("out/bench"), "wire", [TextTable(f"Loopback TCP, {ssl.OPENSSL_VERSION}", ("way", *heads), tuple(rows))], results
    )
    print("" if AESGCM else "cryptography cannot be imported: TLS and AES-GCM are left out")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as private:
        main("--quick" in sys.argv, Path(private))
