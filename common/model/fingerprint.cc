#include "common/model/fingerprint.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>

#include "absl/strings/escaping.h"
#include "common/status.h"
#include "common/tensor.h"

namespace expertmesh {
namespace {

constexpr int64_t kSampleHalf = 2048;

// A hash of a sequence of strings; their lengths are part of it, so no two sequences run together.
class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr);
  }
  void Add(const std::string& field) {
    const uint64_t length = field.size();
    EVP_DigestUpdate(context_.get(), &length, sizeof(length));
    EVP_DigestUpdate(context_.get(), field.data(), field.size());
  }
  std::string Hex() {
    std::string digest(EVP_MAX_MD_SIZE, '\0');
    unsigned int length = 0;
    EVP_DigestFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(digest.data()), &length);
    digest.resize(length);
    return absl::BytesToHexString(digest);
  }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

void AddFormats(const ModelDescription& model, Sha256* hash) {
  for (const LayerDescription& layer : model.layers) {
    const std::optional<QuantizedFormat>& format = layer.experts.row_format;
    hash->Add(absl::StrCat("layer ", layer.layer, ": format ", format ? NameOf(*format) : "native",
                           ", pad multiple ", layer.pad_multiple));
  }
}

}  // namespace

absl::StatusOr<std::string> Fingerprint(const std::string& canonical_config, const Shards& shards,
                                        const ModelDescription& model) {
  Sha256 hash;
  hash.Add(canonical_config);
  for (const auto& [name, location] : shards.tensors) {
    const int64_t bytes = location.info->num_bytes;
    const int64_t first = std::min(bytes, kSampleHalf);
    const int64_t last = std::min(bytes - first, kSampleHalf);
    std::string sample(static_cast<size_t>(first + last), '\0');
    RETURN_IF_ERROR(location.file->Read(name, 0, first, sample.data()));
    RETURN_IF_ERROR(location.file->Read(name, bytes - last, last, sample.data() + first));
    hash.Add(name);
    hash.Add(NameOf(location.info->dtype));
    hash.Add(ShapeToString(location.info->shape));
    hash.Add(sample);
  }
  AddFormats(model, &hash);
  return hash.Hex();
}

std::string FingerprintIn(const std::string& fingerprint, const ModelDescription& model) {
  Sha256 hash;
  hash.Add(fingerprint);
  AddFormats(model, &hash);
  return hash.Hex();
}

}  // namespace expertmesh
