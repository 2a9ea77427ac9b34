// expertmesh bench permute: what the router does to one token beside the gate.
#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "client/cli/bench/bench.h"
#include "client/cli/bench/report.h"
#include "client/cli/bench/synthetic_model.h"
#include "common/model/contiguous_shard.h"
#include "common/status.h"
#include "router/dispatch/plan.h"
#include "router/permutation/permute.h"

namespace expertmesh {
namespace {

struct Options {
  std::string json;
  int repetitions = 9;
  int64_t tokens = 16'384;
  int64_t round_tokens = 1024;
  int32_t experts = 256;
  int32_t top_k = 8;
  int64_t hidden_size = 2048;
  std::vector<int> servers = {1, 2, 4, 8, 16};
};

// [T, K] distinct experts of each token, uniformly: the router of an ideally balanced model.
std::vector<int32_t> RandomRouting(const Options& options) {
  std::vector<int32_t> ids(options.tokens * options.top_k);
  std::vector<int32_t> order(options.experts);
  for (int64_t t = 0; t < options.tokens; ++t) {
    const Tensor random = RandomNormal(DType::kF32, {options.experts}, 1, /*seed=*/t + 1);
    const float* keys = random.as<float>();
    for (int32_t e = 0; e < options.experts; ++e) order[e] = e;
    std::partial_sort(order.begin(), order.begin() + options.top_k, order.end(),
                      [keys](int32_t a, int32_t b) { return keys[a] > keys[b]; });
    std::copy_n(order.begin(), options.top_k, ids.begin() + t * options.top_k);
  }
  return ids;
}

// Nanoseconds of each part of the router's work on all tokens.
struct Sample {
  double plan = 0, gather = 0, combine = 0;
};

// The router's work on all tokens, cut into rounds, with one number of servers.
class Rounds {
 public:
  Rounds(const Options& options, absl::Span<const int32_t> ids, int servers)
      : options_(options), ids_(ids), server_of_expert_(options.experts) {
    for (int32_t s = 0; s < servers; ++s) {
      const ExpertRange range = *ContiguousShard(options.experts, s, servers);
      std::fill(server_of_expert_.begin() + range.begin, server_of_expert_.begin() + range.end, s);
    }
  }

  // hidden_states, output: [round_tokens, D], used by every round; replies: [round_tokens * K, D],
  // whose rows the servers answer with. So buffers are as warm as the router's.
  absl::StatusOr<Sample> Run(const Tensor& hidden_states, const Tensor& replies, Tensor* output) {
    Sample sample;
    rows_sent_ = 0;
    for (int64_t begin = 0; begin < options_.tokens; begin += options_.round_tokens) {
      const int64_t count = std::min(options_.round_tokens, options_.tokens - begin);
      const auto ids = ids_.subspan(begin * options_.top_k, count * options_.top_k);
      double start = Now();
      ASSIGN_OR_RETURN(const RoundPlan plan, Plan(ids));
      sample.plan += 1e9 * (Now() - start);
      start = Now();
      std::vector<const std::byte*> tokens(count);
      for (int64_t t = 0; t < count; ++t) {
        tokens[t] = hidden_states.data() + t * options_.hidden_size * sizeof(uint16_t);
      }
      for (const ServerSlice& slice : plan.slices) {
        rows_sent_ +=
            GatherRows(hidden_states.dtype(), options_.hidden_size, tokens, slice.row_tokens)
                .dim(0);
      }
      sample.gather += 1e9 * (Now() - start);
      const std::vector<Tensor> parts = Split(replies, plan);
      const std::vector<float> weights(ids.size(), 1.0f / static_cast<float>(options_.top_k));
      start = Now();
      CombineInput input;
      input.pairs = plan.pairs;
      input.replies = parts;
      input.topk_weights = weights;
      input.top_k = options_.top_k;
      input.hidden_size = options_.hidden_size;
      Combine(input, output->dtype(), output->data());
      sample.combine += 1e9 * (Now() - start);
    }
    return sample;
  }

  absl::StatusOr<RoundPlan> Plan(absl::Span<const int32_t> ids) const {
    return PlanRound(ids, options_.top_k, server_of_expert_, /*pad_multiple=*/1);
  }

  // Of the last run: rows that were gathered, and with them those that were combined.
  int64_t rows_sent() const { return rows_sent_; }
  int64_t rows_moved() const { return rows_sent_ + static_cast<int64_t>(ids_.size()); }

 private:
  // The servers' replies, each in memory of its own.
  std::vector<Tensor> Split(const Tensor& replies, const RoundPlan& plan) {
    std::vector<Tensor> parts;
    for (const ServerSlice& slice : plan.slices) {
      Tensor& part = buffers_[slice.server];
      if (part.num_elements() < slice.num_pairs * options_.hidden_size) {
        part = Tensor(replies.dtype(), {slice.num_pairs, options_.hidden_size});
        std::copy_n(replies.data(), part.num_bytes(), part.data());
      }
      parts.push_back(part);
    }
    return parts;
  }

