"""The Python client against a router in numpy (fake_router.py): no torch and no binaries needed."""

from __future__ import annotations

import copy
import pickle
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import expertmesh
import grpc
import ml_dtypes
import numpy as np
import pytest
from expertmesh import wire
from expertmesh.target import channel_target
from expertmesh.v1 import moe_pb2, tensor_pb2
from fake_router import FakeRouter, random_layer, sleep_while_active, to_tensor

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]
HIDDEN = 24

Code = grpc.StatusCode


@pytest.fixture
def router():
    with FakeRouter({0: random_layer(0), 2: random_layer(2, top_k=3, identity=1)}) as fake:
        yield fake


@pytest.fixture
def client(router):
    with expertmesh.Client(router.address, timeout=20) as connected:
        yield connected


def tokens(count: int, dtype=np.float32, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(dtype)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


# --- results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 9])
def test_forward(router, client, dtype, count):
    x = tokens(count, dtype)
    output, ids, weights, logits = router.layers[2](x.astype(np.float32))
    result = client.forward(2, x, return_router_logits=True)
    assert same_bits(result.output, output.astype(dtype))
    assert same_bits(result.topk_ids, ids)
    assert same_bits(result.topk_weights, weights)
    assert same_bits(result.router_logits, logits)
    for array in (result.output, result.topk_ids, result.topk_weights, result.router_logits):
        assert array.flags.writeable and array.flags.c_contiguous and array.flags.aligned
    assert client.forward(2, x).router_logits is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(client, dtype):
    x = tokens(8, dtype)
    expected = client.forward(0, x).output
    assert same_bits(client.forward(0, np.asfortranarray(x)).output, expected)
    wide = np.zeros((16, 2 * HIDDEN), dtype)
    wide[::2, ::2] = x
    assert same_bits(client.forward(0, wide[::2, ::2]).output, expected)
    assert same_bits(client.forward(0, x[::-1]).output[::-1], expected)
    assert same_bits(client.forward(0, wide[:1, ::2]).output, expected[:1])


def test_read_only_input(client):
    x = tokens(3)
    x.flags.writeable = False
    assert client.forward(0, x).output.shape == x.shape


def test_layer_may_be_a_numpy_integer(client):
    x = tokens(2)
    assert same_bits(client.forward(np.int64(2), x).output, client.forward(2, x).output)


def test_model(client):
    model = client.model()
    assert (model.model_fingerprint, model.model_type) == ("fake", "mixtral")
    assert [info.layer for info in model.layers] == [0, 2]
    assert model.layers[1] == expertmesh.Layer(
        layer=2,
        kind="MOE",
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_experts=5,
        top_k=3,
        weight_dtype="F32",
        format="native",
        pad_multiple=1,
        num_shared_experts=2,
        shared_intermediate_size=7,
        num_identity_experts=1,
    )


def test_cluster(client):
    cluster = client.cluster()
    assert (cluster.placement_epoch, cluster.serving, cluster.missing) == (3, True, "")
    assert cluster.servers == [
        expertmesh.Server(
            name="server-0",
            address="127.0.0.1:7080",
            pid=1234,
            state="SERVING",
            experts={0: [0, 1, 2, 3, 4], 2: [0, 1, 2, 3, 4]},
            rows=7,
            numerics="fake",
        )
    ]


# --- encoding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 700])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_request_is_what_protobuf_encodes(count, dtype):
    x = tokens(count, dtype)
    request = moe_pb2.ForwardRequest(layer=300, model_fingerprint="ab", return_router_logits=True)
    message = wire.encode_request(request, x)
    decoded = moe_pb2.ForwardRequest.FromString(message)
    data_type = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[x.dtype.name]
    request.hidden_states.CopyFrom(to_tensor(tensor_pb2.DataType.Value("DATA_TYPE_" + data_type), x))
    assert decoded == request
    if count > 0:  # protobuf writes no bytes field that is empty
        assert message == request.SerializeToString()


def a_reply(count: int = 4) -> moe_pb2.ForwardResponse:
    return moe_pb2.ForwardResponse(
        topk_ids=to_tensor(tensor_pb2.DATA_TYPE_I32, np.arange(2 * count, dtype=np.int32).reshape(-1, 2)),
        topk_weights=to_tensor(tensor_pb2.DATA_TYPE_F32, np.ones((count, 2), np.float32)),
        output=to_tensor(tensor_pb2.DATA_TYPE_F32, tokens(count)),
    )


def test_reply_fields_may_come_in_any_order():
    output = moe_pb2.ForwardResponse(output=a_reply().output).SerializeToString()
    rest = a_reply()
    rest.ClearField("output")
    reply = wire.decode_reply(output + rest.SerializeToString() + b"\xa0\x06\x05")  # and one unknown
    assert same_bits(reply.output, tokens(4))
    assert reply.topk_ids.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert reply.router_logits is None


def test_every_truncated_reply_is_refused():
    message = a_reply().SerializeToString()
    from google.protobuf.message import DecodeError

    whole = wire.decode_reply(message)
    for length in range(len(message)):
        try:
            reply = wire.decode_reply(message[:length])
        except (ValueError, DecodeError):
            continue
        # Cut between two fields: the rest is a valid message of fewer tensors.
        assert reply.output.dtype == whole.output.dtype and reply.output.size == 0, length


def test_reply_with_wrong_byte_count_is_refused():
    reply = a_reply()
    reply.output.data = reply.output.data[:-4]
    with pytest.raises(ValueError, match="output.data: expected 384 bytes, given 380"):
        wire.decode_reply(reply.SerializeToString())


# --- messages over the limit -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("logits", "identity"), [(False, 0), (True, 0), (True, 40)])
def test_large_requests_are_split(dtype, logits, identity):
    limit = 64 << 10
    x = tokens(2500, dtype)
    # 40 experts: replies with logits are larger than requests.
    layer = random_layer(3, experts=40, top_k=4, identity=identity)
    with FakeRouter({0: layer}) as router, expertmesh.Client(router.address) as client:
        whole = client.forward(0, x, return_router_logits=logits)
        assert len(router.requests) == 1
    with (
        FakeRouter({0: layer}, message_limit=limit) as router,
        expertmesh.Client(router.address, max_message_bytes=limit) as client,
    ):
        parts = client.forward(0, x, return_router_logits=logits)
        assert len(router.requests) > 1
        assert max(router.requests + router.replies) <= limit
    names = ["output", "topk_ids", "topk_weights"] + ["router_logits"] * logits
    for name in names:
        assert same_bits(getattr(parts, name), getattr(whole, name)), name
        assert getattr(parts, name).flags.writeable


class PartsRouter(FakeRouter):
    """Does to the part of a call that begins with a row what `parts` says of it."""

    def serve(self, parts: dict[int, Callable[[grpc.ServicerContext], None]]) -> None:
        self.parts = parts
        self.seen: list[int] = []
        self.now = self.most = 0
        self.lock = threading.Lock()

    def Forward(self, request, context):
        with self.lock:
            self.seen.append(request.first_row)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            self.parts.get(request.first_row, lambda context: None)(context)
            return super().Forward(request, context)
        finally:
            with self.lock:
                self.now -= 1


@pytest.fixture
def parts():
    """A router, and a client that sends 10 rows a part."""
    row_bytes = HIDDEN * 4 + 2 * (4 + 4)
    with (
        PartsRouter({0: random_layer(0)}) as router,
        expertmesh.Client(router.address, timeout=20, max_message_bytes=4096 + 10 * row_bytes) as client,
    ):
        router.serve({})
        yield router, client


def refuse(context: grpc.ServicerContext) -> None:
    context.abort(Code.INVALID_ARGUMENT, "refused")


def test_two_parts_are_under_way_at_a_time(parts):
    router, client = parts
    router.serve({row: lambda context: time.sleep(0.05) for row in range(0, 60, 10)})
    x = tokens(57)
    assert same_bits(client.forward(0, x).output, router.layers[0](x)[0])
    assert sorted(router.seen) == [0, 10, 20, 30, 40, 50] and router.most == 2


def test_a_part_that_fails_ends_the_call(parts):
    router, client = parts
    ended = threading.Event()

    def wait(context):
        context.add_callback(ended.set)
        ended.wait(10)

    def refuse_late(context):
        while len(router.seen) < 2:
            time.sleep(0.01)
        refuse(context)

    router.serve({0: refuse_late, 10: wait})
    start = time.monotonic()
    with pytest.raises(expertmesh.Error, match="INVALID_ARGUMENT: refused"):
        client.forward(0, tokens(100))
    assert ended.wait(5) and time.monotonic() - start < 5
    assert sorted(router.seen) == [0, 10]
    router.serve({})
    assert client.forward(0, tokens(100)).output.shape == (100, HIDDEN)


def test_the_first_bad_part_is_the_one_named(parts):
    router, client = parts

    def refuse_first(context):
        while len(router.seen) < 2:
            time.sleep(0.01)
        time.sleep(0.2)
        context.abort(Code.INVALID_ARGUMENT, "the first")

    router.serve({0: refuse_first, 10: refuse})
    with pytest.raises(expertmesh.Error, match="the first"):
        client.forward(0, tokens(100))


def test_message_limits_that_cannot_be(router):
    for limit in (4096, 1 << 31, "64"):
        with pytest.raises(expertmesh.Error, match=f"max_message_bytes: expected more than 4096 .*{limit}"):
            expertmesh.Client(router.address, max_message_bytes=limit)
    with expertmesh.Client(router.address, max_message_bytes=(1 << 31) - 1) as client:
        assert client.forward(0, tokens(2)).output.shape == (2, HIDDEN)


def test_replies_over_grpcs_default_limit_arrive():
    """4 MiB is what gRPC receives by default."""
    layer = random_layer(4, hidden=4096, intermediate=1, experts=2, top_k=1)
    x = np.random.default_rng(0).standard_normal((400, 4096), np.float32)
    with FakeRouter({0: layer}) as router, expertmesh.Client(router.address) as client:
        assert same_bits(client.forward(0, x).output, layer(x)[0])
        assert len(router.requests) == 1 and router.replies[0] > 6 << 20


def test_a_row_over_the_limit_is_refused(router):
    with expertmesh.Client(router.address, max_message_bytes=4100) as client:
        with pytest.raises(expertmesh.Error, match="one row needs .* max_message_bytes is 4100"):
            client.forward(0, tokens(1))


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden_states", "message"),
    [
        ([[1.0] * HIDDEN], "hidden_states: expected a numpy array, given list"),
        (np.zeros((2, HIDDEN)), "expected dtype float32, float16 or bfloat16.*given <f8"),
        (np.zeros((2, HIDDEN), np.int32), "expected dtype .*given int32"),
        (np.zeros((2, HIDDEN), ">f4"), "expected dtype .*given >f4"),
        (np.zeros(HIDDEN, np.float32), r"expected shape \[T, D\], given \[24\]"),
        (np.zeros((1, 2, HIDDEN), np.float32), r"expected shape \[T, D\], given \[1, 2, 24\]"),
    ],
)
def test_wrong_input_is_refused_here(router, client, hidden_states, message):
    with pytest.raises(expertmesh.Error, match=message) as caught:
        client.forward(0, hidden_states)
    assert caught.value.code == Code.INVALID_ARGUMENT
    assert router.requests == []


