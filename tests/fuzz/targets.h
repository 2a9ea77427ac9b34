// What is fuzzed: each function takes any bytes, hands them to code that must cope with anything,
// and checks what that code promises of its answers. It returns; a broken promise ends the process.
//
// The functions are run by libFuzzer (fuzzer.cc) and over the committed corpus (fuzz_corpus_test).
#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace expertmesh::fuzz {

using Bytes = absl::Span<const uint8_t>;

// A safetensors file.
void Safetensors(Bytes file);
// A config.json, read for the built-in families and for one that has every key.
void Config(Bytes text);
// A DispatchRequest, decoded and computed as an expert server does; what is refused is decoded once
// more as a DispatchResponse, as a router does.
void Dispatch(Bytes message);
// A ForwardRequest, decoded and gated as a router does.
void Forward(Bytes message);

}  // namespace expertmesh::fuzz
