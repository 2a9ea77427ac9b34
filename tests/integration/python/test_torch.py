"""Remote blocks in models of transformers, against transformers itself. Needs torch and transformers."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import expertmesh
import grpc
import ml_dtypes
import numpy as np
import pytest
import torch
from checkpoints import DTYPES, FAMILIES, make_model, save, write_sparse
from checks import refused, relative
from expertmesh.torch import RemoteMoeBlock, from_pretrained, patch, unpatch
from fake_router import FakeRouter, MoeLayer
from transformers import AutoModelForCausalLM

SHAPES = [(5, 1), (5, 3), (5, 5), (12, 1), (12, 3), (12, 12)]  # experts, top_k
# Relative Frobenius error of a block's output by the dtype of the request.
BOUNDS = {"f32": 1e-5, "bf16": 1e-2, "f16": 2e-3}
NUMPY = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
MIN_GAP = 1e-5
WHOLE_MODEL_BOUND = 1e-5


def local(folder: Path, dtype: torch.dtype | None = None):
    """transformers' own model, with the experts computed one after the other."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or "auto", experts_implementation="eager"
    ).eval()


def prompt(count: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 64, (count, length), generator=torch.Generator().manual_seed(seed))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


# --- blocks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_blocks(cluster, tmp_path, family, experts, top_k, dtype):
    """Every block of a checkpoint in `dtype`, for requests in every dtype, against transformers in fp32."""
    folder = save(make_model(family, dtype, experts, top_k), tmp_path / "model")
    reference = local(folder, torch.float32)
    with expertmesh.Client(cluster(folder, 2)) as client:
        for index, layer in enumerate(reference.model.layers):
            for request, bound in BOUNDS.items():
                x = torch.randn(300, 160, generator=torch.Generator().manual_seed(index))
                given = x.to(DTYPES[request]).float()
                result = client.forward(index, given.numpy().astype(NUMPY[request]))
                expected = layer.mlp(given[None])[0]
                logits, _, ids = layer.mlp.gate(given)
                scores = logits.softmax(-1).sort(descending=True).values
                clear = torch.ones(len(x), dtype=torch.bool)
                if top_k < experts:
                    clear = scores[:, top_k - 1] - scores[:, top_k] > MIN_GAP
                assert (~clear).sum() <= 0.01 * len(x)
                output = torch.from_numpy(result.output.astype(np.float32))
                assert relative(output[clear], expected[clear]) <= bound, (index, request)
                chosen = torch.from_numpy(result.topk_ids).sort().values
                assert torch.equal(chosen[clear].long(), ids.sort().values[clear])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_remote_block_keeps_shape_dtype_and_bits(cluster, tmp_path, family):
    model = make_model(family, "bf16", 5, 3)
    folder = save(model, tmp_path / "model")
    with expertmesh.Client(cluster(folder)) as client:
        patch(model, client)
        block = model.model.layers[1].mlp
        assert isinstance(block, RemoteMoeBlock) and not list(block.parameters())
        for name, dtype in DTYPES.items():
            x = torch.randn(2, 3, 160).to(dtype)
            y = block(x)
            rows = x.reshape(-1, 160).float().numpy().astype(NUMPY[name])
            expected = client.forward(1, rows).output.astype(np.float32)
            assert (y.dtype, y.shape, y.device) == (x.dtype, x.shape, x.device)
            assert torch.equal(y.float().reshape(-1, 160), torch.from_numpy(expected))
            strided = torch.empty(3, 2, 320, dtype=dtype)[:, :, ::2].transpose(0, 1).copy_(x)
            assert same_bits(block(strided), y)
            assert block(x[:, :0]).shape == (2, 0, 160)