@pytest.mark.parametrize("layer", ["0", 0.0, None, 1 << 31])
def test_wrong_layer_type_is_refused_here(client, layer):
    with pytest.raises(expertmesh.Error, match="layer: expected") as caught:
        client.forward(layer, tokens(1))
    assert caught.value.code == Code.INVALID_ARGUMENT


def test_errors_of_the_router_keep_code_and_message(client):
    with pytest.raises(expertmesh.Error) as caught:
        client.forward(1, tokens(1))
    assert caught.value.code == Code.INVALID_ARGUMENT
    assert caught.value.message == "layer: expected one of [0, 2], given 1"
    assert str(caught.value) == "INVALID_ARGUMENT: layer: expected one of [0, 2], given 1"
    with pytest.raises(expertmesh.Error, match="expected 24 columns, given 23"):
        client.forward(0, np.zeros((1, 23), np.float32))
    with pytest.raises(expertmesh.Error, match="model_fingerprint") as caught:
        client.forward(0, tokens(1), model_fingerprint="other")
    assert caught.value.code == Code.FAILED_PRECONDITION
    assert client.forward(0, tokens(1), model_fingerprint="fake").output.shape == (1, HIDDEN)


def test_errors_can_be_pickled():
    error = pickle.loads(pickle.dumps(expertmesh.Error(Code.UNAVAILABLE, "gone")))
    assert (error.code, error.message) == (Code.UNAVAILABLE, "gone")


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":1", "host:0", "host:65536", "a:1,", "a:1,,b:2", "::1:70", "[::1]",
     "http://a:1", "unix:", "unix:/a,b:1", "a:1,unix:/b", "a b:1"],
)  # fmt: skip
def test_malformed_addresses_are_refused(address):
    with pytest.raises(expertmesh.Error, match="address: expected HOST:PORT") as caught:
        expertmesh.Client(address)
    assert caught.value.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("127.0.0.1:70", "dns:///127.0.0.1:70"),
        ("router:70", "dns:///router:70"),
        ("[::1]:70", "dns:///[::1]:70"),
        ("unix:/run/router.sock", "unix:/run/router.sock"),
        ("127.0.0.1:70, 127.0.0.2:71", "ipv4:127.0.0.1:70,127.0.0.2:71"),
        ("[::1]:70,[::2]:71", "ipv6:[::1]:70,[::2]:71"),
        ("127.0.0.1:70,[::1]:71", "ipv6:[::ffff:127.0.0.1]:70,[::1]:71"),
        ("name.invalid:70,127.0.0.1:71", "ipv4:127.0.0.1:71"),
    ],
)
def test_targets(address, target):
    assert channel_target(address) == target


