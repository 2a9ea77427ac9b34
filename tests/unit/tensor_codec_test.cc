// The hand-written half of the wire format against protobuf's generated code, which is what every
// other language uses.
#include "common/rpc/tensor_codec.h"

#include <gmock/gmock.h>
#include <grpcpp/support/slice.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "expertmesh/v1/expert.pb.h"
#include "expertmesh/v1/moe.pb.h"

namespace expertmesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

std::string Bytes(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// The bytes in slices of that size; empty ones in between.
grpc::ByteBuffer Buffer(const std::string& bytes, size_t slice_size = 1 << 30) {
  std::vector<grpc::Slice> slices = {grpc::Slice()};
  for (size_t begin = 0; begin < bytes.size(); begin += slice_size) {
    slices.push_back(grpc::Slice(bytes.substr(begin, slice_size)));
    slices.push_back(grpc::Slice());
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

Tensor Counting(DType dtype, const std::vector<int64_t>& shape) {
  Tensor tensor(dtype, shape);
  for (size_t i = 0; i < tensor.num_bytes(); ++i) {
    tensor.data()[i] = static_cast<std::byte>(i * 37 + 11);
  }
  return tensor;
}

std::string Contents(const Tensor& tensor) {
  return std::string(reinterpret_cast<const char*>(tensor.data()), tensor.num_bytes());
}

void ExpectSame(const Tensor& got, const Tensor& expected) {
  EXPECT_EQ(got.dtype(), expected.dtype());
  EXPECT_EQ(got.shape(), expected.shape());
  EXPECT_EQ(got.num_bytes(), expected.num_bytes());
  EXPECT_TRUE(Contents(got) == Contents(expected));
}

// The four messages that carry rows, with every other field that travels set.
v1::ForwardRequest Header(const v1::ForwardRequest&) {
  v1::ForwardRequest message;
  message.set_layer(31);
  message.set_model_fingerprint("0123abcd");
  message.set_placement_epoch(300);
  message.set_return_router_logits(true);
  message.mutable_topk_ids()->add_shape(7);  // a tensor of another field is not ours
  return message;
}
v1::ForwardResponse Header(const v1::ForwardResponse&) {
  v1::ForwardResponse message;
  ToProto(Counting(DType::kI32, {3, 2}), message.mutable_topk_ids());
  ToProto(Counting(DType::kF32, {3, 2}), message.mutable_topk_weights());
  message.set_context_id("context");
  return message;
}
v1::DispatchRequest Header(const v1::DispatchRequest&) {
  v1::DispatchRequest message;
  message.set_round_id(70000);
  message.set_layer(2);
  message.set_phase(v1::PHASE_FORWARD);
  for (const int32_t expert : {0, 5, 300}) message.add_expert_ids(expert);
  for (const int64_t size : {1, 2, 1}) message.add_m_sizes(size);
  for (const int32_t row : {0, 1, 0, -1}) message.add_gather(row);
  message.set_timeout_us(30'000'000);
  return message;
}
v1::DispatchResponse Header(const v1::DispatchResponse&) {
  v1::DispatchResponse message;
  message.set_round_id(77);
  message.set_code(3);
  message.set_message("what went wrong");
  return message;
}

// The tensor of any of them.
const google::protobuf::FieldDescriptor* TensorField(const google::protobuf::Message& message) {
  return message.GetDescriptor()->FindFieldByNumber(kTensorField);
}
v1::Tensor* Field(google::protobuf::Message& message) {
  return static_cast<v1::Tensor*>(
      message.GetReflection()->MutableMessage(&message, TensorField(message)));
}

template <typename Message>
class TensorCodecTest : public ::testing::Test {};
using Messages = ::testing::Types<v1::ForwardRequest, v1::ForwardResponse, v1::DispatchRequest,
                                  v1::DispatchResponse>;
TYPED_TEST_SUITE(TensorCodecTest, Messages);

TYPED_TEST(TensorCodecTest, IsThatOfTheGeneratedCode) {
  const std::vector<std::vector<int64_t>> shapes = {{},     {0},       {1},       {5},      {0, 8},
                                                    {3, 8}, {300, 70}, {2, 3, 4}, {2, 0, 4}};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kI32, DType::kI64,
                            DType::kF8_E4M3, DType::kF8_E8M0}) {
    for (const std::vector<int64_t>& shape : shapes) {
      for (const bool with_header : {true, false}) {
        SCOPED_TRACE(absl::StrCat(NameOf(dtype), " ", ShapeToString(shape)));
        const TypeParam header = with_header ? Header(TypeParam()) : TypeParam();
        const Tensor tensor = Counting(dtype, shape);
        TypeParam whole = header;
        ToProto(tensor, Field(whole));
        const std::string expected = whole.SerializeAsString();
        EXPECT_TRUE(Bytes(EncodeWithTensor(header, tensor)) == expected);

        TypeParam got;
        Tensor got_tensor;
        const absl::Status status = DecodeWithTensor(Buffer(expected), "field", &got, &got_tensor);
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_EQ(got.SerializeAsString(), header.SerializeAsString());
        ExpectSame(got_tensor, tensor);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(got_tensor.data()) % Tensor::kAlignment, 0u);
      }
    }
  }
}