# --- whole models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "top_k"), [(5, 1), (5, 5), (12, 3)])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_whole_model_fp32(cluster, tmp_path, family, experts, top_k):
    folder = save(make_model(family, "f32", experts, top_k, layers=3), tmp_path / "model")
    reference = local(folder)
    ids = prompt()
    expected = reference(ids).logits
    options = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False}
    text = reference.generate(ids, **options)
    assert text.shape == (2, 24 + 32)
    with expertmesh.Client(cluster(folder, 3)) as client:
        model = from_pretrained(folder, client)
        logits = model(ids).logits
        error = relative(logits, expected)
        print(f"{family} e{experts}k{top_k}: relative error of the logits {error:.2e}")
        assert error <= WHOLE_MODEL_BOUND
        assert torch.equal(model.generate(ids, **options), text)
        assert patch(reference, client) is reference
        assert same_bits(reference(ids).logits, logits)
        assert torch.equal(reference.generate(ids, **options), text)
        assert unpatch(reference) is reference
        assert same_bits(reference(ids).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_whole_model_bf16(cluster, tmp_path, family):
    """Teacher-forced: the same ids go into all. Remote and local blocks round in different places; the remote
    ones are as close to fp32, and both are as close to each other, as rounding to bf16 explains."""
    folder = save(make_model(family, "bf16", 12, 3, layers=3), tmp_path / "model")
    ids = prompt(8, 48)
    exact = local(folder, torch.float32)(ids).logits
    plain = local(folder)(ids).logits
    with expertmesh.Client(cluster(folder, 2)) as client:
        remote = from_pretrained(folder, client)(ids).logits
    assert remote.dtype == plain.dtype == torch.bfloat16

    def divergence(logits: torch.Tensor, expected: torch.Tensor) -> float:
        left, right = logits.float().log_softmax(-1), expected.float().log_softmax(-1)
        return torch.nn.functional.kl_div(left, right, log_target=True, reduction="sum").item() / ids.numel()

    def agreement(logits: torch.Tensor, expected: torch.Tensor) -> float:
        return (logits.argmax(-1) == expected.argmax(-1)).double().mean().item()

    for name, left, right in [
        ("local", remote, plain),
        ("fp32", remote, exact),
        ("local-fp32", plain, exact),
    ]:
        print(f"{family} {name}: argmax {agreement(left, right):.4f}, KL {divergence(left, right):.2e}")
    assert agreement(remote, plain) >= 0.9  # random weights: many near ties
    assert divergence(remote, exact) <= 1.5 * divergence(plain, exact)
    assert divergence(remote, plain) <= 3 * divergence(plain, exact)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_layouts_have_the_same_bits(cluster, tmp_path, family):
    model = make_model(family, "bf16", 12, 3)
    outputs = []
    for layout, servers in [("saved", 1), ("fused", 2), ("sharded", 5)]:
        folder = save(model, tmp_path / layout, layout)
        assert layout != "sharded" or len(list(folder.glob("*.safetensors"))) > 1
        with expertmesh.Client(cluster(folder, servers)) as client:
            outputs.append(from_pretrained(folder, client)(prompt()).logits)
    assert same_bits(outputs[0], outputs[1]) and same_bits(outputs[0], outputs[2])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_router_logits(cluster, tmp_path, family):
    folder = save(make_model(family, "f32", 5, 3), tmp_path / "model")
    reference = local(folder)
    ids = prompt()
    expected = reference(ids, output_router_logits=True)
    with expertmesh.Client(cluster(folder)) as client:
        for model in (from_pretrained(folder, client), patch(reference, client)):
            assert not model(ids).router_logits
            output = model(ids, output_router_logits=True)
            assert len(output.router_logits) == 2
            for given, wanted in zip(output.router_logits, expected.router_logits):
                assert given.shape == wanted.shape and given.dtype == wanted.dtype
                assert relative(given, wanted) <= 1e-5
            assert torch.allclose(output.aux_loss, expected.aux_loss, rtol=1e-5)
    unpatch(reference)
    assert len(reference(ids, output_router_logits=True).router_logits) == 2


@torch.no_grad()
def test_dense_layers_stay_local(cluster, tmp_path):
    folder = save(make_model("qwen3_moe", "f32", 5, 3, layers=3, mlp_only_layers=[1]), tmp_path / "model")
    with expertmesh.Client(cluster(folder)) as client:
        model = from_pretrained(folder, client)
        remote = [isinstance(layer.mlp, RemoteMoeBlock) for layer in model.model.layers]
        assert remote == [True, False, True]
        assert relative(model(prompt()).logits, local(folder)(prompt()).logits) <= WHOLE_MODEL_BOUND


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_tied_embeddings(cluster, tmp_path, family):
    folder = save(make_model(family, "f32", 5, 3, tie_word_embeddings=True), tmp_path / "model")
    with expertmesh.Client(cluster(folder)) as client:
        model = from_pretrained(folder, client)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert relative(model(prompt()).logits, local(folder)(prompt()).logits) <= WHOLE_MODEL_BOUND


@torch.no_grad()
def test_loaded_model_is_what_transformers_loads(cluster, tmp_path):
    folder = save(make_model("olmoe", "bf16", 5, 3), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 5, "do_sample": False}))
    with expertmesh.Client(cluster(folder)) as client:
        model, reference = from_pretrained(folder, client), local(folder)
        parameters = dict(model.named_parameters())
        rest = {name: p for name, p in reference.named_parameters() if ".mlp." not in name}
        assert parameters.keys() == rest.keys()
        assert all(same_bits(parameters[name], tensor) for name, tensor in rest.items())
        assert not any(parameter.requires_grad for parameter in parameters.values())
        buffers = dict(model.named_buffers())
        assert buffers.keys() == dict(reference.named_buffers()).keys() and buffers
        assert all(same_bits(buffers[name], tensor) for name, tensor in reference.named_buffers())
        assert not any(module.training for module in model.modules())
        assert model.dtype == torch.bfloat16 and model.config.dtype == torch.bfloat16
        assert model.generate(prompt(1, 4)).shape == (1, 9)
        wide = from_pretrained(folder, client, dtype=torch.float32, attn_implementation="eager")
        assert wide.dtype == torch.float32 and wide.config._attn_implementation == "eager"
        assert wide.model.rotary_emb.inv_freq.dtype == torch.float32
        assert copy.deepcopy(model)(prompt()).logits.shape == (2, 24, 64)


