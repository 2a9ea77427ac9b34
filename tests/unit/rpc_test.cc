// Addresses, listening servers and the way statuses travel.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/rpc/channel.h"
#include "common/rpc/status.h"
#include "expertmesh/v1/moe.grpc.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace expertmesh {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

const std::vector<std::string>& NoAddresses() {
  static const auto* const addresses =
      new std::vector<std::string>{"",        ":",          ":7070",
                                   "host",    "host:",      "host:x",
                                   "host:-1", "host:65536", "host:99999999999",
                                   "::1:0",   "::1",        "[::1]",
                                   "[]:7070", "[::1:7070",  "a:1,b:2",
                                   "a:1,",    "host:7070x", "http://host:7070"};
  return *addresses;
}

TEST(Address, MalformedOnesAreRefusedEverywhere) {
  for (const std::string& address : NoAddresses()) {
    const absl::Status status = CheckAddress("router", address);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(std::string(status.message()),
                StartsWith("router: expected HOST:PORT with a port"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("got \"", address, "\"")));
    EXPECT_EQ(StartServer(address, {}).status().code(), absl::StatusCode::kInvalidArgument)
        << address;
    if (address == "a:1,b:2") continue;  // several are for channels only
    EXPECT_EQ(MakeChannel(address).status().code(), absl::StatusCode::kInvalidArgument) << address;
  }
}

TEST(Address, GoodOnesAreTaken) {
  for (const char* address :
       {"127.0.0.1:7070", "host:0", "host.example:65535", "[::1]:7070", "[fe80::1%eth0]:1"}) {
    EXPECT_TRUE(CheckAddress("router", address).ok()) << address;
    EXPECT_TRUE(MakeChannel(address).ok()) << address;
  }
}

TEST(Address, UnixOnesAreAbsoluteAndPlain) {
  const std::string longest = "unix:/" + std::string(106, 'x');
  for (const std::string& address : {std::string("unix:/run/expertmesh/router.sock"), longest}) {
    EXPECT_TRUE(CheckAddress("listen", address).ok()) << address;
    EXPECT_TRUE(MakeChannel(address).ok()) << address;
  }
  for (const std::string& address :
       {std::string("unix:"), std::string("unix:/"), std::string("unix:run/socket"),
        std::string("unix:///run/so cket"), std::string("unix:/a%20b"), std::string("unix:/a,b:1"),
        std::string("unix:/a?b"), std::string("unix:/a\0b", 9), longest + "x"}) {
    const absl::Status status = CheckAddress("listen", address);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(std::string(status.message()),
                StartsWith("listen: expected unix:/PATH, absolute, of at most 107 "));
    EXPECT_EQ(MakeChannel(address).status().code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_EQ(StartServer(address, {}).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(MakeChannel("127.0.0.1:1,unix:/a").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Channel, OneOfSeveralNamesThatDoesNotResolveIsNamed) {
  const std::string no_name = std::string(64, 'x') + ".invalid";  // a label has at most 63
  const absl::Status status = MakeChannel(absl::StrCat("127.0.0.1:1,", no_name, ":2")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr(no_name));
  // A single one may come to resolve later.
  EXPECT_TRUE(MakeChannel(absl::StrCat(no_name, ":2")).ok());
  EXPECT_TRUE(MakeChannel("127.0.0.1:1,127.0.0.2:1").ok());
}

grpc::Status Health(const std::string& address, const std::string& service,
                    grpc::health::v1::HealthCheckResponse* response) {
  const auto stub = grpc::health::v1::Health::NewStub(MakeChannel(address).value());
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(20)));
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  return stub->Check(&context, request, response);
}

TEST(Server, SaysWhichPortItGotAndServesWhenTold) {
  ListeningServer listening = StartServer("127.0.0.1:0", {}).value();
  EXPECT_THAT(listening.address, StartsWith("127.0.0.1:"));
  EXPECT_NE(listening.address, "127.0.0.1:0");
  grpc::health::v1::HealthCheckResponse response;
  ASSERT_TRUE(Health(listening.address, "", &response).ok());
  EXPECT_EQ(response.status(), grpc::health::v1::HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(Health(listening.address, "a.Service", &response).error_code(),
            grpc::StatusCode::NOT_FOUND);
  for (const bool serving : {true, false, true}) {
    SetServing(*listening.server, {"a.Service"}, serving);
    for (const char* service : {"", "a.Service"}) {
      ASSERT_TRUE(Health(listening.address, service, &response).ok());
      EXPECT_EQ(response.status(), serving ? grpc::health::v1::HealthCheckResponse::SERVING
                                           : grpc::health::v1::HealthCheckResponse::NOT_SERVING);
    }
  }
  const absl::Status second = StartServer(listening.address, {}).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.message()), HasSubstr(listening.address));
  listening.server->Shutdown();
}

class UnixServer : public testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/rpc_test.XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    folder_ = folder;
    path_ = folder_ + "/socket";
    address_ = "unix:" + path_;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  absl::Status Refusal() const {
    const absl::Status status = StartServer(address_, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), HasSubstr("cannot listen on " + address_));
    return status;
  }

  void ExpectServes() const {
    grpc::health::v1::HealthCheckResponse response;
    EXPECT_TRUE(Health(address_, "", &response).ok());
  }

  std::string folder_, path_, address_;
};

