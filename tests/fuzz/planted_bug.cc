// A wrong check of a length, on purpose: tests/fuzz.sh fails if fuzzing from the dispatch corpus,
// in which no input reaches it, does not find it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "expertmesh/v1/expert.pb.h"
#include "tests/fuzz/decode.h"

volatile int64_t used;  // else the compiler would leave out what writes to the vector

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  expertmesh::v1::DispatchRequest request;
  expertmesh::Tensor rows;
  if (!expertmesh::fuzz::CheckedDecode({data, size}, "rows", &request, &rows).ok()) return 0;
  if (request.layer() < 64 || request.layer() >= 128) return 0;
  std::vector<int64_t> sizes(2);
  if (request.m_sizes_size() <= 64) {  // the bug: 2 fit
    std::copy(request.m_sizes().begin(), request.m_sizes().end(), sizes.begin());
  }
  used = sizes[0];
  return 0;
}