# --- errors ----------------------------------------------------------------------------------------------


@pytest.fixture
def served(cluster, tmp_path):
    """A model, its folder, and a client of a cluster that serves it."""
    model = make_model("qwen3_moe", "f32", 5, 3)
    folder = save(model, tmp_path / "model")
    with expertmesh.Client(cluster(folder)) as client:
        yield model, folder, client


def test_gradients_are_refused(served):
    model, _, client = served
    patch(model, client)
    refused(
        lambda: model(prompt()), "layer 0", "not supported yet", "no_grad",
        code=grpc.StatusCode.UNIMPLEMENTED,
    )  # fmt: skip
    with torch.no_grad():
        model(prompt())
    with torch.inference_mode():
        model(prompt())


def test_other_models_are_refused(served):
    _, _, client = served
    other = make_model("olmoe", "f32", 5, 3)
    refused(lambda: patch(other, client), "model_type", "olmoe", "qwen3_moe")
    other = make_model("qwen3_moe", "f32", 6, 3)
    refused(lambda: patch(other, client), "num_experts of layer 0", "has 6", "serves 5")
    other = make_model("qwen3_moe", "f32", 5, 2)
    refused(lambda: patch(other, client), "top_k of layer 0", "has 2", "serves 3")
    other = make_model("qwen3_moe", "f32", 5, 3, layers=3)
    refused(lambda: patch(other, client), "layer 2", "only layers [0, 1]")
    assert not any(isinstance(module, RemoteMoeBlock) for module in other.modules())
    other.config.model_type = "gpt2"
    refused(lambda: patch(other, client), "mixtral, nemotron_h, olmoe", "gpt2")


