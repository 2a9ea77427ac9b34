// JSON from files that nobody vouches for.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace expertmesh {

// Objects and arrays may be nested this deep.
inline constexpr int kMaxJsonDepth = 128;

// Parses `text`, JSON of RFC 8259 and nothing more: INVALID_ARGUMENT for text that is not UTF-8,
// for comments, NUL bytes, a byte order mark, an object with the same key twice, nesting beyond
// kMaxJsonDepth. White space may surround the value.
absl::StatusOr<nlohmann::json> ParseStrictJson(const std::string& text);

}  // namespace expertmesh
