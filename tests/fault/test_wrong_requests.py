"""Requests that are wrong are refused by name, at once, and nobody else notices."""

from __future__ import annotations

import expertmesh
import grpc
import ml_dtypes
import numpy as np
import pytest
from expertmesh.v1 import moe_pb2, tensor_pb2
from models import SMALL, bits, reply_bits, request, stub, tokens

HIDDEN = 12
F32 = tensor_pb2.DATA_TYPE_F32
Tensor = tensor_pb2.Tensor


def with_tensor(dtype: int, shape: list[int], data: bytes) -> moe_pb2.ForwardRequest:
    return moe_pb2.ForwardRequest(layer=0, hidden_states=Tensor(dtype=dtype, shape=shape, data=data))


def with_row(value: float, row: int, **fields: object) -> moe_pb2.ForwardRequest:
    x = tokens(HIDDEN, 4)
    x[row, 5] = value
    return request(0, x, **fields)


GOOD = tokens(HIDDEN, 4)
# name: the request, and what its message has to say: the field, what was expected, what was given.
INVALID = {
    "narrow": (request(0, GOOD[:, :11]), ["hidden_states.shape", "12", "[4, 11]"]),
    "wide": (request(0, tokens(13, 4)), ["hidden_states.shape", "12", "[4, 13]"]),
    "flat": (with_tensor(F32, [48], GOOD.tobytes()), ["hidden_states.shape", "12", "[48]"]),
    "deep": (with_tensor(F32, [2, 2, 12], GOOD.tobytes()), ["hidden_states.shape", "12", "[2, 2, 12]"]),
    "negative": (with_tensor(F32, [-4, -12], GOOD.tobytes()), ["hidden_states.shape", "[-4, -12]"]),
    "huge": (with_tensor(F32, [1 << 40, 1 << 40], b""), ["hidden_states.shape", str(1 << 40)]),
    "short": (with_tensor(F32, [4, 12], GOOD.tobytes()[:-1]), ["hidden_states.data", "192", "191"]),
    "long": (with_tensor(F32, [4, 12], GOOD.tobytes() + b"0"), ["hidden_states.data", "192", "193"]),
    "claimed": (with_tensor(F32, [1 << 30, 12], b""), ["hidden_states.data", str(48 << 30), "0"]),
    "i32": (with_tensor(tensor_pb2.DATA_TYPE_I32, [4, 12], bytes(192)), ["hidden_states.dtype", "F32", "I32"]),
    "dtype unset": (with_tensor(0, [4, 12], GOOD.tobytes()), ["hidden_states.dtype", "F32", "0"]),
    "dtype 99": (with_tensor(99, [4, 12], GOOD.tobytes()), ["hidden_states.dtype", "F32", "99"]),
    "no tensor": (moe_pb2.ForwardRequest(layer=0), ["hidden_states", "12"]),
    "layer": (request(7, GOOD), ["layer", "0", "7"]),
    "layer -1": (request(-1, GOOD), ["layer", "0", "-1"]),
    "nan": (with_row(np.nan, 2), ["hidden_states", "row 2"]),
    "inf": (with_row(np.inf, 3), ["hidden_states", "row 3"]),
    "-inf": (with_row(-np.inf, 0), ["hidden_states", "row 0"]),
}
UNSUPPORTED = {
    "save_for_backward": True,
    "context_id": "c",
    "topk_ids": Tensor(dtype=tensor_pb2.DATA_TYPE_I32, shape=[4, 2], data=bytes(32)),
    "topk_weights": Tensor(dtype=F32, shape=[4, 2], data=bytes(32)),
    "input_ids": Tensor(dtype=tensor_pb2.DATA_TYPE_I64, shape=[4], data=bytes(32)),
}


@pytest.fixture(scope="module")
def address(shared_processes) -> str:
    return shared_processes.serve(SMALL, 2).address()


def refused(address: str, message: moe_pb2.ForwardRequest, code: grpc.StatusCode) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        stub(address).Forward(message, timeout=20)
    assert caught.value.code() == code, caught.value
    return caught.value.details()


@pytest.mark.parametrize("name", INVALID)
def test_invalid(address, name):
    message, words = INVALID[name]
    details = refused(address, message, grpc.StatusCode.INVALID_ARGUMENT)
    for word in words:
        assert word in details


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_fields(address, field):
    message = request(0, GOOD, **{field: UNSUPPORTED[field]})
    assert field in refused(address, message, grpc.StatusCode.UNIMPLEMENTED)


@pytest.mark.parametrize("field, value", [("model_fingerprint", "0" * 64), ("placement_epoch", 1 << 60)])
def test_another_model_or_placement(address, field, value):
    details = refused(address, request(0, GOOD, **{field: value}), grpc.StatusCode.FAILED_PRECONDITION)
    assert field in details and str(value) in details


