// What a model's MoE layers are, as data: one router descriptor and one expert descriptor cover
// every family. Nothing outside common/model/registry.cc knows a family's name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/quantized_format.h"
#include "common/weight_format.h"

namespace expertmesh {

// How logits become scores.
enum class ScoreFunction {
  kSoftmax,       // over all experts (or over the selected ones, see ScoreOrder)
  kSigmoid,       // 1 / (1 + e^-z)
  kSqrtSoftplus,  // sqrt(log(1 + e^z))
  kSparsemixer,   // one masked softmax per slot; K = 2, selection by the logits
};

// Whether selection looks at the scores or at the logits.
enum class ScoreOrder {
  kScoreThenTopK,
  kTopKThenScore,  // softmax then runs over the selected logits only
};

// Score of a group of experts, where selection is limited to some groups.
enum class GroupScore {
  kNone,     // no groups
  kMax,      // the best expert's
  kTop2Sum,  // the sum of the best two
};

// What the selection scores of experts in groups that were not chosen become.
enum class MaskFill {
  kNegativeInfinity,
  kZero,  // they can still win against negative scores; some families want that
};

// How the selected scores are normalised; S is their sum.
enum class WeightNorm {
  kNone,
  kSum,         // w / (S + epsilon)
  kSumClamped,  // w / max(S, epsilon)
  kPNorm,       // w / (sum |w|^p)^(1/p), p = norm_p
};

// Root mean square normalisation of a layer's input, with a vector of weights:
// x (mean(x^2) + epsilon)^-1/2 weight factor, in fp32.
struct InputNorm {
  bool present = false;
  float epsilon = 0.0f;
  float factor = 1.0f;
};

// The gate of one layer: logits = x W^T (+ logits bias) -> softcap -> score -> selection score (+
// bias) -> group mask -> top-k -> weights of the unbiased scores -> norm -> scale. Slots are
// ordered by descending selection score, ties by the lower expert id.
struct RouterDescriptor {
  int32_t num_experts = 0;  // E, identity experts not counted
  int32_t top_k = 0;        // K
  ScoreFunction score = ScoreFunction::kSoftmax;
  ScoreOrder order = ScoreOrder::kScoreThenTopK;
  bool has_logits_bias = false;     // fp32 [E], added to the logits
  bool has_selection_bias = false;  // fp32 [E], added to the scores for selection only
  GroupScore group_score = GroupScore::kNone;
  int32_t num_groups = 1;   // divides E
  int32_t topk_groups = 1;  // groups that stay
  MaskFill mask_fill = MaskFill::kNegativeInfinity;
  WeightNorm norm = WeightNorm::kNone;
  float norm_epsilon = 0.0f;
  float norm_p = 1.0f;
  float scale = 1.0f;                 // multiplies every weight
  float routed_scale = 1.0f;          // multiplies the routed sum, before shared experts are added
  float softcap = 0.0f;               // c > 0: z becomes tanh(z / c) c
  float jitter = 0.0f;                // sparsemixer: half its threshold
  bool has_per_expert_scale = false;  // fp32 [E], multiplies the weight of each selected expert
  bool weigh_input = false;      // the weight multiplies the expert's input instead of its output
  int32_t identity_experts = 0;  // ids E, E+1, ... that return their input
  InputNorm input_norm = {};     // of what the gate sees
};

// What an expert computes between its two projections; g and u are rows of the gate and up
// projections.
enum class Activation {
  kSiluGlu,          // silu(g) u
  kClampedSwishGlu,  // min(g, L) sigmoid(alpha min(g, L)) (clamp(u, -L, L) + 1)
  kClampedSiluGlu,   // silu(min(g, L)) clamp(u, -L, L)
  kSiluClampedGlu,   // min(silu(g), L) clamp(u, -L, L)
  kGeluTanhGlu,      // gelu_tanh(g) u
  kGeluErfGlu,       // gelu_erf(g) u
  kRelu2,            // max(g, 0)^2, no up projection
};

// How the files store the scales of quantised matrices. In memory they are as WeightFormat says.
enum class ScaleLayout {
  kNone,
  kBlock128,  // one for 128 x 128 weights
  kRow,       // one for an output channel
  kMatrix,    // one for a matrix
  kMixed,     // some matrices have one, others one for a row
  kGroup32,   // one for 32 weights of a row
};

// One expert: y = down(activation(gate(x), up(x))), with biases where the family has them.
struct ExpertDescriptor {
  int64_t hidden_size = 0;        // D
  int64_t intermediate_size = 0;  // F
  Activation activation = Activation::kSiluGlu;
  float activation_alpha = 1.0f;
  float activation_limit = 0.0f;      // L
  bool gated = true;                  // false: no up projection
  bool has_bias = false;              // biases of all projections
  DType weight_dtype = DType::kBF16;  // as stored: F32, BF16, F16, F8_E4M3 or F4
  WeightFormat weight_format = WeightFormat::kPlain;
  ScaleLayout scale_layout = ScaleLayout::kNone;
  DType scale_dtype = DType::kF32;  // as stored, of the layer's first matrix
  // What rows are quantised to before either projection, and what the weights are in then. None:
  // the experts compute natively, on rows of the request's dtype.
  std::optional<QuantizedFormat> row_format = {};
};

// Bytes of one expert's weights as Checkpoint::ReadExpert gives them: scales repeated for every
// row, biases in F32.
inline int64_t BytesOfExpert(const ExpertDescriptor& expert) {
  const int64_t rows = (expert.gated ? 2 : 1) * expert.intermediate_size;
  const auto matrix = [&expert](int64_t n, int64_t k) {
    const int64_t scales = n * ScalesPerRow(expert.weight_format, k);
    return (n * k * BitsOf(expert.weight_dtype) +
            scales * BitsOf(ScaleDType(expert.weight_format))) /
           8;
  };
  const int64_t biases = expert.has_bias ? rows + expert.hidden_size : 0;
  return matrix(rows, expert.hidden_size) + matrix(expert.hidden_size, expert.intermediate_size) +
         biases * BytesOf(DType::kF32);
}

// A dense layer is one without routed experts (E = K = 0) and with one shared expert.
enum class LayerKind { kMoe, kDense };

// Shared experts are ordinary experts with ids E, E+1, ... that every token selects, in this order,
// beside its routed ones; every server holds them.
struct SharedExperts {
  int32_t count = 0;
  ExpertDescriptor experts = {};  // its own sizes, activation, biases and dtype
  bool gated_by_sigmoid = false;  // weighed by sigmoid(x g^T) instead of 1
  bool averaged = false;          // the block's output is the mean of the routed and the shared sum
};

// One layer that is served.
struct LayerDescription {
  int32_t layer = 0;  // Hugging Face decoder index
  LayerKind kind = LayerKind::kMoe;
  RouterDescriptor router;
  ExpertDescriptor experts;  // the routed ones; of a dense layer only hidden_size counts
  SharedExperts shared = {};
  InputNorm expert_input_norm = {};  // of what the experts see
  // The positions of every expert's group are padded to a multiple of this; 1: never.
  int64_t pad_multiple = 1;

  // How many experts servers hold: ids [0, E) are the routed ones, the rest the shared ones.
  int32_t num_held() const { return router.num_experts + shared.count; }
  // That of all its experts.
  const std::optional<QuantizedFormat>& row_format() const {
    return (router.num_experts > 0 ? experts : shared.experts).row_format;
  }
};

// All that is served of a checkpoint.
struct ModelDescription {
  std::string model_type;  // of config.json
  int32_t num_hidden_layers = 0;
  std::vector<LayerDescription> layers;  // ascending

  // The layer with that decoder index, or null.
  const LayerDescription* Find(int32_t layer) const {
    for (const LayerDescription& candidate : layers) {
      if (candidate.layer == layer) return &candidate;
    }
    return nullptr;
  }
};

}  // namespace expertmesh
