// The floating-point environment of quantisation: denormals count, whatever the caller has set.
#pragma once

#include <xmmintrin.h>

namespace expertmesh {

// Clears FTZ and DAZ of the calling thread while it lives, and restores what was set before: the
// opposite of ScopedFlushDenormals, and to be used like it, around calls of KERNEL_NOINLINE
// functions.
class ScopedKeepDenormals {
 public:
  ScopedKeepDenormals() : saved_(_mm_getcsr()) {
    _mm_setcsr(saved_ & ~kFtzDaz);
    asm volatile("" ::: "memory");  // no arithmetic moves above
  }
  ~ScopedKeepDenormals() {
    asm volatile("" ::: "memory");  // nor below
    _mm_setcsr(saved_);
  }
  ScopedKeepDenormals(const ScopedKeepDenormals&) = delete;
  ScopedKeepDenormals& operator=(const ScopedKeepDenormals&) = delete;

 private:
  static constexpr unsigned kFtzDaz = 0x8040;
  const unsigned saved_;
};

}  // namespace expertmesh
