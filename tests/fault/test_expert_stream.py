"""What routers send to expert servers, and what comes of it when the router is wrong, or gone."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from expert_stream import ExpertStream, rows_of, slice_request
from fake_router import checkpoint_layers
from models import SMALL, tokens, write_checkpoint
from processes import Process, cpu_seconds, peak_memory, wait_idle, wait_until

NOBODY = "127.0.0.1:1"  # a router that is not there: nothing listens on port 1
HIDDEN = 12


@pytest.fixture
def server(processes) -> Process:
    return processes.server(SMALL, NOBODY)


def expected_rows(x: np.ndarray, expert: int) -> np.ndarray:
    block = checkpoint_layers(SMALL)[0]
    gate, up = np.split(block.gate_up[expert] @ x.T, 2)
    return (block.down[expert] @ (gate / (1 + np.exp(-gate)) * up)).T


def assert_right(reply, x: np.ndarray, expert: int = 0) -> None:
    expected = expected_rows(x, expert)
    assert np.linalg.norm(rows_of(reply) - expected) <= 1e-5 * np.linalg.norm(expected)


def test_a_slice_whose_reply_would_be_too_large(server):
    x = tokens(HIDDEN, 3)
    with ExpertStream(server.address()) as stream:
        assert_right(stream.ask(slice_request(1, x, [2, 0, 1])), x[[2, 0, 1]])
        # One row of 48 bytes, but 240 MB of replies.
        before = peak_memory(server)
        refused = stream.ask(slice_request(2, x[:1], np.zeros(5_000_000, np.int32)))
        assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        for word in ("gather", "5000000 rows of 12 elements", str(64 << 20)):
            assert word in refused.message
        assert peak_memory(server) - before < 150 << 20  # the request is there, and the reply is not
        assert_right(stream.ask(slice_request(3, x, [1, 1], experts=[4])), x[[1, 1]], 4)
    assert server.stop() == 0


def test_wrong_slices_do_not_end_the_stream(server):
    x = tokens(HIDDEN, 2)
    good = slice_request(1, x, [0, 1])
    wrong = {
        "phase": slice_request(2, x, [0]),
        "expert_ids": slice_request(3, x, [0], experts=[99]),
        "layer": slice_request(4, x, [0], layer=7),
        "gather": slice_request(5, x, [2]),
        "m_sizes": slice_request(6, x, [0]),
        "rows.shape": slice_request(7, tokens(HIDDEN + 1, 2), [0]),
        "rows.data": slice_request(8, x, [0]),
    }
    wrong["phase"].phase = 2
    wrong["m_sizes"].m_sizes[0] = -1
    wrong["rows.data"].rows.data += b"0"
    with ExpertStream(server.address()) as stream:
        for word, message in wrong.items():
            refused = stream.ask(message)
            assert refused.code != 0 and word in refused.message, refused
            assert_right(stream.ask(good), x)


def test_bytes_that_are_no_message_end_the_stream(server):
    x = tokens(HIDDEN, 2)
    for rubbish in (b"\xff" * 40, b"\x08", b"\x7a\xff\xff\xff\xff\x07"):
        with ExpertStream(server.address()) as stream:
            assert_right(stream.ask(slice_request(1, x, [0, 1])), x)
            stream.send(rubbish)
            with pytest.raises(grpc.RpcError):
                stream.receive()
            code, details = stream.ended()
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert "DispatchRequest" in details
    with ExpertStream(server.address()) as stream:
        assert_right(stream.ask(slice_request(1, x, [0, 1])), x)
    assert server.stop() == 0


WIDE = 512
ROWS = 256


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A model whose rows take long."""
    return write_checkpoint(
        tmp_path_factory.mktemp("wide") / "model", experts=4, top_k=2, hidden=WIDE, intermediate=WIDE
    )


@pytest.fixture
def busy(processes, wide) -> Iterator[tuple[Process, ExpertStream, float]]:
    """A server of one thread with much more queued than it will compute in the test; seconds of one slice."""
    server = processes.server(wide, NOBODY, "0/1", "--grace", 1)
    x = tokens(WIDE, 1)
    with ExpertStream(server.address()) as stream:
        start = cpu_seconds(server)
        stream.ask(slice_request(1, x, [0] * ROWS))
        seconds = max(cpu_seconds(server) - start, 0.01)
        for i in range(2, 2 + int(60 / seconds)):
            stream.send(slice_request(i, x, [0] * ROWS))
        stream.receive()  # under way
        yield server, stream, seconds


def test_work_for_a_router_that_is_gone_is_dropped(busy):
    server, stream, seconds = busy
    start = cpu_seconds(server)
    stream.cancel()
    wait_idle(server)
    assert cpu_seconds(server) - start < 2 + 3 * seconds  # of 60
    with ExpertStream(server.address()) as other:
        assert len(rows_of(other.ask(slice_request(1, tokens(WIDE, 1), [0])))) == 1
    assert server.stop() == 0


def test_sigterm_with_much_queued(busy):
    server, stream, _ = busy
    server.signal(signal.SIGTERM)
    assert server.wait(10) == 0


@pytest.mark.parametrize("end", ["cancel", "deadline", "sigterm"])
def test_one_long_slice_of_one_expert(processes, wide, end):
    """Nothing but the rows themselves is left to stop between."""
    server = processes.server(wide, NOBODY, "0/1", "--grace", 0.5, "--max-message-bytes", 1 << 30)
    x = tokens(WIDE, 1)
    with ExpertStream(server.address()) as stream:
        start = cpu_seconds(server)
        stream.ask(slice_request(1, x, [0] * ROWS))
        rows = min(int(ROWS * 60 / max(cpu_seconds(server) - start, 0.01)), 500_000)  # a minute of them
        limit = {"timeout_us": 300_000} if end == "deadline" else {}
        start = cpu_seconds(server)
        stream.send(slice_request(2, x, [0] * rows, **limit))
        if end == "deadline":
            assert stream.receive().code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        else:
            wait_until("it is under way", lambda: cpu_seconds(server) - start > 0.2)
        if end == "cancel":
            stream.cancel()
            wait_idle(server)
        if end == "sigterm":
            assert server.stop(10) == 0  # after the grace period: the router is still there
        else:
            assert cpu_seconds(server) - start < 10
            assert server.running()
