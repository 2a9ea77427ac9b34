"""Clusters on unix sockets: as over TCP, the same bits; nothing is left of the sockets, and nothing in their way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import expertmesh
import pytest
from models import SMALL, bits, forward, tokens, write_hidden_states
from processes import Process, Processes, wait_until

X = tokens(12, 50)


@pytest.fixture
def folder(tmp_path) -> Path:
    private = tmp_path / "sockets"
    private.mkdir(mode=0o700)
    return private


def router(processes: Processes, folder: Path, *options: object) -> Process:
    command = [processes.binaries / "expertmesh-router", "--model", SMALL, "--listen", f"unix:{folder}/router"]
    return processes.start(*command, *options, name="router")


def server(processes: Processes, folder: Path, shard: str) -> Process:
    listen = f"unix:{folder}/server-{shard[0]}"
    command = [processes.binaries / "expertmesh-expert-server", "--model", SMALL, "--listen", listen]
    return processes.start(*command, "--router", f"unix:{folder}/router", "--shard", shard, name="server")


def test_a_cluster_without_tcp(processes, folder, tmp_path):
    servers = [server(processes, folder, "0/2"), server(processes, folder, "1/2")]  # before their router
    first = router(processes, folder)
    address = first.address()
    assert address == f"unix:{folder}/router"
    processes.wait_serving(address)
    assert [s["address"] for s in processes.status(address)["servers"]] == [s.address() for s in servers]
    assert servers[1].address() == f"unix:{folder}/server-1"
    expected = bits(forward(processes.serve(SMALL, 1).address(), 0, X))
    with expertmesh.Client(address, timeout=20) as client:
        assert bits(client.forward(0, X)) == expected
        # Killed, a router leaves its socket; the next one takes its place.
        first.kill()
        assert stat.S_ISSOCK((folder / "router").stat().st_mode)
        router(processes, folder).address()
        assert bits(client.forward(0, X)) == expected
    files = ("--input", write_hidden_states(tmp_path / "x", X), "--output", tmp_path / "y")
    done = processes.cli("forward", "--router", address, "--layer", 0, *files)
    assert done.returncode == 0, done.stderr
    # The same of a server.
    servers[0].kill()
    wait_until("the router knows", lambda: not processes.healthy(address))
    servers[0] = server(processes, folder, "0/2")
    processes.wait_serving(address)
    assert bits(forward(address, 0, X)) == expected
    for process in (processes.started[-1], servers[1], processes.started[-2]):
        if process.running():
            assert process.stop() == 0
    for process in processes.started:
        if process.running() and process.name.endswith(("router", "server")):
            assert process.stop() == 0
    assert os.listdir(folder) == []


def test_a_socket_in_use(processes, folder):
    first = router(processes, folder)
    address = first.address()
    second = router(processes, folder)
    assert second.wait() == 1
    assert f"cannot listen on {address}: the socket is in use" in second.tail()
    assert "listening" not in second.output.read_text()
    server(processes, folder, "0/1")
    processes.wait_serving(address)
    assert forward(address, 0, X).output.shape == X.shape
    assert first.stop() == 0


@pytest.mark.parametrize(
    "listen, text",
    [
        ("unix:relative", "expected unix:/PATH, absolute"),
        ("unix:/" + "x" * 200, "of at most 107"),
        ("unix:/nowhere/at/all/socket", "the folder is missing"),
        ("unix:{folder}/file", "the file is there and no socket"),
    ],
)
def test_no_place_for_a_socket(processes, folder, listen, text):
    (folder / "file").write_text("precious")
    command = [processes.binaries / "expertmesh-router", "--model", SMALL]
    process = processes.start(*command, "--listen", listen.format(folder=folder), name="router")
    assert process.wait() == 1
    assert text in process.tail()
    assert (folder / "file").read_text() == "precious"
