#include "common/kernels/isa.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace expertmesh {
namespace {

std::vector<Isa> Detect() {
  std::vector<Isa> found;
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(Isa::kAvx2);
  if (found.empty() || !__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return found;
  }
  found.push_back(Isa::kAvx512);
  if (__builtin_cpu_supports("avx512bf16")) found.push_back(Isa::kAvx512Bf16);
  return found;
}

}  // namespace

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

Isa BestIsa() { return SupportedIsas().back(); }

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
