"""Processes of a cluster die: calls fail by name or succeed, numbers are never wrong, the rest stays up."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import expertmesh
import grpc
import numpy as np
import pytest
from models import OLMOE, bits, forward, tokens
from processes import children, command_line, wait_until

LAYER = 1
DETECTED_SECONDS = 2  # of a death, with a busy machine


def named_experts(message: str) -> set[int]:
    """The experts of "layer 1: ... holds experts 3, 5-7 ..."."""
    found = re.search(rf"layer {LAYER}: .*? experts? (\d[\d, -]*)", message)
    assert found, message
    experts: set[int] = set()
    for part in found.group(1).strip(", ").split(", "):
        first, _, last = part.partition("-")
        experts |= set(range(int(first), int(last or first) + 1))
    return experts


def unavailable(client: expertmesh.Client, x: np.ndarray) -> str:
    """The message with which this call fails, at once."""
    start = time.monotonic()
    with pytest.raises(expertmesh.Error) as caught:
        client.forward(LAYER, x)
    assert caught.value.code == grpc.StatusCode.UNAVAILABLE, caught.value
    assert time.monotonic() - start < DETECTED_SECONDS
    return caught.value.message


def test_without_a_replica(processes):
    router, servers, address = processes.by_hand(OLMOE, 2)  # experts 0-7, 8-15
    x = tokens(128, 400)
    with expertmesh.Client(address) as client:
        before = client.forward(LAYER, x)
        needs_lost = (before.topk_ids >= 8).any(axis=1)
        assert needs_lost.any() and not needs_lost.all()
        needed = set(before.topk_ids[before.topk_ids >= 8].tolist())

        servers[1].kill()
        assert named_experts(unavailable(client, x)) == needed
        wait_until("down", lambda: processes.states(address)["server-1"] == "down", DETECTED_SECONDS)
        assert processes.states(address)["server-0"] == "serving"
        assert processes.status(address)["missing"] == "layer 0: no live server holds experts 8-15"
        assert processes.cli("health", "--router", address).returncode == 1
        assert named_experts(unavailable(client, x)) == needed

        kept = client.forward(LAYER, x[~needs_lost])
        assert kept.output.tobytes() == before.output[~needs_lost].tobytes()
        one = int(np.argmax(needs_lost))
        assert named_experts(unavailable(client, x[one : one + 1])) == set(
            before.topk_ids[one][before.topk_ids[one] >= 8].tolist()
        )

        again = processes.server(OLMOE, address, "1/2")
        processes.wait_serving(address)
        assert again.address() != servers[1].address()
        assert bits(client.forward(LAYER, x)) == bits(before)
    assert router.running() and servers[0].running()


def test_in_the_middle_of_a_call(processes):
    router, servers, address = processes.by_hand(OLMOE, 2)
    x = tokens(128, 4000)
    failed = 0
    with expertmesh.Client(address) as client, ThreadPoolExecutor(1) as pool:
        start = time.monotonic()
        before = bits(client.forward(LAYER, x))
        whole = time.monotonic() - start
        for fraction in (0.1, 0.4, 0.7):
            call = pool.submit(client.forward, LAYER, x)
            time.sleep(fraction * whole)
            servers[1].kill()
            killed = time.monotonic()
            try:
                assert bits(call.result(timeout=30)) == before
            except expertmesh.Error as error:
                failed += 1
                assert error.code == grpc.StatusCode.UNAVAILABLE, error
                assert named_experts(error.message) <= set(range(8, 16))
                assert time.monotonic() - killed < DETECTED_SECONDS
            servers[1] = processes.server(OLMOE, address, "1/2")
            processes.wait_serving(address)
            assert bits(client.forward(LAYER, x)) == before
    assert failed, "no call was under way when its server died"
    assert router.running() and servers[0].running()


def test_in_the_middle_of_a_call_with_a_replica(processes):
    """The replica takes over what the dead one was asked for: no call fails, and no bit is another."""
    router = processes.router(OLMOE)
    address = router.address()
    servers = [processes.server(OLMOE, address, "0/1", "--name", name) for name in ("a", "b")]
    x = tokens(128, 4000)
    with expertmesh.Client(address) as client, ThreadPoolExecutor(1) as pool:
        wait_until("two", lambda: list(processes.states(address).values()) == ["serving"] * 2)
        start = time.monotonic()
        before = bits(client.forward(LAYER, x))
        whole = time.monotonic() - start
        under_way = 0
        for fraction in (0.1, 0.3, 0.5):
            call = pool.submit(client.forward, LAYER, x)
            time.sleep(fraction * whole)
            under_way += not call.done()
            servers[0].kill()  # the first by name computes everything
            assert bits(call.result(timeout=30)) == before
            wait_until("down", lambda: processes.states(address)["a"] == "down", DETECTED_SECONDS)
            servers[0] = processes.server(OLMOE, address, "0/1", "--name", "a")
            wait_until("two", lambda: list(processes.states(address).values()) == ["serving"] * 2)
    assert under_way, "no call was under way when its server died"
    assert router.running() and servers[1].running()


def test_serve_restarts_its_children(processes):
    serve = processes.serve(OLMOE, 2)
    address = serve.address()
    x = tokens(128, 100)
    with expertmesh.Client(address) as client:
        before = bits(client.forward(LAYER, x))
        for program in ("expertmesh-expert-server", "expertmesh-router"):
            [old, *_] = [pid for pid in children(serve) if command_line(pid)[0].endswith(program)]
            os.kill(old, signal.SIGKILL)
            wait_until(
                f"another {program}",
                lambda: old not in children(serve) and len(children(serve)) == 3,
            )
            processes.wait_serving(address)
            assert bits(client.forward(LAYER, x)) == before
            assert bits(forward(address, LAYER, x)) == before
    assert serve.running()
    assert serve.stop() == 0
