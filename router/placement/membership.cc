#include "router/placement/membership.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rpc/server_identity.h"
#include "common/status.h"
#include "common/text.h"

namespace expertmesh {

std::vector<int32_t> LayerPlacement::Missing(absl::Span<const int32_t> experts) const {
  std::vector<int32_t> missing;
  for (const int32_t expert : experts) {
    if (server_of_expert[expert] < 0) missing.push_back(expert);
  }
  std::sort(missing.begin(), missing.end());
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  return missing;
}

absl::Status NoServer(int32_t layer, absl::Span<const int32_t> experts, const std::string& why) {
  return absl::UnavailableError(absl::StrCat("layer ", layer, ": no live server holds expert",
                                             experts.size() == 1 ? " " : "s ", IdRanges(experts),
                                             why));
}

Membership::Membership(const ModelDescription& model, std::string fingerprint, std::string numerics,
                       absl::Duration startup_grace)
    : model_(model),
      fingerprint_(std::move(fingerprint)),
      numerics_(std::move(numerics)),
      grace_end_(absl::Now() + startup_grace) {
  for (const LayerDescription& layer : model_.layers) {
    ever_served_[layer.layer].resize(layer.num_held());
  }
}

absl::StatusOr<uint64_t> Membership::Register(const ServerRegistration& registration) {
  RETURN_IF_ERROR(CheckServerName("registration.name", registration.name));
  if (registration.address.empty()) {
    return absl::InvalidArgumentError("registration.address: must not be empty");
  }
  if (registration.numerics != numerics_) {
    return absl::FailedPreconditionError(
        absl::StrCat("registration.numerics: server ", registration.name, " computes as \"",
                     registration.numerics, "\", this router as \"", numerics_,
                     "\"; run the same version everywhere"));
  }
  if (registration.model_fingerprint != fingerprint_) {
    return absl::FailedPreconditionError(
        absl::StrCat("registration.model_fingerprint: server ", registration.name,
                     " has the model ", registration.model_fingerprint, ", this router ",
                     fingerprint_, "; give all of them the same --model folder"));
  }
  for (const auto& [layer, experts] : registration.experts) {
    const LayerDescription* description = model_.Find(layer);
    if (description == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("registration.layers: the model has no MoE layer ", layer));
    }
    for (size_t i = 0; i < experts.size(); ++i) {
      if (experts[i] < (i == 0 ? 0 : experts[i - 1] + 1) || experts[i] >= description->num_held()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "registration.layers: layer ", layer, ": expected ascending expert ids in [0, ",
            description->num_held(), "), got ", experts[i]));
      }
    }
  }
  std::shared_ptr<ExpertBackend> dropped;  // destroyed after the lock is released
  absl::MutexLock lock(&mutex_);
  Server& server = servers_[registration.name];
  if (server.ticket != 0 && server.record.state != ServerState::kDown &&
      server.record.registration.address != registration.address) {
    return absl::AlreadyExistsError(
        absl::StrCat("registration.name: \"", registration.name, "\" at ", registration.address,
                     " is taken by the live server at ", server.record.registration.address));
  }
  server.ticket = next_ticket_++;
  server.record = {registration, ServerState::kConnecting, 0};
  dropped = std::move(server.backend);
  server.backend = nullptr;
  Changed();
  return server.ticket;
}

void Membership::SetServing(uint64_t ticket, std::shared_ptr<ExpertBackend> backend) {
  absl::MutexLock lock(&mutex_);
  Server* server = Find(ticket);
  if (server == nullptr) return;
  server->record.state = ServerState::kServing;
  server->backend.swap(backend);  // the old one is destroyed after the lock is released
  for (const auto& [layer, experts] : server->record.registration.experts) {
    for (const int32_t expert : experts) ever_served_[layer][expert] = true;
  }
  Changed();
}

void Membership::SetRows(uint64_t ticket, uint64_t rows) {
  absl::MutexLock lock(&mutex_);
  if (Server* server = Find(ticket)) server->record.rows = rows;
}

void Membership::SetTimes(uint64_t ticket, uint64_t gather_us, uint64_t gemm_us) {
  absl::MutexLock lock(&mutex_);
  if (Server* server = Find(ticket)) {
    server->record.gather_us = gather_us;
    server->record.gemm_us = gemm_us;
  }
}

void Membership::SetDown(uint64_t ticket) {
  std::shared_ptr<ExpertBackend> dropped;  // destroyed after the lock is released
  absl::MutexLock lock(&mutex_);
  Server* server = Find(ticket);
  if (server == nullptr) return;
  server->record.state = ServerState::kDown;
  dropped = std::move(server->backend);
  server->backend = nullptr;
  Changed();
}

