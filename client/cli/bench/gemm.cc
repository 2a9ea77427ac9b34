// expertmesh bench gemm: the grouped GEMM against the roofline.
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "client/cli/bench/bench.h"
#include "client/cli/bench/report.h"
#include "client/cli/bench/synthetic_model.h"
#include "common/kernels/compute_pool.h"
#include "common/kernels/for_loop_gemm.h"
#include "common/kernels/for_loop_quantize.h"
#include "common/kernels/grouped_gemm.h"
#include "common/kernels/quantize.h"
#include "common/numerics/flush_denormals.h"
#include "common/quantized_format.h"
#include "common/status.h"

namespace expertmesh {
namespace {

struct Options {
  CommonBenchOptions common;
  int threads = 1;
  int64_t n = 2048;
  int64_t k = 2048;
  int64_t weights_mib = 512;
  std::vector<int64_t> rows = {1, 4, 8, 16, 64, 256};
  std::vector<std::string> formats = {"bf16", "fp32", "f16"};
  std::vector<std::string> isas;  // empty: all of this processor
};

// Weights, and the rows that go with them: hidden states, or what those are quantised to.
struct GemmFormat {
  BenchFormat weights;
  std::optional<QuantizedFormat> rows = std::nullopt;
};

absl::StatusOr<GemmFormat> ParseGemmFormat(const std::string& name) {
  for (const QuantizedFormat format :
       {QuantizedFormat::kFp8Rowwise, QuantizedFormat::kFp8Block128, QuantizedFormat::kMxfp8}) {
    if (name != NameOf(format)) continue;
    return GemmFormat{{NameOf(format), WeightFormatOf(format), DType::kF8_E4M3, DType::kBF16},
                      format};
  }
  auto weights = ParseBenchFormat("formats", name);
  if (weights.ok()) return GemmFormat{*weights};
  return absl::InvalidArgumentError(
      absl::StrCat("formats: expected bf16, fp32, f16, fp8, fp8_row, mxfp4, fp8_rowwise, "
                   "fp8_block128 or mxfp8, got \"",
                   name, "\""));
}

// One format: as many matrices as fill --weights-mib, so that none is in a cache when its turn
// comes, and rows for all of them.
class GemmBench {
 public:
  GemmBench(const Options& options, const GemmFormat& format, ComputePool* pool)
      : format_(format.weights),
        rows_(format.rows),
        n_(options.n),
        k_(options.k),
        num_(((options.weights_mib << 20) + BytesOfMatrix() - 1) / BytesOfMatrix()),
        pool_(pool),
        scratch_(pool->threads()),
        weights_(format_.format, format_.dtype, num_, n_, k_),
        matrix_(RandomWeights(format_, n_, k_, 0.02f, /*seed=*/1)),
        input_(RandomNormal(format_.activations, {MaxRows(options), k_}, 1, /*seed=*/2)) {
    if (rows_.has_value()) Quantize();
    // The same values for all, which no kernel notices; each at a place of its own.
    const double start = Now();
    pool_->Run([this](int thread) {
      for (int64_t i = thread; i < num_; i += pool_->threads()) weights_.Pack(i, View());
    });
    pack_seconds_ = Now() - start;
  }

  int64_t num() const { return num_; }
  double bytes() const { return static_cast<double>(num_ * BytesOfMatrix()); }
  // Of weights packed, the memory's first touch included.
  double pack_bandwidth() const { return bytes() / pack_seconds_; }
  double flops(int64_t rows) const { return 2.0 * static_cast<double>(num_ * rows * n_ * k_); }