def test_no_name_can_be_resolved():
    with expertmesh.Client("a.invalid:70,b.invalid:70", timeout=1) as client:
        with pytest.raises(expertmesh.Error, match="a.invalid:70,b.invalid:70") as caught:
            client.model()
    assert caught.value.code == Code.UNAVAILABLE


@pytest.mark.parametrize("timeout", [float("inf"), 1.1e9, 10**400])
def test_endless_timeouts_are_refused(router, client, timeout):
    for refused in (
        lambda: client.forward(0, tokens(1), timeout=timeout),
        lambda: client.model(timeout=timeout),
        lambda: expertmesh.Client(router.address, timeout=timeout),
    ):
        with pytest.raises(expertmesh.Error, match=r"timeout: expected at most 1e\+09 seconds") as caught:
            refused()
        assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert client.forward(0, tokens(1), timeout=1e9).output.shape[0] == 1


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_wrong_timeouts_are_refused(client, timeout):
    with pytest.raises(expertmesh.Error, match="timeout: expected more than 0 seconds"):
        client.forward(0, tokens(1), timeout=timeout)


# --- time ------------------------------------------------------------------------------------------------


def test_a_slow_router_is_not_waited_for(router, client):
    client.model()
    router.before = sleep_while_active(10)
    start = time.monotonic()
    with pytest.raises(expertmesh.Error) as caught:
        client.forward(0, tokens(1), timeout=0.3)
    assert caught.value.code == Code.DEADLINE_EXCEEDED
    assert "reachable" not in caught.value.message
    assert time.monotonic() - start < 2


