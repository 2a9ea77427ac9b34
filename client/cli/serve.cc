// expertmesh serve: a router and expert servers as child processes of one supervisor.
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/child_process.h"
#include "client/cli/commands.h"
#include "client/cli/common.h"
#include "client/cpp/client.h"
#include "common/command_line.h"
#include "common/status.h"
#include "router/dispatch/batcher.h"

namespace expertmesh {
namespace {

struct Options {
  ModelSource model;
  int servers = 1;
  std::string host = "127.0.0.1";
  int port = 7070;
  int server_port = -1;
  int threads = 0;
  EngineKind engine = EngineKind::kGrouped;
  Isa isa = BestIsa();
  double grace_seconds = 10;
  int rounds_per_layer = BatchingOptions().rounds_per_layer;
  int64_t batch_wait_us = 0;
  int64_t max_round_tokens = BatchingOptions().max_tokens;
  std::string dispatch_dtype = "native";
  std::string empty_experts = "zero";
};

constexpr absl::Duration kPoll = absl::Milliseconds(100);
constexpr absl::Duration kRouterStart = absl::Minutes(10);  // it reads every gate before it listens
constexpr absl::Duration kFirstBackoff = absl::Milliseconds(200);
constexpr absl::Duration kLongestBackoff = absl::Seconds(5);
// A child that has run this long starts over with the first back-off.
constexpr absl::Duration kStable = absl::Seconds(10);

// One process that is kept running.
struct Service {
  std::string name;
  std::vector<std::string> argv;
  std::unique_ptr<ChildProcess> process;  // null while it waits to be started again
  absl::Time started;
  absl::Time start_again;
  absl::Duration backoff = kFirstBackoff;
};

class Supervisor {
 public:
  explicit Supervisor(const Options& options) : options_(options) {}

  absl::Status Run() {
    sigemptyset(&signals_);
    for (const int number : {SIGTERM, SIGINT, SIGCHLD}) sigaddset(&signals_, number);
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
    absl::Status status = StartAll();
    bool ready = false;
    std::unique_ptr<Client> client;
    if (status.ok() && !stopped_) {
      absl::StatusOr<std::unique_ptr<Client>> made =
          Client::Create(router_address_, {.timeout = absl::Seconds(1)});
      if (made.ok()) {
        client = *std::move(made);
      } else {
        status = made.status();
      }
    }
    while (status.ok() && !stopped_ && !StopRequested(kPoll)) {
      status = Watch(ready);
      if (!status.ok() || ready) continue;
      const absl::StatusOr<bool> serving = client->IsServing();
      if (serving.ok() && *serving) {
        ready = true;
        client.reset();
        std::printf("ready %s\n", router_address_.c_str());
        std::fflush(stdout);
      }
    }
    StopAll();
    return status;
  }

 private:
  // Waits; true once SIGTERM or SIGINT has come. A child's end cuts the wait short.
  bool StopRequested(absl::Duration wait) {
    const timespec timeout = absl::ToTimespec(wait);
    const int number = sigtimedwait(&signals_, nullptr, &timeout);
    return number == SIGTERM || number == SIGINT;
  }

  // IPv6 addresses in brackets.
  std::string Address(int port) const {
    const bool v6 = absl::StrContains(options_.host, ':') && options_.host.front() != '[';
    return v6 ? absl::StrCat("[", options_.host, "]:", port)
              : absl::StrCat(options_.host, ":", port);
  }

  absl::Status StartAll() {
    std::error_code error;
    const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
    const std::string folder = self.parent_path().string();
    Service router;
    router.name = "router";
    router.argv = {folder + "/expertmesh-router",
                   "--listen",
                   Address(options_.port),
                   "--grace",
                   absl::StrCat(options_.grace_seconds),
                   "--engine",
                   NameOf(options_.engine),
                   "--isa",
                   NameOf(options_.isa),
                   "--rounds-per-layer",
                   absl::StrCat(options_.rounds_per_layer),
                   "--batch-wait-us",
                   absl::StrCat(options_.batch_wait_us),
                   "--max-round-tokens",
                   absl::StrCat(options_.max_round_tokens),
                   "--dispatch-dtype",
                   options_.dispatch_dtype,
                   "--empty-experts",
                   options_.empty_experts};
    const std::vector<std::string> model = ModelArguments(options_.model);
    router.argv.insert(router.argv.end(), model.begin(), model.end());
    RETURN_IF_ERROR(StartOne(router, /*capture=*/true));
    absl::StatusOr<std::string> line = absl::DeadlineExceededError("");
    const absl::Time give_up = absl::Now() + kRouterStart;
    while (absl::IsDeadlineExceeded(line.status()) && absl::Now() < give_up) {
      if (StopRequested(absl::ZeroDuration())) {
        stopped_ = true;
        services_.push_back(std::move(router));
        return absl::OkStatus();
      }
      line = router.process->ReadLine(absl::Now() + kPoll);
    }
    if (!line.ok()) {
      return absl::UnavailableError("the router did not start: see its message above");
    }
    router_address_ = line->substr(sizeof("listening ") - 1);
    router.argv[2] = router_address_;  // started again, it is found where it was
    services_.push_back(std::move(router));
    const int threads =
        options_.threads > 0
            ? options_.threads
            : std::max<int>(1, std::thread::hardware_concurrency() / options_.servers);
    for (int i = 0; i < options_.servers; ++i) {
      const int base = options_.server_port >= 0 ? options_.server_port
                       : options_.port == 0      ? 0
                                                 : 7080;
      Service server;
      server.name = absl::StrCat("server-", i);
      server.argv = {folder + "/expertmesh-expert-server",
                     "--listen",
                     Address(base == 0 ? 0 : base + i),
                     "--router",
                     router_address_,
                     "--shard",
                     absl::StrCat(i, "/", options_.servers),
                     "--threads",
                     absl::StrCat(threads),
                     "--grace",
                     absl::StrCat(options_.grace_seconds),
                     "--engine",
                     NameOf(options_.engine),
                     "--isa",
                     NameOf(options_.isa)};
      server.argv.insert(server.argv.end(), model.begin(), model.end());
      RETURN_IF_ERROR(StartOne(server, /*capture=*/false));
      services_.push_back(std::move(server));
    }
    return absl::OkStatus();
  }

