#include "common/model/quantization.h"

#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/status.h"
#include "nlohmann/json.hpp"

namespace expertmesh {
namespace {

using nlohmann::json;

constexpr char kSupported[] =
    "supported are fp8 (e4m3, blocks of 128 x 128 or one scale for a matrix), compressed-tensors "
    "(float-quantized), modelopt (FP8) and mxfp4";

// The value of `name`, or null where it is absent or null.
const json* Look(const json& object, const std::string& name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

// Text of a key, or the fallback.
absl::StatusOr<std::string> Text(const json& object, const std::string& name,
                                 const std::string& fallback) {
  const json* const value = Look(object, name);
  if (value == nullptr) return fallback;
  if (!value->is_string()) {
    return absl::InvalidArgumentError(
        absl::StrCat("quantization_config: ", name, ": expected a string, given ", value->dump()));
  }
  return value->get<std::string>();
}

absl::Status Unsupported(const std::string& what, const std::string& reason) {
  return absl::UnimplementedError(
      absl::StrCat("quantization_config: ", what, " is not supported: ", reason, "; ", kSupported));
}

// Lists of modules that are left as they are; what they name is seen in the files.
absl::Status CheckModuleLists(const json& object) {
  for (const char* name :
       {"ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules"}) {
    const json* const list = Look(object, name);
    if (list == nullptr) continue;
    bool good = list->is_array();
    for (size_t i = 0; good && i < list->size(); ++i) good = (*list)[i].is_string();
    if (!good) {
      return absl::InvalidArgumentError(absl::StrCat(
          "quantization_config: ", name, ": expected a list of names, given ", list->dump()));
    }
  }
  return absl::OkStatus();
}

bool IsBlock128(const json& value) { return value == json::array({kFp8BlockK, kFp8BlockK}); }

absl::StatusOr<Quantization> ReadFp8(const json& object) {
  ASSIGN_OR_RETURN(const std::string fmt, Text(object, "fmt", "e4m3"));
  if (fmt != "e4m3" && fmt != "float8_e4m3fn") {
    return Unsupported(absl::StrCat("fmt '", fmt, "'"), "only e4m3 codes are computed");
  }
  const json* const block = Look(object, "weight_block_size");
  if (block == nullptr) return Quantization{.fp8 = Quantization::Fp8::kByName};
  if (!IsBlock128(*block)) {
    return Unsupported(absl::StrCat("weight_block_size ", block->dump()), "blocks are 128 x 128");
  }
  return Quantization{.fp8 = Quantization::Fp8::kBlock128};
}

absl::StatusOr<Quantization> ReadCompressedTensors(const json& object) {
  const std::map<std::string, std::string> reasons = {
      {"pack-quantized", "packed integers are not computed"},
      {"int-quantized", "integers are not computed"},
      {"nvfp4-pack-quantized", "scales in fp8 are not computed"},
      {"mxfp4-pack-quantized", "MXFP4 is read from tensors of blocks and of scales"},
      {"marlin-24", "sparse weights are not computed"},
      {"mixed-precision", "several formats at once are not read"}};
  ASSIGN_OR_RETURN(const std::string format, Text(object, "format", "(none)"));
  if (format != "float-quantized") {
    const auto reason = reasons.find(format);
    return Unsupported(absl::StrCat("quant_method compressed-tensors with format '", format, "'"),
                       reason == reasons.end() ? "it is not known" : reason->second);
  }
  if (const json* const sparsity = Look(object, "sparsity_config");
      sparsity != nullptr && sparsity->is_object() && !sparsity->empty()) {
    ASSIGN_OR_RETURN(const std::string kind, Text(*sparsity, "format", "dense"));
    if (kind != "dense") {
      return Unsupported(absl::StrCat("sparsity_config with format '", kind, "'"),
                         "sparse weights are not computed");
    }
  }
  const json* const groups = Look(object, "config_groups");
  if (groups == nullptr || !groups->is_object() || groups->empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("quantization_config: config_groups: expected an object of groups, given ",
                     groups == nullptr ? "nothing" : groups->dump()));
  }
  std::optional<Quantization::Fp8> common;
  for (const auto& [name, group] : groups->items()) {
    const json* const weights = group.is_object() ? Look(group, "weights") : nullptr;
    if (weights == nullptr || !weights->is_object()) {
      return absl::InvalidArgumentError(absl::StrCat("quantization_config: config_groups: ", name,
                                                     ": expected an object weights"));
    }
    const json* const bits = Look(*weights, "num_bits");
    ASSIGN_OR_RETURN(const std::string type, Text(*weights, "type", "int"));
    if (type != "float" || bits == nullptr || *bits != 8) {
      return Unsupported(absl::StrCat("weights of type ", type, ", num_bits ",
                                      bits == nullptr ? "(none)" : bits->dump()),
                         "float-quantized weights are floats of 8 bits");
    }
    ASSIGN_OR_RETURN(const std::string strategy, Text(*weights, "strategy", "tensor"));
    const json* const block = Look(*weights, "block_structure");
    Quantization::Fp8 fp8 = Quantization::Fp8::kRow;
    if (strategy == "block" && block != nullptr && IsBlock128(*block)) {
      fp8 = Quantization::Fp8::kBlock128;
    } else if (strategy != "channel" && strategy != "tensor") {
      return Unsupported(
          absl::StrCat("strategy '", strategy, "'",
                       block == nullptr ? "" : absl::StrCat(" with blocks ", block->dump())),
          "weights have a scale for a channel, a tensor or a block of 128 x 128");
    }
    if (common && *common != fp8) {
      return Unsupported("config_groups of several strategies", "one for all is read");
    }
    common = fp8;
  }
  return Quantization{.fp8 = *common};
}

absl::StatusOr<Quantization> ReadModelOpt(const json& object) {
  ASSIGN_OR_RETURN(const std::string algorithm, Text(object, "quant_algo", "(none)"));
  if (algorithm != "FP8") {
    return Unsupported(absl::StrCat("quant_method modelopt with quant_algo '", algorithm, "'"),
                       absl::StrContains(algorithm, "FP4") ? "scales in fp8 are not computed"
                                                           : "only FP8 is read");
  }
  return Quantization{.fp8 = Quantization::Fp8::kRow};
}

}  // namespace

absl::StatusOr<Quantization> ReadQuantizationConfig(const json& object) {
  if (!object.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat("quantization_config: expected an object, given ", object.dump()));
  }
  ASSIGN_OR_RETURN(const std::string method, Text(object, "quant_method", "(none)"));
  RETURN_IF_ERROR(CheckModuleLists(object));
  if (method == "fp8") return ReadFp8(object);
  if (method == "compressed-tensors") return ReadCompressedTensors(object);
  if (method == "modelopt") return ReadModelOpt(object);
  if (method == "mxfp4") return Quantization{.mxfp4 = true};
  const std::map<std::string, std::string> reasons = {
      {"gptq", "packed integers are not computed"},
      {"awq", "packed integers are not computed"},
      {"bitsandbytes", "its 4 and 8 bit codes are not computed"},
      {"fbgemm_fp8", "its layout is not read"},
      {"modelopt_fp4", "scales in fp8 are not computed"}};
  const auto reason = reasons.find(method);
  return Unsupported(absl::StrCat("quant_method '", method, "'"),
                     reason == reasons.end() ? "it is not known" : reason->second);
}