  // Every matrix multiplies `rows` rows of its own; the rows are brought to the kernel's form on
  // the way, as in a server, quantised ones from their codes.
  absl::Status Run(Isa isa, int64_t rows) {
    const DType activations = format_.activations;
    const DType row_dtype = GemmRowDType(isa, format_.dtype, activations);
    const int64_t row_bytes = GemmRowBytes(row_dtype, k_);
    const int64_t total = num_ * rows;
    std::byte* const x = x_.Get(total * row_bytes);
    auto* const y = reinterpret_cast<float*>(y_.Get(total * n_ * sizeof(float)));
    std::vector<GemmGroup> groups;
    for (int64_t i = 0; i < num_; ++i) AddGroups(i, i * rows, rows, &groups);
    GroupedGemm::Args args = {
        isa, &weights_, groups, x, row_dtype, GemmOutput::kRows, RowFormat::kF32, y, n_};
    const int64_t per_row = HasFactors() ? scales_.dim(1) : 0;
    auto* const x_scales = reinterpret_cast<float*>(x_scales_.Get(total * per_row * sizeof(float)));
    if (HasFactors()) args.x_scales = x_scales;
    GroupedGemm gemm(args);
    const int64_t threads = pool_->threads();
    pool_->Run([&](int thread) {
      for (int64_t r = total * thread / threads; r < total * (thread + 1) / threads; ++r) {
        if (!rows_.has_value()) {
          LoadGemmRow(isa, activations, Row(r), k_, row_dtype, x + r * row_bytes);
          continue;
        }
        LoadQuantizedGemmRow(isa, *rows_, Codes(r), Scales(r), k_, row_dtype, x + r * row_bytes);
        if (HasFactors()) std::memcpy(x_scales + r * per_row, Scales(r), per_row * sizeof(float));
      }
      pool_->Barrier();
      gemm.Run(scratch_[thread], [] { return false; });
    });
    return absl::OkStatus();
  }

  // That Run() computes the bits of the reference, in its first, its middle and its last row.
  absl::Status Check(Isa isa, int64_t rows) {
    const size_t bytes = static_cast<size_t>(num_ * rows * n_) * sizeof(float);
    std::memset(y_.Get(bytes), 0xff, bytes);
    RETURN_IF_ERROR(Run(isa, rows));
    const ScopedFlushDenormals flush;
    const auto* const y = reinterpret_cast<const float*>(y_.Get(0));
    std::vector<float> x(k_), expected(n_);
    for (const int64_t row : {int64_t{0}, num_ * rows / 2, num_ * rows - 1}) {
      if (rows_.has_value()) {
        ForLoopDequantizeRow(*rows_, Codes(row), Scales(row), k_, x.data());
      } else {
        for (int64_t i = 0; i < k_; ++i) x[i] = LoadFloat(format_.activations, Row(row), i);
      }
      ForLoopMatVec(x.data(), View(), expected.data(),
                    HasFactors() ? reinterpret_cast<const float*>(Scales(row)) : nullptr);
      if (std::memcmp(expected.data(), y + row * n_, n_ * sizeof(float)) != 0) {
        return absl::InternalError(absl::StrCat("row ", row, " of ", format_.name, " on ",
                                                NameOf(isa), " differs from the reference"));
      }
    }
    return absl::OkStatus();
  }

 private:
  static int64_t MaxRows(const Options& options) {
    return *std::max_element(options.rows.begin(), options.rows.end());
  }
  const std::byte* Row(int64_t row) const {
    return input_.data() + row % input_.dim(0) * k_ * BytesOf(format_.activations);
  }

  void Quantize() {
    codes_ = Tensor(DType::kF8_E4M3, input_.shape());
    scales_ = Tensor(ScaleDType(*rows_), {input_.dim(0), ScalesPerRow(*rows_, k_)});
    QuantizeRows(BestIsa(), {*rows_, input_.dtype(), input_.data(), input_.dim(0), k_,
                             codes_.as<uint8_t>(), scales_.data()});
  }
  const uint8_t* Codes(int64_t row) const {
    return codes_.as<uint8_t>() + row % input_.dim(0) * k_;
  }
  const std::byte* Scales(int64_t row) const {
    return scales_.data() + row % input_.dim(0) * scales_.dim(1) * BytesOf(scales_.dtype());
  }
  // Whether rows have scales that the GEMM applies.
  bool HasFactors() const { return rows_.has_value() && scales_.dtype() == DType::kF32; }

  int64_t BytesOfMatrix() const {
    const bool exponents = ScaleDType(format_.format) == DType::kU8;
    const int64_t scales = exponents ? n_ * k_ / kMxBlockK : 0;
    return n_ * k_ * BitsOf(format_.dtype) / 8 + scales;
  }
  WeightView View() const { return {format_.format, matrix_.values, matrix_.scales}; }

