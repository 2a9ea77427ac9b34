#include "router/permutation/permute.h"

#include <numeric>
#include <optional>

#include "common/status.h"

namespace expertmesh {
namespace {

// Smallest multiple of `multiple` (>= 1) that is at least `value` (>= 0), unless it overflows.
std::optional<int64_t> RoundUp(int64_t value, int64_t multiple) {
  const int64_t rest = value % multiple;
  int64_t result = value;
  if (rest != 0 && __builtin_add_overflow(value, multiple - rest, &result)) return std::nullopt;
  return result;
}

}  // namespace

absl::StatusOr<PermuteIndices> GeneratePermuteIndices(
    absl::Span<const int64_t> tokens_per_expert_group, int64_t num_local_experts, int64_t num_ranks,
    int64_t pad_multiple, EmptyExperts empty_experts) {
  if (num_local_experts < 0 || num_ranks < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_local_experts and num_ranks must not be negative, got ",
                     num_local_experts, " and ", num_ranks));
  }
  if (pad_multiple < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("pad_multiple must be at least 1, got ", pad_multiple));
  }
  int64_t num_counts = 0;
  if (__builtin_mul_overflow(num_ranks, num_local_experts, &num_counts) ||
      num_counts != static_cast<int64_t>(tokens_per_expert_group.size())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokens_per_expert_group must have num_ranks * num_local_experts = ", num_ranks, " * ",
        num_local_experts, " entries, got ", tokens_per_expert_group.size()));
  }

  PermuteIndices result;
  const auto overflow = [] {
    return absl::InvalidArgumentError(
        "tokens_per_expert_group: the sum of the counts, padding included, is too large");
  };

  // First input row of every (rank, expert) group, and rows of every expert.
  std::vector<int64_t> group_begin(static_cast<size_t>(num_counts));
  result.m_sizes.assign(static_cast<size_t>(num_local_experts), 0);
  int64_t rows = 0;
  for (int64_t i = 0; i < num_counts; ++i) {
    const int64_t count = tokens_per_expert_group[i];
    if (count < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("tokens_per_expert_group[", i, "] must not be negative, got ", count));
    }
    group_begin[i] = rows;
    if (__builtin_add_overflow(rows, count, &rows)) return overflow();
    result.m_sizes[i % num_local_experts] += count;  // at most `rows`
  }

  int64_t total = 0;
  for (int64_t& size : result.m_sizes) {
    if (pad_multiple > 1) {
      const bool add_block = size == 0 && empty_experts == EmptyExperts::kOneBlock;
      const std::optional<int64_t> padded = RoundUp(add_block ? 1 : size, pad_multiple);
      if (!padded.has_value()) return overflow();
      size = *padded;
    }
    if (__builtin_add_overflow(total, size, &total)) return overflow();
    result.m_offsets.push_back(total);
  }
  if (static_cast<uint64_t>(total) > result.permuted_indices.max_size()) return overflow();

  result.permuted_indices.assign(static_cast<size_t>(total), -1);
  for (int64_t expert = 0; expert < num_local_experts; ++expert) {
    auto out =
        result.permuted_indices.begin() + (result.m_offsets[expert] - result.m_sizes[expert]);
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const int64_t group = rank * num_local_experts + expert;
      const auto end = out + tokens_per_expert_group[group];
      std::iota(out, end, group_begin[group]);
      out = end;
    }
  }
  return result;
}

int64_t MaxPermutedRows(int64_t rows, int64_t num_local_experts, int64_t pad_multiple) {
  if (rows < 0 || num_local_experts < 0 || pad_multiple < 1) return -1;
  int64_t bound = 0;
  if (__builtin_mul_overflow(num_local_experts, pad_multiple, &bound) ||
      __builtin_add_overflow(bound, rows, &bound)) {
    return -1;
  }
  return RoundUp(bound, pad_multiple).value_or(-1);
}

}  // namespace expertmesh
