#include "common/rpc/status.h"

#include <google/protobuf/any.pb.h>
#include <google/protobuf/duration.pb.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/unknown_field_set.h>
#include <google/protobuf/wire_format_lite.h>

#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace expertmesh {
namespace {

using google::protobuf::internal::WireFormatLite;

constexpr char kRetryInfo[] = "type.googleapis.com/google.rpc.RetryInfo";

// Debian has no google/rpc/*.proto, of which two fields are needed here:
//   message RetryInfo { google.protobuf.Duration retry_delay = 1; }
//   message Status { int32 code = 1; string message = 2; repeated google.protobuf.Any details = 3;
//   }
void AppendField(int number, const std::string& bytes, std::string* message) {
  google::protobuf::io::StringOutputStream stream(message);
  google::protobuf::io::CodedOutputStream coded(&stream);
  WireFormatLite::WriteString(number, bytes, &coded);
}

// The values of a field of strings or messages; none where `message` is malformed.
std::vector<std::string> Fields(int number, const std::string& message) {
  google::protobuf::UnknownFieldSet fields;
  std::vector<std::string> values;
  if (!fields.ParseFromString(message)) return values;
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    if (field.number() == number &&
        field.type() == google::protobuf::UnknownField::TYPE_LENGTH_DELIMITED) {
      values.push_back(field.length_delimited());
    }
  }
  return values;
}

// A serialised google.rpc.Status, or nothing where there are no payloads.
std::string Details(const absl::Status& status, const std::string& message) {
  std::string details;
  status.ForEachPayload([&details](absl::string_view type, const absl::Cord& payload) {
    google::protobuf::Any any;
    any.set_type_url(std::string(type));
    any.set_value(std::string(payload));
    AppendField(3, any.SerializeAsString(), &details);
  });
  if (details.empty()) return details;
  {
    google::protobuf::io::StringOutputStream stream(&details);
    google::protobuf::io::CodedOutputStream coded(&stream);
    WireFormatLite::WriteInt32(1, static_cast<int32_t>(status.code()), &coded);
  }
  AppendField(2, message, &details);
  return details;
}

// Status messages travel as metadata, which peers limit to 8 KiB in all: a longer one would lose
// the status itself.
constexpr size_t kMaxMessageBytes = 2048;

}  // namespace

absl::Status RetryLater(const std::string& what, absl::Duration after) {
  const int64_t ms = absl::ToInt64Milliseconds(after);
  absl::Status status =
      absl::ResourceExhaustedError(absl::StrCat(what, "; retry later (after ", ms, " ms)"));
  google::protobuf::Duration delay;
  delay.set_seconds(ms / 1000);
  delay.set_nanos(static_cast<int32_t>(ms % 1000 * 1'000'000));
  std::string info;
  AppendField(1, delay.SerializeAsString(), &info);
  status.SetPayload(kRetryInfo, absl::Cord(info));
  return status;
}

std::optional<absl::Duration> RetryAfter(const absl::Status& status) {
  const absl::optional<absl::Cord> info = status.GetPayload(kRetryInfo);
  if (!info) return std::nullopt;
  for (const std::string& field : Fields(1, std::string(*info))) {
    google::protobuf::Duration delay;
    if (delay.ParseFromString(field)) {
      return absl::Seconds(delay.seconds()) + absl::Nanoseconds(delay.nanos());
    }
  }
  return std::nullopt;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  std::string message(status.message());
  if (message.size() > kMaxMessageBytes) message = message.substr(0, kMaxMessageBytes) + "...";
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message,
                      Details(status, message));
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  for (const std::string& detail : Fields(3, status.error_details())) {
    google::protobuf::Any any;
    if (any.ParseFromString(detail)) result.SetPayload(any.type_url(), absl::Cord(any.value()));
  }
  return result;
}

}  // namespace expertmesh
