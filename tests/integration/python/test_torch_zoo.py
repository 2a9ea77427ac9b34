"""All families of models, in their released layouts, on clusters, against transformers' modules in fp32."""

from __future__ import annotations

import expertmesh
import ml_dtypes
import numpy as np
import pytest
import torch
from expertmesh.torch import RemoteMoeBlock, from_pretrained, patch, unpatch
from zoo import FAMILIES, Files, dense_mlps, make_model, moe_blocks, rows, run, save

# Relative Frobenius error of a block's output by the dtype of the request.
BOUNDS = {np.float32: 1e-5, ml_dtypes.bfloat16: 1e-2, np.float16: 2e-3}
MIN_GAP = 1e-5
WHOLE_MODEL_BOUND = 1e-5
ROWS = 100
# Each family's shapes (experts and top_k) in turn, in another dtype and layout.
KINDS = [("f32", "released"), ("bf16", "fused"), ("bf16", "released")]
CASES = [(name, *shape, *kind) for name in FAMILIES for shape, kind in zip(FAMILIES[name].shapes, KINDS)]
NO_ROUTER_LOGITS = {"llama4", "llama4_text", "gemma4", "gemma4_text"}  # of the whole model


def relative(given: torch.Tensor, expected: torch.Tensor) -> float:
    return (torch.linalg.norm(given.float() - expected.float()) / torch.linalg.norm(expected.float())).item()


def check_blocks(client: expertmesh.Client, model, files: Files) -> None:
    """Every MoE block and dense MLP that is served, for requests in every dtype. model: in fp32."""
    served = {layer.layer: layer for layer in client.model().layers}
    blocks, mlps = moe_blocks(model), dense_mlps(model)
    assert {i for i, layer in served.items() if layer.kind == "MOE"} == blocks.keys()
    assert {i for i, layer in served.items() if layer.kind == "DENSE"} == mlps.keys()
    for index in served:
        x = rows(ROWS, index)
        for dtype, bound in BOUNDS.items():
            given = torch.from_numpy(x.numpy().astype(dtype).astype(np.float32))
            result = client.forward(index, given.numpy().astype(dtype))
            output = torch.from_numpy(result.output.astype(np.float32))
            if index in mlps:
                with torch.no_grad():
                    assert relative(output, mlps[index](given[None])[0]) <= bound, (index, dtype)
                continue
            expected, ids = run(blocks[index], given)
            clear = torch.from_numpy(files.block(index, given).gaps > MIN_GAP)
            assert (~clear).sum() <= 0.01 * ROWS
            chosen = torch.from_numpy(result.topk_ids).long().sort().values
            assert torch.equal(chosen[clear], ids.sort().values[clear]), (index, dtype)
            error = relative(output[clear], expected[clear])
            assert error <= bound, (index, dtype, error)


@pytest.mark.parametrize(("family", "experts", "top_k", "dtype", "layout"), CASES)
def test_blocks(cluster, tmp_path, family, experts, top_k, dtype, layout):
    model = make_model(family, dtype, experts, top_k, seed=1)
    folder = save(model, tmp_path / "model", family, layout)
    released = folder if layout == "released" else save(model, tmp_path / "released", family, "released")
    with expertmesh.Client(cluster(folder, 2)) as client:
        check_blocks(client, model.float(), Files(family, released))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_whole_model(cluster, tmp_path, family):
    """Logits, 32 greedy tokens and router logits with remote blocks, MoE and dense."""
    model = make_model(family, "f32", *FAMILIES[family].shapes[0])
    folder = save(model, tmp_path / "model", family, "released")
    ids = torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits
    options = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False}
    text = model.generate(ids, **options)
    wanted = None if family in NO_ROUTER_LOGITS else model(ids, output_router_logits=True).router_logits
    with expertmesh.Client(cluster(folder, 3)) as client:
        remote = from_pretrained(folder, client, attn_implementation=model.config._attn_implementation)
        blocks = [module for module in remote.modules() if isinstance(module, RemoteMoeBlock)]
        assert len(blocks) == len(moe_blocks(model))
        error = relative(remote(ids).logits, expected)
        print(f"{family}: relative error of the logits {error:.2e}")
        assert error <= WHOLE_MODEL_BOUND
        assert torch.equal(remote.generate(ids, **options), text)
        if wanted is not None:
            given = remote(ids, output_router_logits=True).router_logits
            assert len(given) == len(wanted)
            assert all(relative(left, right) <= 1e-5 for left, right in zip(given, wanted))
        assert patch(model, client, dense=True) is model
        blocks = [module for module in model.modules() if isinstance(module, RemoteMoeBlock)]
        assert len(blocks) == len(client.model().layers)
        assert relative(model(ids).logits, expected) <= WHOLE_MODEL_BOUND
        unpatch(model)
        assert torch.equal(model(ids).logits, expected)