TYPED_TEST(TensorCodecTest, SlicesDoNotMatter) {
  const Tensor tensor = Counting(DType::kBF16, {9, 33});
  const std::string bytes = Bytes(EncodeWithTensor(Header(TypeParam()), tensor));
  for (const size_t slice_size : {1, 2, 3, 7, 64, 600}) {
    const grpc::ByteBuffer buffer = Buffer(bytes, slice_size);
    for (int time = 0; time < 2; ++time) {  // decoding does not consume
      TypeParam got;
      Tensor got_tensor;
      ASSERT_TRUE(DecodeWithTensor(buffer, "field", &got, &got_tensor).ok());
      EXPECT_EQ(got.SerializeAsString(), Header(TypeParam()).SerializeAsString());
      ExpectSame(got_tensor, tensor);
    }
  }
}

// Whether a tag or a length might be one of more than 5 bytes.
bool HasLongVarint(const std::string& bytes) {
  int run = 0;
  for (const char c : bytes) {
    run = (c & 0x80) != 0 ? run + 1 : 0;
    if (run >= 5) return true;
  }
  return false;
}

// Decodes what may be damaged, and expects the decoder to find what protobuf finds: the same
// refusals, the same fields, the same tensor. True if both accepted.
template <typename Message>
bool Accepts(const std::string& bytes) {
  std::string hex;
  for (const char c : bytes)
    absl::StrAppend(&hex, absl::Hex(static_cast<uint8_t>(c), absl::kZeroPad2));
  SCOPED_TRACE(hex);
  Message got;
  Tensor tensor;
  const absl::Status status = DecodeWithTensor(Buffer(bytes, 50), "field", &got, &tensor);
  Message expected;
  if (!expected.ParseFromString(bytes)) {
    // protobuf's own decoders do not agree about varints of more bytes than they can have.
    if (!HasLongVarint(bytes)) {
      EXPECT_EQ(std::string(status.message()),
                absl::StrCat("the bytes received are no ", got.GetTypeName()));
    }
    EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kInvalidArgument) << status;
    return false;
  }
  absl::StatusOr<Tensor> expected_tensor = Tensor();
  if (expected.GetReflection()->HasField(expected, TensorField(expected))) {
    expected_tensor = FromProto(*Field(expected), "field");
  }
  EXPECT_EQ(status, expected_tensor.status());
  if (!status.ok()) return false;
  expected.GetReflection()->ClearField(&expected, TensorField(expected));
  EXPECT_EQ(got.SerializeAsString(), expected.SerializeAsString());
  if (expected_tensor.ok()) ExpectSame(tensor, *expected_tensor);
  return true;
}

