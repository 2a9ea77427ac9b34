"""Requests that share rounds: nobody gets anything else than alone, and `status` shows how they were merged."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import ml_dtypes
import numpy as np
import pytest
from expertmesh.v1 import tensor_pb2
from models import reply_bits, request, stub, tokens, write_checkpoint
from processes import children, command_line

HIDDEN = 512
CLIENTS = 8
CALLS = 25  # of each client


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Path:
    """A model whose rounds take a few milliseconds with the plain engine."""
    folder = tmp_path_factory.mktemp("slow") / "model"
    return write_checkpoint(folder, experts=16, top_k=8, hidden=HIDDEN, intermediate=HIDDEN)


def start(processes, model: Path, *options: object) -> str:
    address = processes.router(model, *options).address()
    for shard in ("0/2", "1/2"):
        processes.server(model, address, shard, "--engine", "for_loop")
    processes.wait_serving(address)
    return address


def merged(processes, address: str) -> dict[str, int]:
    [layer] = processes.status(address)["layers"]
    assert layer["layer"] == 0
    return layer


@pytest.mark.parametrize("batching", [True, False])
def test_eight_clients_of_one_token(processes, slow, batching):
    address = start(processes, slow, "--rounds-per-layer", 1 if batching else 0)
    x = tokens(HIDDEN, CLIENTS * CALLS)
    ready = threading.Barrier(CLIENTS)

    def client(c: int) -> list[tuple[bytes, bytes, bytes]]:
        moe = stub(address)
        ready.wait()
        mine = range(c * CALLS, (c + 1) * CALLS)
        return [reply_bits(moe.Forward(request(0, x[t : t + 1]), timeout=60)) for t in mine]

    with ThreadPoolExecutor(CLIENTS) as pool:
        replies = sum(pool.map(client, range(CLIENTS)), [])
    counts = merged(processes, address)
    assert counts["requests"] == counts["tokens"] == CLIENTS * CALLS
    if batching:
        assert counts["requests"] >= 3 * counts["rounds"], counts
    else:
        assert counts["requests"] == counts["rounds"], counts
    alone = stub(address)
    for t in range(0, len(x), 7):
        assert replies[t] == reply_bits(alone.Forward(request(0, x[t : t + 1]), timeout=60))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--rounds-per-layer", 0),
        ("--rounds-per-layer", 3, "--max-round-tokens", 7),
        ("--batch-wait-us", 3000, "--max-round-tokens", 20),
    ],
    ids=["default", "off", "small rounds", "wait"],
)
def test_wrong_requests_among_good_ones(processes, tmp_path, options):
    model = write_checkpoint(tmp_path / "model", experts=8, top_k=2, hidden=64, intermediate=32)
    address = start(processes, model, *options)
    moe = stub(address)
    x = tokens(64, 60)
    good = [request(0, x[3 * i : 3 * i + 1 + i % 3]) for i in range(20)]
    expected = [reply_bits(moe.Forward(one, timeout=60)) for one in good]
    not_finite = x[:30].copy()
    not_finite[17, 5] = np.nan
    integers = np.zeros((1, 64), np.int64)
    int64 = request(0, x[:1])
    int64.hidden_states.CopyFrom(
        tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_I64, shape=integers.shape, data=integers.tobytes())
    )
    wrong = {
        "row 1017 ": request(0, not_finite, first_row=1000),
        "expected [T, 64], got [1, 65]": request(0, tokens(65, 1)),
        "hidden_states.dtype: expected F32, BF16 or F16, got I64": int64,
        "layer: ": request(7, x[:1]),
    }
    for _ in range(5):
        calls = [moe.Forward.future(one, timeout=60) for one in good]
        bad = {text: moe.Forward.future(one, timeout=60) for text, one in wrong.items()}
        for text, call in bad.items():
            assert call.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert text in call.details()
        assert [reply_bits(call.result()) for call in calls] == expected
    assert merged(processes, address)["requests"] >= 6 * len(good)


def test_two_dtypes_at_once(processes, tmp_path):
    model = write_checkpoint(tmp_path / "model", experts=8, top_k=2, hidden=64, intermediate=32)
    moe = stub(start(processes, model))
    x = tokens(64, 16)
    half = x.astype(ml_dtypes.bfloat16)
    bf16 = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_BF16, shape=half.shape, data=half.tobytes())
    one, other = request(0, x), request(0, x)
    other.hidden_states.CopyFrom(bf16)
    expected = [reply_bits(moe.Forward(each, timeout=60)) for each in (one, other)]
    assert expected[0] != expected[1]
    calls = [moe.Forward.future(each, timeout=60) for each in (one, other) * 20]
    assert [reply_bits(call.result()) for call in calls] == expected * 20


def test_serve_passes_the_options_on(processes, tmp_path):
    model = write_checkpoint(tmp_path / "model", experts=4, top_k=2)
    options = ("--rounds-per-layer", "2", "--batch-wait-us", "70", "--max-round-tokens", "99")
    serve = processes.serve(model, 1, *options)
    serve.address()
    [router] = [line for line in map(command_line, children(serve)) if line[0].endswith("-router")]
    for name, value in zip(options[::2], options[1::2]):
        assert router[router.index(name) + 1] == value
