// Options that several programs have, for CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "common/kernels/isa.h"
#include "common/model/open_model.h"

namespace expertmesh {

// Adds --engine and --isa; what they point to is the default.
inline void AddEngineOptions(CLI::App& app, EngineKind* engine, Isa* isa) {
  const auto store = [](const auto& parsed, auto* value) {
    if (!parsed.ok()) throw CLI::ValidationError(std::string(parsed.status().message()));
    *value = *parsed;
  };
  app.add_option_function<std::string>(
         "--engine", [=](const std::string& name) { store(ParseEngineKind(name), engine); },
         "what computes GEMMs: grouped (vectorised) or for_loop (the slow reference, on one "
         "thread); "
         "the same bits")
      ->default_str(NameOf(*engine));
  app.add_option_function<std::string>(
         "--isa", [=](const std::string& name) { store(ParseIsa(name), isa); },
         "instruction set: avx2, avx512, avx512bf16 or auto, this machine's best; the "
         "same bits")
      ->default_str("auto");
}

// Adds --precision and --pad-multiple: how the experts of a model are computed.
inline void AddPrecisionOptions(CLI::App& app, ModelSource* source) {
  app.add_option("--precision", source->precision,
                 "number format of the experts of MoE layers: native, fp8_rowwise, fp8_block128, "
                 "mxfp8 or mxfp8_rceil; of\nsome layers: mxfp8:layers=1,3-5. The same on router "
                 "and servers (default: native, or the preset's own)");
  app.add_option("--pad-multiple", source->pad_multiple,
                 "pad the rows of each expert to this multiple, one of the format's own; 0: that. "
                 "The same on router and\nservers; no result depends on it")
      ->capture_default_str()
      ->check(CLI::Range(0, 4096));
}

// Adds --model, --preset and AddPrecisionOptions().
inline void AddModelOptions(CLI::App& app, ModelSource* source) {
  app.add_option("--model", source->folder, "Hugging Face model folder");
  app.add_option("--preset", source->preset,
                 "instead of it, random weights in a shape that `expertmesh presets` names");
  AddPrecisionOptions(app, source);
}

// The arguments that say the same to another program.
inline std::vector<std::string> ModelArguments(const ModelSource& source) {
  std::vector<std::string> arguments = {"--pad-multiple", std::to_string(source.pad_multiple)};
  if (!source.folder.empty()) arguments.insert(arguments.end(), {"--model", source.folder});
  if (!source.preset.empty()) arguments.insert(arguments.end(), {"--preset", source.preset});
  if (!source.precision.empty()) {
    arguments.insert(arguments.end(), {"--precision", source.precision});
  }
  return arguments;
}

// Adds --dispatch-dtype and --empty-experts: how a router sends rows to experts.
inline void AddDispatchOptions(CLI::App& app, std::string* dispatch_dtype,
                               std::string* empty_experts) {
  app.add_option("--dispatch-dtype", *dispatch_dtype,
                 "what rows are sent to the servers as: native, the request's dtype; or fp8, one "
                 "byte an element and\na scale for 128, where experts compute natively")
      ->capture_default_str()
      ->check(CLI::IsMember({"native", "fp8"}));
  app.add_option("--empty-experts", *empty_experts,
                 "what an expert without rows gets where groups are padded (--precision): zero "
                 "positions, or one block\nof padding, as some grouped GEMMs want; the same "
                 "results")
      ->capture_default_str()
      ->check(CLI::IsMember({"zero", "block"}));
}

}  // namespace expertmesh
