// Every model family: a tiny checkpoint in the layout of its released files (and in transformers'
// own, where that differs). The names, shapes and keys are written down a second time on purpose,
// from the released files, and not derived from common/model/registry.cc. For tests.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/tensor.h"
#include "nlohmann/json.hpp"

namespace expertmesh::families {

constexpr int64_t kHidden = 5;    // D
constexpr int64_t kWidth = 3;     // F of a routed expert
constexpr int64_t kShared = 6;    // F of the shared experts together, where the case says no other
constexpr int64_t kDense = 7;     // F of a dense layer
constexpr int64_t kExperts = 12;  // two digits: an order by name is not one by number
constexpr int64_t kIdentity = 4;  // where there are identity experts

// A tensor of a layer. `what`:
//   X matrices of routed experts, S of the shared one, M of a dense layer's MLP, B their biases
//   R gate, l logits bias, s selection bias, p per-expert scale, n input norm, m experts' input
//   norm, G shared gate
// `axes`: one letter for each dimension, or several in brackets for one that joins them:
//   e experts, D hidden, F intermediate; g and u: intermediate, of the gate or up projection alone;
//   j both, gate first; i interleaved; N ids of the gate; 1 one
struct Spec {
  std::string name;  // {l}: layer, {e}: expert
  std::string axes;
  char what = 'X';
};

// How matrices are quantised in the files.
enum class Scheme {
  kNone,
  kFp8Block,       // F32 scales of blocks of 128 x 128
  kFp8BlockUe8m0,  // the same with powers of two
  kFp8Row,         // compressed-tensors: a scale for every row
  kFp8Tensor,      // and for all of a matrix
  kMxfp4,          // tensors of blocks and of scales
};

struct FamilyCase {
  std::string name = {};
  std::string config = {};
  std::string moe = {};    // summary of the MoE layers, see Summary()
  std::string dense = {};  // and of the dense ones
  std::vector<int> moe_layers = {};
  std::vector<int> dense_layers = {};
  std::vector<Spec> moe_tensors = {};
  std::vector<Spec> dense_tensors = {};
  std::string layout = "per-expert";
  int64_t hidden = kHidden;
  int64_t width = kWidth;
  int64_t shared = kShared;
  int64_t dense_width = kDense;
  int64_t identity = 0;
  Scheme scheme = Scheme::kNone;  // of the matrices of all experts
};

// The value of one element: a small integer, exact in every dtype, different for every place.
float Value(char what, int layer, int64_t expert, int64_t row, int64_t col);

// Of expert `expert_of_name` where the name has one: every element is the Value() of its place.
Tensor Fill(const FamilyCase& one, const Spec& spec, int layer, int64_t expert_of_name);

// A BF16 tensor, or one of another dtype.
Tensor MakeTensor(const std::vector<int64_t>& shape, const std::vector<float>& values,
                  DType dtype = DType::kBF16);

// A folder before it is written.
struct Folder {
  nlohmann::json config;
  std::map<std::string, Tensor> tensors;
};

// With the values of Fill(); those of quantised matrices are random.
Folder MakeFolder(const FamilyCase& one);
// With random values, as they may be in a model.
Folder MakeRandomFolder(const FamilyCase& one);
void Write(const Folder& folder, const std::string& path);

// Each family in each of its layouts, not quantised.
std::vector<FamilyCase> Cases();
// Families of different kinds in each of the formats that such are shipped in. No size is a
// multiple of 128.
std::vector<FamilyCase> QuantisedCases();

}  // namespace expertmesh::families