TYPED_TEST(TensorCodecTest, TruncationAnywhereIsNoticed) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, 3}, {0, 300}, {300, 0}}) {
    const std::string bytes =
        Bytes(EncodeWithTensor(Header(TypeParam()), Counting(DType::kF32, shape)));
    const size_t header = Header(TypeParam()).ByteSizeLong();
    ASSERT_TRUE(Accepts<TypeParam>(bytes));
    for (size_t length = 0; length < bytes.size(); ++length) {
      const bool accepted = Accepts<TypeParam>(bytes.substr(0, length));
      if (length > header) {
        EXPECT_FALSE(accepted) << length;
      }
    }
  }
}

TYPED_TEST(TensorCodecTest, RandomDamageIsHarmless) {
  std::mt19937 rng(1);
  const std::string bytes =
      Bytes(EncodeWithTensor(Header(TypeParam()), Counting(DType::kBF16, {2, 3})));
  int accepted = 0;
  constexpr int kTimes = 20000;
  for (int time = 0; time < kTimes && !this->HasFailure(); ++time) {
    std::string damaged = bytes;
    for (uint32_t flips = 1 + rng() % 3; flips > 0; --flips) {
      damaged[rng() % damaged.size()] = static_cast<char>(rng());
    }
    if (rng() % 4 == 0) damaged.resize(rng() % damaged.size());
    accepted += Accepts<TypeParam>(damaged);
  }
  EXPECT_GT(accepted, 0);
  EXPECT_LT(accepted, kTimes);
}

// Wire bytes by hand.

std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}
std::string Number(int field, uint64_t value) { return Varint(field << 3) + Varint(value); }
// Says that `claimed` bytes follow.
std::string LengthDelimited(int field, uint64_t claimed, const std::string& bytes) {
  return Varint(field << 3 | 2) + Varint(claimed) + bytes;
}
std::string LengthDelimited(int field, const std::string& bytes) {
  return LengthDelimited(field, bytes.size(), bytes);
}

constexpr int kDtype = v1::Tensor::kDtypeFieldNumber;
constexpr int kShape = v1::Tensor::kShapeFieldNumber;
constexpr int kData = v1::Tensor::kDataFieldNumber;

absl::StatusOr<Tensor> Decode(const std::string& bytes, v1::DispatchResponse* message) {
  Tensor tensor;
  const absl::Status status = DecodeWithTensor(Buffer(bytes, 3), "rows", message, &tensor);
  if (!status.ok()) return status;
  return tensor;
}
absl::StatusOr<Tensor> DecodeTensor(const std::string& tensor_bytes) {
  v1::DispatchResponse message;
  return Decode(LengthDelimited(kTensorField, tensor_bytes), &message);
}
std::string Refusal(const std::string& tensor_bytes) {
  const auto tensor = DecodeTensor(tensor_bytes);
  return tensor.ok() ? "accepted" : tensor.status().ToString();
}

TEST(TensorCodec, TakesFieldsInAnyOrder) {
  v1::DispatchResponse message;
  const auto tensor =
      Decode(LengthDelimited(kTensorField, LengthDelimited(kData, "abcdefgh") +
                                               LengthDelimited(kShape, Varint(2) + Varint(1)) +
                                               Number(kDtype, v1::DATA_TYPE_I32)) +
                 LengthDelimited(3, "text") + Number(1, 7),
             &message);
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->dtype(), DType::kI32);
  EXPECT_THAT(tensor->shape(), ElementsAre(2, 1));
  EXPECT_EQ(Contents(*tensor), "abcdefgh");
  EXPECT_EQ(message.message(), "text");
  EXPECT_EQ(message.round_id(), 7u);
  EXPECT_FALSE(message.has_rows());
}

