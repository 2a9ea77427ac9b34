#include "common/model/generated.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/model/fingerprint.h"
#include "common/numerics/philox.h"
#include "common/status.h"

namespace expertmesh {
namespace {

constexpr int kBlocks = 48;         // of four words, at a time
constexpr int kWordsOfElement = 6;  // twelve halves
constexpr int kElements = 4 * kBlocks / kWordsOfElement;

// The sums of halves of kElements elements, from the one on that block `first` begins with.
void SumHalves(const GeneratedSequence& sequence, uint64_t first, uint32_t (&sums)[kElements]) {
  uint32_t words[4][kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    words[0][b] = static_cast<uint32_t>(first + b);
    words[1][b] = static_cast<uint32_t>((first + b) >> 32);
    words[2][b] = sequence.expert;
    words[3][b] = static_cast<uint32_t>(sequence.tensor);
  }
  Philox(words, {sequence.seed, sequence.layer});
  for (int e = 0; e < kElements; ++e) {
    sums[e] = 0;
    for (int word = kWordsOfElement * e; word < kWordsOfElement * (e + 1); ++word) {
      const uint32_t bits = words[word % 4][word / 4];
      sums[e] += (bits & 0xffffu) + (bits >> 16);
    }
  }
}

class GeneratedCheckpoint final : public Checkpoint {
 public:
  GeneratedCheckpoint(const ModelDescription& model, const std::string& identity, uint32_t seed)
      : model_(model),
        seed_(seed),
        fingerprint_(FingerprintIn(
            absl::StrCat("generated, version 1, seed ", seed, ": ", identity), model)) {}

  const ModelDescription& model() const override { return model_; }
  const std::string& fingerprint() const override { return fingerprint_; }
  int64_t ExpertBytes(int32_t layer) const override {
    const LayerDescription* const found = model_.Find(layer);
    return found == nullptr || found->router.num_experts == 0 ? 0 : BytesOfExpert(found->experts);
  }
  const std::vector<std::string>& skipped_tensors() const override { return skipped_; }
  const std::string& layout() const override { return layout_; }

  absl::StatusOr<RouterWeights> ReadRouter(int32_t layer) const override {
    ASSIGN_OR_RETURN(const LayerDescription* const found, Find(layer));
    const RouterDescriptor& router = found->router;
    const int64_t hidden_size = found->experts.hidden_size;
    const int64_t num_ids = router.num_experts + router.identity_experts;
    const auto generate = [&](bool present, GeneratedTensor tensor, std::vector<int64_t> shape,
                              DType dtype) {
      if (!present) return Tensor(dtype, {0});
      return GenerateTensor(Sequence(layer, 0, tensor), std::move(shape), hidden_size, dtype);
    };
    RouterWeights weights;
    weights.weight =
        generate(num_ids > 0, GeneratedTensor::kRouter, {num_ids, hidden_size}, DType::kBF16);
    weights.logits_bias =
        generate(router.has_logits_bias, GeneratedTensor::kLogitsBias, {num_ids}, DType::kF32);
    weights.selection_bias = generate(router.has_selection_bias, GeneratedTensor::kSelectionBias,
                                      {num_ids}, DType::kF32);
    weights.shared_gate = generate(found->shared.gated_by_sigmoid, GeneratedTensor::kSharedGate,
                                   {found->shared.count, hidden_size}, DType::kBF16);
    weights.per_expert_scale = Ones(router.has_per_expert_scale ? num_ids : 0);
    weights.input_norm = Ones(router.input_norm.present ? hidden_size : 0);
    weights.expert_input_norm = Ones(found->expert_input_norm.present ? hidden_size : 0);
    return weights;
  }

