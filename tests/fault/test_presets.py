"""Models of random weights by name: no files, the same bits whatever the cluster."""

from __future__ import annotations

import json

import expertmesh
import numpy as np
import pytest
from models import bits, tokens


def serve(processes, preset: str, servers: int, *options: object) -> str:
    command = [processes.binaries / "expertmesh", "serve", "--preset", preset, "--servers", servers]
    return processes.start(*command, "--port", 0, "--threads", 1, *options, name="serve").address()


@pytest.mark.parametrize(
    "preset, moe, own", [("llama4_debugmodel_fp8", 3, "fp8_rowwise"), ("deepseek_v3_debugmodel_mxfp8", 4, "mxfp8")]
)
def test_the_same_bits_whatever_the_cluster(processes, preset, moe, own):
    x = tokens(256, 30)
    results = []
    for servers in (1, 3):
        address = serve(processes, preset, servers)
        with expertmesh.Client(address) as client:
            results.append([bits(client.forward(layer, x)) for layer in (0, moe)])
        formats = {layer["layer"]: layer["format"] for layer in processes.status(address)["layers"]}
        assert (formats[0], formats[moe]) == ("native", own)
    assert results[0] == results[1]
    with expertmesh.Client(serve(processes, preset, 2, "--precision", "native")) as client:
        native = client.forward(moe, x)
    assert bits(native) != results[0][1]
    low = np.frombuffer(results[0][1][0], np.float32).reshape(x.shape)
    assert np.linalg.norm(low - native.output) <= 0.09 * np.linalg.norm(native.output)


def test_daemons_take_presets(processes):
    router = processes.start(
        processes.binaries / "expertmesh-router", "--preset", "gpt_oss_debugmodel", "--listen", "127.0.0.1:0"
    )
    address = router.address()
    command = [processes.binaries / "expertmesh-expert-server", "--preset", "gpt_oss_debugmodel"]
    processes.start(*command, "--router", address, "--listen", "127.0.0.1:0")
    processes.wait_serving(address)
    # The same in another precision is another model.
    command += ["--precision", "mxfp8", "--name", "stranger"]
    stranger = processes.start(*command, "--router", address, "--listen", "127.0.0.1:0")
    assert stranger.wait() == 1
    assert "model_fingerprint" in stranger.tail()


def test_they_are_listed(processes):
    listed = json.loads(processes.cli("presets", "--json").stdout)
    text = processes.cli("presets").stdout
    assert {"llama4_debugmodel", "gpt_oss_20b_layer"} < {preset["name"] for preset in listed}
    assert all(preset["name"] in text and preset["bytes"] > 0 for preset in listed)


@pytest.mark.parametrize(
    "options, message",
    [
        (("--preset", "llama5"), "--preset: expected one of llama4_debugmodel, llama4_debugmodel_fp8"),
        (("--preset", "llama4_debugmodel", "--model", "somewhere"), "expected a model folder or --preset, got both"),
        ((), "expected a model folder or --preset, got neither"),
    ],
)
def test_wrong_ones_are_refused(processes, options, message):
    refused = processes.start(processes.binaries / "expertmesh", "serve", "--port", 0, *options)
    assert refused.wait() == 1
    assert message in refused.tail()
