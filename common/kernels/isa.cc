#include "common/kernels/isa.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/kernels/dot_product_kernels.h"
#include "hwy/targets.h"

namespace expertmesh {
namespace {

std::vector<Isa> Detect() {
  std::vector<Isa> found;
  const int64_t targets = hwy::SupportedTargets();
  if ((targets & HWY_AVX2) == 0) return found;
  found.push_back(Isa::kAvx2);
  if ((targets & HWY_AVX3) == 0) return found;
  found.push_back(Isa::kAvx512);
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bf16") && DotProductHasContractOrder()) {
    found.push_back(Isa::kAvx512Bf16);
  }
  return found;
}

}  // namespace

const char* NameOf(EngineKind kind) {
  return kind == EngineKind::kGrouped ? "grouped" : "for_loop";
}

absl::StatusOr<EngineKind> ParseEngineKind(const std::string& name) {
  if (name == "grouped") return EngineKind::kGrouped;
  if (name == "for_loop") return EngineKind::kForLoop;
  return absl::InvalidArgumentError(
      absl::StrCat("engine: expected grouped or for_loop, got \"", name, "\""));
}

const char* NameOf(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512bf16";
  }
  return "unknown";
}

const std::vector<Isa>& SupportedIsas() {
  static const std::vector<Isa>* const isas = new std::vector<Isa>(Detect());
  return *isas;
}

Isa BestIsa() { return SupportedIsas().empty() ? Isa::kAvx2 : SupportedIsas().back(); }

absl::StatusOr<Isa> ParseIsa(const std::string& name) {
  if (name == "auto") return BestIsa();
  std::vector<std::string> choices = {"auto"};
  for (const Isa isa : SupportedIsas()) {
    if (name == NameOf(isa)) return isa;
    choices.push_back(NameOf(isa));
  }
  return absl::InvalidArgumentError(absl::StrCat("isa: expected one of those of this processor, ",
                                                 absl::StrJoin(choices, ", "), "; got \"", name,
                                                 "\""));
}

}  // namespace expertmesh
