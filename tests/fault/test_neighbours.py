"""Clients and servers that stop, vanish or do not read: the others notice nothing, and nothing is left behind."""

from __future__ import annotations

import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import expertmesh
import grpc
import numpy as np
import pytest
from expert_stream import slice_request
from expertmesh.v1 import expert_pb2
from models import OLMOE, bits, reply_bits, request, stub, tokens, write_checkpoint, write_hidden_states
from processes import Process, open_files, resident, wait_until
from proxy import ThrottledLink

HIDDEN = 4096
MIB = 1 << 20


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """Rows of 16 KiB that are computed fast: the bytes are what costs."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    return write_checkpoint(folder, experts=2, top_k=1, hidden=HIDDEN, intermediate=2)


def latencies(client: expertmesh.Client, layer: int, x: np.ndarray, expected: tuple, calls: int) -> list[float]:
    """Seconds of each of `calls` right calls."""
    seconds = []
    for _ in range(calls):
        start = time.monotonic()
        assert bits(client.forward(layer, x)) == expected
        seconds.append(time.monotonic() - start)
    return seconds


def assert_undisturbed(during: list[float], before: list[float]) -> None:
    """Generous, because the machine may be busy with something else, and because a round that is stuck holds the next
    ones of its layer back for a second (BatchingOptions::patience). Who waits for the disturber waits longer."""
    assert statistics.median(during) < 5 * statistics.median(before) + 0.05
    assert max(during) < max(before) + 2


# --- clients ---------------------------------------------------------------------------------------------


def test_a_client_that_reads_slowly(processes, wide):
    router, servers, address = processes.by_hand(wide, 1)
    x = tokens(HIDDEN, 64)  # 1 MiB in, 1 MiB out
    small = x[:4]
    with expertmesh.Client(address) as client, ThrottledLink(8 * MIB).lead_to(address) as link:
        expected, whole = bits(client.forward(0, small)), bits(client.forward(0, x))
        before = latencies(client, 0, small, expected, 50)
        files = open_files(router)
        slow = stub(link.address, max_receive_message_length=-1)
        calls = [slow.Forward.future(request(0, x), timeout=120) for _ in range(80)]
        done = 64 * len(calls)
        wait_until("all are computed", lambda: processes.status(address)["servers"][0]["rows"] >= done)
        during = latencies(client, 0, small, expected, 50)
        assert bits(client.forward(0, x)) == whole
        assert not calls[-1].done(), "they were read too fast for this test"
        assert_undisturbed(during, before)
        assert reply_bits(calls[0].result()) == whole
        for call in calls:
            call.cancel()
    wait_until("the router has let go of the slow one", lambda: open_files(router) <= files)
    assert router.stop() == 0 and servers[0].stop() == 0


def test_answers_that_nobody_reads_are_bounded(processes, wide):
    limit = 32 * MIB
    router = processes.router(wide, "--queue-bytes", limit)
    address = router.address()
    processes.server(wide, address)
    processes.wait_serving(address)
    x = tokens(HIDDEN, 64)
    with ThrottledLink(MIB / 4).lead_to(address) as link:
        with expertmesh.Client(address) as client:
            expected = bits(client.forward(0, x))
        memory = resident(router)
        slow = stub(link.address, max_receive_message_length=-1)
        calls = [slow.Forward.future(request(0, x), timeout=120) for _ in range(300)]
        deadline = time.monotonic() + 3
        peak = 0
        while time.monotonic() < deadline:
            peak = max(peak, resident(router))
            time.sleep(0.05)
        assert peak - memory < 5 * limit, f"{(peak - memory) / MIB:.0f} MiB"
        for call in calls:
            call.cancel()
    with expertmesh.Client(address) as client:

        def answered() -> bool:
            try:
                return bits(client.forward(0, x)) == expected
            except expertmesh.Error as error:
                assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
                return False

        wait_until("there is room again", answered, 10)


def test_clients_that_vanish(processes, wide, tmp_path):
    """Killed in mid-call. Two of them fill the router's memory, so that each pair needs the room of the last."""
    router = processes.router(wide, "--queue-bytes", 40 * MIB)
    address = router.address()
    server = processes.server(wide, address)
    processes.wait_serving(address)
    x = tokens(HIDDEN, 64 * 20)
    source = write_hidden_states(tmp_path / "x.safetensors", x)
    command = [processes.binaries / "expertmesh", "forward", "--router", address, "--layer", 0]
    command += ["--input", source, "--output", tmp_path / "y.safetensors"]
    memory = 0
    with expertmesh.Client(address) as client:
        expected = bits(client.forward(0, x))
        files = open_files(router)
        for phase in range(10):
            server.signal(signal.SIGSTOP)  # so that the calls are under way for as long as it takes
            for _ in range(2):
                doomed = [subprocess.Popen([str(word) for word in command]) for _ in range(2)]
                wait_until("they are connected", lambda: open_files(router) >= files + 2)
                time.sleep(0.1)
                assert all(process.poll() is None for process in doomed)
                for process in doomed:
                    process.kill()
                    process.wait()
                wait_until("the router knows", lambda: open_files(router) <= files, 5)
                time.sleep(0.1)
            with pytest.raises(expertmesh.Error) as caught:
                client.forward(0, x[:1], timeout=0.3)
            assert caught.value.code == grpc.StatusCode.DEADLINE_EXCEEDED  # there was room
            server.signal(signal.SIGCONT)
            assert bits(client.forward(0, x)) == expected
            if phase == 2:
                memory = resident(router)
    # 560 MiB came since then; the allocator keeps more and more of what is free, up to a limit.
    assert resident(router) - memory < 280 * MIB
    assert not (tmp_path / "y.safetensors").exists()
    assert router.stop() == 0 and server.stop() == 0