def test_single_layers_can_be_patched(served):
    model, _, client = served
    with torch.no_grad():
        expected = model(prompt()).logits
        patch(model, client, layers=[1])
        assert [isinstance(layer.mlp, RemoteMoeBlock) for layer in model.model.layers] == [False, True]
        assert relative(model(prompt()).logits, expected) <= WHOLE_MODEL_BOUND
        refused(lambda: patch(model, client, layers=[1]), "layers", "[0]", "[1]")
        refused(lambda: patch(model, client, layers=[7]), "layers", "[0]", "[7]")


def test_a_loaded_model_has_nothing_to_put_back(served):
    _, folder, client = served
    model = from_pretrained(folder, client)
    refused(lambda: unpatch(model), "without its experts", code=grpc.StatusCode.FAILED_PRECONDITION)
    assert isinstance(model.model.layers[0].mlp, RemoteMoeBlock)


def test_tensors_that_do_not_fit_are_named(served):
    from safetensors.torch import load_file, save_file

    _, folder, client = served
    file = folder / "model.safetensors"
    tensors = load_file(file)
    norm = "model.layers.1.input_layernorm.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != norm}, file)
    refused(lambda: from_pretrained(folder, client), f"missing: {norm}; unexpected: none")
    save_file({**tensors, "model.layers.1.extra.weight": torch.ones(1)}, file)
    refused(
        lambda: from_pretrained(folder, client), "missing: none", "unexpected: model.layers.1.extra.weight"
    )
    save_file({**tensors, norm: torch.ones(159)}, file)
    refused(lambda: from_pretrained(folder, client), norm, "[160]", "[159]")
    index = {"metadata": {}, "weight_map": {name: "../model.safetensors" for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(tensors, file)
    from_pretrained(folder, client)  # where both are there, the index is not looked at
    file.unlink()
    refused(lambda: from_pretrained(folder, client), "../model.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    refused(lambda: from_pretrained(folder, client), "model.safetensors", "neither")


# --- memory ----------------------------------------------------------------------------------------------

LOADER = """
import sys
import expertmesh
from expertmesh.torch import from_pretrained

with expertmesh.Client(sys.argv[2]) as client:
    model = from_pretrained(sys.argv[1], client)
    status = open("/proc/self/status").read()
    print(int(status.split("VmHWM:")[1].split()[0]) << 10)  # the most it ever had, in bytes
"""


def peak_memory(folder: Path, config, layers: int) -> int:
    """Peak resident memory, in bytes, of a process that loads `folder` with remote blocks.

    The router only describes the model: its weights are zeros that take no memory.
    """

    def zeros(*shape: int) -> np.ndarray:
        return np.broadcast_to(np.float32(0), shape)

    experts, hidden, intermediate = config.num_experts, config.hidden_size, config.intermediate_size
    block = MoeLayer(
        gate=zeros(experts, hidden),
        gate_up=zeros(experts, 2 * intermediate, hidden),
        down=zeros(experts, hidden, intermediate),
        top_k=config.num_experts_per_tok,
    )
    with FakeRouter({index: block for index in range(layers)}, config.model_type) as router:
        done = subprocess.run(
            [sys.executable, "-c", LOADER, folder, router.address],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_experts_are_never_in_memory(tmp_path):
    from make_checkpoints import Sizes, make_config

    tiny = make_config("mixtral", 5, 3, Sizes())
    write_sparse(tiny, tmp_path / "tiny")
    sizes = Sizes(hidden=2048, intermediate=8192, layers=4, vocabulary=100_000)
    large = make_config("mixtral", 16, 3, sizes)
    large.dtype = "bfloat16"
    tensors = write_sparse(large, tmp_path / "large")
    experts = sum(size for name, size in tensors.items() if ".mlp." in name)
    rest = sum(tensors.values()) - experts
    assert experts > 6 << 30 and rest > 700 << 20
    base = peak_memory(tmp_path / "tiny", tiny, 2)
    more = peak_memory(tmp_path / "large", large, 4) - base
    print(f"experts {experts >> 20} MiB, the rest {rest >> 20} MiB, memory taken {more >> 20} MiB")
    assert rest * 0.9 < more < rest + (300 << 20)
