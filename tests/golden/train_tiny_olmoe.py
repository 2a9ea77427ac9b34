#!/usr/bin/env python3
"""Trains, captures and checks the small OLMoE model in tests/golden/tiny-olmoe.

The model is a real one on a small scale: the layout of a released OLMoE checkpoint, trained on
English text, so its routers are as uneven as text makes them. The tests serve its MoE layers and
compare with what transformers computes from the same inputs, which `capture` records.

    train_tiny_olmoe.py corpus     fetch the text (a Debian package) and check its digest
    train_tiny_olmoe.py train      train, round to bf16, measure, capture; publish if all criteria hold
    train_tiny_olmoe.py capture    record inputs and outputs of every MoE block of a saved model
    train_tiny_olmoe.py check      verify a model folder: layout, capture and criteria

Exit status: 0 done, 1 a criterion or a comparison failed, 2 wrong usage or a missing input.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import OlmoeConfig, OlmoeForCausalLM
from transformers.utils import logging as transformers_logging

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_MODEL = Path(__file__).resolve().parent / "tiny-olmoe"
DEFAULT_WORK = REPOSITORY / "build" / "tiny-olmoe"

PACKAGE = "jargon-text"
PACKAGE_VERSION = "4.4.7-4.1"
PACKAGE_MEMBER = "usr/share/doc/jargon-text/jargon.txt.gz"
CORPUS_SHA256 = "40dfb4b98191a670a09a183d5798d50f243d23fdbd1495dcc0aca2ce5895ba97"
ORIGIN = f"The Jargon File, version 4.4.7, 29 Dec 2003 (Debian package {PACKAGE} {PACKAGE_VERSION}); public domain"

HELD_OUT_DIVISOR = 20  # the last 1/20 of the text is never trained on
WINDOW = 512  # bytes the model sees at once, in training, evaluation and capture

MIN_GAIN_NATS = 1.0
MIN_LOAD_RATIO = 1.5
MAX_MODEL_BYTES = 8 << 20
MAX_CAPTURE_BYTES = 3 << 20


class Refusal(Exception):
    """An input is missing or unusable; the message says which and what to do."""


@dataclass(frozen=True)
class Training:
    """Everything that decides the weights besides the text and the library versions."""

    steps: int = 1000
    batch: int = 8
    learning_rate: float = 3e-3
    final_learning_rate: float = 1.5e-4
    warmup_steps: int = 50
    weight_decay: float = 0.1
    # Far below the released 0.01: just enough that no expert dies, little enough that the load stays
    # as uneven as the text makes it.
    router_aux_loss_coef: float = 0.001
    seed: int = 20240904


# --- text -------------------------------------------------------------------------------------------


def fetch_corpus(work: Path) -> Path:
    """Downloads and unpacks the Debian package below `work` (no root needed); returns the text's path."""
    text_path = work / "jargon.txt"
    if not text_path.exists():
        work.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", f"{PACKAGE}={PACKAGE_VERSION}"], cwd=work, check=True)
        (archive,) = work.glob(f"{PACKAGE}_*.deb")
        subprocess.run(["dpkg-deb", "-x", archive.name, "unpacked"], cwd=work, check=True)
        text_path.write_bytes(gzip.decompress((work / "unpacked" / PACKAGE_MEMBER).read_bytes()))
    return text_path


def read_corpus(path: Path) -> tuple[bytes, bytes]:
    """Returns the text as (train, held out); refuses any text but the one the model is made from."""
    if not path.is_file():
        raise Refusal(f"no text at {path}: run `{Path(sys.argv[0]).name} corpus` first, or pass --corpus")
    text = path.read_bytes()
    digest = hashlib.sha256(text).hexdigest()
    print(f"text: {path.name}, {len(text)} bytes, sha256 {digest}")
    if digest != CORPUS_SHA256:
        raise Refusal(f"{path} is not the text of {PACKAGE} {PACKAGE_VERSION} (sha256 {CORPUS_SHA256})")
    split = len(text) - len(text) // HELD_OUT_DIVISOR
    return text[:split], text[split:]


