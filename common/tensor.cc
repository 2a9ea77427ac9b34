#include "common/tensor.h"

#include <cassert>
#include <cstdlib>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace expertmesh {

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