TEST_F(UnixServer, ServesAndLeavesNothing) {
  for (int i = 0; i < 2; ++i) {
    ListeningServer listening = StartServer(address_, {}).value();
    EXPECT_EQ(listening.address, address_);
    ExpectServes();
    listening.server->Shutdown();
    listening.server.reset();
    EXPECT_FALSE(std::filesystem::exists(path_));
  }
}

TEST_F(UnixServer, ASocketInUseIsNamed) {
  const ListeningServer listening = StartServer(address_, {}).value();
  EXPECT_THAT(std::string(Refusal().message()), HasSubstr("in use"));
  ExpectServes();  // the first is what it was
  listening.server->Shutdown();
}

TEST_F(UnixServer, WhatAKilledProcessLeftIsReplaced) {
  const int left = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  path_.copy(name.sun_path, sizeof(name.sun_path) - 1);
  ASSERT_EQ(bind(left, reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
  close(left);
  ASSERT_TRUE(std::filesystem::exists(path_));
  const ListeningServer listening = StartServer(address_, {}).value();
  ExpectServes();
  listening.server->Shutdown();
}

TEST_F(UnixServer, AnotherFileIsNotTouched) {
  std::ofstream(path_) << "precious";
  EXPECT_THAT(std::string(Refusal().message()), HasSubstr("no socket"));
  EXPECT_EQ(std::filesystem::file_size(path_), 8u);
  std::filesystem::remove_all(folder_);
  EXPECT_THAT(std::string(Refusal().message()), HasSubstr("folder"));
}

// What gRPC keeps for a retry is larger than the limit, and does not overflow.
TEST(Channel, TheLargestLimitIsTaken) {
  const ListeningServer listening = StartServer("127.0.0.1:0", {}).value();
  const auto stub = grpc::health::v1::Health::NewStub(
      MakeChannel(listening.address, {.max_message_bytes = INT32_MAX}).value());
  grpc::ClientContext context;
  grpc::health::v1::HealthCheckResponse response;
  EXPECT_TRUE(stub->Check(&context, {}, &response).ok());
  listening.server->Shutdown();
}

TEST(Status, IsTheSameThereAndBack) {
  for (const absl::Status& status :
       {absl::OkStatus(), absl::UnavailableError("lost"), absl::InvalidArgumentError(""),
        absl::UnauthenticatedError("who")}) {
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status);
  }
}

TEST(Status, SaysWhenToTryAgain) {
  EXPECT_EQ(RetryAfter(absl::ResourceExhaustedError("full")), std::nullopt);
  const absl::Status full = RetryLater("full", absl::Milliseconds(1250));
  EXPECT_EQ(RetryAfter(full), absl::Milliseconds(1250));
  const absl::Status received = FromGrpcStatus(ToGrpcStatus(full));
  EXPECT_EQ(received, full);
  EXPECT_EQ(RetryAfter(received), absl::Milliseconds(1250));
  // Details of others, or none at all, are no reason to fail.
  EXPECT_EQ(FromGrpcStatus(grpc::Status(grpc::StatusCode::ABORTED, "no", "\xff\xff")),
            absl::AbortedError("no"));
}

// Fails with a text of its choice.
class Failing final : public v1::MoeService::CallbackService {
 public:
  explicit Failing(std::string text) : text_(std::move(text)) {}
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest*, v1::GetModelResponse*) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(absl::FailedPreconditionError(text_)));
    return reactor;
  }

 private:
  const std::string text_;
};

TEST(Status, LongTextsAreCutAndArrive) {
  for (const size_t size : {2048, 2049, 8192, 20'000, 1 << 20}) {
    for (const char c : {'x', '\xff'}) {  // each byte of the second takes three on the wire
      const std::string text(size, c);
      Failing service(text);
      const ListeningServer listening = StartServer("127.0.0.1:0", {&service}).value();
      const auto stub = v1::MoeService::NewStub(MakeChannel(listening.address).value());
      grpc::ClientContext context;
      context.set_wait_for_ready(true);
      context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(20)));
      v1::GetModelResponse response;
      const grpc::Status status = stub->GetModel(&context, {}, &response);
      EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << size;
      EXPECT_TRUE(status.error_message() == (size <= 2048 ? text : text.substr(0, 2048) + "..."))
          << size;
      listening.server->Shutdown();
    }
  }
}

}  // namespace
}  // namespace expertmesh