def choose_excerpt(held_out: bytes) -> bytes:
    """The first WINDOW held-out bytes that start at a dictionary entry and are whole UTF-8 characters."""
    entry = b"\n\n   :"
    at = held_out.find(entry)
    while at >= 0:
        excerpt = held_out[at + 2 : at + 2 + WINDOW]
        try:
            excerpt.decode("utf-8")
        except UnicodeDecodeError:
            at = held_out.find(entry, at + 1)
            continue
        if len(excerpt) == WINDOW:
            return excerpt
        break
    raise Refusal("the held-out text has no entry to take the excerpt from")


def to_ids(text: bytes) -> Tensor:
    """One token per byte: the id is the byte's value."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)


# --- model ------------------------------------------------------------------------------------------


def new_model(training: Training) -> OlmoeForCausalLM:
    """A freshly initialised model; routing as in the released OLMoE (softmax, top-k, no renormalising)."""
    config = OlmoeConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=False,
        max_position_embeddings=WINDOW,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        router_aux_loss_coef=training.router_aux_loss_coef,
    )
    torch.manual_seed(training.seed)
    return OlmoeForCausalLM._from_config(config, dtype=torch.float32, experts_implementation="eager")


def load_model(folder: Path) -> OlmoeForCausalLM:
    """The saved model for evaluation: bf16 weights widened to fp32, the library's plain expert loop."""
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise Refusal(f"{folder} has no {name}: run `train`, or pass --model")
    model, report = OlmoeForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    odd = {kind: sorted(names) for kind, names in report.items() if names}
    if odd:
        raise Refusal(f"{folder} does not load cleanly: {odd}")
    return model.eval()


def learning_rate(training: Training, step: int) -> float:
    """Linear warm-up, then a cosine down to the final rate."""
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / training.warmup_steps
    progress = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
    span = training.learning_rate - training.final_learning_rate
    return training.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * progress))


def train_model(model: OlmoeForCausalLM, text: bytes, training: Training) -> None:
    """AdamW on windows drawn at random positions; prints the running loss."""
    ids = to_ids(text)
    draw = torch.Generator().manual_seed(training.seed)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    scales = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": training.weight_decay}, {"params": scales, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    model.train()
    started = time.monotonic()
    running = 0.0
    every = 25
    for step in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step)
        starts = torch.randint(0, len(ids) - WINDOW, (training.batch,), generator=draw)
        batch = torch.stack([ids[s : s + WINDOW] for s in starts.tolist()])
        out = model(input_ids=batch, labels=batch, output_router_logits=True, use_cache=False)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # The reported loss is the text's alone, so that it compares with the held-out figure.
        running += out.loss.item() - training.router_aux_loss_coef * out.aux_loss.item()
        if (step + 1) % every == 0:
            elapsed = time.monotonic() - started
            left = elapsed / (step + 1) * (training.steps - step - 1)
            print(
                f"step {step + 1:5d}/{training.steps}  loss {running / every:.4f} nats/byte  "
                f"balance {out.aux_loss.item():.2f}  {elapsed:4.0f} s, {left:4.0f} s left",
                flush=True,
            )
            running = 0.0


def save_model(model: OlmoeForCausalLM, folder: Path) -> None:
    """Writes config.json and model.safetensors: bf16, one tensor per expert and projection."""
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    # It would hold only defaults: a byte vocabulary has no special tokens.
    (folder / "generation_config.json").unlink(missing_ok=True)