  static absl::Status StartOne(Service& service, bool capture) {
    ASSIGN_OR_RETURN(ChildProcess process, ChildProcess::Start(service.argv, capture));
    service.process = std::make_unique<ChildProcess>(std::move(process));
    service.started = absl::Now();
    return absl::OkStatus();
  }

  // Starts again what has ended. Before the cluster was ready once, an end is an error: it would
  // only repeat.
  absl::Status Watch(bool ready) {
    for (Service& service : services_) {
      if (service.process != nullptr) {
        const std::optional<std::string> ended = service.process->Poll();
        if (!ended) continue;
        if (!ready) {
          return absl::UnavailableError(absl::StrCat(service.name, " ended with ", *ended,
                                                     " while starting: see its message above"));
        }
        if (absl::Now() - service.started > kStable) service.backoff = kFirstBackoff;
        spdlog::warn("{} ended with {}; starting it again in {}", service.name, *ended,
                     absl::FormatDuration(service.backoff));
        service.process.reset();
        service.start_again = absl::Now() + service.backoff;
        service.backoff = std::min(service.backoff * 2, kLongestBackoff);
      } else if (absl::Now() >= service.start_again) {
        RETURN_IF_ERROR(StartOne(service, /*capture=*/false));
      }
    }
    return absl::OkStatus();
  }

  // SIGTERM to all; what still runs after the grace period, or at a second signal, is killed.
  void StopAll() {
    for (Service& service : services_) {
      if (service.process != nullptr) service.process->Signal(SIGTERM);
    }
    const absl::Time deadline =
        absl::Now() + absl::Seconds(options_.grace_seconds) + absl::Seconds(2);
    const auto running = [this] {
      return std::any_of(services_.begin(), services_.end(), [](Service& service) {
        return service.process != nullptr && !service.process->Poll();
      });
    };
    while (running() && absl::Now() < deadline) {
      if (StopRequested(absl::Milliseconds(20))) break;
    }
    services_.clear();
  }

  const Options options_;
  sigset_t signals_;
  std::string router_address_;
  bool stopped_ = false;           // before everything was started
  std::vector<Service> services_;  // the router first
};

}  // namespace

Command AddServe(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.description(
      "Runs a router and expert servers on this machine, as child processes, until SIGTERM or "
      "Ctrl-C.\n"
      "Prints \"ready HOST:PORT\" alone on a line of standard output when all is loaded; logs go "
      "to\n"
      "standard error. A child that dies is started again, once the cluster has been ready; before "
      "that it\n"
      "ends the command.");
  AddModelOptions(app, &options->model);
  app.add_option("--servers", options->servers, "number of expert servers")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_option("--host", options->host, "address to listen on")->capture_default_str();
  app.add_option("--port", options->port, "port of the router; 0: any free one")
      ->capture_default_str()
      ->check(CLI::Range(0, 65535));
  app.add_option(
         "--server-port", options->server_port,
         "port of the first expert server, the next one up for each further; 0: any free ones "
         "(default: 7080, or 0 where --port is 0)")
      ->check(CLI::Range(0, 65535));
  app.add_option("--threads", options->threads,
                 "threads that compute, per server (default: processors / servers, at least 1)")
      ->check(CLI::Range(1, 1024));
  AddEngineOptions(app, &options->engine, &options->isa);
  app.add_option("--grace", options->grace_seconds,
                 "seconds to finish what is under way after SIGTERM")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--rounds-per-layer", options->rounds_per_layer,
                 "rounds of a layer in flight at a time; 0: requests are never merged")
      ->capture_default_str()
      ->check(CLI::Range(0, 1024));
  app.add_option("--batch-wait-us", options->batch_wait_us,
                 "microseconds that a round which could start waits for more requests")
      ->capture_default_str()
      ->check(CLI::Range(0, 10'000'000));
  app.add_option("--max-round-tokens", options->max_round_tokens, "tokens of a round")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 30));
  AddDispatchOptions(app, &options->dispatch_dtype, &options->empty_experts);
  return [options] {
    const absl::Status status = Supervisor(*options).Run();
    return status.ok() ? static_cast<int>(kOk) : Fail(status);
  };
}

}  // namespace expertmesh