// The last dtype and the last data win, and extents add up, as when protobuf merges.
TEST(TensorCodec, MergesWhatIsRepeated) {
  const std::string first = Number(kDtype, v1::DATA_TYPE_F32) + Number(kShape, 3) +
                            LengthDelimited(kData, std::string(100, 'x')) +
                            LengthDelimited(kData, "123456");
  const std::string second = Number(kDtype, v1::DATA_TYPE_BF16) + Number(kShape, 2);
  const std::string third =
      LengthDelimited(kShape, Varint(1) + Varint(1)) + LengthDelimited(kData, "abcdefghijkl");
  const std::string bytes = Number(1, 5) + LengthDelimited(kTensorField, first) +
                            LengthDelimited(3, "one") + LengthDelimited(kTensorField, second) +
                            LengthDelimited(3, "two") + LengthDelimited(kTensorField, third) +
                            LengthDelimited(kTensorField, "") + Number(1, 6);
  v1::DispatchResponse message;
  const auto tensor = Decode(bytes, &message);
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->dtype(), DType::kBF16);
  EXPECT_THAT(tensor->shape(), ElementsAre(3, 2, 1, 1));
  EXPECT_EQ(Contents(*tensor), "abcdefghijkl");
  EXPECT_EQ(message.message(), "two");
  EXPECT_EQ(message.round_id(), 6u);
  EXPECT_TRUE(Accepts<v1::DispatchResponse>(bytes));
}

TEST(TensorCodec, KeepsUnknownFieldsAndSkipsThoseOfTheTensor) {
  const std::string unknown = Number(100, 1) + LengthDelimited(1000, "new") + Varint(101 << 3 | 5) +
                              "1234" + Varint(102 << 3 | 1) + "12345678";
  v1::DispatchResponse message;
  const auto tensor =
      Decode(unknown + LengthDelimited(kTensorField, unknown + Number(kDtype, v1::DATA_TYPE_F32) +
                                                         unknown + Number(kShape, 1) +
                                                         LengthDelimited(kData, "abcd")),
             &message);
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(Contents(*tensor), "abcd");
  EXPECT_EQ(message.SerializeAsString(), unknown);
}