absl::StatusOr<LayerPlacement> Membership::WaitFor(int32_t layer, absl::Span<const int32_t> experts,
                                                   absl::Time deadline,
                                                   const std::function<bool()>& cancelled) const {
  const LayerDescription* description = model_.Find(layer);
  if (description == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("layer: the model has no MoE layer ", layer));
  }
  absl::MutexLock lock(&mutex_);
  while (true) {
    LayerPlacement placement = PlaceLocked(*description);
    const std::vector<int32_t> missing = placement.Missing(experts);
    if (missing.empty()) return placement;
    const bool may_come = std::none_of(
        missing.begin(), missing.end(),
        [this, layer](int32_t expert)
            ABSL_SHARED_LOCKS_REQUIRED(mutex_) -> bool { return ever_served_.at(layer)[expert]; });
    const absl::Time now = absl::Now();
    if (!may_come || now >= grace_end_ || now >= deadline) {
      return NoServer(layer, missing,
                      may_come ? " (none has registered since the router started)" : "");
    }
    if (cancelled()) return absl::CancelledError("the caller has given up");
    changed_.WaitWithDeadline(&mutex_, std::min({now + kCancelPoll, grace_end_, deadline}));
  }
}

std::vector<ServerRecord> Membership::Servers() const {
  absl::MutexLock lock(&mutex_);
  std::vector<ServerRecord> records;
  for (const auto& [name, server] : servers_) {
    if (server.ticket != 0) records.push_back(server.record);
  }
  return records;
}

uint64_t Membership::epoch() const {
  absl::MutexLock lock(&mutex_);
  return epoch_;
}

std::string Membership::Missing() const {
  absl::MutexLock lock(&mutex_);
  return MissingLocked();
}

void Membership::OnServingChange(std::function<void(bool)> callback) {
  absl::MutexLock lock(&mutex_);
  on_serving_change_ = std::move(callback);
  if (on_serving_change_) on_serving_change_(serving_);
}

Membership::Server* Membership::Find(uint64_t ticket) {
  for (auto& [name, server] : servers_) {
    if (server.ticket == ticket && server.record.state != ServerState::kDown) return &server;
  }
  return nullptr;
}

void Membership::Changed() {
  ++epoch_;
  changed_.SignalAll();
  const bool serving = MissingLocked().empty();
  if (serving == serving_) return;
  serving_ = serving;
  if (on_serving_change_) on_serving_change_(serving);
}

std::string Membership::MissingLocked() const {
  for (const LayerDescription& layer : model_.layers) {
    const LayerPlacement placement = PlaceLocked(layer);
    std::vector<int32_t> missing;
    for (int32_t e = 0; e < layer.num_held(); ++e) {
      if (placement.server_of_expert[e] < 0) missing.push_back(e);
    }
    if (!missing.empty()) {
      return absl::StrCat("layer ", layer.layer, ": no live server holds expert",
                          missing.size() == 1 ? " " : "s ", IdRanges(missing));
    }
  }
  return "";
}

LayerPlacement Membership::Place(int32_t layer,
                                 absl::Span<const std::shared_ptr<ExpertBackend>> without) const {
  absl::MutexLock lock(&mutex_);
  return PlaceLocked(*model_.Find(layer), without);
}

LayerPlacement Membership::PlaceLocked(
    const LayerDescription& layer, absl::Span<const std::shared_ptr<ExpertBackend>> without) const {
  LayerPlacement placement;
  placement.epoch = epoch_;
  placement.server_of_expert.assign(layer.num_held(), -1);
  for (const auto& [name, server] : servers_) {
    if (server.backend == nullptr) continue;
    if (std::find(without.begin(), without.end(), server.backend) != without.end()) continue;
    const auto held = server.record.registration.experts.find(layer.layer);
    if (held == server.record.registration.experts.end()) continue;
    const int32_t index = static_cast<int32_t>(placement.backends.size());
    const auto first_shared =
        std::lower_bound(held->second.begin(), held->second.end(), layer.router.num_experts);
    // All or none: a token's shared rows are computed together.
    const bool has_shared = held->second.end() - first_shared == layer.shared.count;
    if (has_shared && layer.shared.count > 0) placement.shared_servers.push_back(index);
    for (auto expert = held->second.begin(); expert != held->second.end(); ++expert) {
      if (expert >= first_shared && !has_shared) break;
      int32_t& slot = placement.server_of_expert[*expert];
      if (slot < 0) slot = index;
    }
    placement.backends.push_back(server.backend);
  }
  return placement;
}

}  // namespace expertmesh
