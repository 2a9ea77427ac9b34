#include "router/permutation/permute.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "common/model/contiguous_shard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Rows = std::vector<int64_t>;
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

PermuteIndices Permute(const Rows& counts, int64_t experts, int64_t ranks, int64_t multiple,
                       EmptyExperts empty = EmptyExperts::kZeroRows) {
  auto result = GeneratePermuteIndices(counts, experts, ranks, multiple, empty);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *std::move(result) : PermuteIndices{};
}

TEST(Permute, WithoutPadding) {
  const PermuteIndices p = Permute({2, 3, 1, 4}, 2, 2, 1);
  EXPECT_THAT(p.permuted_indices, ElementsAre(0, 1, 5, 2, 3, 4, 6, 7, 8, 9));
  EXPECT_THAT(p.m_sizes, ElementsAre(3, 7));
  EXPECT_THAT(p.m_offsets, ElementsAre(3, 10));
}

TEST(Permute, PadsToFour) {
  const PermuteIndices p = Permute({2, 3, 1, 4}, 2, 2, 4, EmptyExperts::kOneBlock);
  EXPECT_THAT(p.permuted_indices, ElementsAre(0, 1, 5, -1, 2, 3, 4, 6, 7, 8, 9, -1));
  EXPECT_THAT(p.m_sizes, ElementsAre(4, 8));
  EXPECT_THAT(p.m_offsets, ElementsAre(4, 12));
}

TEST(Permute, AnEmptyExpertIsOneBlockOrNothing) {
  const PermuteIndices block = Permute({0, 3, 0, 2}, 2, 2, 4, EmptyExperts::kOneBlock);
  EXPECT_THAT(block.permuted_indices, ElementsAre(-1, -1, -1, -1, 0, 1, 2, 3, 4, -1, -1, -1));
  EXPECT_THAT(block.m_sizes, ElementsAre(4, 8));
  EXPECT_THAT(block.m_offsets, ElementsAre(4, 12));

  const PermuteIndices nothing = Permute({0, 3, 0, 2}, 2, 2, 4, EmptyExperts::kZeroRows);
  EXPECT_THAT(nothing.permuted_indices, ElementsAre(0, 1, 2, 3, 4, -1, -1, -1));
  EXPECT_THAT(nothing.m_sizes, ElementsAre(0, 8));
  EXPECT_THAT(nothing.m_offsets, ElementsAre(0, 8));
}

TEST(Permute, FourExpertsTwoRanksPaddedToEight) {
  for (const EmptyExperts empty : {EmptyExperts::kZeroRows, EmptyExperts::kOneBlock}) {
    const PermuteIndices p = Permute({4, 2, 1, 3, 1, 2, 3, 4}, 4, 2, 8, empty);
    EXPECT_THAT(p.m_sizes, ElementsAre(8, 8, 8, 8));
    EXPECT_THAT(p.m_offsets, ElementsAre(8, 16, 24, 32));
    EXPECT_THAT(p.permuted_indices,
                ElementsAreArray({0, 1,  2,  3,  10, -1, -1, -1, 4, 5, 11, 12, -1, -1, -1, -1,
                                  6, 13, 14, 15, -1, -1, -1, -1, 7, 8, 9,  16, 17, 18, 19, -1}));
  }
}

