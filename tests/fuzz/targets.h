// What is fuzzed: each function takes any bytes, hands them to code that must cope with anything,
// and checks what that code promises of its answers. It returns; a broken promise ends the process.
//
// The functions are run by libFuzzer (fuzzer.cc) and over the committed corpus (fuzz_corpus_test).
#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace expertmesh::fuzz {

using Bytes = absl::Span<const uint8_t>;

// A safetensors file: by itself, and as the weights of small models, which are served if it fits.
void Safetensors(Bytes file);
// A config.json, read for the built-in families and for one that has every key; and beside the
// weights of small models, which are served if it fits.
void Config(Bytes text);
// A DispatchRequest, decoded and computed as an expert server does; what is refused is taken for a
// DispatchResponse, which a router gets from one of its servers in the middle of a call.
void Dispatch(Bytes message);
// A ForwardRequest, decoded and answered as a router does, by two clusters of which one does
// everything in another way.
void Forward(Bytes message);

}  // namespace expertmesh::fuzz
