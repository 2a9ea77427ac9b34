// The least that gRPC costs for one MoE layer: client -> router -> two servers -> router -> client,
// with the rows and nothing else of it.
//
// The services' methods and helpers are the real ones, their messages raw bytes: a RelayHeader,
// `extra_bytes` that stand for ids and indices, and rows. Every token's row goes to both servers,
// each answers with top_k / 2 rows a token, the router adds them. Rows are read where gRPC put
// them; one message a hop; one call at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/tensor.h"

namespace expertmesh {

struct RelayHeader {
  int64_t tokens = 0;
  int64_t hidden_size = 0;  // of bf16 rows
  int32_t top_k = 0;
  int32_t extra_bytes = 0;
};

// hidden_size has to be a multiple of it.
inline constexpr int64_t kRelayBlock = 32;

// The two kinds of processes: print "listening HOST:PORT" and run until SIGTERM, which ends the
// process. `servers`: "HOST:PORT,HOST:PORT".
absl::Status RunRelayServer();
absl::Status RunRelayRouter(const std::string& servers);

// The client. Not thread-safe.
class RelayClient {
 public:
  static absl::StatusOr<std::unique_ptr<RelayClient>> Create(const std::string& router);
  virtual ~RelayClient() = default;

  // hidden_states [T, D] BF16, D a multiple of kRelayBlock; top_k even. The output [T, D]: every
  // row a server answers with is filled with kRelayFill, and its weight is 1 / top_k.
  virtual absl::StatusOr<Tensor> Forward(const Tensor& hidden_states, int32_t top_k) = 0;
};

inline constexpr uint8_t kRelayFill = 0x3f;  // of every byte: a finite number, 0.746

}  // namespace expertmesh
