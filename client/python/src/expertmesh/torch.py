"""Remote MoE blocks inside models of transformers: mixtral, qwen3_moe and olmoe.

    from expertmesh.torch import from_pretrained

    with expertmesh.Client("127.0.0.1:7070") as client:
        model = from_pretrained("path/to/checkpoint", client)  # never reads the experts
        model.generate(...)

Inference only: gradients do not flow through remote blocks yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np

try:
    import torch
    from safetensors import safe_open
    from torch import nn
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationConfig,
        PretrainedConfig,
        PreTrainedModel,
    )
except ImportError as error:
    raise ImportError(
        f"expertmesh.torch needs torch, transformers and safetensors ({error}): "
        "pip install 'expertmesh[torch]'"
    ) from error

from .client import Client
from .error import Error

# The one table of families: model_type -> the names of the MoE block within a decoder layer; the first is its
# attribute, all of them are names that checkpoints use.
_BLOCKS = {
    "mixtral": ("mlp", "block_sparse_moe"),
    "olmoe": ("mlp",),
    "qwen3_moe": ("mlp",),
}

# A mapped file counts as resident memory where it was read, so files are opened anew after this much of them.
_BYTES_PER_MAPPING = 64 << 20
_NAMES_IN_MESSAGES = 10


class RemoteMoeBlock(nn.Module):
    """Stands in for the MoE block of one decoder layer; the cluster computes it. It has no parameters.

    forward takes [..., D] float32, bfloat16 or float16 on any device, and returns the same. Hooks on `gate`
    get what those on the replaced block's router got (that is how transformers collects router logits).

    Errors: `Error`, as Client.forward; UNIMPLEMENTED if a gradient would be needed.
    """

    def __init__(self, client: Client, layer: int, model_fingerprint: str, replaced: nn.Module) -> None:
        super().__init__()
        self.client = client
        self.layer = layer
        self.model_fingerprint = model_fingerprint
        self.gate = _stand_in(replaced.gate)
        # In a tuple, so that it is not a submodule: its parameters are not this block's.
        self.replaced = (replaced,)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"layer {self.layer}: training through remote MoE blocks is not supported yet; "
                "call the model under torch.no_grad()",
            )
        listening = bool(self.gate._forward_hooks)
        result = self.client.forward(
            self.layer,
            _to_numpy(hidden_states.reshape(-1, hidden_states.shape[-1])),
            return_router_logits=listening,
            model_fingerprint=self.model_fingerprint,
        )
        device, dtype = hidden_states.device, hidden_states.dtype
        if listening:
            self.gate(
                _from_numpy(result.router_logits).to(device, dtype),
                _from_numpy(result.topk_weights).to(device),
                _from_numpy(result.topk_ids).to(device, torch.int64),
            )
        return _from_numpy(result.output).to(device).reshape(hidden_states.shape)

    def extra_repr(self) -> str:
        return f"{self.client!r}, layer={self.layer}"


def patch(model: PreTrainedModel, client: Client, *, layers: Iterable[int] | None = None) -> PreTrainedModel:
    """Replaces MoE blocks of `model`, in place, by remote ones, and returns it. See `unpatch`.

    layers: decoder layers to replace; by default all that have an MoE block. The replaced blocks stay in
    memory; `from_pretrained` makes a model that never had them.

    Errors: INVALID_ARGUMENT if the model's family is not supported, or the cluster serves another model (by
    model_type, sizes, experts per token); the errors of Client.model.
    """
    attribute = _block_names(model.config)[0]
    decoder = model.base_model.layers
    local = [i for i, layer in enumerate(decoder) if _is_moe_block(getattr(layer, attribute))]
    chosen = local if layers is None else sorted(set(layers))
    if wrong := sorted(set(chosen) - set(local)):
        raise _invalid(f"layers: expected some of {local} (with a local MoE block), given {wrong}")
    served = client.model()
    config = model.config
    if served.model_type != config.model_type:
        raise _invalid(
            f"model_type: the model has {config.model_type}, the cluster serves {served.model_type}"
        )
    expected = {
        "kind": "MOE",
        "hidden_size": config.hidden_size,
        "num_experts": config.num_experts,
        "top_k": config.num_experts_per_tok,
    }
    infos = {info.layer: info for info in served.layers}
    for index in chosen:
        if index not in infos:
            raise _invalid(f"layer {index}: the cluster serves only layers {sorted(infos)}")
        for name, value in expected.items():
            if (given := getattr(infos[index], name)) != value:
                raise _invalid(f"{name} of layer {index}: the model has {value}, the cluster serves {given}")
    for index in chosen:
        block = getattr(decoder[index], attribute)
        remote = RemoteMoeBlock(client, index, served.model_fingerprint, block)
        setattr(decoder[index], attribute, remote.train(block.training))
    return model


def unpatch(model: PreTrainedModel) -> PreTrainedModel:
    """Puts back, in place, the blocks that `patch` replaced, and returns the model.

    Error: FAILED_PRECONDITION for a model of `from_pretrained`, which never had them.
    """
    attribute = _block_names(model.config)[0]
    remote = [
        layer for layer in model.base_model.layers if isinstance(getattr(layer, attribute), RemoteMoeBlock)
    ]
    originals = [getattr(layer, attribute).replaced[0] for layer in remote]
    if any(parameter.is_meta for block in originals for parameter in block.parameters()):
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            "the model was loaded without its experts; load it with transformers to have them",
        )
    for layer, block in zip(remote, originals):
        setattr(layer, attribute, block)
    return model


def from_pretrained(
    path: str | Path, client: Client, *, dtype: torch.dtype | None = None, **kwargs: Any
) -> PreTrainedModel:
    """Loads the causal language model in folder `path` with remote MoE blocks, in eval mode, on the CPU.

    Expert weights are neither read nor allocated; the other tensors are read from its safetensors files.

    dtype: of the model; by default that of config.json, or else of the checkpoint's embeddings.
    kwargs: for transformers' AutoModelForCausalLM.from_config, for example attn_implementation.

    Errors: INVALID_ARGUMENT as `patch`, or if tensors of the checkpoint are missing, unexpected (named) or of
    another shape; the errors of Client.model; OSError if a file cannot be read.
    """
    folder = Path(path)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    block_names = _block_names(config)
    files = _tensor_files(folder)
    dtype = dtype or config.dtype or _embedding_dtype(files)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)
    patch(model, client)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    remote = tuple(
        f"{model.base_model_prefix}.layers.{index}.{name}."
        for index, layer in enumerate(model.base_model.layers)
        if isinstance(getattr(layer, block_names[0]), RemoteMoeBlock)
        for name in block_names
    )
    tied = set(model.all_tied_weights_keys)
    wanted = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    # Files of old versions hold the rotary frequencies, which follow from the configuration.
    unexpected = [
        name
        for name in files
        if name not in wanted and not name.startswith(remote) and not name.endswith(".inv_freq")
    ]
    missing = wanted - tied - set(files)
    if missing or unexpected:
        raise _invalid(
            f"{folder}: tensors do not fit {config.model_type}; "
            f"missing: {_some(missing)}; unexpected: {_some(unexpected)}"
        )
    _load(model, {name: files[name] for name in wanted - tied})
    model.tie_weights()
    _compute_buffers(model)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _invalid(message: str) -> Error:
    return Error(grpc.StatusCode.INVALID_ARGUMENT, message)


def _block_names(config: PretrainedConfig) -> tuple[str, ...]:
    if config.model_type not in _BLOCKS:
        raise _invalid(f"model_type: expected one of {', '.join(_BLOCKS)}, given {config.model_type}")
    return _BLOCKS[config.model_type]


def _is_moe_block(module: nn.Module) -> bool:
    return hasattr(module, "gate") and hasattr(module, "experts")


def _stand_in(router: nn.Module) -> nn.Module:
    """A module of the router's class, without parameters, whose forward returns its arguments.

    Being of that class, it gets the hooks that transformers installs on it. It shares the router's hooks, so
    that those installed before a block is replaced, or while it is, are there before and after.
    """

    def forward(self: nn.Module, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return outputs

    members = {"__init__": nn.Module.__init__, "forward": forward}
    stand_in = type("Remote" + type(router).__name__, (type(router),), members)()
    for hooks in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        setattr(stand_in, hooks, getattr(router, hooks))
    return stand_in


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Shares memory with a contiguous tensor on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:  # unknown to torch's numpy bridge
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _from_numpy(array: np.ndarray) -> torch.Tensor:
    """Shares memory with `array`."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a checkpoint."""
    single = folder / "model.safetensors"
    if single.is_file():  # comes first, as in transformers and on the servers
        with safe_open(single, framework="pt") as tensors:
            return {name: single for name in tensors.keys()}
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise _invalid(f"{folder}: expected model.safetensors or {index.name}, given neither")
    weight_map = json.loads(index.read_text())["weight_map"]
    for name, file in weight_map.items():
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise _invalid(f"{index}: {name}: expected a file in the folder, given {file}")
    return {name: folder / file for name, file in weight_map.items()}


