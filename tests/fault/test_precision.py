"""Experts in a low precision through real processes: the same bits whatever the cluster, and what `status` counts."""

from __future__ import annotations

import numpy as np
import pytest
from models import OLMOE, SMALL, bits, forward, tokens
from processes import wait_until

# Codes and scales of a row of 128 channels, and what groups are padded to.
FORMATS = {"fp8_rowwise": (132, 16), "fp8_block128": (132, 128), "mxfp8": (132, 32), "mxfp8_rceil": (132, 32)}


def unquantised(processes, x) -> np.ndarray:
    serve = processes.serve(OLMOE, 1)
    output = forward(serve.address(), 2, x).output
    assert serve.stop() == 0
    return output


@pytest.mark.parametrize("precision", FORMATS)
def test_the_same_bits_whatever_the_cluster(processes, precision):
    x = tokens(128, 333)
    row_bytes, multiple = FORMATS[precision]
    expected = None
    for servers, options in (
        (1, ("--engine", "for_loop")),
        (2, ()),
        (3, ("--empty-experts", "block", "--pad-multiple", 2 * multiple, "--max-round-tokens", 50)),
    ):
        serve = processes.serve(OLMOE, servers, "--precision", precision, *options)
        address = serve.address()
        result = forward(address, 2, x)
        if expected is None:
            expected = bits(result)
            error = np.linalg.norm(result.output - unquantised(processes, x)) / np.linalg.norm(result.output)
            assert 0.005 < error < (0.09 if precision == "mxfp8" else 0.08)
        assert bits(result) == expected
        layer = processes.status(address)["layers"][2]
        assert layer["format"] == precision
        assert layer["pairs"] == 4 * 333
        assert 333 <= layer["unique_rows"] <= min(servers, 4) * 333
        assert layer["row_bytes"] == layer["unique_rows"] * row_bytes
        assert layer["padded_positions"] > 0
        assert (layer["padded_positions"] + layer["pairs"]) % multiple == 0
        assert (layer["saturated_rows"] > 0) == (precision == "mxfp8")
        assert serve.stop() == 0


def test_native_is_never_padded(processes):
    address = processes.serve(OLMOE, 3, "--empty-experts", "block").address()
    forward(address, 0, tokens(128, 57))
    layer = processes.status(address)["layers"][0]
    assert (layer["format"], layer["pairs"], layer["padded_positions"]) == ("native", 4 * 57, 0)
    assert layer["row_bytes"] == layer["unique_rows"] * 128 * 4


def test_some_layers(processes):
    x = tokens(128, 20)
    serve = processes.serve(OLMOE, 1)
    native = [bits(forward(serve.address(), layer, x)) for layer in range(4)]
    assert serve.stop() == 0
    address = processes.serve(OLMOE, 2, "--precision", "mxfp8:layers=0,2-3").address()
    same = [bits(forward(address, layer, x)) == native[layer] for layer in range(4)]
    assert same == [False, True, False, False]
    formats = [layer["format"] for layer in processes.status(address)["layers"]]
    assert formats == ["mxfp8", "native", "mxfp8", "mxfp8"]


def test_rows_that_only_travel_in_fp8(processes):
    x = tokens(128, 100)
    results = []
    for servers in (1, 3):
        serve = processes.serve(OLMOE, servers, "--dispatch-dtype", "fp8")
        results.append(forward(serve.address(), 2, x))
        layer = processes.status(serve.address())["layers"][2]
        assert (layer["format"], layer["padded_positions"]) == ("native", 0)
        assert layer["row_bytes"] == layer["unique_rows"] * (128 + 4)
        assert serve.stop() == 0
    assert bits(results[0]) == bits(results[1])
    native = unquantised(processes, x)
    assert 0.005 < np.linalg.norm(results[0].output - native) / np.linalg.norm(native) < 0.08


@pytest.mark.parametrize(
    "options, message",
    [
        (("--precision", "fp4"), "--precision: expected native, fp8_rowwise, fp8_block128, mxfp8 or mxfp8_rceil"),
        (("--precision", "mxfp8:layers=7"), "expected MoE layers (0-3), got 7"),
        (("--precision", "mxfp8", "--pad-multiple", "48"), "expected a multiple of 32 with --precision mxfp8, got 48"),
        (("--pad-multiple", "16"), "--pad-multiple"),
        (("--precision", "mxfp8", "--dispatch-dtype", "fp8"), "compute in mxfp8, got fp8"),
    ],
)
def test_what_does_not_work_is_refused(processes, options, message):
    serve = processes.serve(OLMOE, 1, *options)
    assert serve.wait() == 1
    assert message in serve.tail()


def test_router_and_servers_agree(processes):
    router = processes.router(SMALL, "--precision", "mxfp8")
    address = router.address()
    stranger = processes.server(SMALL, address)
    assert stranger.wait() == 1
    assert "model_fingerprint" in stranger.tail()
    processes.server(SMALL, address, "0/1", "--precision", "mxfp8")
    wait_until("the cluster serves", lambda: processes.healthy(address))
    assert forward(address, 0, tokens(12, 5)).output.shape == (5, 12)


def test_top_shows_what_goes_on(processes):
    address = processes.serve(OLMOE, 2, "--precision", "mxfp8").address()
    top = processes.start(processes.binaries / "expertmesh", "top", "--router", address, "--interval", 0.5, "--count", 3)
    while top.running():
        forward(address, 1, tokens(128, 3))
    assert top.wait() == 0
    tables = top.output.read_text().split("serving; a second:")[1:]
    assert len(tables) == 3
    rows = [line.split() for line in tables[1].splitlines() if line.split()[1:2] == ["mxfp8"]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert float(rows[1][4]) > 0 and float(rows[0][4]) == 0  # tokens a second