  const Options& options_;
  const absl::Span<const int32_t> ids_;
  std::vector<int32_t> server_of_expert_;
  std::map<int32_t, Tensor> buffers_;  // by server; they grow to the largest round
  int64_t rows_sent_ = 0;
};

absl::Status Run(const Options& options) {
  if (options.top_k > options.experts) {
    return absl::InvalidArgumentError(absl::StrCat("top-k: expected at most the ", options.experts,
                                                   " experts, got ", options.top_k));
  }
  const auto tokens = static_cast<double>(options.tokens);
  const std::vector<int32_t> ids = RandomRouting(options);
  std::vector<int64_t> counts(options.experts);
  for (const int32_t id : ids) ++counts[id];
  const int64_t round_tokens = std::min(options.round_tokens, options.tokens);
  const std::vector<int64_t> row = {round_tokens, options.hidden_size};
  const Tensor hidden_states = RandomNormal(DType::kBF16, row, 1, /*seed=*/2);
  const Tensor replies = RandomNormal(
      DType::kBF16, {round_tokens * options.top_k, options.hidden_size}, 1, /*seed=*/3);
  Tensor output(DType::kBF16, row);
  std::fill_n(output.data(), output.num_bytes(), std::byte{0});

  std::vector<Rounds> rounds;
  for (const int servers : options.servers) rounds.emplace_back(options, ids, servers);
  double permute = 0, whole_plan = 0;
  std::vector<Sample> samples(rounds.size());
  std::vector<double> all_permutes, all_plans;
  std::vector<std::vector<Sample>> all_samples(rounds.size());
  const auto once = [&](int repetition) -> absl::Status {
    ShowProgress(absl::StrCat("repetition ", repetition + 1, " of ", options.repetitions));
    double start = Now();
    RETURN_IF_ERROR(GeneratePermuteIndices(counts, options.experts, /*num_ranks=*/1,
                                           /*pad_multiple=*/1, EmptyExperts::kZeroRows)
                        .status());
    permute = 1e9 * (Now() - start);
    start = Now();
    RETURN_IF_ERROR(rounds.front().Plan(ids).status());
    whole_plan = 1e9 * (Now() - start);
    for (size_t i = 0; i < rounds.size(); ++i) {
      ASSIGN_OR_RETURN(samples[i], rounds[i].Run(hidden_states, replies, &output));
    }
    return absl::OkStatus();
  };
  const auto keep = [&] {
    all_permutes.push_back(permute);
    all_plans.push_back(whole_plan);
    for (size_t i = 0; i < rounds.size(); ++i) all_samples[i].push_back(samples[i]);
  };
  RETURN_IF_ERROR(once(0));  // warms up
  ASSIGN_OR_RETURN(const Repetitions repetitions,
                   Repeat(options.repetitions, /*threads=*/1, once, keep));

  Report report("permute");
  const auto add = [&](const char* name, const std::vector<double>& nanoseconds) {
    nlohmann::ordered_json one = {
        {"case", name},
        {"tokens", options.tokens},
        {"experts", options.experts},
        {"ms_min", 1e-6 * *std::min_element(nanoseconds.begin(), nanoseconds.end())},
        {"ms_median", 1e-6 * Median(nanoseconds)},
        {"ns_per_token", Median(nanoseconds) / tokens}};
    AddRepetitions(repetitions, &one);
    report.Add(std::move(one));
  };
  add("generate_permute_indices", all_permutes);
  add(absl::StrCat("plan_round, ", options.servers.front(), " server(s)").c_str(), all_plans);
  double first_per_row = 0;
  for (size_t i = 0; i < rounds.size(); ++i) {
    std::vector<double> plan, gather, combine, total;
    for (const Sample& sample : all_samples[i]) {
      plan.push_back(sample.plan);
      gather.push_back(sample.gather);
      combine.push_back(sample.combine);
      total.push_back(sample.plan + sample.gather + sample.combine);
    }
    const double median = Median(total);
    const double per_row = median / static_cast<double>(rounds[i].rows_moved());
    if (i == 0) first_per_row = per_row;
    nlohmann::ordered_json one = {
        {"case", "plan+gather+combine"},
        {"tokens", options.tokens},
        {"experts", options.experts},
        {"servers", options.servers[i]},
        {"ms_min", 1e-6 * *std::min_element(total.begin(), total.end())},
        {"ms_median", 1e-6 * median},
        {"ns_per_token", median / tokens},
        {"plan_ns", Median(plan) / tokens},
        {"gather_ns", Median(gather) / tokens},
        {"combine_ns", Median(combine) / tokens},
        {"rows_sent_per_token", static_cast<double>(rounds[i].rows_sent()) / tokens},
        {"gather_ns_per_row",
         Median(gather) / static_cast<double>(std::max<int64_t>(1, rounds[i].rows_sent()))},
        {"ns_per_row", per_row},
        {"ratio_to_first", per_row / first_per_row}};
    AddRepetitions(repetitions, &one);
    report.Add(std::move(one));
  }
  report.Note(
      "Rows moved: those gathered for the servers and the top-k ones combined. ratio_to_first near "
      "1: the cost grows as they do.");
  return report.Finish(options.json);
}

}  // namespace

Command AddBenchPermute(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.footer(
      "On one core, bf16 rows, uniformly random routing: generating the permutation indices, and "
      "per\n"
      "token what planning a round, gathering its rows and combining the replies costs the router, "
      "by\n"
      "the number of servers. The columns *_ns are nanoseconds per token.");
  AddJsonOption(app, &options->json);
  app.add_option("--repetitions", options->repetitions, "repetitions that count")
      ->capture_default_str()
      ->check(CLI::Range(1, 10'000));
  app.add_option("--tokens", options->tokens, "tokens")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option(
         "--round-tokens", options->round_tokens,
         "tokens of the rounds into which they are cut to be planned, gathered and combined")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--experts", options->experts, "experts of the layer")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--top-k", options->top_k, "experts of a token")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 10));
  app.add_option("--hidden-size", options->hidden_size, "width of a row")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--servers", options->servers, "numbers of servers, separated by commas")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  return [options] { return Finish(Run(*options)); };
}

}  // namespace expertmesh
