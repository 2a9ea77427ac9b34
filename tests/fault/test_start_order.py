"""The order in which the processes of a cluster start does not matter."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import expertmesh
import numpy as np
import pytest
from models import OLMOE, bits, forward, read_safetensors, tokens
from processes import Processes, free_port

LAYER = 2


@pytest.fixture(scope="module")
def expected(shared_processes: Processes) -> tuple[bytes, bytes, bytes]:
    """What a cluster of `expertmesh serve` returns."""
    serve = shared_processes.serve(OLMOE, 2)
    result = bits(forward(serve.address(), LAYER, tokens(128, 50)))
    assert serve.stop() == 0
    return result


def test_daemons_by_hand_equal_serve_and_the_reference(processes, expected):
    _, _, address = processes.by_hand(OLMOE, 3)
    assert bits(forward(address, LAYER, tokens(128, 50))) == expected
    captured = read_safetensors(OLMOE / "captured.safetensors")
    x, y = captured[f"layer.{LAYER}.hidden_states"], captured[f"layer.{LAYER}.output"]
    result = forward(address, LAYER, x.astype(np.float32))
    assert (result.topk_ids == captured[f"layer.{LAYER}.topk_ids"]).all()
    assert np.linalg.norm(result.output - y) <= 1e-5 * np.linalg.norm(y)


@pytest.mark.parametrize("seconds", [1, pytest.param(5, marks=pytest.mark.full)])
def test_servers_before_the_router(processes, expected, seconds):
    port = free_port()
    servers = [processes.server(OLMOE, f"127.0.0.1:{port}", f"{i}/2") for i in range(2)]
    for server in servers:
        server.address()
    time.sleep(seconds)
    processes.router(OLMOE, port=port)
    assert bits(forward(f"127.0.0.1:{port}", LAYER, tokens(128, 50))) == expected
    assert all(server.running() for server in servers)


# The wait of the longest fits into the router's --startup-grace (60 s), and all into the SDK's timeout.
@pytest.mark.parametrize("seconds", [3, pytest.param(30, marks=pytest.mark.full)])
def test_client_then_router_then_servers(processes, expected, seconds):
    port = free_port()
    address = f"127.0.0.1:{port}"
    with ThreadPoolExecutor(1) as pool:
        first_call = pool.submit(forward, address, LAYER, tokens(128, 50), timeout=90)
        time.sleep(1)
        router = processes.router(OLMOE, port=port)
        assert router.address() == address
        time.sleep(seconds)
        assert processes.cli("health", "--router", address).returncode == 1
        assert not first_call.done(), first_call.exception()
        for i in range(2):
            processes.server(OLMOE, address, f"{i}/2")
        assert bits(first_call.result(timeout=60)) == expected


def test_without_servers_the_call_names_what_is_missing(processes):
    address = processes.router(OLMOE, "--startup-grace", 0.5).address()
    with pytest.raises(expertmesh.Error, match=rf"UNAVAILABLE: layer {LAYER}: no live server holds experts? \d"):
        forward(address, LAYER, tokens(128, 5), timeout=20)


def test_health_without_a_router(processes):
    done = processes.cli("health", "--router", f"127.0.0.1:{free_port()}", "--timeout", 0.5)
    assert done.returncode == 2