def test_the_timeout_is_that_of_the_whole_call(router):
    router.before = sleep_while_active(0.5)
    with expertmesh.Client(router.address, max_message_bytes=4096 + 1024) as client:
        client.model()
        with pytest.raises(expertmesh.Error) as caught:
            client.forward(0, tokens(100), timeout=2)  # more than ten parts
    assert caught.value.code == Code.DEADLINE_EXCEEDED
    assert 1 < len(router.requests) <= 10  # two at a time


def test_no_router(client):
    port = free_port()
    with expertmesh.Client(f"127.0.0.1:{port}", timeout=0.5) as lonely:
        with pytest.raises(expertmesh.Error) as caught:
            lonely.forward(0, tokens(1))
    assert caught.value.code == Code.DEADLINE_EXCEEDED
    assert f"no router was reachable at 127.0.0.1:{port}" in caught.value.message


def test_client_may_start_before_the_router():
    port = free_port()
    with expertmesh.Client(f"127.0.0.1:{port}", timeout=20) as client:
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(client.forward, 0, tokens(3))
            time.sleep(0.5)
            assert not pending.done()
            with FakeRouter({0: random_layer(0)}, listen=f"127.0.0.1:{port}") as router:
                result = pending.result(20)
                assert same_bits(result.output, router.layers[0](tokens(3))[0])


