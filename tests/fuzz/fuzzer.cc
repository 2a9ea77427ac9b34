// libFuzzer's entry to the function of targets.h that EXPERTMESH_FUZZ_TARGET names.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  expertmesh::fuzz::EXPERTMESH_FUZZ_TARGET({data, size});
  return 0;
}
