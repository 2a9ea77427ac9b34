// DecodeWithTensor on any bytes, held against protobuf's own parser.
#pragma once

#include <google/protobuf/message.h>
#include <google/protobuf/stubs/logging.h>
#include <grpcpp/support/slice.h>

#include <cstring>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/rpc/tensor_codec.h"
#include "tests/fuzz/check.h"
#include "tests/fuzz/targets.h"

namespace expertmesh::fuzz {

// The bytes as gRPC would deliver them, in slices of at most that size.
inline grpc::ByteBuffer BufferOf(Bytes bytes, size_t slice_size) {
  std::vector<grpc::Slice> slices;
  for (size_t begin = 0; begin < bytes.size(); begin += slice_size) {
    const Bytes part = bytes.subspan(begin, slice_size);
    slices.emplace_back(part.data(), part.size());
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

inline bool SameTensor(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         (a.num_bytes() == 0 || std::memcmp(a.data(), b.data(), a.num_bytes()) == 0);
}

// Decodes `bytes`, and checks that what protobuf's own parser and FromProto accept gives the same
// here, and that what is accepted does not depend on how gRPC cut the bytes into slices and
// survives being encoded and decoded again. (Of bytes that protobuf's parser refuses some are
// accepted: tags of more than 5 bytes, which no encoder writes.)
template <typename Message>
absl::Status CheckedDecode(Bytes bytes, const std::string& field, Message* message,
                           Tensor* tensor) {
  // protobuf's parser would say on stderr what it does not like.
  [[maybe_unused]] static const auto silenced = google::protobuf::SetLogHandler(nullptr);
  const absl::Status status =
      DecodeWithTensor(BufferOf(bytes, bytes.size() + 1), field, message, tensor);

  Message whole;
  if (whole.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    absl::StatusOr<Tensor> expected = Tensor();
    const auto* reflection = whole.GetReflection();
    const auto* descriptor = whole.GetDescriptor()->FindFieldByNumber(kTensorField);
    if (reflection->HasField(whole, descriptor)) {
      expected = FromProto(
          static_cast<const v1::Tensor&>(reflection->GetMessage(whole, descriptor)), field);
    }
    FUZZ_CHECK(status.code() == expected.status().code());
    if (!status.ok()) return status;
    reflection->ClearField(&whole, descriptor);
    FUZZ_CHECK(message->SerializeAsString() == whole.SerializeAsString());
    FUZZ_CHECK(SameTensor(*tensor, *expected));
  }
  if (!status.ok()) return status;

  for (const grpc::ByteBuffer& buffer :
       {BufferOf(bytes, bytes.size() / 3 + 1), EncodeWithTensor(*message, *tensor)}) {
    Message other;
    Tensor same;
    FUZZ_CHECK(DecodeWithTensor(buffer, field, &other, &same).ok());
    FUZZ_CHECK(message->SerializeAsString() == other.SerializeAsString());
    FUZZ_CHECK(SameTensor(*tensor, same));
  }
  return absl::OkStatus();
}

}  // namespace expertmesh::fuzz
