"""The client: numpy arrays in, numpy arrays out."""

from __future__ import annotations

import operator
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError

import grpc

from . import fork, wire
from .error import Error
from .target import MAX_INT, channel_options, channel_target
from .v1 import cluster_pb2, moe_pb2

_HIDDEN_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# What a message needs beside its rows: dtypes, shapes, lengths, the model's fingerprint.
_HEADER_BYTES = 4096
_SERVICE = "/expertmesh.v1.MoeService/"
# Parts of one call that are under way at a time: the next is there when the router has computed one.
_PARTS_UNDER_WAY = 2
# In seconds; clocks and gRPC count in integers.
_MAX_TIMEOUT = 1e9
# How long a channel is asked for its state after a deadline, to say whether a router was there at all.
_STATE_SECONDS = 0.2


@dataclass(frozen=True)
class ForwardResult:
    """Output of one MoE block for T tokens. The arrays are the caller's own and writable."""

    #: [T, D] in the dtype of the input.
    output: np.ndarray
    #: int32 [T, K]: the experts of each token, by descending selection score, ties by the lower id.
    topk_ids: np.ndarray
    #: float32 [T, K]: the routing weight of each.
    topk_weights: np.ndarray
    #: float32 [T, E + num_identity_experts]: the gate's logits, if they were asked for.
    router_logits: np.ndarray | None


@dataclass(frozen=True)
class Layer:
    """One served layer."""

    #: Decoder layer, as Hugging Face numbers them (0-based).
    layer: int
    #: "MOE" or "DENSE".
    kind: str
    #: D, in elements.
    hidden_size: int
    #: F, in elements.
    intermediate_size: int
    #: E.
    num_experts: int
    #: K.
    top_k: int
    #: How the expert weights are stored: "F32", "BF16", "F16", "F8_E4M3" or "F4".
    weight_dtype: str
    #: Number format the experts are computed in: "native".
    format: str
    #: Rows of every expert's group are padded to this multiple; 1 means never.
    pad_multiple: int
    #: Shared experts, which every token passes through beside its K; the network of a dense layer is one.
    num_shared_experts: int = 0
    #: F of the shared experts, in elements; 0 if there are none.
    shared_intermediate_size: int = 0
    #: Ids E, E + 1, ... that the gate may choose and that return their input.
    num_identity_experts: int = 0


@dataclass(frozen=True)
class Model:
    """What the router serves."""

    #: Hash of the configuration and the tensors.
    model_fingerprint: str
    #: model_type of its config.json.
    model_type: str
    #: The served layers, ascending.
    layers: list[Layer]


@dataclass(frozen=True)
class Server:
    """One expert server as the router sees it."""

    name: str
    #: HOST:PORT.
    address: str
    #: Process id on its machine.
    pid: int
    #: "SERVING", "CONNECTING" or "DOWN".
    state: str
    #: Expert ids it holds, by layer.
    experts: dict[int, list[int]]
    #: Pairs of token and expert computed since it started.
    rows: int
    #: Version of its arithmetic.
    numerics: str


@dataclass(frozen=True)
class Cluster:
    """The state of the cluster as one router sees it."""

    #: Changes whenever the set of live servers changes; never 0.
    placement_epoch: int
    #: Every server that registered since the router started, by name.
    servers: list[Server]
    #: Whether every expert of every layer has a live server.
    serving: bool
    #: What is missing while `serving` is false.
    missing: str
    #: Version of the router.
    version: str


