"""The Python client against a real cluster, compared with numpy (fake_router.py); no torch needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import expertmesh
import grpc
import ml_dtypes
import numpy as np
import pytest
from fake_router import checkpoint_layers

CHECKPOINTS = Path(__file__).resolve().parents[2] / "golden" / "checkpoints"
FAMILIES = ["mixtral", "qwen3_moe", "olmoe"]
BOUNDS = {np.dtype(np.float32): 1e-5, np.dtype(np.float16): 2e-3, np.dtype(ml_dtypes.bfloat16): 1e-2}
MIN_GAP = 1e-5  # between the scores at the k-th place, below which either choice is right


def checkpoint(family: str, layout: str = "saved") -> Path:
    return CHECKPOINTS / f"{family}-bf16-e11k2-{layout}"


def tokens(client: expertmesh.Client, count: int, dtype=np.float32, seed: int = 0) -> np.ndarray:
    shape = (count, client.model().layers[0].hidden_size)
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers(cluster, family, servers):
    layers = checkpoint_layers(checkpoint(family))
    with expertmesh.Client(cluster(checkpoint(family), servers)) as client:
        model = client.model()
        assert model.model_type == family
        assert [info.layer for info in model.layers if info.kind == "MOE"] == sorted(layers)
        for index, layer in layers.items():
            for dtype, bound in BOUNDS.items():
                x = tokens(client, 200, dtype)
                result = client.forward(index, x, return_router_logits=True)
                output, ids, weights, logits = layer(x.astype(np.float32))
                scores = np.exp(logits - logits.max(axis=1, keepdims=True))
                scores = -np.sort(-scores / scores.sum(axis=1, keepdims=True), axis=1)
                clear = scores[:, layer.top_k - 1] - scores[:, layer.top_k] > MIN_GAP
                assert clear.mean() >= 0.99
                assert (np.sort(result.topk_ids) == np.sort(ids))[clear].all()
                assert np.allclose(result.topk_weights[clear], weights[clear], rtol=1e-5, atol=1e-6)
                assert np.allclose(result.router_logits, logits, rtol=1e-5, atol=1e-5)
                assert result.output.dtype == dtype
                difference = result.output.astype(np.float32)[clear] - output[clear]
                assert np.linalg.norm(difference) <= bound * np.linalg.norm(output[clear])


@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_whatever_the_cluster_layout_and_split(cluster, family):
    cases = [("saved", 1, {}), ("saved", 3, {"max_message_bytes": 8 << 10}), ("fused", 2, {})]
    outputs = []
    for layout, servers, options in cases:
        address = cluster(checkpoint(family, layout), servers)
        with expertmesh.Client(address, **options) as client:
            result = client.forward(0, tokens(client, 300), return_router_logits=True)
            arrays = (result.output, result.topk_ids, result.topk_weights, result.router_logits)
            outputs.append([array.tobytes() for array in arrays])
    assert outputs[0] == outputs[1] == outputs[2]


def test_eight_threads(cluster):
    with expertmesh.Client(cluster(checkpoint("olmoe"), 2)) as client:
        inputs = [tokens(client, 1 + 5 * seed, seed=seed) for seed in range(8)]
        alone = [client.forward(0, x).output for x in inputs]
        with ThreadPoolExecutor(8) as pool:
            for _ in range(10):
                together = pool.map(lambda x: client.forward(0, x).output, inputs)
                for left, right in zip(alone, together):
                    assert left.tobytes() == right.tobytes()


def test_empty_and_refused_requests(cluster):
    with expertmesh.Client(cluster(checkpoint("mixtral"), 1)) as client:
        x = tokens(client, 4)
        result = client.forward(0, x[:0])
        assert (result.output.shape, result.topk_ids.shape) == ((0, x.shape[1]), (0, 2))

        def refused(layer: int, array: np.ndarray, *words: str) -> None:
            with pytest.raises(expertmesh.Error) as caught:
                client.forward(layer, array)
            assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
            for word in words:
                assert word in caught.value.message

        refused(77, x, "layer", "77")
        refused(0, x[:, 1:].copy(), "hidden_states", str(x.shape[1]), str(x.shape[1] - 1))
        bad = x.copy()
        bad[2, 1] = np.nan
        refused(0, bad, "hidden_states", "2")
        with pytest.raises(expertmesh.Error) as caught:
            client.forward(0, x, model_fingerprint="other")
        assert caught.value.code == grpc.StatusCode.FAILED_PRECONDITION
        assert client.forward(0, x).output.shape == x.shape


def test_cluster_state(cluster):
    with expertmesh.Client(cluster(checkpoint("qwen3_moe"), 3)) as client:
        state = client.cluster()
    assert state.serving and state.missing == "" and state.placement_epoch != 0
    assert [server.state for server in state.servers] == ["SERVING"] * 3
    held = sorted(expert for server in state.servers for expert in server.experts[0])
    assert held == list(range(11))
    assert state.version == expertmesh.__version__
