"""Calls that wait for servers: what they say in the end, and that nobody else waits with them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import expertmesh
import grpc
import numpy as np
import pytest
from fake_router import checkpoint_layers
from models import SMALL, reply_bits, request, stub, tokens, write_checkpoint, write_hidden_states
from processes import wait_until

WAITING = 32


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    """Rows that the first of two servers (experts 0-5 of 11) computes alone, and rows that need the second."""
    x = tokens(12, 200)
    _, ids, _, _ = checkpoint_layers(SMALL)[0](x)
    alone = (ids < 6).all(axis=1)
    assert 10 < alone.sum() < 190
    return x[alone], x[~alone]


@pytest.fixture
def half(processes) -> Iterator[tuple]:
    """A router with the first of two servers: (start a cluster with these options, make it whole)."""
    address = ""

    def start(*options: object) -> str:
        nonlocal address
        address = processes.router(SMALL, *options).address()
        processes.server(SMALL, address, "0/2")
        wait_until("server-0 serves", lambda: processes.states(address).get("server-0") == "serving")
        return address

    yield start, lambda: processes.server(SMALL, address, "1/2")


def test_a_call_that_can_be_answered_overtakes_those_that_wait(half, rows):
    start, complete = half
    client = stub(start())
    mine, waiting = rows
    calls = [client.Forward.future(request(0, waiting[i : i + 1]), timeout=60) for i in range(WAITING)]
    for _ in range(10):
        assert client.Forward(request(0, mine), timeout=20).output.shape == list(mine.shape)
    assert not any(call.done() for call in calls)
    complete()
    for i, call in enumerate(calls):
        assert reply_bits(call.result()) == reply_bits(client.Forward(request(0, waiting[i : i + 1]), timeout=20))


@pytest.mark.parametrize("limit", [0, 3000])
def test_bytes_that_wait_are_bounded(half, rows, limit):
    start, complete = half
    mine, waiting = rows
    client = stub(start("--queue-bytes", limit))
    large = waiting[:1].repeat(100, axis=0)  # 4800 bytes: over the limit, and let in where nobody else is
    first = client.Forward.future(request(0, large), timeout=60)

    def refusal(x: np.ndarray) -> grpc.RpcError | None:
        try:
            assert client.Forward(request(0, x), timeout=20).output.shape == list(x.shape)
        except grpc.RpcError as error:
            return error
        return None

    error = wait_until("a second call is refused", lambda: refusal(mine[:1]))  # the first may not be there yet
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(limit) in error.details() and "retry later" in error.details()
    assert not first.done()
    complete()
    first.result()
    for x in (mine[:1], large):
        wait_until("there is room again", lambda: refusal(x) is None)


def test_the_text_of_a_call_that_waited_in_vain(processes, tmp_path):
    """No bare "deadline exceeded": the experts are named, though it is the caller's clock that ran out."""
    model = write_checkpoint(tmp_path / "model", experts=4, top_k=4)
    address = processes.router(model, "--startup-grace", 60).address()
    x = tokens(16, 3)
    file = write_hidden_states(tmp_path / "x.safetensors", x)
    text = "layer 0: no live server holds experts 0-3"
    with ThreadPoolExecutor(1) as pool, expertmesh.Client(address, timeout=2) as client:
        files = ("--input", file, "--output", tmp_path / "y.safetensors")
        command = pool.submit(
            processes.cli, "forward", "--router", address, "--layer", 0, "--timeout", 2, *files
        )
        with pytest.raises(expertmesh.Error) as caught:
            client.forward(0, x)
        assert caught.value.code == grpc.StatusCode.UNAVAILABLE, caught.value
        assert text in caught.value.message
        assert command.result().returncode == 1
        assert text in command.result().stderr
    assert not (tmp_path / "y.safetensors").exists()