class Client:
    """A connection to the routers of a cluster.

    Thread-safe: one client may be used by any number of threads, and calls do not hold the interpreter's lock
    while they wait. Nothing is connected before the first call, and a call waits, up to its timeout, for a
    router that is not up yet. A client can be pickled; the copy connects on its own.

    In a forked child the client connects anew, unless a call was in flight when the process forked: gRPC does
    not survive that, and the child's calls are refused. Other start methods have no such limit.

    All methods raise `Error`.
    """

    def __init__(self, address: str, *, timeout: float = 30.0, max_message_bytes: int = 64 << 20) -> None:
        """
        address: "HOST:PORT", several of them separated by commas (all routers are equal: calls go to those
            that are up, in turn), or one "unix:PATH". IPv6 addresses are written in brackets.
        timeout: seconds a call may take when it does not say otherwise.
        max_message_bytes: the routers' message limit in bytes; larger requests are sent in parts.
        """
        if not isinstance(max_message_bytes, int) or not _HEADER_BYTES < max_message_bytes <= MAX_INT:
            raise _invalid(
                f"max_message_bytes: expected more than {_HEADER_BYTES} and at most {MAX_INT}, "
                f"given {max_message_bytes!r}"
            )
        self._address = address
        self._timeout = _positive("timeout", timeout)
        self._max_message_bytes = max_message_bytes
        channel_target(address, resolve=False)  # a malformed address is refused here, not at the first call
        self._channel: grpc.Channel | None = None
        self._pid = 0
        self._closed = False
        self._layers: dict[int, Layer] | None = None

    def forward(
        self,
        layer: int,
        hidden_states: np.ndarray,
        *,
        timeout: float | None = None,
        return_router_logits: bool = False,
        model_fingerprint: str | None = None,
    ) -> ForwardResult:
        """Runs the MoE block of one decoder layer.

        layer: its index, one that `model()` lists.
        hidden_states: [T, D] float32, float16 or ml_dtypes.bfloat16 with any strides, finite; T may be 0.
        timeout: seconds, for the whole call; by default that of the client.
        return_router_logits: return the gate's logits as well.
        model_fingerprint: if given, FAILED_PRECONDITION if the cluster serves another model.

        A request over the message limit is sent in parts; the result has the same bits.

        Errors: INVALID_ARGUMENT (an argument is wrong, or a hidden state is not finite), UNAVAILABLE (no
        router, or needed experts have no live server; named), DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED.
        """
        deadline = self._deadline(timeout)
        request = moe_pb2.ForwardRequest(
            layer=_layer_index(layer),
            return_router_logits=bool(return_router_logits),
            model_fingerprint=model_fingerprint or "",
        )
        hidden_states = _checked(hidden_states)
        tokens = hidden_states.shape[0]
        step = self._rows_per_message(request, hidden_states, deadline)
        try:
            if tokens <= step:
                return self._forward_whole(request, hidden_states, deadline)
            with fork.calling():
                return self._forward_parts(request, hidden_states, step, deadline)
        except Error:
            self._layers = None  # it may be another model's by now
            raise

    def model(self, *, timeout: float | None = None) -> Model:
        """Describes the model and its layers."""
        return self._model(self._deadline(timeout))

    def cluster(self, *, timeout: float | None = None) -> Cluster:
        """Describes the router that answers, and the expert servers it knows."""
        reply = self._call(
            "GetCluster",
            moe_pb2.GetClusterRequest().SerializeToString(),
            moe_pb2.GetClusterResponse.FromString,
            self._deadline(timeout),
        )
        return Cluster(
            placement_epoch=reply.placement_epoch,
            servers=[
                Server(
                    name=server.name,
                    address=server.address,
                    pid=server.pid,
                    state=_enum_name(cluster_pb2.ServerInfo.State, server.state, "STATE_"),
                    experts={held.layer: list(held.expert_ids) for held in server.layers},
                    rows=server.rows,
                    numerics=server.numerics,
                )
                for server in reply.servers
            ],
            serving=reply.serving,
            missing=reply.missing,
            version=reply.version,
        )

    def close(self) -> None:
        """Closes the connections; calls in flight in other threads fail. May be called more than once."""
        with fork.LOCK:
            self._closed = True
            channel, self._channel = self._channel, None
        if channel is not None and self._pid == os.getpid():
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"expertmesh.Client({self._address!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"timeout": self._timeout, "max_message_bytes": self._max_message_bytes}
        return _restore, (self._address, options)

    def _model(self, deadline: float) -> Model:
        reply = self._call(
            "GetModel",
            moe_pb2.GetModelRequest().SerializeToString(),
            moe_pb2.GetModelResponse.FromString,
            deadline,
        )
        layers = [
            Layer(
                layer=info.layer,
                kind=_enum_name(moe_pb2.LayerInfo.Kind, info.kind, "KIND_"),
                hidden_size=info.hidden_size,
                intermediate_size=info.intermediate_size,
                num_experts=info.num_experts,
                top_k=info.top_k,
                weight_dtype=info.weight_dtype,
                format=info.format,
                pad_multiple=info.pad_multiple,
                num_shared_experts=info.num_shared_experts,
                shared_intermediate_size=info.shared_intermediate_size,
                num_identity_experts=info.num_identity_experts,
            )
            for info in reply.layers
        ]
        self._layers = {layer.layer: layer for layer in layers}
        return Model(reply.model_fingerprint, reply.model_type, layers)

    def _rows_per_message(
        self, request: moe_pb2.ForwardRequest, hidden_states: np.ndarray, deadline: float
    ) -> int:
        """The most rows whose request and reply both stay below the message limit."""
        layers = self._layers
        if layers is None:
            layers = {info.layer: info for info in self._model(deadline).layers}
        row_bytes = hidden_states.shape[1] * hidden_states.dtype.itemsize
        if info := layers.get(request.layer):  # an unknown layer is the router's to refuse
            row_bytes += info.top_k * (4 + 4)
            if request.return_router_logits:
                row_bytes += (info.num_experts + info.num_identity_experts) * 4
        rows: int = (self._max_message_bytes - _HEADER_BYTES) // max(row_bytes, 1)
        if rows == 0:
            raise _invalid(
                f"hidden_states: one row needs {row_bytes + _HEADER_BYTES} bytes in a message, "
                f"max_message_bytes is {self._max_message_bytes}"
            )
        return rows

    def _forward_whole(
        self, request: moe_pb2.ForwardRequest, hidden_states: np.ndarray, deadline: float
    ) -> ForwardResult:
        message = wire.encode_request(request, hidden_states)
        reply = self._call("Forward", message, lambda data: _decoded(request, hidden_states, data), deadline)
        return ForwardResult(
            output=reply.output.copy(),
            topk_ids=reply.topk_ids.copy(),
            topk_weights=reply.topk_weights.copy(),
            router_logits=reply.router_logits.copy() if request.return_router_logits else None,
        )

    def _forward_parts(
        self, request: moe_pb2.ForwardRequest, hidden_states: np.ndarray, step: int, deadline: float
    ) -> ForwardResult:
        """Sends `step` rows at a time.

        The first error in the order of the rows is that of the call; the parts after it are cancelled.
        """
        names = ["output", "topk_ids", "topk_weights"] + ["router_logits"] * request.return_router_logits
        joined: dict[str, np.ndarray] = {}
        tokens = hidden_states.shape[0]
        starts = iter(range(0, tokens, step))
        channel = self._connected()
        under_way: deque[tuple[int, grpc.Future]] = deque()
        try:
            while True:
                for start in islice(starts, _PARTS_UNDER_WAY - len(under_way)):
                    request.first_row = start
                    message = wire.encode_request(request, hidden_states[start : start + step])
                    under_way.append((start, self._started(channel, message, deadline)))
                if not under_way:
                    return ForwardResult(**{"router_logits": None, **joined})
                start, call = under_way[0]
                reply = _decoded(request, hidden_states[start : start + step], call.result())
                under_way.popleft()
                for name in names:
                    part = getattr(reply, name)
                    if start == 0:
                        joined[name] = np.empty((tokens, *part.shape[1:]), part.dtype)
                    if part.shape[1:] != joined[name].shape[1:]:
                        raise Error(
                            grpc.StatusCode.INTERNAL,
                            f"malformed reply of the router: {name} changes its width from part to part",
                        )
                    joined[name][start : start + step] = part
        except grpc.RpcError as error:
            raise self._translated(channel, error) from None
        finally:
            for _, call in under_way:
                call.cancel()

    def _started(self, channel: grpc.Channel, message: bytes, deadline: float) -> grpc.Future:
        timeout = max(deadline - time.monotonic(), 0)
        try:
            return channel.unary_unary(_SERVICE + "Forward").future(
                message, timeout=timeout, wait_for_ready=True
            )
        except ValueError:  # the channel was closed meanwhile
            raise self._closed_error() from None

    def _call(self, method: str, request: bytes, decode: Callable[[bytes], Any], deadline: float) -> Any:
        channel = self._connected()
        try:
            with fork.calling():
                reply = channel.unary_unary(_SERVICE + method)(
                    request, timeout=max(deadline - time.monotonic(), 0), wait_for_ready=True
                )
        except grpc.RpcError as error:
            raise self._translated(channel, error) from None
        except ValueError:  # the channel was closed between the two lines above
            raise self._closed_error() from None
        return decode(reply)

    def _connected(self) -> grpc.Channel:
        fork.check()
        target = ""
        if self._channel is None or self._pid != os.getpid():
            target = channel_target(self._address)  # may wait for a name server: not under the lock
        with fork.LOCK:
            if self._closed:
                raise self._closed_error()
            if self._channel is None or self._pid != os.getpid():
                # A forked child cannot use its parent's connection.
                target = target or channel_target(self._address)
                options = channel_options(self._address, self._max_message_bytes)
                self._channel = grpc.insecure_channel(target, options=options)
                self._pid = os.getpid()
            return self._channel

    def _translated(self, channel: grpc.Channel, error: grpc.RpcError) -> Error:
        code, details = error.code(), error.details() or ""
        if self._closed and code == grpc.StatusCode.CANCELLED:
            return self._closed_error()
        if code == grpc.StatusCode.DEADLINE_EXCEEDED and not _is_ready(channel):
            return Error(code, f"no router was reachable at {self._address} before the timeout")
        return Error(code, details)

    def _closed_error(self) -> Error:
        return Error(grpc.StatusCode.FAILED_PRECONDITION, f"the client of {self._address} is closed")

    def _deadline(self, timeout: float | None) -> float:
        seconds = self._timeout if timeout is None else _positive("timeout", timeout)
        return time.monotonic() + seconds


