// expertmesh bench roofline: the two ceilings of every kernel.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "client/cli/bench/bench.h"
#include "client/cli/bench/report.h"
#include "common/status.h"

namespace expertmesh {
namespace {

constexpr int64_t kIterations = 1'000'000;  // of the peak: a tenth of a second

struct Options {
  CommonBenchOptions common;
  int threads = 1;
};

absl::Status Run(const Options& options) {
  Probe probe(options.threads, static_cast<size_t>(options.common.probe_mib) << 20);
  const std::vector<FmaKind> kinds = SupportedFmaKinds();
  double bandwidth = 0;
  std::vector<double> peaks(kinds.size());
  std::vector<double> all_bandwidths;
  std::vector<std::vector<double>> all_peaks(kinds.size());
  const auto once = [&](int repetition) {
    ShowProgress(absl::StrCat("repetition ", repetition + 1));
    bandwidth = 1e-9 * probe.ReadBandwidth(probe.buffer_bytes());
    for (size_t k = 0; k < kinds.size(); ++k) {
      peaks[k] = 1e-9 * probe.PeakFlops(kinds[k], kIterations);
    }
    return absl::OkStatus();
  };
  const auto keep = [&] {
    all_bandwidths.push_back(bandwidth);
    for (size_t k = 0; k < kinds.size(); ++k) all_peaks[k].push_back(peaks[k]);
  };
  ASSIGN_OR_RETURN(const Repetitions repetitions,
                   Repeat(options.common.repetitions, options.threads, once, keep));

  Report report("roofline");
  const auto add = [&](const char* name, const char* unit, const std::vector<double>& values) {
    nlohmann::ordered_json row = {{"case", name},
                                  {"threads", options.threads},
                                  {"median", Median(values)},
                                  {"max", *std::max_element(values.begin(), values.end())},
                                  {"unit", unit}};
    AddRepetitions(repetitions, &row);
    report.Add(std::move(row));
  };
  add("read", "GB/s", all_bandwidths);
  for (size_t k = 0; k < kinds.size(); ++k) add(NameOf(kinds[k]), "GFLOP/s", all_peaks[k]);
  return report.Finish(options.common.json);
}

}  // namespace

Command AddBenchRoofline(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.footer("Reads memory and multiplies in registers on all threads at once.");
  options->common.probe_mib = 2048;
  AddCommonBenchOptions(app, &options->common, /*repetitions=*/7);
  AddThreadsOption(app, &options->threads);
  return [options] { return Finish(Run(*options)); };
}

}  // namespace expertmesh
