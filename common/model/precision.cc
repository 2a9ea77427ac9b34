#include "common/model/precision.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "common/kernels/isa.h"
#include "common/kernels/quantize.h"
#include "common/model/fingerprint.h"
#include "common/status.h"
#include "common/text.h"

namespace expertmesh {
namespace {

constexpr QuantizedFormat kFormats[] = {QuantizedFormat::kFp8Rowwise, QuantizedFormat::kFp8Block128,
                                        QuantizedFormat::kMxfp8, QuantizedFormat::kMxfp8Rceil};
constexpr char kLayersPrefix[] = "layers=";

bool ParseLayer(const std::string& text, int32_t* layer) {
  return !text.empty() && std::all_of(text.begin(), text.end(), absl::ascii_isdigit) &&
         absl::SimpleAtoi(text, layer);
}

// "3" or "3-5".
bool ParseRange(const std::string& text, std::pair<int32_t, int32_t>* range) {
  const size_t dash = text.find('-');
  const std::string last = dash == std::string::npos ? text : text.substr(dash + 1);
  return ParseLayer(text.substr(0, dash), &range->first) && ParseLayer(last, &range->second) &&
         range->first <= range->second;
}

// Replaces values [n, k], of `parts` projections below each other, by codes, and the scales by
// theirs.
void Quantize(QuantizedFormat format, int64_t parts, Tensor* values, Tensor* scales) {
  const WeightFormat weight_format = WeightFormatOf(format);
  const int64_t n = values->dim(0), k = values->dim(1);
  Tensor codes(DType::kF8_E4M3, {n, k});
  *scales = Tensor(ScaleDType(weight_format), {n, ScalesPerRow(weight_format, k)});
  const auto part = [parts](const Tensor& tensor, int64_t p) {
    return static_cast<int64_t>(tensor.num_bytes()) / parts * p;
  };
  for (int64_t p = 0; p < parts; ++p) {
    QuantizeArgs args;
    args.format = format;
    args.dtype = values->dtype();
    args.values = values->data() + part(*values, p);
    args.rows = n / parts;
    args.k = k;
    args.codes = codes.as<uint8_t>() + part(codes, p);
    args.scales = scales->data() + part(*scales, p);
    QuantizeWeights(BestIsa(), args);
  }
  *values = std::move(codes);
}

class QuantizedCheckpoint final : public Checkpoint {
 public:
  QuantizedCheckpoint(std::shared_ptr<const Checkpoint> stored, ModelDescription model)
      : stored_(std::move(stored)),
        model_(std::move(model)),
        fingerprint_(FingerprintIn(stored_->fingerprint(), model_)) {}

  const ModelDescription& model() const override { return model_; }
  const std::string& fingerprint() const override { return fingerprint_; }
  int64_t ExpertBytes(int32_t layer) const override {
    const ExpertDescriptor& experts = model_.Find(layer)->experts;
    return experts.row_format ? BytesOfExpert(experts) : stored_->ExpertBytes(layer);
  }
  const std::vector<std::string>& skipped_tensors() const override {
    return stored_->skipped_tensors();
  }
  const std::string& layout() const override { return stored_->layout(); }
  absl::StatusOr<RouterWeights> ReadRouter(int32_t layer) const override {
    return stored_->ReadRouter(layer);
  }
  absl::StatusOr<ExpertWeights> ReadExpert(int32_t layer, int32_t expert) const override;

 private:
  const std::shared_ptr<const Checkpoint> stored_;
  const ModelDescription model_;
  const std::string fingerprint_;
};

absl::StatusOr<ExpertWeights> QuantizedCheckpoint::ReadExpert(int32_t layer, int32_t expert) const {
  ASSIGN_OR_RETURN(ExpertWeights weights, stored_->ReadExpert(layer, expert));
  const auto descriptor = [layer, expert](const ModelDescription& model) {
    const LayerDescription& found = *model.Find(layer);
    return expert < found.router.num_experts ? found.experts : found.shared.experts;
  };
  const ExpertDescriptor wanted = descriptor(model_);
  if (descriptor(stored_->model()).weight_format == wanted.weight_format) return weights;
  Quantize(*wanted.row_format, wanted.gated ? 2 : 1, &weights.gate_up, &weights.gate_up_scales);
  Quantize(*wanted.row_format, 1, &weights.down, &weights.down_scales);
  return weights;
}

// Makes the experts of a layer ("experts" or "shared experts") ones in that format.
absl::Status Convert(int32_t layer, const std::string& which, QuantizedFormat format,
                     ExpertDescriptor* experts) {
  const bool plain = experts->weight_format == WeightFormat::kPlain;
  const bool blocks = experts->weight_format == WeightFormat::kFp8Block128;
  if (!plain && !(blocks && format == QuantizedFormat::kFp8Block128)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--precision: layer ", layer, ": ", which, " stored as ", NameOf(experts->weight_dtype),
        " (", NameOf(experts->weight_format), ") cannot be made ", NameOf(format),
        "; of these: native", blocks ? ", fp8_block128" : "",
        "; of F32, BF16 or F16: native, fp8_rowwise, fp8_block128, mxfp8, mxfp8_rceil"));
  }
  experts->row_format = format;
  experts->weight_format = WeightFormatOf(format);
  experts->weight_dtype = DType::kF8_E4M3;
  return absl::OkStatus();
}

