// Who an expert server is, told in the initial metadata of every Dispatch stream: an address may be
// wrong, or have been taken over by another process, and two models must never mix.
#pragma once

#include <string>

namespace expertmesh {

struct ServerIdentity {
  std::string name;
  std::string model_fingerprint;
};

inline constexpr char kServerNameKey[] = "expertmesh-server";
inline constexpr char kFingerprintKey[] = "expertmesh-model-fingerprint";

}  // namespace expertmesh
