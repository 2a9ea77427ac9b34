"""What cannot work ends with a message that says why, and disturbs nobody."""

from __future__ import annotations

import json

import pytest
from models import OLMOE, SMALL, bits, forward, tokens, write_checkpoint


@pytest.fixture
def small(processes):
    """A cluster by hand: router, servers, address, a call and its bits."""
    router, servers, address = processes.by_hand(SMALL, 1)
    x = tokens(12, 9)
    return router, servers, address, x, bits(forward(address, 0, x))


@pytest.mark.parametrize("program", ["router", "server", "serve"])
def test_port_in_use(processes, small, program):
    router, [server], address, x, before = small
    taken = (server if program == "server" else router).address().rpartition(":")[2]
    if program == "router":
        second = processes.router(SMALL, port=taken)
    elif program == "server":
        second = processes.server(SMALL, address, "0/1", "--name", "second", port=taken)
    else:
        second = processes.serve(SMALL, 1, port=taken)
    assert second.wait() == 1
    assert f"127.0.0.1:{taken}" in second.tail()
    assert router.running() and server.running()
    assert list(processes.states(address).values()) == ["serving"]
    for _ in range(20):  # over new connections
        assert bits(forward(address, 0, x)) == before


def test_serve_with_a_port_of_its_servers_in_use(processes, small):
    _, [server], _, _, _ = small
    taken = server.address().rpartition(":")[2]
    second = processes.serve(SMALL, 1, "--server-port", taken)
    assert second.wait() == 1
    assert f"127.0.0.1:{taken}" in second.tail()
    assert "server-0 ended with exit code 1 while starting" in second.tail()


def test_a_server_of_another_model(processes, small, tmp_path):
    router, servers, address, x, before = small
    # Another fine-tune: the same configuration and shapes, other weights.
    other = tmp_path / "other"
    other.mkdir()
    for file in SMALL.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    with (other / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, 2)
        last = weights.read(1)
        weights.seek(-1, 2)
        weights.write(bytes([last[0] ^ 1]))
    epoch = processes.status(address)["placement_epoch"]
    stranger = processes.server(other, address, "0/1", "--name", "stranger")
    assert stranger.wait() == 1
    for word in ("refuses", "model_fingerprint", "stranger"):
        assert word in stranger.tail()
    for folder in (SMALL, other):
        assert json.loads(processes.cli("inspect", folder, "--json").stdout)["model_fingerprint"] in stranger.tail()
    assert processes.states(address) == {"server-0": "serving"}
    assert processes.status(address)["placement_epoch"] == epoch
    assert bits(forward(address, 0, x)) == before
    assert router.running() and servers[0].running()


def test_too_little_memory(processes, tmp_path):
    model = write_checkpoint(
        tmp_path / "large", experts=8, top_k=2, hidden=2048, intermediate=4096, layers=8, sparse=True
    )
    stat = (model / "model.safetensors").stat()
    assert stat.st_size > 3 << 30 and stat.st_blocks * 512 < 1 << 20
    share = 8 * 8 * 3 * 2048 * 4096 * 2
    limit = 2 << 30  # of address space: less than the file
    plan = processes.cli("inspect", model, "--servers", 1, "--json", seconds=10)
    assert [server["bytes"] for server in json.loads(plan.stdout)["servers"]] == [share]
    assert (model / "model.safetensors").stat().st_blocks == stat.st_blocks

    address = processes.router(model).address()  # needs the gates only
    server = processes.server(model, address, prefix=("prlimit", f"--as={limit}"))
    assert server.wait() == 1
    [message] = [line for line in server.tail().splitlines() if " error " in line]
    assert f"need {share} bytes" in message
    available = int(message.partition("but only ")[2].split()[0])
    assert 0 < available <= limit
    assert processes.status(address)["servers"] == []


@pytest.mark.parametrize("program", ["router", "server", "serve"])
def test_a_folder_without_a_model(processes, tmp_path, program):
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    process = {
        "router": lambda: processes.router(nothing),
        "server": lambda: processes.server(nothing, "127.0.0.1:1"),
        "serve": lambda: processes.serve(nothing, 1),
    }[program]()
    assert process.wait() == 1
    assert str(nothing) in process.tail() and "config.json" in process.tail()


def test_version(processes):
    texts = set()
    for name in ("expertmesh", "expertmesh-router", "expertmesh-expert-server"):
        process = processes.start(processes.binaries / name, "--version")
        assert process.wait() == 0
        texts.add(process.output.read_text())
    assert len(texts) == 1 and texts.pop().startswith("0.")
    assert processes.cli("inspect", OLMOE).returncode == 0
