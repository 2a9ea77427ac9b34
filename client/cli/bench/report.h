// What the benchmarks print and write: a table for people, JSON for programs.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cli/bench/probe.h"
#include "nlohmann/json.hpp"

namespace expertmesh {

// A benchmark's rows. Not thread-safe.
class Report {
 public:
  // `bench`: its name, for example "gemm".
  explicit Report(const std::string& bench);

  // One row: column names and values in order. Rows need not have the same columns.
  void Add(nlohmann::ordered_json row);
  // The rows that follow stand in a table of their own, with other columns.
  void NextTable() { tables_.push_back(rows_.size()); }
  // A line below the tables, and in "notes" of the JSON.
  void Note(const std::string& text);

  // Prints the tables to standard output and, unless `json_file` is empty, writes there an object
  // with "bench", "machine" {cpu, isa, cores, date, version}, "rows" and "notes". PERMISSION_DENIED
  // naming the file when it cannot be written.
  absl::Status Finish(const std::string& json_file) const;

 private:
  void PrintTable(size_t begin, size_t end) const;

  const std::string bench_;
  std::vector<size_t> tables_ = {0};  // the first row of each
  nlohmann::ordered_json rows_ = nlohmann::ordered_json::array();
  nlohmann::ordered_json notes_ = nlohmann::ordered_json::array();
};

// Appends "dropped" and "contended".
void AddRepetitions(const Repetitions& repetitions, nlohmann::ordered_json* row);

// Appends what Measure() found to a row: ms_min, ms_median, gb_per_s, gflops, bound, efficiency,
// the probes' medians, AddRepetitions(), and "error": "probe" where the efficiency cannot be true.
void AddMeasurement(const Measurement& measurement, nlohmann::ordered_json* row);

}  // namespace expertmesh