absl::StatusOr<Quantization> ReadHfQuantConfig(const json& file) {
  const json* const object = file.is_object() ? Look(file, "quantization") : nullptr;
  if (object == nullptr || !object->is_object()) {
    return absl::InvalidArgumentError(absl::StrCat("quantization: expected an object, given ",
                                                   object == nullptr ? "nothing" : object->dump()));
  }
  RETURN_IF_ERROR(CheckModuleLists(*object));
  if (Look(*object, "quant_algo") == nullptr) return Quantization{};  // caches alone may be
  return ReadModelOpt(*object);
}

absl::StatusOr<StoredMatrix> FindMatrix(
    const Quantization& quantization, const std::string& name,
    const std::function<std::optional<DType>(const std::string&)>& dtype_of) {
  const std::optional<DType> dtype = dtype_of(name);
  const std::string blocks = name + "_blocks";
  const std::string exponents = name + "_scales";
  if (!dtype && (dtype_of(blocks) || (quantization.mxfp4 && dtype_of(exponents)))) {
    if (!quantization.mxfp4) {
      return absl::UnimplementedError(absl::StrCat(
          "tensor '", blocks, "': config.json has no quantization_config of quant_method mxfp4"));
    }
    return StoredMatrix{WeightFormat::kMxfp4, blocks, exponents};
  }
  if (dtype != DType::kF8_E4M3) return StoredMatrix{WeightFormat::kPlain, name, ""};
  if (quantization.fp8 == Quantization::Fp8::kNone) {
    return absl::UnimplementedError(absl::StrCat(
        "tensor '", name, "' is F8_E4M3, but config.json has no quantization_config of fp8"));
  }
  const std::string inverse = name + "_scale_inv";  // which multiplies all the same
  std::vector<std::string> names = {inverse, name + "_scale"};
  if (absl::EndsWith(name, ".weight")) {
    names.push_back(absl::StrCat(absl::StripSuffix(name, "weight"), "scale"));
  }
  for (const std::string& scales : names) {
    if (!dtype_of(scales)) continue;
    const bool block = quantization.fp8 == Quantization::Fp8::kBlock128 ||
                       (quantization.fp8 == Quantization::Fp8::kByName && scales == inverse);
    return StoredMatrix{block ? WeightFormat::kFp8Block128 : WeightFormat::kFp8Row, name, scales};
  }
  return absl::InvalidArgumentError(absl::StrCat("tensor '", name,
                                                 "' is F8_E4M3 and has no scales: '",
                                                 absl::StrJoin(names, "' or '"), "' is missing"));
}