def _restore(address: str, options: dict[str, Any]) -> Client:
    return Client(address, **options)


def _invalid(message: str) -> Error:
    return Error(grpc.StatusCode.INVALID_ARGUMENT, message)


def _positive(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _invalid(f"{name}: expected a number of seconds, given {value!r}")
    if not value > 0:
        raise _invalid(f"{name}: expected more than 0 seconds, given {value}")
    if value > _MAX_TIMEOUT:
        raise _invalid(f"{name}: expected at most {_MAX_TIMEOUT:g} seconds, given {value}")
    return value


def _layer_index(layer: int) -> int:
    try:
        index = operator.index(layer)
    except TypeError:
        raise _invalid(f"layer: expected an integer, given {layer!r}") from None
    if not -(2**31) <= index < 2**31:
        raise _invalid(f"layer: expected a 32-bit integer, given {index}")
    return index


def _checked(hidden_states: np.ndarray) -> np.ndarray:
    """`hidden_states`, C-contiguous."""
    if not isinstance(hidden_states, np.ndarray):
        raise _invalid(f"hidden_states: expected a numpy array, given {type(hidden_states).__name__}")
    if hidden_states.dtype not in _HIDDEN_DTYPES:
        raise _invalid(
            "hidden_states: expected dtype float32, float16 or bfloat16 (ml_dtypes), "
            f"given {hidden_states.dtype.str if hidden_states.dtype.kind == 'f' else hidden_states.dtype}"
        )
    if hidden_states.ndim != 2:
        raise _invalid(f"hidden_states: expected shape [T, D], given {list(hidden_states.shape)}")
    return np.ascontiguousarray(hidden_states)


def _decoded(request: moe_pb2.ForwardRequest, rows: np.ndarray, message: bytes) -> wire.Reply:
    """The reply to a request with these rows."""

    def malformed(what: object) -> Error:
        return Error(grpc.StatusCode.INTERNAL, f"malformed reply of the router: {what}")

    try:
        reply = wire.decode_reply(message)
    except (ValueError, DecodeError) as error:
        raise malformed(error) from error
    if reply.output.shape != rows.shape or reply.output.dtype != rows.dtype:
        raise Error(
            grpc.StatusCode.INTERNAL,
            f"output: expected {list(rows.shape)} {rows.dtype}, "
            f"the router sent {list(reply.output.shape)} {reply.output.dtype}",
        )
    if request.return_router_logits and reply.router_logits is None:
        raise Error(grpc.StatusCode.INTERNAL, "router_logits: asked for, the router sent none")
    for name in ("topk_ids", "topk_weights", "router_logits"):
        given = getattr(reply, name)
        if given is not None and (given.ndim != 2 or len(given) != len(rows)):
            raise malformed(f"{name}: expected {len(rows)} rows, given shape {list(given.shape)}")
    return reply


def _enum_name(enum: Any, value: int, prefix: str) -> str:
    """The name without its prefix; the number itself where a newer router sends an unknown one."""
    try:
        name: str = enum.Name(value)
    except ValueError:
        return str(value)
    return name[len(prefix) :]


def _is_ready(channel: grpc.Channel) -> bool:
    ready = grpc.channel_ready_future(channel)
    try:
        ready.result(timeout=_STATE_SECONDS)
        return True
    except grpc.FutureTimeoutError:
        return False
    finally:
        ready.cancel()
