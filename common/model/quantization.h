// Quantised weights of checkpoints: what a configuration says of them, and how their scales are
// stored. Which matrices are quantised the files say themselves, by their dtypes and names: those
// of modules that a configuration leaves out are plain.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/description.h"
#include "common/tensor.h"
#include "common/weight_format.h"
#include "nlohmann/json_fwd.hpp"

namespace expertmesh {

// What the configuration allows.
struct Quantization {
  enum class Fp8 {
    kNone,
    kByName,  // blocks where scales are called ..._scale_inv, else rows
    kBlock128,
    kRow,  // one scale for a row, or for a whole matrix
  };
  Fp8 fp8 = Fp8::kNone;
  bool mxfp4 = false;

  bool none() const { return fp8 == Fp8::kNone && !mxfp4; }
};

// Reads the object quantization_config of config.json: quant_method fp8 with blocks of 128 x 128 or
// one scale for a matrix; compressed-tensors with the format float-quantized; modelopt with the
// quant_algo FP8; mxfp4. UNIMPLEMENTED for all others, by name and with the reason;
// INVALID_ARGUMENT where it is malformed.
absl::StatusOr<Quantization> ReadQuantizationConfig(const nlohmann::json& object);

// The same for hf_quant_config.json, which modelopt writes beside config.json.
absl::StatusOr<Quantization> ReadHfQuantConfig(const nlohmann::json& file);

// Where a matrix is.
struct StoredMatrix {
  WeightFormat format = WeightFormat::kPlain;
  std::string values;  // names of tensors
  std::string scales;  // empty for kPlain
};

// Where the matrix called `name` is, as the files have it. `dtype_of` says the dtype of a tensor,
// or nothing where there is none. INVALID_ARGUMENT, naming the tensor, where values have no scales;
// UNIMPLEMENTED where the configuration does not speak of such values.
absl::StatusOr<StoredMatrix> FindMatrix(
    const Quantization& quantization, const std::string& name,
    const std::function<std::optional<DType>(const std::string&)>& dtype_of);

// True for tensors that quantisers add to a module and that change nothing here: scales of
// activations, which are not quantised.
bool IsUnusedByQuantization(const std::string& name);

// The shapes that the scales of a matrix [n, k] may have in a file, which stores it as [k, n] where
// `transposed`; `leading` extents come first.
std::vector<std::vector<int64_t>> ScaleShapes(WeightFormat format, int64_t n, int64_t k,
                                              bool transposed, const std::vector<int64_t>& leading);

// How the scales of one of `experts` matrices are laid out that are stored together in that shape.
ScaleLayout LayoutOfScales(WeightFormat format, const std::vector<int64_t>& shape, int64_t experts);

// True for the dtypes that scales are stored in: U8 or F8_E8M0 for kMxfp4, else F32, BF16, F16 or
// F8_E8M0.
bool IsScaleDType(WeightFormat format, DType dtype);

// The first stored scale that is not positive and finite, or an exponent above kMaxMxfp4Scale; -1
// where there is none.
int64_t FindBadScale(WeightFormat format, const TensorView& stored);

// Scales of a matrix [n, k], one of ScaleShapes, as WeightFormat wants them of its rows.
Tensor ExpandScales(WeightFormat format, const TensorView& stored, int64_t n, int64_t k,
                    bool transposed);

}  // namespace expertmesh