  const BenchFormat format_;
  const std::optional<QuantizedFormat> rows_;
  const int64_t n_, k_, num_;
  ComputePool* const pool_;
  std::vector<Workspace> scratch_;
  PackedWeights weights_;
  const BenchWeights matrix_;
  const Tensor input_;
  Tensor codes_, scales_;  // of input_, where it is quantised
  Workspace x_, x_scales_, y_;
  double pack_seconds_ = 0;
};

absl::Status Run(const Options& options) {
  std::vector<Isa> isas;
  for (const std::string& name : options.isas) {
    ASSIGN_OR_RETURN(const Isa isa, ParseIsa(name));
    isas.push_back(isa);
  }
  if (isas.empty()) isas = SupportedIsas();
  std::vector<GemmFormat> formats;
  for (const std::string& name : options.formats) {
    ASSIGN_OR_RETURN(const GemmFormat format, ParseGemmFormat(name));
    if (format.weights.format == WeightFormat::kMxfp4 && options.k % 2 == 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("k: expected an even number for mxfp4, got ", options.k));
    }
    formats.push_back(format);
  }
  Probe probe(options.threads, static_cast<size_t>(options.common.probe_mib) << 20);
  ComputePool pool(options.threads);
  Report report("gemm");
  for (const GemmFormat& gemm_format : formats) {
    const BenchFormat& format = gemm_format.weights;
    ShowProgress(absl::StrCat("packing weights in ", format.name));
    GemmBench bench(options, gemm_format, &pool);
    for (const int64_t rows : options.rows) {
      std::vector<BenchCase> cases;
      for (const Isa isa : isas) {
        RETURN_IF_ERROR(bench.Check(isa, rows));
        BenchCase one;
        one.name = absl::StrCat(format.name, ", ", NameOf(isa), ", ", rows, " rows");
        one.ceiling = CeilingOf(isa, format.activations, format.dtype);
        one.run = [&bench, isa, rows] { return bench.Run(isa, rows); };
        one.bytes = [&bench] { return bench.bytes(); };
        one.flops = [&bench, rows] { return bench.flops(rows); };
        cases.push_back(std::move(one));
      }
      ASSIGN_OR_RETURN(
          const std::vector<Measurement> measurements,
          Measure(probe, cases, {.repetitions = options.common.repetitions, .warm_up = 0}));
      for (size_t i = 0; i < cases.size(); ++i) {
        nlohmann::ordered_json row = {{"case", "gemm"},         {"format", format.name},
                                      {"isa", NameOf(isas[i])}, {"threads", options.threads},
                                      {"n", options.n},         {"k", options.k},
                                      {"experts", bench.num()}, {"rows_per_expert", rows}};
        row["pack_gb_s"] = 1e-9 * bench.pack_bandwidth();
        AddMeasurement(measurements[i], &row);
        report.Add(std::move(row));
      }
    }
  }
  return report.Finish(options.common.json);
}

}  // namespace

Command AddBenchGemm(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.footer(
      "Multiplies rows with matrices [N, K] that together are too large for any cache; every "
      "matrix\n"
      "is visited once, with as many rows of its own as --rows says. Hidden states have the dtype "
      "of\n"
      "the weights, BF16 for fp8 (scales of blocks), fp8_row and mxfp4; they are quantised as the\n"
      "weights are for fp8_rowwise, fp8_block128 and mxfp8. The instruction sets take turns, and\n"
      "each has to give the bits of the scalar reference first.\n\n"
      "  expertmesh bench gemm --formats bf16 --isa avx2,avx512bf16 --rows 1,64\n"
      "  expertmesh bench gemm --n 1536 --k 2048 --threads 1\n\n"
      "Few rows are bound by memory (one row takes two operations for each weight read), many by "
      "the\n"
      "multiply-adds: column `bound`.");
  AddCommonBenchOptions(app, &options->common, /*repetitions=*/5);
  AddThreadsOption(app, &options->threads);
  app.add_option("--n", options->n, "outputs of a matrix")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--k", options->k, "inputs of a matrix")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--weights-mib", options->weights_mib, "weights of each format, at least, in MiB")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--rows", options->rows, "rows per matrix, separated by commas")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 16));
  app.add_option("--formats", options->formats,
                 "separated by commas: bf16, fp32, f16, fp8, fp8_row, mxfp4, fp8_rowwise, "
                 "fp8_block128, mxfp8")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--isa", options->isas,
                 "instruction sets, separated by commas (default: all of this processor)")
      ->delimiter(',');
  return [options] { return Finish(Run(*options)); };
}

}  // namespace expertmesh
