#include "common/tensor.h"

#include <sys/mman.h>

#include <cassert>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace expertmesh {

namespace {

// A wish for huge pages where malloc maps memory anew each time: the faults of small ones would
// take longer than reading weights from the page cache does.
void AdviseHugePages(std::byte* memory, size_t bytes) {
  constexpr size_t kMappedAlways = size_t{32} << 20;
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  if (bytes < kMappedAlways) return;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const size_t skipped = (address + kHugePage - 1) / kHugePage * kHugePage - address;
  madvise(memory + skipped, (bytes - skipped) / kHugePage * kHugePage, MADV_HUGEPAGE);
}

}  // namespace

int64_t NumElements(absl::Span<const int64_t> shape) {
  int64_t product = 1;
  for (const int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(product, extent, &product)) return -1;
  }
  return product;
}

std::string ShapeToString(absl::Span<const int64_t> shape) {
  constexpr size_t kShown = 8;
  return absl::StrCat("[", absl::StrJoin(shape.subspan(0, kShown), ", "),
                      shape.size() > kShown ? ", ...]" : "]");
}

Tensor::Tensor(DType dtype, std::vector<int64_t> shape)
    : dtype_(dtype), shape_(std::move(shape)), num_elements_(NumElements(shape_)) {
  // aligned_alloc wants a multiple of the alignment, and an empty tensor still has an address.
  const size_t bytes = (num_bytes() / kAlignment + 1) * kAlignment;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, bytes));
  if (memory == nullptr) throw std::bad_alloc();
  AdviseHugePages(memory, bytes);
  data_ = std::shared_ptr<std::byte>(memory, [](std::byte* p) { std::free(p); });
}

Tensor Tensor::Reinterpret(DType dtype, std::vector<int64_t> shape) const {
  Tensor other;
  other.dtype_ = dtype;
  other.shape_ = std::move(shape);
  other.num_elements_ = NumElements(other.shape_);
  other.data_ = data_;
  assert(other.num_bytes() == num_bytes());
  return other;
}

}  // namespace expertmesh
