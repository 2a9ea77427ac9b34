#include "common/rpc/tensor_codec.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/slice.h>

#include <atomic>
#include <cassert>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "common/status.h"

namespace expertmesh {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;
using google::protobuf::io::StringOutputStream;

constexpr uint32_t LengthDelimitedTag(int field) {
  return (static_cast<uint32_t>(field) << 3) | WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
}

// A slice that shares the tensor's memory. gRPC lets go of it on a thread of its own choice.
grpc::Slice ShareMemory(const Tensor& tensor) {
  struct Owner {
    std::shared_ptr<std::byte> memory;
    // gRPC orders the two threads; ThreadSanitizer cannot see how, and sees this.
    std::atomic<bool> given = false;
  };
  auto owner = std::make_unique<Owner>();
  owner->memory = tensor.buffer();
  void* memory = owner->memory.get();
  owner->given.store(true, std::memory_order_release);
  const auto release = [](void* p) {
    auto* given = static_cast<Owner*>(p);
    if (given->given.load(std::memory_order_acquire)) delete given;
  };
  return grpc::Slice(memory, tensor.num_bytes(), release, owner.release());
}

// What was found of a tensor on the wire.
struct WireTensor {
  int dtype = 0;
  std::vector<int64_t> shape;
  Tensor bytes = Tensor(DType::kU8, {0});
};

// Reads a length and checks that as many bytes are there: PushLimit ignores longer ones, and
// nothing may be allocated for them.
bool ReadLength(CodedInputStream& input, int* length) {
  return input.ReadVarintSizeAsInt(length) && *length <= input.BytesUntilLimit();
}

bool ReadTensor(CodedInputStream& input, WireTensor* tensor) {
  int length;
  if (!ReadLength(input, &length)) return false;
  const CodedInputStream::Limit limit = input.PushLimit(length);
  while (const uint32_t tag = input.ReadTag()) {
    if (tag == ((v1::Tensor::kDtypeFieldNumber << 3) | WireFormatLite::WIRETYPE_VARINT)) {
      uint64_t value;
      if (!input.ReadVarint64(&value)) return false;
      tensor->dtype = static_cast<int>(value);
    } else if (tag == ((v1::Tensor::kShapeFieldNumber << 3) | WireFormatLite::WIRETYPE_VARINT)) {
      uint64_t value;
      if (!input.ReadVarint64(&value)) return false;
      tensor->shape.push_back(static_cast<int64_t>(value));
    } else if (tag == LengthDelimitedTag(v1::Tensor::kShapeFieldNumber)) {  // packed
      int packed;
      if (!ReadLength(input, &packed)) return false;
      const CodedInputStream::Limit inner = input.PushLimit(packed);
      while (input.BytesUntilLimit() > 0) {
        uint64_t value;
        if (!input.ReadVarint64(&value)) return false;
        tensor->shape.push_back(static_cast<int64_t>(value));
      }
      input.PopLimit(inner);
    } else if (tag == LengthDelimitedTag(v1::Tensor::kDataFieldNumber)) {
      int size;
      if (!ReadLength(input, &size)) return false;
      tensor->bytes = Tensor(DType::kU8, {size});
      if (!input.ReadRaw(tensor->bytes.data(), size)) return false;
    } else if (!WireFormatLite::SkipField(&input, tag)) {
      return false;
    }
  }
  if (!input.ConsumedEntireMessage()) return false;
  input.PopLimit(limit);
  return true;
}

absl::StatusOr<Tensor> Assemble(WireTensor wire, const std::string& field) {
  ASSIGN_OR_RETURN(const DType dtype, FromProto(static_cast<v1::DataType>(wire.dtype), field));
  const int64_t elements = NumElements(wire.shape);
  int64_t bytes;
  if (elements < 0 || __builtin_mul_overflow(elements, BytesOf(dtype), &bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        field, ".shape: expected extents of at least 0 whose product fits in 63 bits, got ",
        ShapeToString(wire.shape)));
  }
  if (bytes != wire.bytes.num_elements()) {
    return absl::InvalidArgumentError(absl::StrCat(field, ".data: expected ", bytes, " bytes for ",
                                                   NameOf(dtype), " ", ShapeToString(wire.shape),
                                                   ", got ", wire.bytes.num_elements()));
  }
  return std::move(wire.bytes).Reinterpret(dtype, std::move(wire.shape));
}

}  // namespace

v1::DataType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return v1::DATA_TYPE_F32;
    case DType::kBF16:
      return v1::DATA_TYPE_BF16;
    case DType::kF16:
      return v1::DATA_TYPE_F16;
    case DType::kI32:
      return v1::DATA_TYPE_I32;
    case DType::kI64:
      return v1::DATA_TYPE_I64;
    case DType::kF8_E4M3:
      return v1::DATA_TYPE_F8_E4M3;
    case DType::kF8_E8M0:
      return v1::DATA_TYPE_F8_E8M0;
    default:
      return v1::DATA_TYPE_UNSPECIFIED;
  }
}

