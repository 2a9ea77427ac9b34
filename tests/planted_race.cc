// A gRPC handler with a data race, on purpose: .ci/run builds this with ThreadSanitizer and fails
// if the race is not reported, since then tests/tsan_suppressions.txt would hide the races of real
// handlers, too.

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "expertmesh/v1/moe.grpc.pb.h"

namespace expertmesh {
namespace {

class RacyService final : public v1::MoeService::Service {
 public:
  grpc::Status GetModel(grpc::ServerContext*, const v1::GetModelRequest*,
                        v1::GetModelResponse*) override {
    ++calls_;  // The race: handlers run on several threads, and nothing guards this.
    return grpc::Status::OK;
  }

 private:
  int calls_ = 0;
};

int Run() {
  RacyService service;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (!server) return 2;

  std::vector<std::thread> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back([port] {
      auto stub = v1::MoeService::NewStub(grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                                                              grpc::InsecureChannelCredentials()));
      for (int call = 0; call < 200; ++call) {
        grpc::ClientContext context;
        v1::GetModelResponse response;
        (void)stub->GetModel(&context, v1::GetModelRequest(), &response);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  server->Shutdown();
  return 0;
}

}  // namespace
}  // namespace expertmesh

int main() { return expertmesh::Run(); }
