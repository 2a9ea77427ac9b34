"""Encodes requests and decodes replies of MoeService.Forward with one copy of the tensor bytes.

A generated message copies a tensor's bytes several times on its way to the socket. The contract puts the
bytes last (field 15 of a message whose field 15 is its tensor), so here protobuf encodes and parses
everything but them, and they are appended to, or read from, the buffer directly. What is sent is plain
protobuf.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from .v1 import moe_pb2, tensor_pb2

# Number of the tensor in ForwardRequest and ForwardResponse, and of the bytes in Tensor.
_LAST_FIELD = 15
_LAST_TAG = bytes([_LAST_FIELD << 3 | 2])

_DTYPES: dict[Any, np.dtype[Any]] = {
    tensor_pb2.DATA_TYPE_F32: np.dtype(np.float32),
    tensor_pb2.DATA_TYPE_BF16: np.dtype(ml_dtypes.bfloat16),
    tensor_pb2.DATA_TYPE_F16: np.dtype(np.float16),
    tensor_pb2.DATA_TYPE_I32: np.dtype(np.int32),
    tensor_pb2.DATA_TYPE_I64: np.dtype(np.int64),
}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()}


@dataclass
class Reply:
    """A decoded ForwardResponse. The arrays are read-only views of the received bytes."""

    output: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    router_logits: np.ndarray | None


def encode_request(request: moe_pb2.ForwardRequest, hidden_states: np.ndarray) -> bytes:
    """`request` (without its hidden_states) with `hidden_states` [T, D], C-contiguous, as its tensor."""
    header = tensor_pb2.Tensor(
        dtype=_DATA_TYPES[hidden_states.dtype], shape=hidden_states.shape
    ).SerializeToString()
    header += _LAST_TAG + _varint(hidden_states.nbytes)
    length = len(header) + hidden_states.nbytes
    # Viewed as bytes because the buffer protocol does not know bfloat16.
    data = hidden_states.reshape(-1).view(np.uint8).data
    return b"".join([request.SerializeToString(), _LAST_TAG, _varint(length), header, data])


def decode_reply(message: bytes) -> Reply:
    """Throws ValueError (or protobuf's DecodeError) if `message` is not a well-formed ForwardResponse."""
    rest, output = _split_last(memoryview(message))
    response = moe_pb2.ForwardResponse.FromString(rest)
    rest, data = _split_last(output)
    logits = None
    if response.HasField("router_logits"):
        logits = _array("router_logits", response.router_logits)
    return Reply(
        output=_array("output", tensor_pb2.Tensor.FromString(rest), data),
        topk_ids=_array("topk_ids", response.topk_ids),
        topk_weights=_array("topk_weights", response.topk_weights),
        router_logits=logits,
    )


def _array(name: str, tensor: tensor_pb2.Tensor, data: memoryview | None = None) -> np.ndarray:
    buffer = tensor.data if data is None else data
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"{name}.dtype: unknown value {tensor.dtype}")
    expected = prod(tensor.shape) * dtype.itemsize
    if len(buffer) != expected:
        raise ValueError(f"{name}.data: expected {expected} bytes, given {len(buffer)}")
    if expected == 0:
        return np.empty(tuple(tensor.shape), dtype)
    return np.frombuffer(buffer, dtype).reshape(tuple(tensor.shape))


def _split_last(message: memoryview) -> tuple[bytes, memoryview]:
    """Splits an encoded message into itself without field 15, and the content of that field (maybe empty)."""
    content = message[:0]
    rest = []
    at = length = 0
    while at < len(message):
        start = at
        tag, at = _read_varint(message, at)
        wire_type = tag & 7
        if wire_type == 0:
            _, at = _read_varint(message, at)
        elif wire_type == 2:
            length, at = _read_varint(message, at)
            at += length
        elif wire_type in (1, 5):
            at += 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire_type}")
        if at > len(message):
            raise ValueError("the message is truncated")
        if tag == _LAST_FIELD << 3 | 2:
            content = message[at - length : at]
        else:
            rest.append(message[start:at])
    return b"".join(rest), content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    """The value at `at`, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a varint is truncated or too long")
