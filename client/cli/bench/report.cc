#include "client/cli/bench/report.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/rpc/process.h"

namespace expertmesh {
namespace {

using nlohmann::ordered_json;

std::string CpuName() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

ordered_json Machine() {
  ordered_json isas = ordered_json::array();
  for (const Isa isa : SupportedIsas()) isas.push_back(NameOf(isa));
  return {{"cpu", CpuName()},
          {"isa", isas},
          {"cores", std::thread::hardware_concurrency()},
          {"date", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone())},
          {"version", std::string(kVersion)}};
}

// Three to four digits that matter.
std::string CellText(const ordered_json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_number_float()) return value.dump();
  const double number = value.get<double>();
  char text[32];
  std::snprintf(text, sizeof(text), "%.*f",
                number >= 1000 || number == 0 ? 0
                : number >= 100               ? 1
                : number >= 1                 ? 2
                                              : 4,
                number);
  return text;
}

}  // namespace

Report::Report(const std::string& bench) : bench_(bench) {}

void Report::Add(ordered_json row) { rows_.push_back(std::move(row)); }

void Report::Note(const std::string& text) { notes_.push_back(text); }

void Report::PrintTable(size_t begin, size_t end) const {
  const std::vector<ordered_json> rows(rows_.begin() + begin, rows_.begin() + end);
  std::vector<std::string> columns;
  for (const ordered_json& row : rows) {
    for (const auto& [name, value] : row.items()) {
      if (std::find(columns.begin(), columns.end(), name) == columns.end()) columns.push_back(name);
    }
  }
  // What is the same in all rows stands above the table once.
  const auto text = [](const ordered_json& row, const std::string& name) {
    return row.contains(name) ? CellText(row[name]) : "-";
  };
  std::vector<std::string> shown, common;
  for (const std::string& name : columns) {
    const bool varies = std::any_of(rows.begin(), rows.end(), [&](const ordered_json& row) {
      return text(row, name) != text(rows.front(), name);
    });
    if (varies || name == "case") {
      shown.push_back(name);
    } else {
      common.push_back(absl::StrCat(name, " ", text(rows.front(), name)));
    }
  }
  if (!common.empty()) {
    std::printf("%s: %s\n\n", bench_.c_str(), absl::StrJoin(common, ", ").c_str());
  }
  std::vector<std::vector<std::string>> lines = {shown};
  for (const ordered_json& row : rows) {
    std::vector<std::string>& line = lines.emplace_back();
    for (const std::string& name : shown) line.push_back(text(row, name));
  }
  for (const std::vector<std::string>& line : lines) {
    for (size_t i = 0; i < shown.size(); ++i) {
      size_t width = 0;
      for (const std::vector<std::string>& other : lines) width = std::max(width, other[i].size());
      // The first column says what the row is; numbers stand to the right.
      std::printf(i == 0 ? "%-*s" : "  %*s", static_cast<int>(width), line[i].c_str());
    }
    std::printf("\n");
  }
}

absl::Status Report::Finish(const std::string& json_file) const {
  for (size_t i = 0; i < tables_.size(); ++i) {
    if (i > 0) std::printf("\n");
    PrintTable(tables_[i], i + 1 < tables_.size() ? tables_[i + 1] : rows_.size());
  }
  for (const ordered_json& note : notes_) std::printf("%s\n", note.get<std::string>().c_str());
  std::fflush(stdout);
  if (json_file.empty()) return absl::OkStatus();
  std::ofstream file(json_file);
  const ordered_json whole = {
      {"bench", bench_}, {"machine", Machine()}, {"rows", rows_}, {"notes", notes_}};
  file << whole.dump(2) << "\n";
  file.close();
  if (!file) {
    return absl::PermissionDeniedError(absl::StrCat("json: cannot write \"", json_file, "\""));
  }
  return absl::OkStatus();
}

void AddRepetitions(const Repetitions& repetitions, ordered_json* row) {
  (*row)["dropped"] = repetitions.dropped;
  (*row)["contended"] = repetitions.contended;
}

void AddMeasurement(const Measurement& measurement, ordered_json* row) {
  const double median = Median(measurement.seconds);
  ordered_json& out = *row;
  out["ms_min"] = 1e3 * *std::min_element(measurement.seconds.begin(), measurement.seconds.end());
  out["ms_median"] = 1e3 * median;
  out["gb_per_s"] = 1e-9 * measurement.bytes / median;
  out["gflops"] = 1e-9 * measurement.flops / median;
  out["bound"] = measurement.memory_bound ? "memory" : "fma";
  out["efficiency"] = Median(measurement.efficiency);
  out["probe_gb_per_s"] = 1e-9 * Median(measurement.bandwidth);
  out["probe_gflops"] = 1e-9 * Median(measurement.peak);
  AddRepetitions(measurement.repetitions, row);
  if (measurement.ProbeError()) out["error"] = "probe";
}

}  // namespace expertmesh
