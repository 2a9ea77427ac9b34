"""Callers that give up: nobody computes for them, nothing is kept for them, the others go on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from models import reply_bits, request, stub, tokens, write_checkpoint
from processes import Process, cpu_seconds, peak_memory, wait_idle, wait_until

HIDDEN = 512
MIB = 1 << 20


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A model whose rows take long with the plain engine."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    return write_checkpoint(folder, experts=4, top_k=4, hidden=HIDDEN, intermediate=4 * HIDDEN)


@pytest.fixture
def cluster(processes, wide) -> tuple[str, list[Process]]:
    address = processes.router(wide).address()
    servers = [processes.server(wide, address, shard, "--engine", "for_loop") for shard in ("0/2", "1/2")]
    processes.wait_serving(address)
    return address, servers


def used(servers: list[Process]) -> float:
    return sum(map(cpu_seconds, servers))


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_a_call_that_is_given_up_in_mid_compute(cluster, end):
    address, servers = cluster
    client = stub(address, max_receive_message_length=-1)
    x = tokens(HIDDEN, 20)
    start = used(servers)
    expected = reply_bits(client.Forward(request(0, x), timeout=60))
    seconds = max(used(servers) - start, 0.01) / len(x)
    long = tokens(HIDDEN, min(int(60 / seconds), 5000))  # up to a minute of computing
    start = used(servers)
    call = client.Forward.future(request(0, long), timeout=1 if end == "deadline" else 120)
    wait_until("it is computed", lambda: used(servers) - start > 0.3)
    if end == "cancel":
        call.cancel()
    else:
        assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    for server in servers:
        wait_idle(server)
    assert used(servers) - start < 0.25 * seconds * len(long)
    assert reply_bits(client.Forward(request(0, x), timeout=60)) == expected


def test_a_call_that_is_given_up_in_a_merged_round(cluster):
    address, servers = cluster
    client = stub(address)
    x = tokens(HIDDEN, 200)
    expected = [reply_bits(client.Forward(request(0, x[i * 20 : i * 20 + 20]), timeout=60)) for i in range(10)]
    for turn in range(3):
        calls = [client.Forward.future(request(0, x[i * 20 : i * 20 + 20]), timeout=60) for i in range(10)]
        time.sleep(0.01 * turn)
        for call in calls[1::3]:
            call.cancel()
        hurried = client.Forward.future(request(0, x[:1]), timeout=0.02)
        for i, call in enumerate(calls):
            if i % 3 != 1:
                assert reply_bits(call.result()) == expected[i]
        assert hurried.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OK)


def test_a_stopped_server(processes, tmp_path):
    """Its callers get DEADLINE_EXCEEDED in time, others are answered, and nothing piles up for it."""
    model = write_checkpoint(tmp_path / "model", experts=8, top_k=1, hidden=256, intermediate=2)
    router, servers, address = processes.by_hand(model, 2)  # experts 0-3, 4-7
    client = stub(address)
    x = tokens(256, 4096)
    halves = [client.Forward(request(0, half), timeout=60) for half in np.split(x, 2)]
    ids = np.concatenate([np.frombuffer(half.topk_ids.data, np.int32) for half in halves])
    mine, its = x[ids < 4][:1024], x[ids >= 4][:1024]  # 1 MiB each
    assert len(mine) == len(its) == 1024
    expected = [reply_bits(client.Forward(request(0, rows), timeout=60)) for rows in (mine, its)]
    servers[1].signal(signal.SIGSTOP)
    before = peak_memory(router)
    start = time.monotonic()
    answered = 0
    # The connection counts as dead 5 s after a ping, and one may be due at once.
    while time.monotonic() - start < 4:
        late = [client.Forward.future(request(0, its), timeout=0.5) for _ in range(20)]
        healthy = client.Forward.future(request(0, mine), timeout=10)
        asked = time.monotonic()
        assert [call.code() for call in late] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 20
        assert time.monotonic() - asked < 2
        assert reply_bits(healthy.result()) == expected[0]
        answered += 1
    assert answered >= 3
    # 20 MiB of requests a turn, and as much again on their way to the server.
    assert peak_memory(router) - before < 150 * MIB
    servers[1].signal(signal.SIGCONT)
    wait_until(
        "it answers again",
        lambda: client.Forward.future(request(0, its), timeout=5).code() == grpc.StatusCode.OK,
    )
    assert reply_bits(client.Forward(request(0, its), timeout=20)) == expected[1]
    assert router.stop() == 0


def test_a_server_that_is_killed_fails_those_who_need_it(processes, tmp_path):
    model = write_checkpoint(tmp_path / "model", experts=8, top_k=1, hidden=HIDDEN, intermediate=HIDDEN)
    address = processes.router(model).address()
    servers = [processes.server(model, address, shard, "--engine", "for_loop") for shard in ("0/2", "1/2")]
    processes.wait_serving(address)
    client = stub(address)
    x = tokens(HIDDEN, 2000)
    ids = np.frombuffer(client.Forward(request(0, x), timeout=60).topk_ids.data, np.int32)
    parts = [x[ids < 4][i * 50 : i * 50 + 50] for i in range(10)] + [x[ids >= 4][i * 50 : i * 50 + 50] for i in range(10)]
    expected = [reply_bits(client.Forward(request(0, rows), timeout=60)) for rows in parts]
    first = client.Forward.future(request(0, x[:300]), timeout=60)  # in flight while the others queue
    calls = [client.Forward.future(request(0, rows), timeout=60) for rows in parts]
    time.sleep(0.1)
    servers[1].kill()
    assert first.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK)
    for i, call in enumerate(calls):
        if i < 10 or call.code() == grpc.StatusCode.OK:
            assert reply_bits(call.result()) == expected[i]
        else:
            assert call.code() == grpc.StatusCode.UNAVAILABLE
            assert "layer 0: " in call.details() and "expert" in call.details()
    assert any(call.code() != grpc.StatusCode.OK for call in calls), "all were done before it was killed"
    processes.server(model, address, "1/2", "--engine", "for_loop")
    processes.wait_serving(address)
    assert [reply_bits(client.Forward(request(0, rows), timeout=60)) for rows in parts] == expected
