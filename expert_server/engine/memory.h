// How much memory this process may still take.
#pragma once

#include <cstdint>

namespace expertmesh {

// The least of: what the machine has available, what its control group and the parents of that have
// left, and what RLIMIT_AS leaves; in bytes. Limits that cannot be read do not count.
int64_t AvailableMemoryBytes();

}  // namespace expertmesh