TEST(TensorCodec, WithoutTheFieldTheTensorIsTheDefault) {
  v1::DispatchResponse message;
  Tensor tensor = Counting(DType::kI64, {2});
  ASSERT_TRUE(DecodeWithTensor(Buffer(Number(1, 9)), "rows", &message, &tensor).ok());
  EXPECT_EQ(message.round_id(), 9u);
  EXPECT_EQ(tensor.dtype(), DType::kF32);
  EXPECT_THAT(tensor.shape(), ElementsAre(0));
  ASSERT_TRUE(DecodeWithTensor(Buffer(""), "rows", &message, &tensor).ok());
  EXPECT_EQ(DecodeWithTensor(grpc::ByteBuffer(), "rows", &message, &tensor).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(TensorCodec, RefusalsNameTheField) {
  const std::string f32 = Number(kDtype, v1::DATA_TYPE_F32);
  const auto shape = [](const std::vector<int64_t>& extents) {
    std::string packed;
    for (const int64_t extent : extents) packed += Varint(static_cast<uint64_t>(extent));
    return LengthDelimited(kShape, packed);
  };
  const std::string four = LengthDelimited(kData, "1234");
  EXPECT_EQ(Refusal(f32 + shape({1}) + four), "accepted");
  EXPECT_EQ(Refusal(shape({1}) + four),
            "INVALID_ARGUMENT: rows.dtype: expected one of F32, BF16, F16, I32, I64, F8_E4M3, "
            "F8_E8M0, got 0");
  EXPECT_EQ(Refusal(""), Refusal(shape({0})));
  EXPECT_EQ(Refusal(Number(kDtype, 99) + shape({1}) + four),
            "INVALID_ARGUMENT: rows.dtype: expected one of F32, BF16, F16, I32, I64, F8_E4M3, "
            "F8_E8M0, got 99");
  EXPECT_EQ(Refusal(f32 + shape({2}) + four),
            "INVALID_ARGUMENT: rows.data: expected 8 bytes for F32 [2], got 4");
  EXPECT_EQ(Refusal(f32 + shape({1})),
            "INVALID_ARGUMENT: rows.data: expected 4 bytes for F32 [1], got 0");
  EXPECT_EQ(Refusal(f32 + shape({0, 7}) + four),
            "INVALID_ARGUMENT: rows.data: expected 0 bytes for F32 [0, 7], got 4");
  for (const std::vector<int64_t>& extents : {std::vector<int64_t>{-1},
                                              {-1, -1},
                                              {0, -1},
                                              {1, kMax, 2},
                                              {kMax, 2},
                                              {1ll << 32, 1ll << 32},
                                              {kMax / 2},
                                              {kMax}}) {
    EXPECT_EQ(Refusal(f32 + shape(extents) + four),
              absl::StrCat("INVALID_ARGUMENT: rows.shape: expected extents of at least 0 whose "
                           "product fits in 63 bits, got ",
                           ShapeToString(extents)));
  }
}

// Refusals travel as metadata, which has little room.
TEST(TensorCodec, RefusalsOfManyExtentsAreShort) {
  for (const int64_t extent : {int64_t{-1}, int64_t{1}, kMax}) {
    std::string packed;
    for (int i = 0; i < 5000; ++i) packed += Varint(static_cast<uint64_t>(extent));
    const std::string refusal =
        Refusal(Number(kDtype, v1::DATA_TYPE_F32) + LengthDelimited(kShape, packed) +
                LengthDelimited(kData, "12345678"));
    EXPECT_THAT(refusal, StartsWith("INVALID_ARGUMENT: rows."));
    EXPECT_THAT(refusal, HasSubstr(absl::StrCat("[", extent, ", ", extent)));
    EXPECT_LT(refusal.size(), 400u);
  }
}

// A sender may claim any length. Memory is taken for what is there only.
TEST(TensorCodec, AllocatesNothingForBytesThatAreNotThere) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they map terabytes
  rlimit saved;
  ASSERT_EQ(getrlimit(RLIMIT_AS, &saved), 0);
  rlimit tight = saved;
  tight.rlim_cur = 1ull << 30;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &tight), 0);
#endif
  constexpr uint64_t k2GiB = 1ull << 31;
  const std::string head =
      Number(kDtype, v1::DATA_TYPE_F32) + Number(kShape, static_cast<uint64_t>((k2GiB - 4) / 4));
  for (const uint64_t claimed :
       {k2GiB - 4, k2GiB - 1, k2GiB, k2GiB * 2 - 4, k2GiB * 2, ~uint64_t{0}}) {
    const std::string data = LengthDelimited(kData, claimed, "1234");
    v1::DispatchResponse message;
    const auto honest = Decode(LengthDelimited(kTensorField, head + data), &message);
    EXPECT_EQ(honest.status().code(), absl::StatusCode::kInvalidArgument) << claimed;
    const auto consistent =
        Decode(LengthDelimited(kTensorField, head.size() + claimed, head + data), &message);
    EXPECT_EQ(consistent.status().code(), absl::StatusCode::kInvalidArgument) << claimed;
    const auto packed = DecodeTensor(head + LengthDelimited(kShape, claimed, "\1"));
    EXPECT_EQ(packed.status().code(), absl::StatusCode::kInvalidArgument) << claimed;
  }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  ASSERT_EQ(setrlimit(RLIMIT_AS, &saved), 0);
#endif
}