absl::StatusOr<DType> FromProto(v1::DataType dtype, const std::string& field) {
  switch (dtype) {
    case v1::DATA_TYPE_F32:
      return DType::kF32;
    case v1::DATA_TYPE_BF16:
      return DType::kBF16;
    case v1::DATA_TYPE_F16:
      return DType::kF16;
    case v1::DATA_TYPE_I32:
      return DType::kI32;
    case v1::DATA_TYPE_I64:
      return DType::kI64;
    case v1::DATA_TYPE_F8_E4M3:
      return DType::kF8_E4M3;
    case v1::DATA_TYPE_F8_E8M0:
      return DType::kF8_E8M0;
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          field, ".dtype: expected one of F32, BF16, F16, I32, I64, F8_E4M3, F8_E8M0, got ",
          static_cast<int>(dtype)));
  }
}

grpc::ByteBuffer EncodeWithTensor(const google::protobuf::Message& message, const Tensor& tensor) {
  v1::Tensor header;
  header.set_dtype(ToProto(tensor.dtype()));
  header.mutable_shape()->Add(tensor.shape().begin(), tensor.shape().end());
  std::string tensor_header = header.SerializeAsString();
  const size_t bytes = tensor.num_bytes();
  if (bytes > 0) {  // protobuf leaves empty bytes out
    StringOutputStream stream(&tensor_header);
    CodedOutputStream coded(&stream);
    coded.WriteTag(LengthDelimitedTag(v1::Tensor::kDataFieldNumber));
    coded.WriteVarint64(bytes);
  }
  std::string head = message.SerializeAsString();
  {
    StringOutputStream stream(&head);
    CodedOutputStream coded(&stream);
    coded.WriteTag(LengthDelimitedTag(kTensorField));
    coded.WriteVarint64(tensor_header.size() + bytes);
    coded.WriteString(tensor_header);
  }
  std::vector<grpc::Slice> slices = {grpc::Slice(head)};
  if (bytes > 0) slices.push_back(ShareMemory(tensor));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

grpc::ByteBuffer Encode(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

absl::Status DecodeWithTensor(const grpc::ByteBuffer& buffer, const std::string& field,
                              google::protobuf::Message* message, Tensor* tensor) {
  const absl::Status malformed = absl::InvalidArgumentError(
      absl::StrCat("the bytes received are no ", message->GetTypeName()));
  grpc::ByteBuffer bytes = buffer;  // shares the slices; the reader wants it mutable
  grpc::ProtoBufferReader reader(&bytes);
  if (!reader.status().ok() || bytes.Length() > INT32_MAX) return malformed;
  CodedInputStream input(&reader);
  input.PushLimit(static_cast<int>(bytes.Length()));
  std::string rest;
  WireTensor wire;
  bool found = false;
  {
    StringOutputStream stream(&rest);
    CodedOutputStream others(&stream);
    while (const uint32_t tag = input.ReadTag()) {
      if (tag == LengthDelimitedTag(kTensorField)) {
        if (!ReadTensor(input, &wire)) return malformed;
        found = true;
      } else if (!WireFormatLite::SkipField(&input, tag, &others)) {
        return malformed;
      }
    }
  }
  if (!input.ConsumedEntireMessage() || !message->ParseFromString(rest)) return malformed;
  if (!found) {
    *tensor = Tensor();
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(*tensor, Assemble(std::move(wire), field));
  return absl::OkStatus();
}

uint64_t VarintField(const grpc::ByteBuffer& buffer, int field) {
  grpc::ByteBuffer bytes = buffer;  // as above
  grpc::ProtoBufferReader reader(&bytes);
  if (!reader.status().ok()) return 0;
  CodedInputStream input(&reader);
  const uint32_t wanted = static_cast<uint32_t>(field) << 3 | WireFormatLite::WIRETYPE_VARINT;
  while (const uint32_t tag = input.ReadTag()) {
    uint64_t value = 0;
    if (tag == wanted) return input.ReadVarint64(&value) ? value : 0;
    if (!WireFormatLite::SkipField(&input, tag)) return 0;
  }
  return 0;
}

void ToProto(const Tensor& tensor, v1::Tensor* message) {
  message->set_dtype(ToProto(tensor.dtype()));
  message->mutable_shape()->Assign(tensor.shape().begin(), tensor.shape().end());
  message->set_data(tensor.data(), tensor.num_bytes());
}

absl::StatusOr<Tensor> FromProto(const v1::Tensor& message, const std::string& field) {
  WireTensor wire;
  wire.dtype = message.dtype();
  wire.shape.assign(message.shape().begin(), message.shape().end());
  wire.bytes = Tensor(DType::kU8, {static_cast<int64_t>(message.data().size())});
  std::memcpy(wire.bytes.data(), message.data().data(), message.data().size());
  return Assemble(std::move(wire), field);
}

}  // namespace expertmesh