TEST(Permute, NothingIsPaddedWithMultipleOne) {
  for (const EmptyExperts empty : {EmptyExperts::kZeroRows, EmptyExperts::kOneBlock}) {
    const PermuteIndices p = Permute({0, 5, 0, 3}, 4, 1, 1, empty);
    EXPECT_THAT(p.m_sizes, ElementsAre(0, 5, 0, 3));
    EXPECT_THAT(p.permuted_indices, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  }
}

TEST(Permute, PaddedCountsAreTheOnesInUse) {
  const PermuteIndices p = Permute({1, 15, 17, 0}, 4, 1, 16);
  EXPECT_THAT(p.m_sizes, ElementsAre(16, 16, 32, 0));
  EXPECT_THAT(p.m_offsets, ElementsAre(16, 32, 64, 64));
  EXPECT_EQ(p.permuted_indices.size(), 64u);
  EXPECT_EQ(p.permuted_indices[16], 1);
  EXPECT_EQ(p.permuted_indices[32], 16);
}

TEST(Permute, NoRowsAndNoExperts) {
  const PermuteIndices none = Permute({0, 0, 0}, 3, 1, 16);
  EXPECT_THAT(none.permuted_indices, IsEmpty());
  EXPECT_THAT(none.m_sizes, ElementsAre(0, 0, 0));
  const PermuteIndices blocks = Permute({0, 0, 0}, 3, 1, 2, EmptyExperts::kOneBlock);
  EXPECT_THAT(blocks.m_sizes, ElementsAre(2, 2, 2));
  EXPECT_EQ(blocks.permuted_indices.size(), 6u);
  EXPECT_THAT(blocks.permuted_indices, Each(-1));
  EXPECT_THAT(Permute({}, 0, 4, 16).m_sizes, IsEmpty());          // a server without experts
  EXPECT_THAT(Permute({}, 2, 0, 16).m_sizes, ElementsAre(0, 0));  // no source of rows
}

// One vector of rows per expert, filled in input order.
TEST(Permute, RandomCountsAgainstVectorsOfVectors) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    const int64_t experts = 1 + static_cast<int64_t>(random() % 12);
    const int64_t ranks = 1 + static_cast<int64_t>(random() % 5);
    const int64_t multiple = std::vector<int64_t>{1, 2, 7, 16, 32, 128}[random() % 6];
    const auto empty = random() % 2 ? EmptyExperts::kZeroRows : EmptyExperts::kOneBlock;
    const uint64_t most = std::vector<uint64_t>{1, 2, 5, 40}[random() % 4];
    Rows counts(static_cast<size_t>(experts * ranks));
    for (int64_t& c : counts) c = static_cast<int64_t>(random() % most);

    std::vector<Rows> groups(static_cast<size_t>(experts));
    int64_t row = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      for (int64_t n = 0; n < counts[i]; ++n) {
        groups[i % static_cast<size_t>(experts)].push_back(row++);
      }
    }
    Rows indices, sizes, offsets;
    for (Rows& group : groups) {
      if (group.empty() && multiple > 1 && empty == EmptyExperts::kOneBlock) group.push_back(-1);
      while (static_cast<int64_t>(group.size()) % multiple != 0) group.push_back(-1);
      indices.insert(indices.end(), group.begin(), group.end());
      sizes.push_back(static_cast<int64_t>(group.size()));
      offsets.push_back(static_cast<int64_t>(indices.size()));
    }

    const PermuteIndices p = Permute(counts, experts, ranks, multiple, empty);
    ASSERT_EQ(p.permuted_indices, indices);
    ASSERT_EQ(p.m_sizes, sizes);
    ASSERT_EQ(p.m_offsets, offsets);
    ASSERT_EQ(static_cast<int64_t>(indices.size()) % multiple, 0);
    ASSERT_LE(static_cast<int64_t>(indices.size()), MaxPermutedRows(row, experts, multiple));
  }
}

TEST(Permute, RefusesSizesThatDoNotFit) {
  const auto refused = [](const Rows& counts, int64_t experts, int64_t ranks, int64_t multiple) {
    const auto result =
        GeneratePermuteIndices(counts, experts, ranks, multiple, EmptyExperts::kZeroRows);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << result.status();
    return std::string(result.status().message());
  };
  EXPECT_THAT(refused({1, 2, 3}, 2, 2, 1), HasSubstr("2 * 2 entries, got 3"));
  EXPECT_THAT(refused({1, 2, 3}, -3, -1, 1), HasSubstr("got -3 and -1"));
  EXPECT_THAT(refused({}, kMax, kMax, 1), HasSubstr("entries, got 0"));
  EXPECT_THAT(refused({1, -2}, 2, 1, 1), HasSubstr("tokens_per_expert_group[1]"));
  EXPECT_THAT(refused({1, -2}, 2, 1, 1), HasSubstr("got -2"));
  EXPECT_THAT(refused({1, 2}, 2, 1, 0), HasSubstr("pad_multiple must be at least 1, got 0"));
  // Sums of counts, rounding up, and sums of padded sizes, each beyond int64.
  EXPECT_THAT(refused({kMax, 1}, 2, 1, 1), HasSubstr("too large"));
  EXPECT_THAT(refused({kMax - 1}, 1, 1, 16), HasSubstr("too large"));
  EXPECT_THAT(refused({1, 1, 1}, 3, 1, kMax / 2), HasSubstr("too large"));
  // Fits in int64, but no vector can hold it.
  EXPECT_THAT(refused({kMax / 2}, 1, 1, 1), HasSubstr("too large"));
}