// A length that reaches beyond what contains it is an error, even where what follows would do.
TEST(TensorCodec, LengthsStayInside) {
  const std::string good = Number(kDtype, v1::DATA_TYPE_F32) + LengthDelimited(kShape, Varint(1)) +
                           LengthDelimited(kData, "1234");
  v1::DispatchResponse message;
  ASSERT_TRUE(Decode(LengthDelimited(kTensorField, good), &message).ok());
  for (const uint64_t beyond : {uint64_t{1}, uint64_t{100}, uint64_t{1} << 31, uint64_t{1} << 32}) {
    EXPECT_FALSE(Decode(LengthDelimited(kTensorField, good.size() + beyond, good), &message).ok())
        << beyond;
    EXPECT_FALSE(DecodeTensor(Number(kDtype, v1::DATA_TYPE_F32) +
                              LengthDelimited(kShape, 1 + beyond, Varint(0)))
                     .ok())
        << beyond;
  }
  // The extents end inside a varint; the rest of it lies outside.
  EXPECT_FALSE(DecodeTensor(Number(kDtype, v1::DATA_TYPE_F32) +
                            LengthDelimited(kShape, 1, std::string("\x80\x00", 2)))
                   .ok());
}

TEST(TensorCodec, TheBufferKeepsTheMemoryAlive) {
  grpc::ByteBuffer buffer;
  std::weak_ptr<std::byte> memory;
  std::string contents;
  {
    const Tensor tensor = Counting(DType::kF32, {100, 100});
    memory = tensor.buffer();
    contents = Contents(tensor);
    buffer = EncodeWithTensor(v1::DispatchResponse(), tensor);
    // Not a copy: the buffer's last slice is the tensor's memory.
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer.Dump(&slices).ok());
    EXPECT_EQ(static_cast<const void*>(slices.back().begin()), tensor.data());
  }
  EXPECT_FALSE(memory.expired());
  v1::DispatchResponse message;
  Tensor decoded;
  ASSERT_TRUE(DecodeWithTensor(buffer, "rows", &message, &decoded).ok());
  EXPECT_TRUE(Contents(decoded) == contents);
  buffer.Clear();
  EXPECT_TRUE(memory.expired());
  EXPECT_TRUE(Contents(decoded) == contents);
}

TEST(TensorCodec, FindsOneFieldOfWhatIsNotDecoded) {
  constexpr int kField = v1::DispatchResponse::kRoundIdFieldNumber;
  v1::DispatchResponse message;
  EXPECT_EQ(VarintField(EncodeWithTensor(message, Counting(DType::kF32, {4, 5})), kField), 0u);
  message.set_message("text");
  message.set_round_id((uint64_t{1} << 63) + 7);
  const std::string header = message.SerializeAsString();
  const std::string rows =
      Bytes(EncodeWithTensor(v1::DispatchResponse(), Counting(DType::kF32, {4, 5})));
  for (const std::string& bytes : {header + rows, rows + header}) {
    EXPECT_EQ(VarintField(Buffer(bytes, 3), kField), message.round_id());
  }
  EXPECT_EQ(VarintField(Buffer(rows.substr(0, rows.size() - 1)), kField), 0u);
  EXPECT_EQ(VarintField(grpc::ByteBuffer(), kField), 0u);
}

TEST(TensorCodec, MessageFormOfSmallTensors) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {0}, {2, 3}}) {
    const Tensor tensor = Counting(DType::kI64, shape);
    v1::Tensor message;
    message.add_shape(99);  // what was there is replaced
    ToProto(tensor, &message);
    const auto back = FromProto(message, "topk_ids");
    ASSERT_TRUE(back.ok()) << back.status();
    ExpectSame(*back, tensor);
  }
  v1::Tensor message;
  message.set_dtype(v1::DATA_TYPE_F16);
  message.add_shape(3);
  message.set_data("12345");
  EXPECT_EQ(std::string(FromProto(message, "topk_ids").status().message()),
            "topk_ids.data: expected 6 bytes for F16 [3], got 5");
}

}  // namespace
}  // namespace expertmesh