def test_router_restarts():
    layers = {0: random_layer(0)}
    with FakeRouter(layers) as first, expertmesh.Client(first.address, timeout=20) as client:
        before = client.forward(0, tokens(3)).output
        first.stop()
        with FakeRouter(layers, listen=first.address):
            assert same_bits(client.forward(0, tokens(3)).output, before)


def test_a_full_size_call_is_retried():
    """gRPC retries nothing over 256 KiB unless it is told to keep more."""
    layer = random_layer(4, hidden=4096, intermediate=1, experts=2, top_k=1)
    x = np.random.default_rng(0).standard_normal((500, 4096), np.float32)
    left = [2]

    def refuse_twice(context):
        if left[0] > 0:
            left[0] -= 1
            context.abort(Code.UNAVAILABLE, "not now")

    with (
        FakeRouter({0: layer}, before=refuse_twice) as router,
        expertmesh.Client(router.address) as client,
    ):
        assert same_bits(client.forward(0, x).output, layer(x)[0])
        assert len(router.requests) == 3 and router.requests[0] > 7 << 20


# --- several routers, threads, processes -----------------------------------------------------------------


def test_calls_go_to_all_routers():
    layers = {0: random_layer(0)}
    with FakeRouter(layers) as one, FakeRouter(layers) as two:
        with expertmesh.Client(f"{one.address},{two.address}", timeout=20) as client:
            deadline = time.monotonic() + 10
            while not (one.requests and two.requests) and time.monotonic() < deadline:
                client.forward(0, tokens(1))
        assert one.requests and two.requests


def test_one_of_two_routers_is_dead():
    with FakeRouter({0: random_layer(0)}) as alive:
        dead = f"127.0.0.1:{free_port()}"
        for address in (f"{dead},{alive.address}", f"{alive.address},{dead}"):
            with expertmesh.Client(address, timeout=20) as client:
                for _ in range(20):
                    assert client.forward(0, tokens(1)).output.shape == (1, HIDDEN)


def test_one_of_two_routers_dies():
    layers = {0: random_layer(0)}
    with FakeRouter(layers) as one, FakeRouter(layers) as two:
        with expertmesh.Client(f"{one.address},{two.address}", timeout=20) as client:
            for call in range(40):
                if call == 10:
                    one.stop()
                assert client.forward(0, tokens(1)).output.shape == (1, HIDDEN)


def test_unix_socket(tmp_path):
    path = f"unix:{tmp_path}/router.sock"
    with FakeRouter({0: random_layer(0)}, listen=path), expertmesh.Client(path, timeout=20) as client:
        assert client.forward(0, tokens(2)).output.shape == (2, HIDDEN)