  absl::StatusOr<ExpertWeights> ReadExpert(int32_t layer, int32_t expert) const override {
    ASSIGN_OR_RETURN(const LayerDescription* const found, Find(layer));
    if (expert < 0 || expert >= found->num_held()) {
      return absl::NotFoundError(absl::StrCat("layer ", layer, " has experts 0 to ",
                                              found->num_held() - 1, ", not ", expert));
    }
    const ExpertDescriptor& of =
        expert < found->router.num_experts ? found->experts : found->shared.experts;
    const int64_t rows = (of.gated ? 2 : 1) * of.intermediate_size;
    const auto generate = [&](GeneratedTensor tensor, std::vector<int64_t> shape, int64_t fan_in,
                              DType dtype) {
      return GenerateTensor(Sequence(layer, expert, tensor), std::move(shape), fan_in, dtype);
    };
    ExpertWeights weights;
    weights.gate_up =
        generate(GeneratedTensor::kGateUp, {rows, of.hidden_size}, of.hidden_size, DType::kBF16);
    weights.down = generate(GeneratedTensor::kDown, {of.hidden_size, of.intermediate_size},
                            of.intermediate_size, DType::kBF16);
    weights.gate_up_bias = weights.down_bias = Tensor(DType::kF32, {0});
    if (of.has_bias) {
      weights.gate_up_bias =
          generate(GeneratedTensor::kGateUpBias, {rows}, of.hidden_size, DType::kF32);
      weights.down_bias =
          generate(GeneratedTensor::kDownBias, {of.hidden_size}, of.intermediate_size, DType::kF32);
    }
    return weights;
  }

 private:
  static Tensor Ones(int64_t n) {
    Tensor ones(DType::kF32, {n});
    std::fill_n(ones.as<float>(), n, 1.0f);
    return ones;
  }

  GeneratedSequence Sequence(int32_t layer, int32_t expert, GeneratedTensor tensor) const {
    return {seed_, static_cast<uint32_t>(layer), static_cast<uint32_t>(expert), tensor};
  }

  absl::StatusOr<const LayerDescription*> Find(int32_t layer) const {
    const LayerDescription* const found = model_.Find(layer);
    if (found == nullptr) {
      return absl::NotFoundError(absl::StrCat("the model has no layer ", layer));
    }
    return found;
  }

  const ModelDescription model_;
  const uint32_t seed_;
  const std::string fingerprint_;
  const std::vector<std::string> skipped_;
  const std::string layout_ = "generated";
};

}  // namespace

Tensor GenerateTensor(const GeneratedSequence& sequence, std::vector<int64_t> shape, int64_t fan_in,
                      DType dtype) {
  Tensor tensor(dtype, std::move(shape));
  const auto deviation = static_cast<float>(1.0 / std::sqrt(static_cast<double>(fan_in)));
  const int64_t n = tensor.num_elements();
  for (int64_t begin = 0; begin < n; begin += kElements) {
    uint32_t sums[kElements];
    SumHalves(sequence, static_cast<uint64_t>(begin / kElements) * kBlocks, sums);
    const int64_t count = std::min<int64_t>(kElements, n - begin);
    for (int64_t i = 0; i < count; ++i) {
      const int32_t centred = 2 * static_cast<int32_t>(sums[i]) - 12 * 65535;
      const float z = static_cast<float>(centred) * 0x1p-17f;
      const uint16_t bits = BF16FromFloat(z * deviation);
      if (dtype == DType::kBF16) {
        tensor.as<uint16_t>()[begin + i] = bits;
      } else {
        tensor.as<float>()[begin + i] = FloatFromBF16(bits);
      }
    }
  }
  return tensor;
}

absl::StatusOr<std::shared_ptr<const Checkpoint>> GenerateCheckpoint(const ModelDescription& model,
                                                                     const std::string& identity,
                                                                     uint32_t seed) {
  for (const LayerDescription& layer : model.layers) {
    for (const ExpertDescriptor* experts : {&layer.experts, &layer.shared.experts}) {
      if (experts->weight_format != WeightFormat::kPlain || experts->weight_dtype != DType::kBF16 ||
          experts->row_format) {
        return absl::InvalidArgumentError(
            absl::StrCat("layer ", layer.layer, ": only plain BF16 weights are generated"));
      }
    }
  }
  return std::make_shared<GeneratedCheckpoint>(model, identity, seed);
}

}  // namespace expertmesh
