"""A Dispatch stream of an expert server as a router opens it, by hand: with the stubs that protoc generates, or
with bytes that no router would send."""

from __future__ import annotations

import queue
from collections.abc import Sequence

import grpc
import numpy as np
from expertmesh.v1 import expert_pb2, tensor_pb2


def slice_request(
    round_id: int, x: np.ndarray, gather: Sequence[int], *, experts: Sequence[int] = (0,), **fields: object
) -> expert_pb2.DispatchRequest:
    """Every expert computes the positions of `gather` that come to it: as many for each."""
    return expert_pb2.DispatchRequest(
        round_id=round_id,
        phase=expert_pb2.PHASE_FORWARD,
        expert_ids=experts,
        m_sizes=[len(gather) // len(experts)] * len(experts),
        gather=gather,
        rows=tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_F32, shape=x.shape, data=x.tobytes()),
        **fields,
    )


class ExpertStream:
    """Open until `close` or `cancel`; every reply has to be taken by `receive`."""

    def __init__(self, address: str) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(address, options)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method = self._channel.stream_stream("/expertmesh.v1.ExpertService/Dispatch")
        self.call = method(iter(self._requests.get, None), timeout=60, wait_for_ready=True)

    def send(self, request: expert_pb2.DispatchRequest | bytes) -> None:
        encoded = request if isinstance(request, bytes) else request.SerializeToString()
        self._requests.put(encoded)

    def receive(self) -> expert_pb2.DispatchResponse:
        return expert_pb2.DispatchResponse.FromString(next(self.call))

    def ask(self, request: expert_pb2.DispatchRequest) -> expert_pb2.DispatchResponse:
        self.send(request)
        reply = self.receive()
        assert reply.round_id == request.round_id
        return reply

    def ended(self) -> tuple[grpc.StatusCode, str]:
        """How the server ended it."""
        return self.call.code(), self.call.details()

    def cancel(self) -> None:
        self.call.cancel()

    def __enter__(self) -> ExpertStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self._requests.put(None)
        self._channel.close()


def rows_of(reply: expert_pb2.DispatchResponse) -> np.ndarray:
    assert reply.code == 0, reply.message
    return np.frombuffer(reply.rows.data, np.float32).reshape(tuple(reply.rows.shape))
