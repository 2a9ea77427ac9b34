// Messages with a large tensor at their end, without copying the tensor where that can be avoided.
//
// On the wire they are plain protobuf: a message whose highest-numbered field is an
// expertmesh.v1.Tensor, whose own highest-numbered field is its bytes. So the encoder serialises
// everything else and appends the caller's buffer as a slice, and the decoder reads the bytes
// straight into aligned memory.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/tensor.h"
#include "expertmesh/v1/tensor.pb.h"

namespace expertmesh {

// Number of the tensor field in every message that carries rows (ForwardRequest.hidden_states,
// ...).
inline constexpr int kTensorField = 15;

// Dtypes that travel: F32, BF16, F16, I32, I64, F8_E4M3 and F8_E8M0. The conversion to the wire's
// enum is defined for these.
v1::DataType ToProto(DType dtype);
absl::StatusOr<DType> FromProto(v1::DataType dtype, const std::string& field);

// Encodes `message`, in which the tensor field is not set, followed by `tensor` as that field. The
// buffer holds a reference to the tensor's memory until gRPC is done with it; nobody may write
// there meanwhile.
grpc::ByteBuffer EncodeWithTensor(const google::protobuf::Message& message, const Tensor& tensor);

// Encodes a message without a tensor.
grpc::ByteBuffer Encode(const google::protobuf::Message& message);

// Decodes what any protobuf encoder wrote, fields in any order. The tensor field of `message` stays
// unset and its content goes to `*tensor`; without such a field `*tensor` is the default (F32 [0]).
// INVALID_ARGUMENT: not a message of that type, or the tensor's dtype, shape and byte count
// disagree; `field` is the tensor field's name for the error text. Does not consume `buffer`.
absl::Status DecodeWithTensor(const grpc::ByteBuffer& buffer, const std::string& field,
                              google::protobuf::Message* message, Tensor* tensor);

// The first value of a varint field of an encoded message; 0 if it has none. Decodes nothing else
// and allocates next to nothing: says what a message is about that there is no memory for.
uint64_t VarintField(const grpc::ByteBuffer& buffer, int field);

// Copies between a tensor and its message form; for small ones.
void ToProto(const Tensor& tensor, v1::Tensor* message);
absl::StatusOr<Tensor> FromProto(const v1::Tensor& message, const std::string& field);

}  // namespace expertmesh
