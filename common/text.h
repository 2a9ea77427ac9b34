// Numbers as people read them.
#pragma once

#include <cstdint>
#include <string>

#include "absl/types/span.h"

namespace expertmesh {

// "0-3, 7": ascending ids as ranges.
std::string IdRanges(absl::Span<const int32_t> ids);

// "1.50 GiB", "6.7 MiB", "0.5 KiB".
std::string HumanBytes(int64_t bytes);

}  // namespace expertmesh
