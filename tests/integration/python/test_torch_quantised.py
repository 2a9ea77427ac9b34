"""Checkpoints with quantised weights, as they are released, against transformers with their exact values."""

from __future__ import annotations

import json
import re
import shutil

import expertmesh
import expertmesh.torch
import grpc
import pytest
import torch
from checks import refused, relative
from expertmesh.torch import from_pretrained
from safetensors.torch import load_file, save_file
from zoo import MODELS, Files, check_blocks, save_quantised

WHOLE_MODEL_BOUND = 1e-5
IDS = torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(0))
# The formula for the plain files, where it is not that for the released ones.
PLAIN = {"llama4": "llama4_text"}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_quantised(cluster, tmp_path, monkeypatch, name):
    """Blocks, logits, 32 greedy tokens, and the tensors outside the experts."""
    folder = tmp_path / "model"
    model = save_quantised(name, folder)
    family = MODELS[name].family
    logits = model(IDS).logits
    options = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False}
    text = model.generate(IDS, **options)
    with expertmesh.Client(cluster(folder, 2)) as client:
        check_blocks(client, model, Files(PLAIN.get(family, family), tmp_path / "model-plain"))
        attention = model.config._attn_implementation
        remote = from_pretrained(folder, client, dtype=torch.float32, attn_implementation=attention)
        error = relative(remote(IDS).logits, logits)
        print(f"{name}: relative error of the logits {error:.2e}")
        assert error <= WHOLE_MODEL_BOUND
        assert torch.equal(remote.generate(IDS, **options), text)

        monkeypatch.setattr(expertmesh.torch, "_BYTES_PER_MAPPING", 1 << 14)  # matrices in several pieces
        narrow = from_pretrained(folder, client)
        assert narrow.dtype == torch.bfloat16
        assert getattr(narrow.config, "quantization_config", None) is None
        exact = dict(model.named_parameters())
        for parameter, tensor in narrow.named_parameters():
            assert torch.equal(tensor, exact[parameter].to(tensor.dtype)), parameter
        dequantised = [parameter for parameter in exact if re.search(MODELS[name].names, parameter)]
        local = [parameter for parameter in dequantised if parameter in dict(narrow.named_parameters())]
        assert bool(local) == (family != "gpt_oss")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised") / "model"
    save_quantised("dots1-tensor", folder)
    return folder


@pytest.fixture
def served(cluster, tmp_path, written):
    """A folder of its own, and a client of a cluster that serves one like it."""
    folder = shutil.copytree(written, tmp_path / "copy")
    with expertmesh.Client(cluster(written)) as client:
        yield folder, client


def test_unknown_quantisations_are_refused_by_name(served):
    folder, client = served
    path = folder / "config.json"
    config = json.loads(path.read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]

    def with_weights(**weights):
        groups = {"group_0": {**group, "weights": {**group["weights"], **weights}}}
        return {**config["quantization_config"], "config_groups": groups}

    for given, word in [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "[64, 64]"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'NVFP4'"),
        ({**config["quantization_config"], "format": "pack-quantized"}, "'pack-quantized'"),
        (with_weights(type="int"), "'int'"),
        (with_weights(strategy="group"), "'group'"),
    ]:
        path.write_text(json.dumps({**config, "quantization_config": given}))
        refused(
            lambda: from_pretrained(folder, client), word, "supported are", code=grpc.StatusCode.UNIMPLEMENTED
        )


def test_bad_scales_are_named(served):
    folder, client = served
    file = folder / "model.safetensors"
    tensors = load_file(file)
    weight = "model.layers.0.self_attn.q_proj.weight"
    scale = weight + "_scale"

    def load_with(**changed):
        save_file({name: changed.get(name, tensor) for name, tensor in tensors.items()}, file)
        return from_pretrained(folder, client)

    load_with(**{scale: tensors[scale].bfloat16()})
    refused(lambda: load_with(**{scale: torch.ones(3)}), scale, "[3]")
    refused(lambda: load_with(**{scale: torch.zeros(1)}), scale, "positive")
    refused(lambda: load_with(**{scale: torch.full((1,), torch.inf)}), scale, "finite")
    refused(lambda: load_with(**{weight: tensors[weight].to(torch.float8_e5m2)}), weight, "F8_E5M2")
    codes = tensors[weight].view(torch.uint8).clone()
    codes[2, 1] = 0x7F
    refused(lambda: load_with(**{weight: codes.view(torch.float8_e4m3fn)}), weight, "not a number")
    del tensors[scale]
    refused(load_with, weight, "no scales", scale)

    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    refused(load_with, "F8_E4M3", "no quantization_config")
