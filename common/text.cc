#include "common/text.h"

#include <cstddef>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace expertmesh {

std::string IdRanges(absl::Span<const int32_t> ids) {
  std::vector<std::string> ranges;
  for (size_t i = 0; i < ids.size();) {
    size_t j = i;
    while (j + 1 < ids.size() && ids[j + 1] == ids[j] + 1) ++j;
    ranges.push_back(i == j ? absl::StrCat(ids[i]) : absl::StrCat(ids[i], "-", ids[j]));
    i = j + 1;
  }
  return absl::StrJoin(ranges, ", ");
}

std::string HumanBytes(int64_t bytes) {
  const double value = static_cast<double>(bytes);
  if (bytes < 1 << 20) return absl::StrFormat("%.1f KiB", value / (1 << 10));
  if (bytes < 1 << 30) return absl::StrFormat("%.1f MiB", value / (1 << 20));
  return absl::StrFormat("%.2f GiB", value / (1 << 30));
}

}  // namespace expertmesh
