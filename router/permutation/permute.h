// From "rows in arrival order" to "rows grouped by expert".
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace expertmesh {

// What a group without rows becomes when groups are padded.
enum class EmptyExperts {
  kZeroRows,  // it stays empty
  kOneBlock,  // one block of padding, for grouped GEMMs that do not take an empty group
};

struct PermuteIndices {
  // Row of the input that each row of the output reads; -1 is padding. Row p of the output is row
  // permuted_indices[p] of the input. Its length is the sum of m_sizes.
  std::vector<int64_t> permuted_indices;
  std::vector<int64_t> m_sizes;    // [E]: rows of each group, padding included
  std::vector<int64_t> m_offsets;  // [E]: inclusive prefix sums of m_sizes, no leading 0
};

// A stable counting sort from (rank-major, expert-minor) to expert-major order: inside an expert,
// the ranks in order, and inside a rank its rows in order. A rank is a source of rows. O(rows +
// num_ranks * num_local_experts); thread-safe.
//
// tokens_per_expert_group: [num_ranks * num_local_experts] counts of rows, (rank 0, expert 0),
// (rank 0, expert 1), ... With pad_multiple 1 nothing is padded, whatever empty_experts says, and
// the indices are a permutation of all rows; otherwise each group is rounded up to the multiple by
// trailing -1. INVALID_ARGUMENT if the sizes do not fit each other, a count is negative,
// pad_multiple < 1, or the padded total cannot be held; the message names the argument.
absl::StatusOr<PermuteIndices> GeneratePermuteIndices(
    absl::Span<const int64_t> tokens_per_expert_group, int64_t num_local_experts, int64_t num_ranks,
    int64_t pad_multiple, EmptyExperts empty_experts);

// Upper bound of the sum of m_sizes before the counts are known: round_up(rows + num_local_experts
// * pad_multiple, pad_multiple). -1 if an argument is negative, pad_multiple < 1, or the bound does
// not fit in int64.
int64_t MaxPermutedRows(int64_t rows, int64_t num_local_experts, int64_t pad_multiple);

}  // namespace expertmesh
