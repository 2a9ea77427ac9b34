#!/usr/bin/env python3
"""Writes low_precision.json: what ml_dtypes makes of e4m3, e2m1 and e8m0 codes, of MXFP4 and MXFP8.

usage: make_low_precision_golden.py [FILE]    (needs numpy and ml_dtypes)
"""

import json
import pathlib
import sys

import ml_dtypes
import numpy as np


def bits(values):
    """The bit patterns of fp32 values; NaN is null."""
    values = np.asarray(values, dtype=np.float32)
    return [None if np.isnan(v) else int(b) for v, b in zip(values, values.view(np.uint32))]


def main():
    codes = np.arange(256, dtype=np.uint8)
    e4m3 = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    e8m0 = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    e2m1 = codes[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    scales = [0, 1, 2, 3, 126, 127, 128, 200, 251, 252]
    mxfp4 = {}
    for scale in scales:
        products = e2m1.astype(np.float64) * 2.0 ** (scale - 127)
        mxfp4[str(scale)] = bits(products.astype(np.float32))
    mxfp8 = {}
    for scale in [0, 1, 2, 9, 10, 11, 127, 128, 246, 247]:
        products = e4m3.astype(np.float64) * 2.0 ** (scale - 127)
        products[np.abs(products) >= 2.0**128] = np.nan
        mxfp8[str(scale)] = bits(products.astype(np.float32))
    golden = {
        "e4m3": bits(e4m3),
        "e8m0": bits(e8m0),
        "e2m1": bits(e2m1),
        "mxfp4": mxfp4,
        "mxfp8": mxfp8,
    }
    default = pathlib.Path(__file__).with_name("low_precision.json")
    path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    path.write_text(json.dumps(golden, indent=1).replace("\n   ", " ").replace("\n  ", " ") + "\n")


if __name__ == "__main__":
    main()