# --- servers ---------------------------------------------------------------------------------------------


@pytest.fixture
def pair(processes) -> Iterator[tuple]:
    """A cluster of two servers: router, servers, a client, rows that the first computes alone, rows of both."""
    router, servers, address = processes.by_hand(OLMOE, 2)  # experts 0-7, 8-15
    x = tokens(128, 2000)
    with expertmesh.Client(address, timeout=30) as client:
        alone = (client.forward(0, x).topk_ids < 8).all(axis=1)
        assert 4 <= alone.sum() < len(x)
        yield router, servers, client, x[alone], x


def test_a_server_that_stops(pair):
    """Its callers are told in time, those of the other go on; when it goes on, so do all."""
    router, servers, client, mine, both = pair
    expected, whole = bits(client.forward(0, mine)), bits(client.forward(0, both))
    before = latencies(client, 0, mine, expected, 50)
    files = open_files(router)
    servers[1].signal(signal.SIGSTOP)
    outcomes: list[object] = []

    def call() -> None:
        start = time.monotonic()
        try:
            outcomes.append(client.forward(0, both, timeout=2))
        except expertmesh.Error as error:
            outcomes.append((error.code, time.monotonic() - start))

    callers = [threading.Thread(target=call) for _ in range(8)]
    for caller in callers:
        caller.start()
    during = latencies(client, 0, mine, expected, 50)
    for caller in callers:
        caller.join()
    assert_undisturbed(during, before)
    for code, seconds in outcomes:
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED and seconds < 3
    servers[1].signal(signal.SIGCONT)
    for _ in range(5):
        assert bits(client.forward(0, both)) == whole
    assert open_files(router) <= files
    assert router.stop() == 0 and all(server.stop() == 0 for server in servers)


@pytest.mark.full
def test_a_server_that_stops_for_long(processes, pair):
    """The router notices by itself, and so it does when the server is back."""
    router, servers, client, mine, both = pair
    address = router.address()
    whole = bits(client.forward(0, both))
    servers[1].signal(signal.SIGSTOP)
    wait_until("it is down", lambda: processes.states(address)["server-1"] == "down", 30)
    start = time.monotonic()
    with pytest.raises(expertmesh.Error, match="UNAVAILABLE.*experts? [81]"):
        client.forward(0, both)
    assert time.monotonic() - start < 2
    assert client.forward(0, mine).output.shape == mine.shape
    servers[1].signal(signal.SIGCONT)
    processes.wait_serving(address)
    assert bits(client.forward(0, both)) == whole


