// A Hugging Face model folder: its description and its weights, read on demand.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/description.h"
#include "common/tensor.h"

namespace expertmesh {

struct Family;  // common/model/registry.h

// Gate of one layer; N = E + identity experts.
struct RouterWeights {
  Tensor weight;                  // [N, D], as stored: F32, BF16 or F16
  Tensor logits_bias;             // F32 [N], or empty [0]
  Tensor selection_bias;          // F32 [N], or empty [0]
  Tensor per_expert_scale;        // F32 [N], or empty [0]
  Tensor shared_gate = {};        // [S, D] as stored where shared experts are gated, or empty [0]
  Tensor input_norm = {};         // F32 [D], of what the gate sees, or empty [0]
  Tensor expert_input_norm = {};  // F32 [D], of what the experts see, or empty [0]
};

// One expert's matrices, each as stored, in the canonical arrangement whatever the file's.
struct ExpertWeights {
  Tensor gate_up;       // [2F, D]: gate rows, then up rows; [F, D] where there is no gate
  Tensor down;          // [D, F]
  Tensor gate_up_bias;  // F32 [2F] or [F], or empty [0]
  Tensor down_bias;     // F32 [D], or empty [0]
  // As WeightFormat says, the rows in the order of the matrix's; empty [0] for plain weights.
  // Blocks of 128 rows are those of the gate, of the up and of the down projection, each from its
  // row 0.
  Tensor gate_up_scales;
  Tensor down_scales;
};

// Opened by Open(), immutable afterwards; all methods may be called concurrently and block on file
// reads.
class Checkpoint {
 public:
  // Reads and checks config.json, the index and all safetensors headers, and that every tensor that
  // the layers need is there with the right shape and a supported dtype. Reads no weights but the
  // fingerprint's samples. Errors: NOT_FOUND (folder or file), INVALID_ARGUMENT (malformed; the
  // message names file, tensor, expected and given), UNIMPLEMENTED (a model type or feature that is
  // not supported, by name).
  static absl::StatusOr<std::shared_ptr<const Checkpoint>> Open(const std::string& directory);
  // The same with other families than the built-in ones.
  static absl::StatusOr<std::shared_ptr<const Checkpoint>> Open(const std::string& directory,
                                                                absl::Span<const Family> families);

  virtual ~Checkpoint() = default;

  virtual const ModelDescription& model() const = 0;
  // SHA-256 (hex) of the configuration, of every tensor's name, dtype, shape and a sample of its
  // bytes, and of the number format of every layer.
  virtual const std::string& fingerprint() const = 0;
  // BytesOfExpert of a routed expert of that layer (0 for a dense layer), which is one of
  // model().layers.
  virtual int64_t ExpertBytes(int32_t layer) const = 0;
  // Names of tensors that no served layer uses (attention, norms, embeddings, ...), sorted.
  virtual const std::vector<std::string>& skipped_tensors() const = 0;
  // Which arrangement the routed experts have in the files: "per-expert" or "fused".
  virtual const std::string& layout() const = 0;

  // Copies the weights out of the files; touches no other tensor's bytes, and leaves no page of the
  // file mapped. NOT_FOUND if layer or expert do not exist; INVALID_ARGUMENT if a weight is NaN or
  // infinite.
  //
  // Of a dense layer the router's weights are all empty. Experts E, E+1, ... are the shared ones.
  virtual absl::StatusOr<RouterWeights> ReadRouter(int32_t layer) const = 0;
  virtual absl::StatusOr<ExpertWeights> ReadExpert(int32_t layer, int32_t expert) const = 0;
};

}  // namespace expertmesh
