"""Remote MoE blocks inside models of transformers.

    from expertmesh.torch import from_pretrained

    with expertmesh.Client("127.0.0.1:7070") as client:
        model = from_pretrained("path/to/checkpoint", client)  # never reads the experts
        model.generate(...)

Inference only: gradients do not flow through remote blocks yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np

try:
    import torch
    import transformers
    from safetensors import safe_open
    from torch import nn
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
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

from . import quantised
from .client import Client
from .error import Error

# Of a router, None where it was not asked for logits: logits [T, E], weights [T, K], ids [T, K].
_Outputs = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Family:
    """Where a family's MoE block, or the dense MLP in its place, sits in a decoder layer, and its interface.

    names: the block's; the first is its attribute, all of them are names that checkpoints use.
    router: the module in the block whose outputs transformers records; None where the block is that module.
    recorded: what that module returns.
    returns: what the block returns, from its output and what the router returned. needs_logits: always.
    absorbed: other modules of the layer that the cluster's block includes, and what takes their place.
    renamed: parts of names in checkpoints that are others in transformers.
    """

    names: tuple[str, ...] = ("mlp",)
    router: str | None = "gate"
    recorded: Callable[[_Outputs], Any] = lambda outputs: outputs
    returns: Callable[[torch.Tensor, Any], Any] = lambda output, recorded: output
    needs_logits: bool = False
    absorbed: dict[str, Callable[[], nn.Module | None]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)


def _llama4_recorded(outputs: _Outputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of all experts, zero where not chosen, and the logits."""
    logits, weights, ids = outputs
    assert logits is not None
    return torch.zeros_like(logits).scatter(1, ids, weights.to(logits.dtype)), logits


def _gemma4_recorded(outputs: _Outputs) -> _Outputs:
    logits, weights, ids = outputs
    return (None if logits is None else logits.float().softmax(-1), weights, ids)


class _ReturnsWeights(nn.Module):
    """Stands in for experts that the router's stand-in has computed, with their output for the weights."""

    def forward(self, hidden_states: torch.Tensor, ids: None, weights: torch.Tensor) -> torch.Tensor:
        return weights


