// The floating-point environment of the bit contract: denormals in and out of arithmetic are zero.
#pragma once

#include <xmmintrin.h>

namespace expertmesh {

// Sets FTZ and DAZ of the calling thread while it lives, and restores what was set before. Every
// thread that computes under the bit contract holds one; nested ones are fine. Functions that
// compute must not be inlined into the scope's owner: see KERNEL_NOINLINE.
class ScopedFlushDenormals {
 public:
  ScopedFlushDenormals() : saved_(_mm_getcsr()) {
    _mm_setcsr(saved_ | kFtzDaz);
    asm volatile("" ::: "memory");  // no arithmetic moves above
  }
  ~ScopedFlushDenormals() {
    asm volatile("" ::: "memory");  // nor below
    _mm_setcsr(saved_);
  }
  ScopedFlushDenormals(const ScopedFlushDenormals&) = delete;
  ScopedFlushDenormals& operator=(const ScopedFlushDenormals&) = delete;

 private:
  static constexpr unsigned kFtzDaz = 0x8040;
  const unsigned saved_;
};

// For functions of arithmetic called under a ScopedFlushDenormals: the compiler may move plain
// floating-point operations across the change of the control register, but not across a call it
// cannot see into.
#ifdef __clang__  // makes no clones
#define KERNEL_NOINLINE __attribute__((noinline))
#else
#define KERNEL_NOINLINE __attribute__((noinline, noclone))
#endif

// Lets the compiler use the FMA instruction for std::fma in one function. Processors without it are
// refused at start-up (InitProcess), so there is one result everywhere; a program that uses this
// code as a library calls that first.
#define KERNEL_FMA __attribute__((target("fma")))

}  // namespace expertmesh