TEST(MaxPermutedRows, RoundsUpAndIsSixtyFourBit) {
  EXPECT_EQ(MaxPermutedRows(10, 2, 4), 20);
  EXPECT_EQ(MaxPermutedRows(333, 8, 16), 464);
  EXPECT_EQ(MaxPermutedRows(10, 3, 1), 13);
  EXPECT_EQ(MaxPermutedRows(0, 0, 16), 0);
  EXPECT_EQ(MaxPermutedRows(int64_t{1} << 31, 256, 128), (int64_t{1} << 31) + 256 * 128);
  EXPECT_EQ(MaxPermutedRows((int64_t{1} << 40) + 1, 256, 128), (int64_t{1} << 40) + 257 * 128);
  EXPECT_EQ(MaxPermutedRows(kMax - 15, 1, 8), kMax - 7);  // the largest multiple of 8
}

TEST(MaxPermutedRows, SaysWhenThereIsNoBound) {
  EXPECT_EQ(MaxPermutedRows(kMax, 1, 1), -1);
  EXPECT_EQ(MaxPermutedRows(0, kMax, 2), -1);
  EXPECT_EQ(MaxPermutedRows(kMax - 10, 1, 9), -1);
  EXPECT_EQ(MaxPermutedRows(-1, 1, 1), -1);
  EXPECT_EQ(MaxPermutedRows(1, -1, 1), -1);
  EXPECT_EQ(MaxPermutedRows(1, 1, 0), -1);
}

TEST(ContiguousShard, UnevenSplits) {
  const auto sizes = [](int32_t experts, int32_t shards) {
    std::vector<int32_t> result;
    int32_t next = 0;
    for (int32_t s = 0; s < shards; ++s) {
      const auto range = ContiguousShard(experts, s, shards);
      EXPECT_TRUE(range.ok()) << range.status();
      EXPECT_EQ(range->begin, next) << "gap or overlap before shard " << s;
      next = range->end;
      result.push_back(range->size());
    }
    EXPECT_EQ(next, experts);
    return result;
  };
  EXPECT_THAT(sizes(64, 4), ElementsAre(16, 16, 16, 16));
  EXPECT_THAT(sizes(10, 4), ElementsAre(3, 3, 2, 2));
  EXPECT_THAT(sizes(3, 4), ElementsAre(1, 1, 1, 0));
  EXPECT_THAT(sizes(0, 2), ElementsAre(0, 0));
  EXPECT_THAT(sizes(7, 1), ElementsAre(7));
  const int32_t most = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(ContiguousShard(most, most - 1, most)->end, most);
  EXPECT_EQ(ContiguousShard(most, 1, 2)->end, most);
}

TEST(ContiguousShard, RefusesShardsThatDoNotExist) {
  const auto refused = [](int32_t experts, int32_t shard, int32_t shards) {
    const auto range = ContiguousShard(experts, shard, shards);
    EXPECT_EQ(range.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(range.status().message());
  };
  EXPECT_THAT(refused(8, 4, 4), HasSubstr("[0, 4), got 4"));
  EXPECT_THAT(refused(8, -1, 4), HasSubstr("got -1"));
  EXPECT_THAT(refused(8, 0, 0), HasSubstr("[0, 0)"));
  EXPECT_THAT(refused(-1, 0, 1), HasSubstr("num_experts"));
}

}  // namespace
}  // namespace expertmesh
