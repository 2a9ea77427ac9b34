// Who an expert server is, told in the initial metadata of every Dispatch stream: an address may be
// wrong, or have been taken over by another process, and two models must never mix.
#pragma once

#include <algorithm>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace expertmesh {

struct ServerIdentity {
  std::string name;
  std::string model_fingerprint;
};

// INVALID_ARGUMENT naming `field` unless the name may stand in metadata, logs and error texts: gRPC
// aborts the process over a metadata value that is not printable ASCII.
inline absl::Status CheckServerName(const std::string& field, const std::string& name) {
  constexpr size_t kMaxLength = 128;
  const auto printable = [](char c) { return c > ' ' && c <= '~'; };
  if (!name.empty() && name.size() <= kMaxLength &&
      std::all_of(name.begin(), name.end(), printable)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      field, ": expected 1 to ", kMaxLength, " printable ASCII characters without spaces, got \"",
      absl::CHexEscape(name.substr(0, kMaxLength)), "\"", name.size() > kMaxLength ? "..." : ""));
}

inline constexpr char kServerNameKey[] = "expertmesh-server";
inline constexpr char kFingerprintKey[] = "expertmesh-model-fingerprint";

}  // namespace expertmesh
