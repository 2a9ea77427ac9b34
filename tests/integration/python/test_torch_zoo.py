"""All families of models, in their released layouts, on clusters, against transformers' modules in fp32."""

from __future__ import annotations

import json
import re
import subprocess

import expertmesh
import expertmesh.torch
import pytest
import torch
from checks import relative
from expertmesh.torch import RemoteMoeBlock, from_pretrained, patch, unpatch
from transformers import CONFIG_MAPPING
from zoo import FAMILIES, Files, check_blocks, make_model, moe_blocks, rows, save

WHOLE_MODEL_BOUND = 1e-5
# Each family's shapes (experts and top_k) in turn, in another dtype and layout.
KINDS = [("f32", "released"), ("bf16", "fused"), ("bf16", "released")]
CASES = [(name, *shape, *kind) for name in FAMILIES for shape, kind in zip(FAMILIES[name].shapes, KINDS)]
NO_ROUTER_LOGITS = {"llama4", "llama4_text", "gemma4", "gemma4_text"}  # of the whole model


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


@pytest.mark.parametrize(
    ("family", "shared", "identity"), [("longcat_flash", (0, 0), 4), ("deepseek_v3", (1, 42), 0)]
)
def test_layers_say_what_they_have_beside_experts(cluster, tmp_path, family, shared, identity):
    model = make_model(family, "f32", *FAMILIES[family].shapes[0])
    folder = save(model, tmp_path / "model", family, "released")
    with expertmesh.Client(cluster(folder), max_message_bytes=8192) as client:
        layer = client.model().layers[-1]
        assert (layer.num_shared_experts, layer.shared_intermediate_size) == shared
        assert layer.num_identity_experts == identity
        x = rows(100, 0).numpy()  # in parts
        logits = client.forward(layer.layer, x, return_router_logits=True).router_logits
        assert logits.shape == (100, layer.num_experts + identity)


# What transformers calls otherwise, or has no class for.
NOT_IN_TRANSFORMERS = {"minimax_m1", "minimax_text_01"}
# Language models of a multimodal one, which transformers has only together.
PARTS = {"qwen3_vl_moe_text"}
# Multimodal models of no type of their own on the servers, which look at the language model's.
WHOLE = {"mistral3"}


def test_the_table_has_every_family_that_is_served(binaries, tmp_path):
    """The servers' registry, what `from_pretrained` knows and the models of these tests: the same families."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    done = subprocess.run([binaries / "expertmesh", "inspect", tmp_path], capture_output=True, text=True)
    listed = re.search(r"supported: ([^)]*)", done.stderr)
    assert listed is not None, done.stderr
    served = set(listed[1].split(", ")) - NOT_IN_TRANSFORMERS
    assert len(served) > 40
    table = expertmesh.torch._FAMILIES.keys()
    same_as = expertmesh.torch._SAME_AS
    assert {same_as.get(name, name) for name in served} == set(table)
    assert same_as.keys() <= served
    assert set(table) <= set(CONFIG_MAPPING)
    assert not NOT_IN_TRANSFORMERS & set(CONFIG_MAPPING)
    assert (served - PARTS) | WHOLE == FAMILIES.keys()
