// Large aligned memory for weights and workspaces.
#pragma once

#include <cstddef>
#include <memory>

namespace expertmesh {

// `bytes` of zeroed memory, aligned to a cache line, on huge pages where it is large and the system
// has them: streaming weights over small pages would miss the TLB at every one. std::bad_alloc when
// there is none.
std::shared_ptr<std::byte> AllocateLarge(size_t bytes);

// Memory that only grows, for what is needed again and again. Not synchronised.
class Workspace {
 public:
  // At least `bytes`, aligned to a cache line; what was there before is lost when it has to grow.
  std::byte* Get(size_t bytes);
  // All that is there; for tests.
  void Fill(std::byte value);

 private:
  std::shared_ptr<std::byte> memory_;
  size_t capacity_ = 0;
};

}  // namespace expertmesh