def test_eight_threads_share_a_client(router, client):
    inputs = [tokens(1 + seed % 7, DTYPES[seed % 3], seed) for seed in range(8)]
    expected = [router.layers[2](x.astype(np.float32))[0].astype(x.dtype) for x in inputs]
    start = threading.Barrier(8)

    def run(index: int) -> bool:
        start.wait()
        return all(same_bits(client.forward(2, inputs[index]).output, expected[index]) for _ in range(25))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(8)))


def test_calls_wait_without_the_interpreters_lock(router, client):
    """Eight calls of half a second at once take half a second, and leave other threads running."""
    client.model()
    router.before = sleep_while_active(0.5)
    start = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: client.forward(0, tokens(1)), range(8)))
    assert time.monotonic() - start < 2.5


def test_closed_client(router, client):
    client.forward(0, tokens(1))
    client.close()
    client.close()
    for call in (client.model, client.cluster, lambda: client.forward(0, tokens(1))):
        with pytest.raises(expertmesh.Error, match="the client of 127.0.0.1:.* is closed") as caught:
            call()
        assert caught.value.code == Code.FAILED_PRECONDITION


def test_close_ends_calls_in_flight(router, client):
    client.model()
    router.before = sleep_while_active(10)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(client.forward, 0, tokens(1))
        while not router.requests:
            time.sleep(0.01)
        client.close()
        with pytest.raises(expertmesh.Error, match="is closed"):
            pending.result(5)


def test_copies_connect_on_their_own(router, client):
    client.forward(0, tokens(1))
    for other in (pickle.loads(pickle.dumps(client)), copy.deepcopy(client)):
        with other:
            assert other.forward(0, tokens(1)).output.shape == (1, HIDDEN)
    assert client.forward(0, tokens(1)).output.shape == (1, HIDDEN)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_child_processes(router, tmp_path, method):
    """A client that was used in the parent works in its children, and goes on working in the parent."""
    script = tmp_path / "children.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys
            import expertmesh
            import numpy as np

            def child(client, x, results):
                results.put(client.forward(0, x).output)

            if __name__ == "__main__":
                context = multiprocessing.get_context(sys.argv[2])
                client = expertmesh.Client(sys.argv[1], timeout=10)
                x = np.ones((4, 24), np.float32)
                expected = client.forward(0, x).output
                for _ in range(3):
                    results = context.Queue()
                    children = [
                        context.Process(target=child, args=(client, x, results)) for _ in range(2)
                    ]
                    for process in children:
                        process.start()
                    for process in children:
                        assert (results.get(timeout=30) == expected).all()
                    for process in children:
                        process.join(30)
                        assert process.exitcode == 0, process.exitcode
                    assert (client.forward(0, x).output == expected).all()
                client.close()
                print("done")
            """
        )
    )
    done = subprocess.run(
        [sys.executable, script, router.address, method], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_fork_during_a_call_is_an_error_in_the_child(router, tmp_path):
    script = tmp_path / "fork.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys, threading, time
            import expertmesh
            import numpy as np

            def child(client, x, results):
                try:
                    client.forward(0, x)
                except expertmesh.Error as error:
                    results.put((error.code.name, error.message))

            if __name__ == "__main__":
                client = expertmesh.Client(sys.argv[1], timeout=20)
                x = np.ones((4, 24), np.float32)
                client.model()
                call = threading.Thread(target=client.forward, args=(0, x))
                call.start()
                time.sleep(0.5)
                context = multiprocessing.get_context("fork")
                results = context.SimpleQueue()
                process = context.Process(target=child, args=(client, x, results))
                process.start()
                code, message = results.get()
                process.join(10)
                call.join(20)
                print(process.exitcode, code, "forked while another thread" in message)
            """
        )
    )
    router.before = sleep_while_active(2)
    done = subprocess.run(
        [sys.executable, script, router.address], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "0 FAILED_PRECONDITION True\n"), done.stderr


def test_version_is_the_projects():
    project = (REPOSITORY / "CMakeLists.txt").read_text()
    assert re.search(r"project\(expertmesh VERSION (\S+)", project)[1] == expertmesh.__version__