class _Zeros(nn.Module):
    """Stands in for a network whose output the remote block includes and the layer adds."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


_MLP = _Family()
_MIXTRAL = _Family(("mlp", "block_sparse_moe"))
_GRANITE = _Family(("block_sparse_moe",), router="router", absorbed={"shared_mlp": lambda: None})

# The one table of families, by the model_type of their language model.
_FAMILIES: dict[str, _Family] = {
    "afmoe": _Family(router="router"),
    "cohere2_moe": _MLP,
    "dbrx": _Family(("ffn",), router="router", recorded=lambda outputs: outputs[0]),
    "deepseek_v2": _MLP,
    "deepseek_v3": _MLP,
    "deepseek_v32": _MLP,
    "dots1": _MLP,
    "ernie4_5_moe": _MLP,
    "exaone_moe": _MLP,
    "flex_olmo": _MLP,
    # The router sees the residual, the experts a norm of it; the remote block gets the residual.
    "gemma4_text": _Family(
        ("router",),
        router=None,
        recorded=_gemma4_recorded,
        returns=lambda output, recorded: (recorded[0], output, None),
        absorbed={"experts": _ReturnsWeights, "pre_feedforward_layernorm_2": nn.Identity},
    ),
    "glm4_moe": _MLP,
    "glm4_moe_lite": _MLP,
    "glm_moe_dsa": _MLP,
    "gpt_oss": _Family(router="router", returns=lambda output, recorded: (output, recorded[1])),
    "granitemoe": _GRANITE,
    "granitemoehybrid": _Family(("block_sparse_moe",), router="router", absorbed={"shared_mlp": _Zeros}),
    "granitemoeshared": _GRANITE,
    "hunyuan_v1_moe": _MLP,
    "hy_v3": _MLP,
    "jamba": _Family(("feed_forward",), router="router"),
    "laguna": _MLP,
    "lfm2_moe": _Family(("feed_forward",)),
    "llama4_text": _Family(
        ("feed_forward",),
        router="router",
        recorded=_llama4_recorded,
        returns=lambda output, recorded: (output.reshape(-1, output.shape[-1]), recorded[1]),
        needs_logits=True,
    ),
    "longcat_flash": _Family(router="router"),
    "mellum": _MLP,
    "mimo_v2_flash": _Family(renamed={"self_attn.attention_sink_bias": "self_attn.sinks"}),
    "minimax": _MIXTRAL,
    "minimax_m2": _MIXTRAL,
    "mistral4": _MLP,
    "mixtral": _MIXTRAL,
    "nemotron_h": _Family(("mixer",)),
    "olmoe": _MLP,
    "phimoe": _Family(("mlp", "block_sparse_moe"), router="router"),
    "qwen2_moe": _MLP,
    "qwen3_5_moe_text": _MLP,
    "qwen3_moe": _MLP,
    "qwen3_next": _MLP,
    "qwen3_vl_moe_text": _MLP,
    "solar_open": _MLP,
}
# Model types that are another one's language model, or its code under another name.
_SAME_AS = {
    "gemma4": "gemma4_text",
    "kimi_k2": "deepseek_v3",
    "llama4": "llama4_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
# What checkpoints call the decoder, beside what transformers does.
_DECODER_PREFIXES = ("model.language_model.", "language_model.model.", "backbone.")
# What configurations call the same number.
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")

# A mapped file counts as resident memory where it was read, so files are opened anew after this much of them.
_BYTES_PER_MAPPING = 64 << 20
_NAMES_IN_MESSAGES = 10


class RemoteMoeBlock(nn.Module):
    """Stands in for the MoE block, or the dense MLP, of one decoder layer; the cluster computes it. It has no
    parameters.

    forward takes [..., D] float32, bfloat16 or float16 on any device, and returns what the replaced block
    returns. Hooks on the router get what those on the replaced block's got (that is how transformers collects
    router logits).

    Errors: `Error`, as Client.forward; UNIMPLEMENTED if a gradient would be needed.
    """

    def __init__(
        self, client: Client, layer: int, model_fingerprint: str, family: _Family, replaced: nn.Module
    ) -> None:
        super().__init__()
        self.client = client
        self.layer = layer
        self.model_fingerprint = model_fingerprint
        self.family = family
        self.router_name = None
        router = replaced if family.router is None else getattr(replaced, family.router, None)
        if router is not None:  # not a dense MLP
            # transformers may look for it by its name.
            self.router_name = family.router or "router"
            # Where logits are capped, those that transformers records are.
            self.softcap = float(getattr(router, "router_logit_softcapping", 0.0))
            setattr(self, self.router_name, _stand_in(router))

    def forward(self, hidden_states: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise Error(
                grpc.StatusCode.UNIMPLEMENTED,
                f"layer {self.layer}: training through remote MoE blocks is not supported yet; "
                "call the model under torch.no_grad()",
            )
        router = None if self.router_name is None else getattr(self, self.router_name)
        listening = router is not None and bool(router._forward_hooks)
        result = self.client.forward(
            self.layer,
            _to_numpy(hidden_states.reshape(-1, hidden_states.shape[-1])),
            return_router_logits=listening or (router is not None and self.family.needs_logits),
            model_fingerprint=self.model_fingerprint,
        )
        device, dtype = hidden_states.device, hidden_states.dtype
        output = _from_numpy(result.output).to(device).reshape(hidden_states.shape)
        if router is None:
            return output
        logits = None if result.router_logits is None else _from_numpy(result.router_logits)
        if logits is not None and self.softcap > 0:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        recorded = self.family.recorded(
            (
                None if logits is None else logits.to(device, dtype),
                _from_numpy(result.topk_weights).to(device),
                _from_numpy(result.topk_ids).to(device, torch.int64),
            )
        )
        if listening:
            router(recorded)
        return self.family.returns(output, recorded)

    def extra_repr(self) -> str:
        return f"{self.client!r}, layer={self.layer}"


def patch(
    model: PreTrainedModel, client: Client, *, layers: Iterable[int] | None = None, dense: bool = False
) -> PreTrainedModel:
    """Replaces MoE blocks of `model`, in place, by remote ones, and returns it. See `unpatch`.

    layers: decoder layers to replace; by default all that have an MoE block. dense: also the MLPs of dense
    layers that the cluster serves. The replaced blocks stay in memory; `from_pretrained` makes a model that
    never had them.

    Errors: INVALID_ARGUMENT if the model's family is not supported, or the cluster serves another model (by
    model_type, sizes, experts per token); the errors of Client.model.
    """
    config = model.config.get_text_config()
    family = _family_of(config.model_type)
    decoder = _decoder_layers(model)
    served = client.model()
    infos = {info.layer: info for info in served.layers}
    local = [i for i, layer in enumerate(decoder) if _is_moe_layer(layer, family)]
    if dense:
        local += [i for i, layer in enumerate(decoder) if _is_dense_layer(layer, family, infos.get(i))]
    chosen = local if layers is None else sorted(set(layers))
    if wrong := sorted(set(chosen) - set(local)):
        raise _invalid(f"layers: expected some of {sorted(local)} (with a local block), given {wrong}")
    given_type = _canonical(served.model_type)
    # One that is not in the table is that of a multimodal model, whose language model has a type of its own.
    if given_type in _FAMILIES and given_type != _canonical(config.model_type):
        raise _invalid(
            f"model_type: the model has {config.model_type}, the cluster serves {served.model_type}"
        )
    for index in chosen:
        if index not in infos:
            raise _invalid(f"layer {index}: the cluster serves only layers {sorted(infos)}")
        expected: dict[str, Any] = {"kind": "DENSE", "hidden_size": config.hidden_size}
        if _is_moe_layer(decoder[index], family):
            expected["kind"] = "MOE"
            expected["num_experts"] = _number(config, _NUM_EXPERTS, index)
            expected["top_k"] = _number(config, _TOP_K, index)
        for name, value in expected.items():
            if (given := getattr(infos[index], name)) != value:
                raise _invalid(f"{name} of layer {index}: the model has {value}, the cluster serves {given}")
    for index in chosen:
        layer, attribute = decoder[index], family.names[0]
        block = getattr(layer, attribute)
        remote = RemoteMoeBlock(client, index, served.model_fingerprint, family, block)
        _replace(layer, attribute, remote.train(block.training))
        for name, make in family.absorbed.items():
            if getattr(layer, name, None) is not None:
                _replace(layer, name, make())
    return model


def unpatch(model: PreTrainedModel) -> PreTrainedModel:
    """Puts back, in place, the modules that `patch` replaced, and returns the model.

    Error: FAILED_PRECONDITION for a model of `from_pretrained`, which never had them.
    """
    _family_of(model.config.get_text_config().model_type)
    patched = [layer for layer in _decoder_layers(model) if hasattr(layer, _REPLACED)]
    originals = [module for layer in patched for module in getattr(layer, _REPLACED).values()]
    if any(parameter.is_meta for module in originals for parameter in module.parameters()):
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            "the model was loaded without its experts; load it with transformers to have them",
        )
    for layer in patched:
        for name, module in getattr(layer, _REPLACED).items():
            setattr(layer, name, module)
        delattr(layer, _REPLACED)
    return model


def from_pretrained(
    path: str | Path,
    client: Client,
    *,
    dtype: torch.dtype | None = None,
    dense: bool = False,
    **kwargs: Any,
) -> PreTrainedModel:
    """Loads the causal language model in folder `path` with remote MoE blocks, in eval mode, on the CPU. Of a
    multimodal model it loads the language model alone, where transformers has a class for that.

    Expert weights are neither read nor allocated; the other tensors are read from its safetensors files.
    Those that are quantised are dequantised in float32 and rounded to the dtype of the model.

    dtype: of the model; by default that of config.json, or else of the checkpoint's embeddings, or bfloat16
        where these are quantised.
    dense: as in `patch`.
    kwargs: for transformers' AutoModelForCausalLM.from_config, for example attn_implementation.

    Errors: INVALID_ARGUMENT as `patch`, or if tensors of the checkpoint are missing, unexpected (named), of
    another shape or have no good scales; UNIMPLEMENTED if it is quantised in another way than the servers
    read; the errors of Client.model; OSError if a file cannot be read.
    """
    folder = Path(path)
    whole = _read_config(folder)
    config = whole.get_text_config()
    family = _family_of(config.model_type)
    scheme = quantised.read_scheme(folder)
    for part in (whole, config):  # the model will have plain weights
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    files = _tensor_files(folder)
    dtype = dtype or config.dtype or whole.dtype or _embedding_dtype(files)
    with torch.device("meta"):
        model = _make_model(whole, config, dtype=dtype, **kwargs)
    patch(model, client, dense=dense)
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    _compute_buffers(model)

    layers = _layers_name(model)
    decoder = layers.rpartition(".")[0] + "."
    names = {name: _module_name(name, decoder, family) for name in files}
    if type(model.config) is not type(whole):  # the other parts of a multimodal model
        names = {name: inside for name, inside in names.items() if inside.startswith((decoder, "lm_head."))}
    remote = tuple(
        f"{layers}.{index}.{name}."
        for index, layer in enumerate(_decoder_layers(model))
        for name in _checkpoint_names(layer, family)
    )
    tied = set(model.all_tied_weights_keys)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    wanted = parameters | model.state_dict().keys()
    found = {inside: name for name, inside in names.items() if inside in wanted - tied}
    scales = quantised.read_scales(found.values(), files, scheme)
    unused = {name for name in files if scheme is not None and quantised.is_scale(name)}
    ignored = model._keys_to_ignore_on_load_unexpected or []
    unexpected = [
        name
        for name, inside in names.items()
        if inside not in wanted
        and name not in unused
        and not inside.startswith(remote)
        and _layer_of(inside, layers) < len(_decoder_layers(model))  # later ones predict further tokens
        # Files of old versions hold the rotary frequencies, which follow from the configuration.
        and not inside.endswith(".inv_freq")
        and not any(re.search(pattern, name) for pattern in ignored)
    ]
    missing = parameters - tied - found.keys()
    if missing or unexpected:
        raise _invalid(
            f"{folder}: tensors do not fit {config.model_type}; "
            f"missing: {_some(missing)}; unexpected: {_some(unexpected)}"
        )
    _load(model, {inside: (files[name], name) for inside, name in found.items()}, scales)
    model.tie_weights()
    if empty := [name for name, buffer in model.named_buffers() if buffer.isnan().any()]:
        raise _invalid(f"{folder}: no values for {_some(empty)}")
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _invalid(message: str) -> Error:
    return Error(grpc.StatusCode.INVALID_ARGUMENT, message)


def _canonical(model_type: str) -> str:
    return _SAME_AS.get(model_type, model_type)


def _family_of(model_type: str) -> _Family:
    if _canonical(model_type) not in _FAMILIES:
        raise _invalid(f"model_type: expected one of {', '.join(_FAMILIES)}, given {model_type}")
    return _FAMILIES[_canonical(model_type)]


def _read_config(folder: Path) -> PretrainedConfig:
    path = folder / "config.json"
    if path.is_file():
        fields = json.loads(path.read_text())
        model_type = fields.get("model_type")
        if model_type in _SAME_AS and model_type not in CONFIG_MAPPING:
            fields["model_type"] = _SAME_AS[model_type]
            return CONFIG_MAPPING[_SAME_AS[model_type]].from_dict(fields)
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def _make_model(whole: PretrainedConfig, config: PretrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """The language model of a configuration, or all of it where transformers has no class for that."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM.from_config(config, **kwargs)
    for part in (config, whole):
        for name in part.architectures or []:  # not all language models are in transformers' table
            if hasattr(transformers, name):
                return getattr(transformers, name)._from_config(part, **kwargs)
    raise _invalid(f"{whole.model_type}: no class of transformers for architectures {whole.architectures}")


