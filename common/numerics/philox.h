// Philox4x32-10, a counter-based generator of random numbers: any part of a sequence without the
// parts before it, the same on every machine (Salmon, Moraes, Dror and Shaw, "Parallel Random
// Numbers: As Easy as 1, 2, 3", SC 2011).
#pragma once

#include <array>
#include <cstdint>

namespace expertmesh {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

// The 4 words that belong to a counter, for kBlocks counters side by side, so that a compiler can
// use vectors: counter[i][b] is word i of counter b, and the result takes its place.
template <int kBlocks>
constexpr void Philox(uint32_t (&counter)[4][kBlocks], PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    for (int b = 0; b < kBlocks; ++b) {
      const uint64_t a = uint64_t{0xd2511f53u} * counter[0][b];
      const uint64_t c = uint64_t{0xcd9e8d57u} * counter[2][b];
      counter[0][b] = static_cast<uint32_t>(c >> 32) ^ counter[1][b] ^ key[0];
      counter[1][b] = static_cast<uint32_t>(c);
      counter[2][b] = static_cast<uint32_t>(a >> 32) ^ counter[3][b] ^ key[1];
      counter[3][b] = static_cast<uint32_t>(a);
    }
    key[0] += 0x9e3779b9u;
    key[1] += 0xbb67ae85u;
  }
}

constexpr PhiloxCounter Philox(const PhiloxCounter& counter, const PhiloxKey& key) {
  uint32_t words[4][1] = {{counter[0]}, {counter[1]}, {counter[2]}, {counter[3]}};
  Philox(words, key);
  return {words[0][0], words[1][0], words[2][0], words[3][0]};
}

}  // namespace expertmesh