bool IsUnusedByQuantization(const std::string& name) {
  return absl::EndsWith(name, "input_scale") || absl::EndsWith(name, "activation_scale");
}

std::vector<std::vector<int64_t>> ScaleShapes(WeightFormat format, int64_t n, int64_t k,
                                              bool transposed,
                                              const std::vector<int64_t>& leading) {
  const auto blocks = [](int64_t extent) { return (extent + kFp8BlockK - 1) / kFp8BlockK; };
  std::vector<std::vector<int64_t>> endings;
  switch (format) {
    case WeightFormat::kFp8Block128:
      endings = {{blocks(n), blocks(k)}};
      if (transposed) endings = {{blocks(k), blocks(n)}};
      break;
    case WeightFormat::kFp8Row:
      endings = {{n, 1}, {n}, {1}, {}, {1, 1}};
      if (transposed) endings[0] = {1, n};
      break;
    case WeightFormat::kMxfp4:
      endings = {{n, k / kMxBlockK}};
      break;
    case WeightFormat::kMxfp8:  // in no file
    case WeightFormat::kPlain:
      break;
  }
  for (std::vector<int64_t>& shape : endings) {
    shape.insert(shape.begin(), leading.begin(), leading.end());
  }
  return endings;
}

ScaleLayout LayoutOfScales(WeightFormat format, const std::vector<int64_t>& shape,
                           int64_t experts) {
  switch (format) {
    case WeightFormat::kFp8Block128:
      return ScaleLayout::kBlock128;
    case WeightFormat::kFp8Row:
      return NumElements(shape) == experts ? ScaleLayout::kMatrix : ScaleLayout::kRow;
    case WeightFormat::kMxfp4:
    case WeightFormat::kMxfp8:
      return ScaleLayout::kGroup32;
    case WeightFormat::kPlain:
      break;
  }
  return ScaleLayout::kNone;
}

bool IsScaleDType(WeightFormat format, DType dtype) {
  if (format == WeightFormat::kMxfp4) return dtype == DType::kU8 || dtype == DType::kF8_E8M0;
  return IsActivationDType(dtype) || dtype == DType::kF8_E8M0;
}

// Not of kMxfp4.
float ScaleAt(const TensorView& stored, int64_t i) {
  return stored.dtype == DType::kF8_E8M0
             ? FloatFromE8M0(static_cast<const uint8_t*>(stored.data)[i])
             : LoadFloat(stored.dtype, stored.data, i);
}

int64_t FindBadScale(WeightFormat format, const TensorView& stored) {
  const int64_t count = NumElements(stored.shape);
  const auto* const exponents = static_cast<const uint8_t*>(stored.data);
  for (int64_t i = 0; i < count; ++i) {
    if (format == WeightFormat::kMxfp4) {
      if (exponents[i] > kMaxMxfp4Scale) return i;
    } else if (const float scale = ScaleAt(stored, i); !(scale > 0 && std::isfinite(scale))) {
      return i;
    }
  }
  return -1;
}

Tensor ExpandScales(WeightFormat format, const TensorView& stored, int64_t n, int64_t k,
                    bool transposed) {
  Tensor scales(ScaleDType(format), {n, ScalesPerRow(format, k)});
  if (format == WeightFormat::kMxfp4) {
    std::memcpy(scales.data(), stored.data, scales.num_bytes());
    return scales;
  }
  const int64_t per_row = scales.dim(1);
  const int64_t row_blocks = (n + kFp8BlockK - 1) / kFp8BlockK;
  const bool one = NumElements(stored.shape) == 1;
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t i = 0; i < per_row; ++i) {
      int64_t source = one ? 0 : r;
      if (format == WeightFormat::kFp8Block128) {
        const int64_t block = r / kFp8BlockK;
        source = transposed ? i * row_blocks + block : block * per_row + i;
      }
      scales.as<float>()[r * per_row + i] = ScaleAt(stored, source);
    }
  }
  return scales;
}

}  // namespace expertmesh