def _number(config: PretrainedConfig, names: tuple[str, ...], layer: int) -> int | None:
    """Some families have one number per layer, or it is in a section of its own."""
    for section in (config, getattr(config, "ffn_config", None)):
        for name in names:
            value = getattr(section, name, None)
            if value is not None:
                return value[layer] if isinstance(value, (list, tuple)) else value
    return None


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    return model.get_submodule(_layers_name(model))


def _layers_name(model: PreTrainedModel) -> str:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.split(".")[-1] in ("layers", "blocks"):
            if not any(part in name for part in ("vision", "visual", "audio")):
                return name
    raise _invalid(f"{type(model).__name__}: no decoder layers found")


def _module_name(name: str, decoder: str, family: _Family) -> str:
    """What a tensor of a checkpoint is called in the language model, whose decoder has that prefix."""
    for old, new in family.renamed.items():
        name = name.replace(old, new)
    for prefix in _DECODER_PREFIXES:
        if name.startswith(prefix):
            return decoder + name.removeprefix(prefix)
    return name.removeprefix("language_model.")


def _layer_of(name: str, layers: str) -> int:
    """The decoder layer that a tensor belongs to, or -1."""
    match = re.match(re.escape(layers) + r"\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _is_moe_layer(layer: nn.Module, family: _Family) -> bool:
    block = getattr(layer, family.names[0], None)
    if block is None or isinstance(block, RemoteMoeBlock):
        return False
    return family.router is None or (hasattr(block, family.router) and hasattr(block, "experts"))


def _is_dense_layer(layer: nn.Module, family: _Family, info: Any) -> bool:
    block = getattr(layer, family.names[0], None)
    return info is not None and info.kind == "DENSE" and not isinstance(block, RemoteMoeBlock)


def _checkpoint_names(layer: nn.Module, family: _Family) -> set[str]:
    """Of the modules of a layer that were replaced."""
    replaced = set(getattr(layer, _REPLACED, {}))
    return replaced | set(family.names) if replaced else replaced


_REPLACED = "_replaced_by_expertmesh"


def _replace(layer: nn.Module, name: str, module: nn.Module | None) -> None:
    """The replaced modules are kept in a dict, so that they are no submodules: their parameters are not the
    layer's."""
    if not hasattr(layer, _REPLACED):
        object.__setattr__(layer, _REPLACED, {})
    getattr(layer, _REPLACED)[name] = getattr(layer, name)
    setattr(layer, name, module)


def _stand_in(router: nn.Module) -> nn.Module:
    """A module of the router's class, without parameters, whose forward returns its argument.

    Being of that class, it gets the hooks that transformers installs on it. It shares the router's hooks, so
    that those installed before a block is replaced, or while it is, are there before and after.
    """

    def forward(self: nn.Module, recorded: Any) -> Any:
        return recorded

    members = {"__init__": nn.Module.__init__, "forward": forward, "extra_repr": lambda self: ""}
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
    for name in files:
        if name.endswith(("embed_tokens.weight", "embeddings.weight", "wte.weight")):
            with safe_open(files[name], framework="pt") as tensors:
                dtype = tensors.get_slice(name)[:1].dtype
                return torch.bfloat16 if dtype == quantised.CODES else dtype
    raise _invalid("missing tensor: model.embed_tokens.weight")


def _load(
    model: PreTrainedModel, files: dict[str, tuple[Path, str]], scales: dict[str, quantised.Scales]
) -> None:
    """Reads these tensors, and nothing else, from their files, where they have that name. scales: those of
    the tensors that are quantised, by the same name."""
    pieces: dict[Path, list[tuple[str, str, int, int]]] = {}  # by file: name, name in it, first row, end
    for name, (file, stored_name) in sorted(files.items()):
        shape = _allocate(model, name).shape
        rows = max(1, _BYTES_PER_MAPPING // (4 * max(1, prod(shape[1:]))))
        for first in range(0, shape[0], rows):
            pieces.setdefault(file, []).append((name, stored_name, first, min(first + rows, shape[0])))
    for file, pending in pieces.items():
        while pending:
            read = 0
            with safe_open(file, framework="pt") as tensors:
                while pending and read < _BYTES_PER_MAPPING:
                    name, stored_name, first, end = pending.pop()
                    module, _, attribute = name.rpartition(".")
                    parameter = getattr(model.get_submodule(module), attribute)
                    stored = tensors.get_slice(stored_name)
                    if stored.get_shape() != list(parameter.shape):
                        raise _invalid(
                            f"{file}: {stored_name}: expected shape {list(parameter.shape)}, "
                            f"given {stored.get_shape()}"
                        )
                    rows_read = stored[first:end]
                    read += rows_read.nbytes
                    if stored_name in scales:
                        rows_read = scales[stored_name].dequantise(rows_read, first)
                        if bool(rows_read.isnan().any()):
                            raise _invalid(f"{file}: {stored_name}: a code is not a number")
                    parameter[first:end].copy_(rows_read)
                    del rows_read  # the mapping stays as long as it


def _allocate(model: PreTrainedModel, name: str) -> torch.Tensor:
    module_name, _, attribute = name.rpartition(".")
    module = model.get_submodule(module_name)
    tensor = getattr(module, attribute)
    memory = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        memory = nn.Parameter(memory, requires_grad=False)
    setattr(module, attribute, memory)
    return memory


def _compute_buffers(model: PreTrainedModel) -> None:
    """Gives buffers, such as rotary frequencies, the values that follow from the configuration."""
    for module in model.modules():
        buffers = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
        for name, buffer in buffers.items():
            setattr(module, name, torch.full(buffer.shape, torch.nan).to(buffer.dtype))
        if buffers:
            model._init_weights(module)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(ordered[:_NAMES_IN_MESSAGES]) or "none"
    more = len(ordered) - _NAMES_IN_MESSAGES
    return shown + (f" and {more} more" if more > 0 else "")