// Those that `precision` chooses of the model's MoE layers.
absl::StatusOr<std::vector<int32_t>> ChosenLayers(const ModelDescription& model,
                                                  const Precision& precision) {
  std::vector<int32_t> moe;
  for (const LayerDescription& layer : model.layers) {
    if (layer.kind == LayerKind::kMoe) moe.push_back(layer.layer);
  }
  if (precision.layers.empty()) return moe;
  std::vector<int32_t> chosen;
  for (const auto& [first, last] : precision.layers) {
    const size_t before = chosen.size();
    std::copy_if(moe.begin(), moe.end(), std::back_inserter(chosen),
                 [first = first, last = last](int32_t l) { return first <= l && l <= last; });
    if (chosen.size() > before && last < model.num_hidden_layers) continue;
    const bool dense = first == last && model.Find(first) != nullptr;
    return absl::InvalidArgumentError(
        absl::StrCat("--precision: layers: expected MoE layers (", IdRanges(moe), "), got ", first,
                     first == last ? "" : absl::StrCat("-", last),
                     dense ? ", which is dense and stays native" : ", which is not served"));
  }
  return chosen;
}

}  // namespace

absl::StatusOr<Precision> ParsePrecision(const std::string& text) {
  if (text == "native") return Precision();
  const size_t colon = text.find(':');
  Precision precision;
  for (const QuantizedFormat format : kFormats) {
    if (text.substr(0, colon) == NameOf(format)) precision.format = format;
  }
  const std::string layers = colon == std::string::npos ? "" : text.substr(colon + 1);
  const bool some = layers.rfind(kLayersPrefix, 0) == 0;
  if (!precision.format || (colon != std::string::npos && !some)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--precision: expected native, fp8_rowwise, fp8_block128, mxfp8 or "
                     "mxfp8_rceil (all but native for some layers only with e.g. "
                     ":layers=1,3-5), got '",
                     text, "'"));
  }
  if (!some) return precision;
  const std::vector<std::string> ranges =
      absl::StrSplit(layers.substr(sizeof(kLayersPrefix) - 1), ',');
  for (const std::string& range : ranges) {
    if (!ParseRange(range, &precision.layers.emplace_back())) {
      return absl::InvalidArgumentError(
          absl::StrCat("--precision: layers: expected decoder layers and ascending ranges of them, "
                       "like 1,3-5, got '",
                       range, "' in '", text, "'"));
    }
  }
  return precision;
}

absl::StatusOr<std::shared_ptr<const Checkpoint>> WithPrecision(
    std::shared_ptr<const Checkpoint> checkpoint, const Precision& precision,
    int64_t pad_multiple) {
  if (!precision.format) {
    if (pad_multiple == 0 || pad_multiple == 1) return checkpoint;
    return absl::InvalidArgumentError(absl::StrCat(
        "--pad-multiple: expected 1 with --precision native, whose groups are never padded, got ",
        pad_multiple));
  }
  const QuantizedFormat format = *precision.format;
  const int64_t needed = PadMultipleOf(format);
  if (pad_multiple < 0 || pad_multiple % needed != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--pad-multiple: expected a multiple of ",
                                                   needed, " with --precision ", NameOf(format),
                                                   ", got ", pad_multiple));
  }
  ModelDescription model = checkpoint->model();
  ASSIGN_OR_RETURN(const std::vector<int32_t> chosen, ChosenLayers(model, precision));
  for (LayerDescription& layer : model.layers) {
    if (std::find(chosen.begin(), chosen.end(), layer.layer) == chosen.end()) continue;
    layer.pad_multiple = pad_multiple == 0 ? needed : pad_multiple;
    RETURN_IF_ERROR(Convert(layer.layer, "experts", format, &layer.experts));
    if (layer.shared.count == 0) continue;
    RETURN_IF_ERROR(Convert(layer.layer, "shared experts", format, &layer.shared.experts));
  }
  return std::make_shared<const QuantizedCheckpoint>(std::move(checkpoint), std::move(model));
}

}  // namespace expertmesh
