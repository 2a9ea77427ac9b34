"""SIGTERM ends processes with exit code 0 in time and no call hangs; SIGKILL leaves no orphans."""

from __future__ import annotations

import os
import shutil
import signal
import time

import grpc
import pytest
from models import OLMOE, reply_bits, request, stub, tokens, write_checkpoint
from processes import children, command_line, exists, wait_until

LAYER = 0
CALLS = 50
GRACE_SECONDS = 10  # the default of --grace
GIVEN_UP = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def outcomes(calls: list[grpc.Future], expected: tuple[bytes, ...]) -> dict[str, int]:
    """How many calls ended how. Each must have the right result, or be told that there is none."""
    counts: dict[str, int] = {}
    for call in calls:
        try:
            assert reply_bits(call.result(timeout=GRACE_SECONDS + 5)) == expected
            code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            code = error.code()
            assert code in GIVEN_UP, error
        counts[code.name] = counts.get(code.name, 0) + 1
    return counts


def stop_under_load(processes, target: str, delay: float) -> dict[str, int]:
    """SIGTERM to one process, `delay` seconds after 50 calls were sent."""
    if target == "serve":
        stopped = processes.serve(OLMOE, 2)
        address, others = stopped.address(), []
    else:
        router, servers, address = processes.by_hand(OLMOE, 2)
        stopped, others = (router, servers) if target == "router" else (servers[0], [router, servers[1]])
    pids = [stopped.pid, *children(stopped)]
    x = tokens(128, 200)
    client = stub(address)
    expected = reply_bits(client.Forward(request(LAYER, x), timeout=60))
    calls = [client.Forward.future(request(LAYER, x), timeout=60) for _ in range(CALLS)]
    time.sleep(delay)
    stopped.signal(signal.SIGTERM)
    start = time.monotonic()
    counts = outcomes(calls, expected)
    assert stopped.wait(GRACE_SECONDS + 5) == 0
    assert time.monotonic() - start < GRACE_SECONDS, f"the grace period was used up: {counts}"
    wait_until("no process is left", lambda: not any(map(exists, pids)), 2)
    assert all(other.running() for other in others)
    for other in others:
        assert other.stop() == 0
    return counts


@pytest.mark.parametrize(
    "target, delay", [("serve", 0), ("serve", 0.1), ("serve", 0.4), ("router", 0.1), ("server", 0.1)]
)
def test_sigterm_under_load(processes, target, delay):
    stop_under_load(processes, target, delay)


@pytest.mark.full
@pytest.mark.parametrize("target", ["serve", "router", "server"])
def test_sigterm_under_load_again_and_again(processes, target):
    totals: dict[str, int] = {}
    for i in range(20):
        for name, count in stop_under_load(processes, target, delay=0.025 * i).items():
            totals[name] = totals.get(name, 0) + count
    assert totals.get("OK", 0) > 0, totals


@pytest.mark.parametrize("program", ["router", "server", "serve"])
def test_sigterm_without_load(processes, program):
    if program == "serve":
        process = processes.serve(OLMOE, 1)
        process.address()
    else:
        router, [server], _ = processes.by_hand(OLMOE, 1)
        process = router if program == "router" else server
    start = time.monotonic()
    assert process.stop() == 0
    assert time.monotonic() - start < 5


def test_sigint_is_like_sigterm(processes):
    serve = processes.serve(OLMOE, 1)
    serve.address()
    serve.signal(signal.SIGINT)
    assert serve.wait() == 0


@pytest.mark.parametrize("program", ["router", "server"])
def test_sigterm_while_loading(processes, tmp_path, program):
    """The end does not wait for the load."""
    if program == "server":
        size = {"experts": 16, "hidden": 2048, "intermediate": 2048, "layers": 4}  # 1.5 GiB to read
    else:
        size = {"experts": 256, "hidden": 65536, "intermediate": 1, "layers": 16}  # gates of 0.5 GiB
    model = write_checkpoint(tmp_path / "model", top_k=2, sparse=True, **size)
    binary = processes.binaries / ("expertmesh-router" if program == "router" else "expertmesh-expert-server")
    # At the lowest priority: this test has to be faster.
    process = processes.start("nice", "-n", 19, binary, "--model", model, "--listen", "127.0.0.1:0", name=program)
    wait_until("it loads", lambda: ": model " in process.log.read_text())
    assert process.stop(5) == 0
    assert "serving on" not in process.log.read_text(), "loaded too fast for this test"
    assert "listening" not in process.output.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_is_stopped_before_its_router_listens(processes, tmp_path, number):
    shutil.copy2(processes.binaries / "expertmesh", tmp_path)
    router = tmp_path / "expertmesh-router"
    router.write_text("#!/bin/sh\nexec sleep 1000\n")  # one that loads for ever
    router.chmod(0o755)
    serve = processes.start(tmp_path / "expertmesh", "serve", "--model", OLMOE, "--port", 0, name="serve")
    [child] = wait_until("the router is started", lambda: children(serve))
    wait_until("it sleeps", lambda: command_line(child)[:1] == ["sleep"])
    start = time.monotonic()
    serve.signal(number)
    assert serve.wait() == 0
    assert time.monotonic() - start < 5
    assert not exists(child)


def test_killed_serve_leaves_no_children(processes):
    serve = processes.serve(OLMOE, 2)
    serve.address()
    pids = children(serve)
    assert len(pids) == 3
    serve.kill()
    try:
        wait_until("the children are gone", lambda: not any(map(exists, pids)), 5)
    finally:
        for pid in filter(exists, pids):
            os.kill(pid, signal.SIGKILL)
