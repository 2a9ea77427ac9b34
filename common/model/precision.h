// Experts in a low precision: quantised as they are read, whatever the files store.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/checkpoint.h"
#include "common/quantized_format.h"

namespace expertmesh {

// What --precision says.
struct Precision {
  std::optional<QuantizedFormat> format;  // none: native, as the files have them
  // Inclusive ranges of decoder layers; empty: every MoE layer.
  // A range may have dense layers in it, which stay as they are, but not these alone.
  std::vector<std::pair<int32_t, int32_t>> layers;
};

// "native", or a format's name and which layers if not every MoE layer: "mxfp8",
// "mxfp8:layers=1,3-5". INVALID_ARGUMENT naming the flag, what is expected and what was given.
absl::StatusOr<Precision> ParsePrecision(const std::string& text);

// A view of `checkpoint` whose routed and shared experts have a row_format in the layers that
// `precision` chooses, and weights in its WeightFormatOf: quantised by QuantizeWeights, gate and up
// each on its own, when they are read. Gates, biases and all other layers stay as they are. Thread
// safety and errors of reading are those of `checkpoint`; reading takes memory for both copies of
// an expert. The fingerprint depends on format and pad multiple of every layer.
//
// pad_multiple: of the groups of these layers, a multiple of PadMultipleOf(format); 0: that.
//
// F32, BF16 and F16 weights can have every format; those of the files that are kFp8Block128 are
// taken as they are for fp8_block128. INVALID_ARGUMENT naming what does not fit: a layer that is
// no MoE layer of the model, weights stored in a format that this one cannot be made of, a
// pad_multiple.
absl::StatusOr<std::shared_ptr<const Checkpoint>> WithPrecision(
    std::shared_ptr<const Checkpoint> checkpoint, const Precision& precision,
    int64_t pad_multiple = 0);

}  // namespace expertmesh