def test_a_server_that_dies(processes, pair):
    router, servers, client, mine, both = pair
    expected, whole = bits(client.forward(0, mine)), bits(client.forward(0, both))
    before = latencies(client, 0, mine, expected, 50)
    files = open_files(router)
    for _ in range(3):
        servers[1].signal(signal.SIGSTOP)
        failed: list[grpc.StatusCode] = []

        def call() -> None:
            try:
                client.forward(0, both)
            except expertmesh.Error as error:
                failed.append(error.code)

        callers = [threading.Thread(target=call) for _ in range(4)]
        for caller in callers:
            caller.start()
        time.sleep(0.2)  # they are under way
        servers[1].kill()
        assert_undisturbed(latencies(client, 0, mine, expected, 30), before)
        for caller in callers:
            caller.join(5)
        assert failed == [grpc.StatusCode.UNAVAILABLE] * 4
        servers[1] = processes.server(OLMOE, router.address(), "1/2")
        processes.wait_serving(router.address())
        assert bits(client.forward(0, both)) == whole
    wait_until("the dead are let go", lambda: open_files(router) <= files, 5)


# --- streams ---------------------------------------------------------------------------------------------

SLICES = 500


def pushed_stream(address: str, message: Callable[[int], bytes]) -> tuple[grpc.Channel, grpc.Call, list[int]]:
    """A Dispatch stream that writes SLICES messages as fast as the server takes them and reads none; what it has
    handed to gRPC so far."""
    sent = [0]

    def messages() -> Iterator[bytes]:
        for i in range(1, SLICES + 1):
            yield message(i)
            sent[0] = i

    channel = grpc.insecure_channel(
        address, [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    )
    call = channel.stream_stream("/expertmesh.v1.ExpertService/Dispatch")(messages(), timeout=60)
    return channel, call, sent


def test_half_a_gigabyte_before_the_first_reply_is_read(processes, wide):
    """Both ways 1 MiB a slice. The server stops taking more when a few are with it, and is not stuck."""
    limit = 2 * MIB
    router = processes.router(wide)
    address = router.address()
    server = processes.server(wide, address, "0/1", "--max-message-bytes", limit)
    processes.wait_serving(address)
    x = tokens(HIDDEN, 64)
    memory = resident(server)
    with expertmesh.Client(address) as client:
        small = x[:4]
        expected = bits(client.forward(0, small))
        first = slice_request(1, x, range(64)).SerializeToString()
        assert first[:2] == b"\x08\x01"  # round_id comes first

        def message(i: int) -> bytes:
            return expert_pb2.DispatchRequest(round_id=i).SerializeToString() + first[2:]

        start = time.monotonic()
        channel, call, sent = pushed_stream(server.address(), message)
        last = (0, start)
        while sent[0] < SLICES and time.monotonic() - last[1] < 5:  # all sent, or no progress any more
            if sent[0] != last[0]:
                last = sent[0], time.monotonic()
            assert bits(client.forward(0, small)) == expected  # a neighbour, meanwhile
            time.sleep(0.01)
        assert sent[0] > 10
        grown = resident(server) - memory
        assert sent[0] < SLICES and grown < 32 * limit, f"{sent[0]} sent, {grown / MIB:.0f} MiB more"
        rows, codes = {}, set()
        try:
            for encoded in call:
                reply = expert_pb2.DispatchResponse.FromString(encoded)
                codes.add(reply.code)
                rows[reply.round_id] = reply.rows.data
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error
        assert time.monotonic() - start < 60
        assert codes <= {0, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]}
        assert len(rows) == SLICES and len({data for data in rows.values() if data}) == 1
        channel.close()
        assert bits(client.forward(0, small)) == expected
    assert server.stop() == 0


def test_a_router_that_never_reads(processes, wide):
    """Its stream stays full for ever. Others are served, and the server ends when it is told to."""
    router = processes.router(wide)
    address = router.address()
    server = processes.server(wide, address, "0/1", "--grace", 2)
    processes.wait_serving(address)
    x = tokens(HIDDEN, 64)
    encoded = slice_request(1, x, range(64)).SerializeToString()
    with expertmesh.Client(address) as client:
        small = x[:4]
        expected = bits(client.forward(0, small))
        before = latencies(client, 0, small, expected, 30)
        channel, call, sent = pushed_stream(server.address(), lambda i: encoded)
        wait_until("it has sent what the server takes", lambda: sent[0] > 10)
        time.sleep(2)
        assert_undisturbed(latencies(client, 0, small, expected, 30), before)
    assert router.stop() == 0
    assert server.stop(8) == 0
    channel.close()
