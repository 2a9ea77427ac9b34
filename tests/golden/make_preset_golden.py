"""Makes presets.json: checksums of the weights that presets generate, restated here in numpy from the definition in
common/model/generated.h. The words of Philox4x32-10 are checked with the known answers of its authors' Random123.

    python tests/golden/make_preset_golden.py tests/golden/presets.json
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

GATE_UP, DOWN, GATE_UP_BIAS, DOWN_BIAS, ROUTER, LOGITS_BIAS, SELECTION_BIAS, SHARED_GATE = range(8)
SEED = 0
# Random123's kat_vectors: counter, key, result.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def philox(counters: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 of counters [n, 4]."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & mask,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def tensor(layer: int, expert: int, kind: int, shape: tuple[int, ...], fan_in: int) -> np.ndarray:
    """bf16 values of one tensor, row-major."""
    n = int(np.prod(shape))
    blocks = -(-6 * n // 4)
    counters = np.zeros((blocks, 4), np.uint64)
    counters[:, 0] = np.arange(blocks)  # below 2^32 here
    counters[:, 2], counters[:, 3] = expert, kind
    words = philox(counters, (SEED, layer)).reshape(-1)[: 6 * n].reshape(n, 6)
    sums = ((words & 0xFFFF) + (words >> 16)).sum(axis=1, dtype=np.int64)
    z = ((2 * sums - 12 * 65535) / 2**17).astype(np.float32)
    return (z * np.float32(1.0 / np.sqrt(np.float64(fan_in)))).astype(ml_dtypes.bfloat16).reshape(shape)


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


def expert(layer: int, number: int, hidden: int, width: int, bias: bool = False) -> dict[str, str]:
    """Biases are kept in fp32."""
    made = {
        "gate_up": digest(tensor(layer, number, GATE_UP, (2 * width, hidden), hidden)),
        "down": digest(tensor(layer, number, DOWN, (hidden, width), width)),
    }
    if bias:
        made["gate_up_bias"] = digest(tensor(layer, number, GATE_UP_BIAS, (2 * width,), hidden).astype(np.float32))
        made["down_bias"] = digest(tensor(layer, number, DOWN_BIAS, (hidden,), width).astype(np.float32))
    return made


def layer(index: int, hidden: int, experts: int, width: int, shared: int = 0, bias: bool = False) -> dict:
    made: dict = {"experts": {str(e): expert(index, e, hidden, width, bias) for e in range(experts)}}
    if shared:
        made["experts"][str(experts)] = expert(index, experts, hidden, shared)
    if experts:
        made["router"] = digest(tensor(index, 0, ROUTER, (experts, hidden), hidden))
    if bias:
        made["logits_bias"] = digest(tensor(index, 0, LOGITS_BIAS, (experts,), hidden).astype(np.float32))
    return made


def some(hidden: int, width: int, numbers: tuple[int, ...], **more) -> dict:
    """A few experts of a large layer."""
    return {"0": {"experts": {str(e): expert(0, e, hidden, width, **more) for e in numbers}}}


def main() -> None:
    for counter, key, words in KNOWN:
        assert tuple(philox(np.array([counter], np.uint64), key)[0]) == words, counter
    llama4 = {str(i): layer(i, 256, 8, 512, 512) if i % 2 else layer(i, 256, 0, 0, 768) for i in range(6)}
    deepseek = {str(i): layer(i, 256, 8, 256, 512) if i else layer(i, 256, 0, 0, 1024) for i in range(6)}
    golden = {
        "llama4_debugmodel": llama4,
        "deepseek_v3_debugmodel": deepseek,
        "gpt_oss_debugmodel": {str(i): layer(i, 256, 8, 384, bias=True) for i in range(4)},
        "olmoe_1b_7b_layer": some(2048, 1024, (0, 63)),
        "qwen3_30b_a3b_layer": some(2048, 768, (127,)),
        "gpt_oss_20b_layer": some(2880, 2880, (31,), bias=True),
    }
    Path(sys.argv[1]).write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
