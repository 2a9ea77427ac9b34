#include "common/safetensors/strict_json.h"

#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

using nlohmann::json;

// What the parser's own checks do not cover; thrown out of its callback.
class Refused : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Names the first byte that is not UTF-8; empty if there is none.
std::string FindInvalidUtf8(const std::string& text) {
  try {
    json(text).dump();
    return "";
  } catch (const json::type_error& error) {
    return error.what();
  }
}

}  // namespace

absl::StatusOr<json> ParseStrictJson(const std::string& text) {
  // The parser takes a NUL byte for the end of the text and skips a byte order mark.
  if (const size_t nul = text.find('\0'); nul != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("bad JSON: NUL byte at offset ", nul));
  }
  if (text.rfind("\xef\xbb\xbf", 0) == 0) {
    return absl::InvalidArgumentError("bad JSON: byte order mark");
  }
  std::vector<std::set<std::string>> keys;  // of the objects being parsed, outermost first
  const auto check = [&keys](int depth, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        if (depth >= kMaxJsonDepth) {
          throw Refused(absl::StrCat("nested more than ", kMaxJsonDepth, " deep"));
        }
        if (event == json::parse_event_t::object_start) keys.emplace_back();
        break;
      case json::parse_event_t::object_end:
        keys.pop_back();
        break;
      case json::parse_event_t::key:
        if (!keys.back().insert(parsed.get<std::string>()).second) {
          throw Refused(absl::StrCat("duplicate key '", parsed.get<std::string>(), "'"));
        }
        break;
      default:
        break;
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const Refused& error) {
    return absl::InvalidArgumentError(absl::StrCat("bad JSON: ", error.what()));
  } catch (const json::exception& error) {
    if (const std::string invalid = FindInvalidUtf8(text); !invalid.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("not UTF-8: ", invalid));
    }
    return absl::InvalidArgumentError(absl::StrCat("bad JSON: ", error.what()));
  }
}

}  // namespace expertmesh