def expected_tensors(config: OlmoeConfig) -> set[str]:
    """Tensor names of a released OLMoE checkpoint with this config."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for n in range(config.num_hidden_layers):
        layer = f"model.layers.{n}"
        names |= {f"{layer}.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")}
        names |= {f"{layer}.self_attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
        names.add(f"{layer}.mlp.gate.weight")
        for j in range(config.num_experts):
            names |= {f"{layer}.mlp.experts.{j}.{p}_proj.weight" for p in ("gate", "up", "down")}
    return names


def check_layout(folder: Path, config: OlmoeConfig) -> None:
    """Refuses a file whose tensors are not those of the released per-expert layout, all bf16."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        dtypes = {file.get_slice(name).get_dtype() for name in names}
    odd = sorted(names ^ expected_tensors(config))
    if odd:
        raise Refusal(f"model.safetensors differs from the released layout in {len(odd)} tensors, first {odd[0]}")
    if dtypes != {"BF16"}:
        raise Refusal(f"model.safetensors holds {sorted(dtypes)}, expected BF16 alone")


# --- measuring --------------------------------------------------------------------------------------


def unigram_loss(train: bytes, text: bytes) -> float:
    """Nats per byte of `text` under the byte frequencies of `train` (one added to each count)."""
    counts = torch.bincount(to_ids(train), minlength=256).double() + 1
    surprise = -(counts / counts.sum()).log()
    return surprise[to_ids(text)].mean().item()


@torch.no_grad()
def nats_per_byte(model: OlmoeForCausalLM, text: bytes) -> float:
    """The mean loss. Windows overlap by one byte, so that every byte but the first is predicted exactly once."""
    ids = to_ids(text)
    nats = 0.0
    for start in range(0, len(ids) - 1, WINDOW - 1):
        window = ids[start : start + WINDOW]
        logits = model(input_ids=window[None], use_cache=False).logits[0].float()
        nats += F.cross_entropy(logits[:-1], window[1:], reduction="sum").item()
    return nats / (len(ids) - 1)


