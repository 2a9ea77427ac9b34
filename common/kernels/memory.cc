#include "common/kernels/memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace expertmesh {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kCacheLine = 64;

size_t RoundUp(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

std::shared_ptr<std::byte> AllocateLarge(size_t bytes) {
#if !defined(__SANITIZE_ADDRESS__)  // which watches the ends of what malloc gives
  if (bytes >= kHugePage) {
    const size_t size = RoundUp(bytes, kHugePage);
    // One page more, so that the memory can begin at the start of a huge one.
    void* mapped = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    auto* const begin =
        reinterpret_cast<std::byte*>(RoundUp(reinterpret_cast<size_t>(mapped), kHugePage));
    madvise(begin, size, MADV_HUGEPAGE);  // a wish; small pages do as well
    return std::shared_ptr<std::byte>(
        begin, [mapped, size](std::byte*) { munmap(mapped, size + kHugePage); });
  }
#endif
  const size_t size = RoundUp(bytes + 1, kCacheLine);
  auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kCacheLine, size));
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, size);
  return std::shared_ptr<std::byte>(memory, [](std::byte* p) { std::free(p); });
}

std::byte* Workspace::Get(size_t bytes) {
  if (bytes > capacity_) {
    memory_.reset();  // first, so that both are never there at once
    capacity_ = 0;
    // A quarter more than asked for: rounds of slowly growing size would allocate every time.
    memory_ = AllocateLarge(bytes + bytes / 4);
    capacity_ = bytes + bytes / 4;
  }
  return memory_.get();
}

void Workspace::Fill(std::byte value) {
  if (capacity_ > 0) std::memset(memory_.get(), static_cast<int>(value), capacity_);
}

}  // namespace expertmesh
