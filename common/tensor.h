// Dense row-major tensors: an owning one with aligned memory, and a view.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "common/dtype.h"

namespace expertmesh {

// Product of the extents, or -1 if one is negative or the product does not fit in int64.
int64_t NumElements(absl::Span<const int64_t> shape);

// "[2, 3]"; what comes after the eighth extent is left out.
std::string ShapeToString(absl::Span<const int64_t> shape);

// Owns (or shares the ownership of) its memory, aligned to kAlignment bytes; the memory is not
// initialised. Copies share the memory, so a tensor can be handed to a sender that outlives its
// maker. Not synchronised: whoever writes must be alone.
class Tensor {
 public:
  static constexpr size_t kAlignment = 64;  // one cache line, one AVX-512 vector

  Tensor() = default;
  // Allocates product(shape) elements. dtype has whole bytes; the extents are not negative.
  Tensor(DType dtype, std::vector<int64_t> shape);

  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t dim(size_t i) const { return shape_[i]; }
  int64_t num_elements() const { return num_elements_; }
  size_t num_bytes() const { return static_cast<size_t>(num_elements_ * BytesOf(dtype_)); }

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(data_.get());
  }
  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(data_.get());
  }
  // The same memory as another dtype and shape of as many bytes.
  Tensor Reinterpret(DType dtype, std::vector<int64_t> shape) const;

  // Keeps the memory alive beyond this tensor.
  const std::shared_ptr<std::byte>& buffer() const { return data_; }

 private:
  DType dtype_ = DType::kF32;
  std::vector<int64_t> shape_ = {0};
  int64_t num_elements_ = 0;
  std::shared_ptr<std::byte> data_;
};

// Somebody else's tensor; valid as long as the owner says.
struct TensorView {
  DType dtype = DType::kF32;
  absl::Span<const int64_t> shape;
  const void* data = nullptr;

  TensorView() = default;
  TensorView(DType d, absl::Span<const int64_t> s, const void* p) : dtype(d), shape(s), data(p) {}
  // Of a tensor that outlives the view.
  TensorView(const Tensor& t)  // NOLINT: implicit, as for std::string_view
      : dtype(t.dtype()), shape(t.shape()), data(t.data()) {}
};

}  // namespace expertmesh