def test_texts_stay_short(address):
    """Errors travel as metadata, which is limited: a long one would be lost with its code."""
    long = "f" * 20_000
    details = refused(address, request(0, GOOD, model_fingerprint=long), grpc.StatusCode.FAILED_PRECONDITION)
    assert "model_fingerprint: expected " in details and "ffff" in details and len(details) < 4000
    for shape in ([1] * 5000, [-1] * 5000, [1 << 62] * 5000):
        details = refused(address, with_tensor(F32, shape, bytes(4)), grpc.StatusCode.INVALID_ARGUMENT)
        assert "hidden_states.shape" in details and str(shape[0]) in details and len(details) < 4000
    with expertmesh.Client(address) as client:
        with pytest.raises(expertmesh.Error, match="FAILED_PRECONDITION: model_fingerprint: expected"):
            client.forward(0, GOOD, model_fingerprint=long)


def test_bytes_that_are_no_message(address):
    channel = grpc.insecure_channel(address)
    call = channel.unary_unary("/expertmesh.v1.MoeService/Forward")
    # No tag, a field without its value, a tensor that claims 2 GiB.
    for rubbish in (b"\xff" * 40, b"\x08", b"\x7a\xff\xff\xff\xff\x07"):
        with pytest.raises(grpc.RpcError) as caught:
            call(rubbish, timeout=20)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "ForwardRequest" in caught.value.details()


def test_neighbours_of_wrong_requests(address):
    client = stub(address)
    inputs = [tokens(HIDDEN, 1 + 7 * i, seed=i) for i in range(20)]
    alone = [reply_bits(client.Forward(request(0, x), timeout=30)) for x in inputs]
    for _ in range(3):
        wrong = [client.Forward.future(message, timeout=30) for message, _ in INVALID.values()]
        good = [client.Forward.future(request(0, x), timeout=30) for x in inputs]
        wrong += [client.Forward.future(message, timeout=30) for message, _ in INVALID.values()]
        assert [reply_bits(call.result()) for call in good] == alone
        assert {call.code() for call in wrong} == {grpc.StatusCode.INVALID_ARGUMENT}


def test_rows_beside_a_nan(address):
    """The call is refused as a whole; without the row the others are what they were."""
    x = tokens(HIDDEN, 4)
    with expertmesh.Client(address) as client:
        whole = client.forward(0, x).output
        bad = x.copy()
        bad[2] = np.nan
        with pytest.raises(expertmesh.Error, match="INVALID_ARGUMENT: hidden_states.*row 2"):
            client.forward(0, bad)
        others = [0, 1, 3]
        assert client.forward(0, x[others]).output.tobytes() == whole[others].tobytes()


def test_rows_are_numbered_as_the_caller_does(address):
    """Also where the SDK sends a call in parts, of 15 rows or so."""
    part = with_row(np.nan, 2, first_row=1000)
    assert "row 1002" in refused(address, part, grpc.StatusCode.INVALID_ARGUMENT)
    x = tokens(HIDDEN, 100)
    x[77, 3] = np.nan
    x[78, 3] = np.nan
    with expertmesh.Client(address, max_message_bytes=5000) as client:
        with pytest.raises(expertmesh.Error, match=r"INVALID_ARGUMENT: hidden_states.*row 77\b"):
            client.forward(0, x)


def test_through_the_sdk(address):
    with expertmesh.Client(address) as client:
        for layer, x, words in [
            (0, GOOD[:, :11], ["hidden_states.shape", "12", "11"]),
            (7, GOOD, ["layer", "0", "7"]),
            (0, GOOD.astype(np.float64), ["hidden_states", "float32", "f8"]),
            (0, GOOD.astype(np.int32), ["hidden_states", "float32", "int32"]),
            (0, GOOD[0], ["hidden_states", "[T, D]", "[12]"]),
        ]:
            with pytest.raises(expertmesh.Error) as caught:
                client.forward(layer, x)
            assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
            for word in words:
                assert word in caught.value.message


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_no_tokens(address, dtype):
    with expertmesh.Client(address) as client:
        result = client.forward(0, np.empty((0, HIDDEN), dtype), return_router_logits=True)
    assert (result.output.shape, result.output.dtype) == ((0, HIDDEN), dtype)
    assert (result.topk_ids.shape, result.topk_weights.shape) == ((0, 2), (0, 2))
    assert result.router_logits.shape == (0, 11)


def test_over_the_message_limit(address):
    limit = 64 << 20
    x = np.tile(tokens(HIDDEN, 1000), (limit // (1000 * HIDDEN * 4) + 1, 1))
    assert x.nbytes > limit
    details = refused(address, request(0, x), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert str(limit) in details
    with expertmesh.Client(address, timeout=120) as client:
        part = client.forward(0, x[:1000])
        whole = client.forward(0, x)
    assert whole.output.tobytes() == part.output.tobytes() * (len(x) // 1000)
    assert bits(part)[1] * (len(x) // 1000) == whole.topk_ids.tobytes()