def evaluate(model: OlmoeForCausalLM, text: bytes) -> tuple[float, Tensor]:
    """Nats per byte of `text`, and the tokens each expert of each layer got, [layers, experts]."""
    loads = torch.zeros(model.config.num_hidden_layers, model.config.num_experts, dtype=torch.int64)

    def count(layer: int):
        def hook(_module, _inputs, outputs) -> None:
            loads[layer] += torch.bincount(outputs[2].flatten(), minlength=loads.shape[1])

        return hook

    hooks = [layer.mlp.gate.register_forward_hook(count(n)) for n, layer in enumerate(model.model.layers)]
    try:
        return nats_per_byte(model, text), loads
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def record_inputs(model: OlmoeForCausalLM, ids: Tensor) -> list[Tensor]:
    """The tensor that enters each layer's MoE block, [tokens, hidden], rounded to bf16."""
    inputs: list[Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _module, args: inputs.append(args[0][0].to(torch.bfloat16)))
        for layer in model.model.layers
    ]
    try:
        model(input_ids=ids[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


@torch.no_grad()
def reference_block(block: torch.nn.Module, hidden_states: Tensor) -> dict[str, Tensor]:
    """What the library's MoE block computes in fp32 from bf16 inputs: output, expert ids and weights."""
    x = hidden_states.to(torch.float32)
    logits, weights, ids = block.gate(x)
    # topk leaves the order of equal scores open; the recorded slots promise the lower expert first.
    scores = logits.softmax(dim=-1)
    ordered = scores.sort(dim=-1, descending=True, stable=True)
    k = ids.shape[1]
    if not torch.equal(ordered.indices[:, :k], ids):
        raise Refusal("the excerpt has tokens with equally scored experts: its routing has more than one right answer")
    return {
        "output": block(x[None])[0],
        "topk_ids": ids.to(torch.int32),
        "topk_weights": weights,
        "topk_gap": (ordered.values[:, k - 1] - ordered.values[:, k]).min(),
    }


def capture(model: OlmoeForCausalLM, excerpt: bytes) -> tuple[dict[str, Tensor], list[float]]:
    """The tensors of captured.safetensors, and per layer the smallest score gap between slots k and k+1."""
    ids = to_ids(excerpt)
    tensors = {"input_ids": ids}
    gaps = []
    for n, hidden_states in enumerate(record_inputs(model, ids)):
        tensors[f"layer.{n}.hidden_states"] = hidden_states
        reference = reference_block(model.model.layers[n].mlp, hidden_states)
        gaps.append(reference.pop("topk_gap").item())
        tensors |= {f"layer.{n}.{name}": tensor.contiguous() for name, tensor in reference.items()}
    return tensors, gaps


def write_capture(tensors: dict[str, Tensor], excerpt: bytes, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # One entry: the order of several would differ from run to run, and with it the file's bytes.
    save_file(tensors, folder / "captured.safetensors", metadata={"text": ORIGIN})
    (folder / "captured.safetensors").chmod(0o644)
    (folder / "captured.txt").write_bytes(excerpt)


def captured_loads(tensors: dict[str, Tensor], config: OlmoeConfig) -> Tensor:
    """Tokens per expert on the captured text, [layers, experts]."""
    return torch.stack(
        [
            torch.bincount(tensors[f"layer.{n}.topk_ids"].flatten(), minlength=config.num_experts)
            for n in range(config.num_hidden_layers)
        ]
    )


def load_ratios(loads: Tensor) -> list[float]:
    """Per layer, the busiest expert's tokens over the mean."""
    return [round(r, 4) for r in (loads.max(dim=1).values / loads.double().mean(dim=1)).tolist()]


# --- criteria ---------------------------------------------------------------------------------------


def measure(folder: Path, train: bytes, held_out: bytes, training: Training) -> dict[str, Any]:
    """All figures of a model folder that holds its capture, from the bf16 weights as saved."""
    model = load_model(folder)
    check_layout(folder, model.config)
    tensors = load_file(folder / "captured.safetensors")
    _, gaps = capture(model, (folder / "captured.txt").read_bytes())
    on_capture = captured_loads(tensors, model.config)
    held_out_loss, on_held_out = evaluate(model, held_out)
    unigram = unigram_loss(train, held_out)
    return {
        "text": {
            "origin": ORIGIN,
            "sha256": CORPUS_SHA256,
            "train_bytes": len(train),
            "held_out_bytes": len(held_out),
        },
        "training": asdict(training),
        "parameters": sum(p.numel() for p in model.parameters()),
        "model_bytes": (folder / "model.safetensors").stat().st_size,
        "capture_bytes": (folder / "captured.safetensors").stat().st_size,
        "held_out_nats_per_byte": round(held_out_loss, 4),
        "unigram_nats_per_byte": round(unigram, 4),
        "gain_nats_per_byte": round(unigram - held_out_loss, 4),
        "held_out_load_min": on_held_out.min(dim=1).values.tolist(),
        "held_out_load_max_over_mean": load_ratios(on_held_out),
        "captured_load_min": on_capture.min(dim=1).values.tolist(),
        "captured_load_max_over_mean": load_ratios(on_capture),
        "captured_smallest_topk_gap": [float(f"{gap:.3g}") for gap in gaps],
    }


def judge(metrics: dict[str, Any]) -> bool:
    """Prints one line per criterion; true if all hold."""
    rows = [
        ("held-out gain over unigram, nats/byte", metrics["gain_nats_per_byte"], ">=", MIN_GAIN_NATS),
        ("least used expert on held-out text, tokens", min(metrics["held_out_load_min"]), ">=", 1),
        ("captured load max/mean, flattest layer", min(metrics["captured_load_max_over_mean"]), ">=", MIN_LOAD_RATIO),
        ("model.safetensors, bytes", metrics["model_bytes"], "<=", MAX_MODEL_BYTES),
        ("captured.safetensors, bytes", metrics["capture_bytes"], "<=", MAX_CAPTURE_BYTES),
    ]
    print(f"\n{'criterion':44s} {'measured':>10s}    {'required':>10s}")
    all_hold = True
    for name, value, relation, limit in rows:
        holds = value >= limit if relation == ">=" else value <= limit
        all_hold &= holds
        print(f"{name:44s} {value:>10} {relation} {limit:>10}  {'ok' if holds else 'MISSED'}")
    print("\ntokens per expert: the least used expert, and the busiest over the mean")
    print("layer   held-out: least  max/mean   captured: least  max/mean  smallest top-k gap")
    columns = (
        "held_out_load_min",
        "held_out_load_max_over_mean",
        "captured_load_min",
        "captured_load_max_over_mean",
        "captured_smallest_topk_gap",
    )
    for n, row in enumerate(zip(*(metrics[c] for c in columns))):
        print(f"{n:5d} {row[0]:17d} {row[1]:9.2f} {row[2]:17d} {row[3]:9.2f} {row[4]:19.2e}")
    print(f"\nheld-out loss {metrics['held_out_nats_per_byte']}, unigram {metrics['unigram_nats_per_byte']} nats/byte")
    return all_hold


# --- commands ---------------------------------------------------------------------------------------


def run_corpus(args: argparse.Namespace) -> int:
    read_corpus(fetch_corpus(args.work))
    return 0


def run_train(args: argparse.Namespace) -> int:
    train, held_out = read_corpus(args.corpus or fetch_corpus(args.work))
    excerpt = choose_excerpt(held_out)
    training = Training(steps=args.steps, router_aux_loss_coef=args.router_aux_loss_coef, seed=args.seed)
    model = new_model(training)
    print(f"model: {sum(p.numel() for p in model.parameters())} parameters; {training}")
    train_model(model, train, training)

    candidate = args.work / "candidate"
    save_model(model, candidate)
    saved = load_model(candidate)
    write_capture(capture(saved, excerpt)[0], excerpt, candidate)
    metrics = measure(candidate, train, held_out, training)
    (candidate / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    if not judge(metrics):
        print(f"refused: a criterion is missed; {args.output} is unchanged, see {candidate}", file=sys.stderr)
        return 1
    args.output.mkdir(parents=True, exist_ok=True)
    for path in sorted(candidate.iterdir()):
        shutil.copyfile(path, args.output / path.name)
        print(f"wrote {args.output / path.name}, {path.stat().st_size} bytes")
    return 0


def run_capture(args: argparse.Namespace) -> int:
    text = args.text or args.model / "captured.txt"
    if not text.is_file():
        raise Refusal(f"no text at {text}: pass --text")
    excerpt = text.read_bytes()
    if len(excerpt) != WINDOW:
        raise Refusal(f"{text} has {len(excerpt)} bytes, expected {WINDOW}")
    model = load_model(args.model)
    tensors, gaps = capture(model, excerpt)
    write_capture(tensors, excerpt, args.output)
    print(f"wrote {args.output / 'captured.safetensors'}; load max/mean per layer "
          f"{load_ratios(captured_loads(tensors, model.config))}, smallest top-k gaps {gaps}")  # fmt: skip
    return 0


def compare_capture(folder: Path, model: OlmoeForCausalLM) -> bool:
    """Recomputes the capture of a folder. Ids must be equal; floats may differ as far as another
    processor's summation order explains, and the references are recomputed from the stored inputs so
    that a bf16 rounding that falls the other way does not carry into them."""
    stored = load_file(folder / "captured.safetensors")
    excerpt = (folder / "captured.txt").read_bytes()
    fresh, _ = capture(model, excerpt)
    if {n: (t.dtype, t.shape) for n, t in stored.items()} != {n: (t.dtype, t.shape) for n, t in fresh.items()}:
        print("captured.safetensors: names, types or shapes differ from a fresh capture")
        return False
    good = True
    for name, tensor in stored.items():
        if torch.equal(tensor, fresh[name]):
            continue
        limit = 0.0
        if name.endswith(".hidden_states"):
            limit = 2.0**-7  # one bf16 step, relative to the largest value
        elif tensor.dtype == torch.float32:
            limit = 1e-5
        block, kind = name.rsplit(".", 1)
        if kind in ("output", "topk_ids", "topk_weights"):
            layer = model.model.layers[int(block.removeprefix("layer."))]
            fresh[name] = reference_block(layer.mlp, stored[f"{block}.hidden_states"])[kind]
        error = ((tensor.double() - fresh[name].double()).abs().max() / tensor.double().abs().max()).item()
        print(f"{name}: differs by {error:.2e} of the largest value (allowed {limit:.0e})")
        good &= error <= limit
    print(f"captured.safetensors: {len(stored)} tensors compared, {'as recorded' if good else 'NOT as recorded'}")
    return good


def run_check(args: argparse.Namespace) -> int:
    model = load_model(args.model)
    check_layout(args.model, model.config)
    print("model.safetensors: the released per-expert layout, BF16; loads with no missing or unexpected tensor")
    good = compare_capture(args.model, model)
    recorded = json.loads((args.model / "metrics.json").read_text())
    if args.corpus is None:
        print("figures as recorded in metrics.json (pass --corpus to measure them again):")
        return 0 if judge(recorded) and good else 1
    train, held_out = read_corpus(args.corpus)
    if (args.model / "captured.txt").read_bytes() not in held_out:
        print("captured.txt is not part of the held-out text")
        good = False
    metrics = measure(args.model, train, held_out, Training(**recorded["training"]))
    return 0 if judge(metrics) and good else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Python packages: tests/requirements-reference.txt. Training takes about ten minutes on two cores.\n"
        "The same seed gives the same weights on the same machine and library versions only; what any\n"
        "run promises is the criteria that `train` prints and insists on.",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=2, help="processor threads to use (default 2)")
    commands = parser.add_subparsers(required=True, metavar="command")
    defaults = Training()
    model_help = "model folder (default tests/golden/tiny-olmoe)"

    command = commands.add_parser("corpus", help=f"download Debian's {PACKAGE} {PACKAGE_VERSION} and unpack its text")
    command.add_argument("--work", type=Path, default=DEFAULT_WORK, help="scratch folder (default build/tiny-olmoe)")
    command.set_defaults(run=run_corpus)

    command = commands.add_parser("train", help="train, measure, capture, and publish the model if it is good")
    command.add_argument("--corpus", type=Path, help="the text, already unpacked (default: fetch it)")
    command.add_argument("--work", type=Path, default=DEFAULT_WORK, help="scratch folder (default build/tiny-olmoe)")
    command.add_argument("--output", type=Path, default=DEFAULT_MODEL,
                         help="folder to publish to (default tests/golden/tiny-olmoe)")  # fmt: skip
    command.add_argument("--steps", type=int, default=defaults.steps, help=f"default {defaults.steps}")
    command.add_argument("--router-aux-loss-coef", type=float, default=defaults.router_aux_loss_coef,
                         help="weight of the load-balancing loss; higher evens the load out "
                         f"(default {defaults.router_aux_loss_coef})")  # fmt: skip
    command.add_argument("--seed", type=int, default=defaults.seed, help=f"default {defaults.seed}")
    command.set_defaults(run=run_train)

    command = commands.add_parser("capture", help="write captured.safetensors and captured.txt for a saved model")
    command.add_argument("--model", type=Path, default=DEFAULT_MODEL, help=model_help)
    command.add_argument("--text", type=Path, help=f"{WINDOW} bytes to run (default: the model folder's captured.txt)")
    command.add_argument("--output", type=Path, required=True, help="folder to write to")
    command.set_defaults(run=run_capture)

    command = commands.add_parser("check", help="verify a model folder: layout, capture, criteria")
    command.add_argument("--model", type=Path, default=DEFAULT_MODEL, help=model_help)
    command.add_argument("--corpus", type=Path, help="the text, to measure the held-out figures again")
    command.set_defaults(run=run_check)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    transformers_logging.disable_progress_bar()
    try:
        return args.run(args)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
    except subprocess.CalledProcessError as failure:
        print(f"error: {' '.join(failure.cmd)} failed with status {failure.returncode}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