def _embedding_dtype(files: dict[str, Path]) -> torch.dtype:
    name = "model.embed_tokens.weight"
    if name not in files:
        raise _invalid(f"missing tensor: {name}")
    with safe_open(files[name], framework="pt") as tensors:
        return tensors.get_slice(name)[:1].dtype


def _load(model: PreTrainedModel, files: dict[str, Path]) -> None:
    """Reads these parameters, and nothing else, from their files."""
    pieces: dict[Path, list[tuple[str, int, int]]] = {}  # by file: name, first row, end
    for name, file in sorted(files.items()):
        shape = _allocate(model, name).shape
        rows = max(1, _BYTES_PER_MAPPING // (4 * max(1, prod(shape[1:]))))
        for first in range(0, shape[0], rows):
            pieces.setdefault(file, []).append((name, first, min(first + rows, shape[0])))
    for file, pending in pieces.items():
        while pending:
            read = 0
            with safe_open(file, framework="pt") as tensors:
                while pending and read < _BYTES_PER_MAPPING:
                    name, first, end = pending.pop()
                    parameter, stored = model.get_parameter(name), tensors.get_slice(name)
                    if stored.get_shape() != list(parameter.shape):
                        raise _invalid(
                            f"{file}: {name}: expected shape {list(parameter.shape)}, "
                            f"given {stored.get_shape()}"
                        )
                    rows_read = stored[first:end]
                    parameter[first:end].copy_(rows_read)
                    read += rows_read.nbytes
                    del rows_read  # the mapping stays as long as it


def _allocate(model: PreTrainedModel, name: str) -> nn.Parameter:
    module_name, _, attribute = name.rpartition(".")
    module = model.get_submodule(module_name)
    memory = torch.empty_like(getattr(module, attribute), device="cpu")
    parameter = nn.Parameter(memory, requires_grad=False)
    setattr(module, attribute, parameter)
    return parameter


def _compute_buffers(model: PreTrainedModel) -> None:
    """Gives the rotary embedding, the only module with buffers, their values."""
    rotary = model.base_model.rotary_emb
    model.base_model.rotary_emb = type(rotary)(model.config).eval()
    if empty := [name for name, tensor in _tensors(model) if tensor.is_meta]:
        raise _invalid(f"{type(model).__name__}: no values for {_some(empty)}")


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:_NAMES_IN_MESSAGES]) or "none"
    more = len(ordered) - _NAMES_IN_MESSAGES
    return shown + (f" and {more} more" if more > 0 else "")
