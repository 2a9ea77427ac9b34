// Options that several programs have, for CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "common/kernels/isa.h"

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

}  // namespace expertmesh
