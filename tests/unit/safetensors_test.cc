// The safetensors reader against files written byte by byte, and the writer against a file of the
// reference implementation.

#include "common/safetensors/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "common/safetensors/strict_json.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace expertmesh {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

std::string Text(const absl::Status& status) { return std::string(status.message()); }

// 8 bytes, little-endian.
std::string Length(uint64_t n) { return std::string(reinterpret_cast<const char*>(&n), sizeof(n)); }

// A file with that header and that many bytes of data, 0, 1, 2, ...
std::string FileOf(const std::string& header, size_t data_bytes) {
  std::string file = Length(header.size()) + header;
  for (size_t i = 0; i < data_bytes; ++i) file += static_cast<char>(i);
  return file;
}

class SafetensorsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("safetensors_test." + std::to_string(getpid()) + "." +
               ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
    path_ = (folder_ / "t.safetensors").string();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  absl::StatusOr<std::shared_ptr<const SafetensorsFile>> OpenBytes(const std::string& bytes) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
    return SafetensorsFile::Open(path_);
  }

  // The message of the refusal; "accepted" if there was none.
  std::string Refusal(const std::string& bytes) {
    const auto file = OpenBytes(bytes);
    if (file.ok()) return "accepted";
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << file.status();
    EXPECT_THAT(Text(file.status()), HasSubstr("t.safetensors")) << "the message names the file";
    return Text(file.status());
  }
  std::string HeaderRefusal(const std::string& header, size_t data_bytes = 0) {
    return Refusal(FileOf(header, data_bytes));
  }

  std::filesystem::path folder_;
  std::string path_;
};

TEST_F(SafetensorsTest, ReadsTensorsOfAnyAlignmentAndKeepsMetadata) {
  // "a" begins at an odd address of the file; the rest covers rank 0 and no elements.
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"u":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
      R"("a":{"dtype":"F32","shape":[1,2],"data_offsets":[1,9],"extra":{"deep":[1.5,null]}},)"
      R"("empty":{"dtype":"F32","shape":[2,0],"data_offsets":[9,9]},)"
      R"("scalar":{"dtype":"BF16","shape":[],"data_offsets":[9,11]}})";
  const auto file = OpenBytes(FileOf(header, 11));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT((*file)->metadata(), ElementsAre(Pair("format", "pt")));
  ASSERT_EQ((*file)->tensors().size(), 4u);

  const auto a = (*file)->ReadTensor("a");
  ASSERT_TRUE(a.ok()) << a.status();
  EXPECT_THAT(a->shape(), ElementsAre(1, 2));
  EXPECT_EQ(std::memcmp(a->data(), "\1\2\3\4\5\6\7\10", 8), 0);

  EXPECT_EQ((*file)->ReadTensor("empty")->num_elements(), 0);
  EXPECT_EQ((*file)->ReadTensor("scalar")->num_elements(), 1);

  char two[2];
  ASSERT_TRUE((*file)->Read("a", 6, 2, two).ok());
  EXPECT_EQ(std::string(two, 2), "\7\10");
  EXPECT_EQ((*file)->Read("a", 7, 2, two).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*file)->Read("a", -1, 1, two).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*file)->Read("a", 1, std::numeric_limits<int64_t>::max(), two).code(),
            absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*file)->Read("b", 0, 0, two).code(), absl::StatusCode::kNotFound);
}

TEST_F(SafetensorsTest, AcceptsEmptyFilesAndWhiteSpaceAroundTheHeader) {
  EXPECT_EQ(HeaderRefusal("{}      "), "accepted");
  EXPECT_EQ(HeaderRefusal("  \n\t{} \r\n"), "accepted");
  EXPECT_EQ(HeaderRefusal(R"({"__metadata__":{}})"), "accepted");
  EXPECT_EQ(HeaderRefusal(R"({"__metadata__":null})"), "accepted");
  EXPECT_EQ(HeaderRefusal(R"({"a":{"dtype":"F4","shape":[2,2],"data_offsets":[0,2]}})", 2),
            "accepted");
  EXPECT_EQ(HeaderRefusal(R"({"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}})", 3),
            "accepted");
}

TEST_F(SafetensorsTest, RefusesBadHeaderLengths) {
  EXPECT_THAT(Refusal(""), HasSubstr("HeaderTooSmall"));
  EXPECT_THAT(Refusal(std::string(7, '\0')), HasSubstr("HeaderTooSmall"));
  EXPECT_THAT(Refusal(std::string("\x3c\0\0\0\0\xff\xff\xff{}", 10)), HasSubstr("HeaderTooLarge"));
  EXPECT_THAT(Refusal(Length(100'000'001) + "{}"), HasSubstr("HeaderTooLarge"));
  EXPECT_THAT(Refusal(Length(~0ull) + "{}"), HasSubstr("HeaderTooLarge"));
  EXPECT_THAT(Refusal(Length(100'000'000) + "{}"), HasSubstr("InvalidHeaderLength"));
  EXPECT_THAT(Refusal(Length(0x3c)), HasSubstr("InvalidHeaderLength"));
  EXPECT_THAT(Refusal(Length(1000) + "{}"), HasSubstr("InvalidHeaderLength"));
}

TEST_F(SafetensorsTest, RefusesHeadersThatAreNoStrictJson) {
  EXPECT_THAT(HeaderRefusal("\xff"), HasSubstr("not UTF-8"));
  EXPECT_THAT(HeaderRefusal("{\"\xc3\":1}"), HasSubstr("not UTF-8"));
  EXPECT_THAT(HeaderRefusal("{"), HasSubstr("bad JSON"));
  EXPECT_THAT(HeaderRefusal(""), HasSubstr("bad JSON"));
  EXPECT_THAT(HeaderRefusal("{} {}"), HasSubstr("bad JSON"));
  EXPECT_THAT(HeaderRefusal("{}/**/"), HasSubstr("bad JSON"));
  EXPECT_THAT(HeaderRefusal("\xef\xbb\xbf{}"), HasSubstr("byte order mark"));
  EXPECT_THAT(HeaderRefusal(std::string("{}\0hidden", 9)), HasSubstr("NUL byte at offset 2"));
  EXPECT_THAT(HeaderRefusal("[]"), HasSubstr("expected an object, given array"));
}

TEST_F(SafetensorsTest, RefusesDuplicateKeys) {
  const std::string a = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_EQ(HeaderRefusal("{" + a + "}", 1), "accepted");
  EXPECT_THAT(HeaderRefusal("{" + a + "," + a + "}", 1), HasSubstr("duplicate key 'a'"));
  EXPECT_THAT(
      HeaderRefusal(R"({"a":{"dtype":"U8","shape":[1],"dtype":"I8","data_offsets":[0,1]}})", 1),
      HasSubstr("duplicate key 'dtype'"));
  // The same key in different objects is none.
  EXPECT_EQ(HeaderRefusal(R"({"__metadata__":{"a":"a"},)" + a + "}", 1), "accepted");
}

TEST_F(SafetensorsTest, DeepNestingIsRefusedAndDoesNotOverflowTheStack) {
  EXPECT_THAT(HeaderRefusal(std::string(1'000'000, '[')), HasSubstr("nested more than"));
  std::string objects;
  for (int i = 0; i < 200'000; ++i) objects += "{\"a\":";
  EXPECT_THAT(HeaderRefusal(objects), HasSubstr("nested more than"));
}

TEST_F(SafetensorsTest, RefusesBadEntriesNamingTheTensor) {
  const auto entry = [this](const std::string& value, size_t bytes = 4) {
    return HeaderRefusal("{\"w\":" + value + "}", bytes);
  };
  const auto refused = [](const char* what) {
    return AllOf(HasSubstr("tensor 'w'"), HasSubstr("InvalidHeaderDeserialization"),
                 HasSubstr(what));
  };
  EXPECT_THAT(entry("1"), refused("expected an object"));
  EXPECT_THAT(entry(R"({"shape":[1],"data_offsets":[0,4]})"), refused("no dtype"));
  EXPECT_THAT(entry(R"({"dtype":"F32","data_offsets":[0,4]})"), refused("no shape"));
  EXPECT_THAT(entry(R"({"dtype":"F32","shape":[1]})"), refused("no data_offsets"));
  EXPECT_THAT(entry(R"({"dtype":"F33","shape":[1],"data_offsets":[0,4]})"),
              refused("unknown dtype \"F33\""));
  EXPECT_THAT(entry(R"({"dtype":1,"shape":[1],"data_offsets":[0,4]})"), refused("is no string"));
  EXPECT_THAT(entry(R"({"dtype":"F32","shape":1,"data_offsets":[0,4]})"), refused("no array"));
  for (const char* bad :
       {"-1", "1.0", "1e0", "\"1\"", "null", "true", "[1]", "-0", "18446744073709551616"}) {
    EXPECT_THAT(
        entry(std::string(R"({"dtype":"F32","shape":[)") + bad + R"(],"data_offsets":[0,4]})"),
        refused("unsigned integers"))
        << bad;
    EXPECT_THAT(entry(std::string(R"({"dtype":"F32","shape":[1],"data_offsets":[0,)") + bad + "]}"),
                refused("unsigned integers"))
        << bad;
  }
  EXPECT_THAT(entry(R"({"dtype":"F32","shape":[1],"data_offsets":[0]})"), refused("two unsigned"));
  EXPECT_THAT(entry(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4,4]})"),
              refused("two unsigned"));
  EXPECT_THAT(HeaderRefusal(R"({"__metadata__":{"k":1}})"), HasSubstr("__metadata__: 'k'"));
  EXPECT_THAT(HeaderRefusal(R"({"__metadata__":"x"})"), HasSubstr("__metadata__"));
}

TEST_F(SafetensorsTest, RefusesHolesOverlapsAndOrdersNamingTheTensor) {
  const auto two = [this](const std::string& a, const std::string& b, size_t bytes) {
    return HeaderRefusal(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
                             R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}",
                         bytes);
  };
  EXPECT_EQ(two("[0,4]", "[4,8]", 8), "accepted");
  EXPECT_EQ(two("[4,8]", "[0,4]", 8), "accepted");
  EXPECT_THAT(two("[0,4]", "[5,9]", 9), AllOf(HasSubstr("'b'"), HasSubstr("InvalidOffset")));
  EXPECT_THAT(two("[0,4]", "[3,7]", 8), AllOf(HasSubstr("'b'"), HasSubstr("InvalidOffset")));
  EXPECT_THAT(two("[0,4]", "[0,4]", 4), AllOf(HasSubstr("'b'"), HasSubstr("InvalidOffset")));
  EXPECT_THAT(two("[1,5]", "[5,9]", 9), AllOf(HasSubstr("'a'"), HasSubstr("InvalidOffset")));
  EXPECT_THAT(two("[0,4]", "[4,2]", 8), AllOf(HasSubstr("'b'"), HasSubstr("InvalidOffset")));
  EXPECT_THAT(two("[0,4]", "[4,18446744073709551615]", 8), HasSubstr("TensorInvalidInfo"));
}

TEST_F(SafetensorsTest, RefusesWrongSizesNamingTheTensor) {
  const auto one = [this](const std::string& dtype, const std::string& shape,
                          const std::string& offsets, size_t bytes) {
    return HeaderRefusal(R"({"w":{"dtype":")" + dtype + R"(","shape":)" + shape +
                             R"(,"data_offsets":)" + offsets + "}}",
                         bytes);
  };
  for (const char* shape :
       {"[2,18446744073709551614]", "[2,9223372036854775807]", "[9223372036854775808]",
        "[4294967296,4294967296]", "[1152921504606846976]"}) {
    EXPECT_THAT(one("F32", shape, "[0,16]", 16),
                AllOf(HasSubstr("'w'"), HasSubstr("ValidationOverflow")))
        << shape;
  }
  EXPECT_THAT(one("F4", "[1,3]", "[0,1]", 1),
              AllOf(HasSubstr("'w'"), HasSubstr("MisalignedSlice")));
  EXPECT_THAT(one("I32", "[2,2]", "[0,4]", 4),
              AllOf(HasSubstr("'w'"), HasSubstr("TensorInvalidInfo")));
  // A shape of a million floats over four bytes.
  EXPECT_THAT(one("F32", "[1000,1000]", "[0,4]", 4),
              AllOf(HasSubstr("'w'"), HasSubstr("TensorInvalidInfo"), HasSubstr("4000000")));
  EXPECT_THAT(one("F32", "[1000,1000]", "[0,4000000]", 4),
              AllOf(HasSubstr("'w'"), HasSubstr("MetadataIncompleteBuffer")));
  EXPECT_THAT(one("U8", "[4]", "[0,4]", 2), HasSubstr("MetadataIncompleteBuffer"));
  EXPECT_THAT(one("U8", "[4]", "[0,4]", 5), HasSubstr("MetadataIncompleteBuffer"));
}

TEST_F(SafetensorsTest, OpenErrorsAreTheFileSystems) {
  EXPECT_EQ(SafetensorsFile::Open(path_ + ".none").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::Open(path_ + "/below").status().code(), absl::StatusCode::kNotFound);
  const auto refusal = [](const std::string& path) {
    const absl::Status status = SafetensorsFile::Open(path).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(Text(status).find(path), 0u) << status;
    return Text(status);
  };
  EXPECT_THAT(refusal(folder_.string()), HasSubstr("expected a file, given a folder"));
  EXPECT_THAT(refusal("/dev/zero"), HasSubstr("given a device"));
  EXPECT_THAT(refusal(path_ + std::string(300, 'x')), HasSubstr("name too long"));
  // Nobody will ever write to it.
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(refusal(path_), HasSubstr("given a FIFO"));
  std::filesystem::remove(path_);
  std::filesystem::create_symlink("t.safetensors", path_);
  EXPECT_THAT(refusal(path_), HasSubstr("symbolic links"));
  std::filesystem::remove(path_);
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  ASSERT_LT(path_.size(), sizeof(address.sun_path));
  path_.copy(address.sun_path, path_.size());
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  refusal(path_);
  close(listener);
}

// A small valid file, three tensors.
std::string SmallFile() {
  return FileOf(R"({"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
                R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]},)"
                R"("c":{"dtype":"U8","shape":[2],"data_offsets":[22,24]}})",
                24);
}

TEST_F(SafetensorsTest, EveryTruncationIsRefused) {
  const std::string file = SmallFile();
  ASSERT_EQ(Refusal(file), "accepted");
  for (size_t size = 0; size < file.size(); ++size) {
    EXPECT_NE(Refusal(file.substr(0, size)), "accepted") << size;
  }
}

TEST_F(SafetensorsTest, EveryChangedHeaderByteIsRefusedOrHarmless) {
  // Whatever one byte becomes, what is accepted stays inside the file.
  const std::string file = SmallFile();
  const size_t header_end = file.size() - 24;
  for (size_t i = 0; i < header_end; ++i) {
    for (const char byte :
         {'\0', '"', '9', '{', ' ', '\xff', '-', static_cast<char>(file[i] ^ 1)}) {
      std::string changed = file;
      changed[i] = byte;
      const auto opened = OpenBytes(changed);
      if (!opened.ok()) continue;
      for (const auto& [name, info] : (*opened)->tensors()) {
        EXPECT_LE(info.file_offset + info.num_bytes, static_cast<int64_t>(file.size()));
        std::vector<char> bytes(static_cast<size_t>(info.num_bytes));
        EXPECT_TRUE((*opened)->Read(name, 0, info.num_bytes, bytes.data()).ok());
      }
    }
  }
}

TEST_F(SafetensorsTest, EveryRetypedTensorAndSwappedOffsetIsRefused) {
  const std::vector<std::string> dtypes = {"F32", "BF16", "U8"};
  const std::vector<std::string> shapes = {"[2,2]", "[3]", "[2]"};
  const std::vector<std::string> offsets = {"[0,16]", "[16,22]", "[22,24]"};
  const auto file = [&](const std::vector<std::string>& types,
                        const std::vector<std::string>& ranges) {
    std::string header = "{";
    for (size_t i = 0; i < 3; ++i) {
      header += std::string(i == 0 ? "" : ",") + "\"" + static_cast<char>('a' + i) +
                R"(":{"dtype":")" + types[i] + R"(","shape":)" + shapes[i] + R"(,"data_offsets":)" +
                ranges[i] + "}";
    }
    return FileOf(header + "}", 24);
  };
  ASSERT_EQ(Refusal(file(dtypes, offsets)), "accepted");
  for (size_t i = 0; i < 3; ++i) {
    for (const char* other : {"F4", "F6_E2M3", "U8", "F16", "F32", "F64", "I64", "C64"}) {
      const std::optional<DType> dtype = DTypeFromName(other);
      if (BitsOf(*dtype) == BitsOf(*DTypeFromName(dtypes[i]))) continue;  // the same bytes
      std::vector<std::string> changed = dtypes;
      changed[i] = other;
      EXPECT_THAT(Refusal(file(changed, offsets)),
                  AllOf(HasSubstr("tensor '"), ::testing::Not("accepted")))
          << other;
    }
    for (size_t j = i + 1; j < 3; ++j) {
      std::vector<std::string> swapped = offsets;
      std::swap(swapped[i], swapped[j]);
      EXPECT_THAT(Refusal(file(dtypes, swapped)), HasSubstr("TensorInvalidInfo"));
    }
  }
}

TEST_F(SafetensorsTest, AFileCutShortWhileOpenIsAnErrorOfTheRead) {
  const auto file = OpenBytes(SmallFile());
  ASSERT_TRUE(file.ok());
  ASSERT_EQ(truncate(path_.c_str(), static_cast<off_t>(SmallFile().size() - 4)), 0);
  EXPECT_TRUE((*file)->ReadTensor("a").ok());
  const absl::Status status = (*file)->ReadTensor("b").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("'b'"), HasSubstr("shorter")));
}

TEST_F(SafetensorsTest, TensorsOfLessThanAByteAnElementAreNotCopied) {
  const auto file =
      OpenBytes(FileOf(R"({"w":{"dtype":"F6_E2M3","shape":[4,128],"data_offsets":[0,384]}})", 384));
  ASSERT_TRUE(file.ok()) << file.status();
  const auto tensor = (*file)->ReadTensor("w");
  EXPECT_EQ(tensor.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(tensor.status().message()), HasSubstr("'w'"));
}

// Bytes of this process's memory that are pages of the file.
int64_t ResidentBytes(const std::string& path) {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool ours = false;
  int64_t kib = 0;
  while (std::getline(maps, line)) {
    if (line.find('-') < line.find(' ') && line.find(':') > line.find(' ')) {
      ours = line.find(path) != std::string::npos;
    } else if (ours && line.rfind("Rss:", 0) == 0) {
      kib += std::stoll(line.substr(4));
    }
  }
  return kib * 1024;
}

TEST_F(SafetensorsTest, ReadingLeavesNoPageOfTheFileResident) {
  const Tensor tensor(DType::kF32, {1024, 1024});
  std::memset(const_cast<std::byte*>(tensor.data()), 1, tensor.num_bytes());
  ASSERT_TRUE(WriteSafetensors(path_, {{"w", tensor}}).ok());
  const auto file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(ResidentBytes(path_), 0);
  ASSERT_TRUE((*file)->ReadTensor("w").ok());
  EXPECT_EQ(ResidentBytes(path_), 0);
  // The count is not blind: pages that are touched through a mapping do show.
  const int fd = open(path_.c_str(), O_RDONLY);
  void* mapping = mmap(nullptr, tensor.num_bytes(), PROT_READ, MAP_PRIVATE, fd, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  volatile char sum = 0;
  for (size_t i = 0; i < tensor.num_bytes(); i += 4096) sum = sum + static_cast<char*>(mapping)[i];
  EXPECT_GE(ResidentBytes(path_), 4 << 20);
  munmap(mapping, tensor.num_bytes());
  close(fd);
}

std::string Slurp(const std::string& path) {
  std::ostringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  return bytes.str();
}

TEST_F(SafetensorsTest, WritesWhatTheReferenceWriterWrites) {
  // safetensors 0.8.0's serialize() of the same three tensors and metadata.
  const std::string header =
      R"({"__metadata__":{"k":"v"},"z":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
      R"("a":{"dtype":"BF16","shape":[1,1],"data_offsets":[8,10]},)"
      R"("b":{"dtype":"BF16","shape":[],"data_offsets":[10,12]},)"
      R"("q":{"dtype":"U8","shape":[3],"data_offsets":[12,15]}})";
  const std::string padded = header + std::string((8 - header.size() % 8) % 8, ' ');

  std::string data;
  for (char i = 0; i < 15; ++i) data += i;
  const std::vector<int64_t> two = {2}, one_one = {1, 1}, none = {}, three = {3};
  ASSERT_TRUE(WriteSafetensors(path_,
                               {{"a", TensorView(DType::kBF16, one_one, data.data() + 8)},
                                {"b", TensorView(DType::kBF16, none, data.data() + 10)},
                                {"q", TensorView(DType::kU8, three, data.data() + 12)},
                                {"z", TensorView(DType::kF32, two, data.data())}},
                               {{"k", "v"}})
                  .ok());
  EXPECT_EQ(Slurp(path_), FileOf(padded, 15));
  const auto file = SafetensorsFile::Open(path_);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT((*file)->metadata(), ElementsAre(Pair("k", "v")));
}

TEST_F(SafetensorsTest, AFailedWriteLeavesTheOldFileAndNoOther) {
  std::ofstream(path_) << "old";
  const std::vector<int64_t> three = {3};
  const char data[3] = {};
  EXPECT_EQ(WriteSafetensors(path_, {{"w", TensorView(DType::kF4, three, data)}}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(WriteSafetensors(path_, {{"\xff", TensorView(DType::kU8, three, data)}}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(WriteSafetensors(path_, {{"__metadata__", TensorView(DType::kU8, three, data)}}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Slurp(path_), "old");
  // Renaming over a folder fails after the bytes are written.
  const std::string taken = (folder_ / "taken").string();
  std::filesystem::create_directories(taken);
  EXPECT_FALSE(WriteSafetensors(taken, {{"w", TensorView(DType::kU8, three, data)}}).ok());
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_)) ++files;
  EXPECT_EQ(files, 2u);
  EXPECT_EQ(WriteSafetensors((folder_ / "none" / "t").string(), {}).code(),
            absl::StatusCode::kNotFound);
}

TEST(StrictJson, ParsesOrdinaryJson) {
  const auto parsed = ParseStrictJson(R"( {"a":[1,2.5,null,"é\u00e9"],"b":{"a":{}}} )");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ((*parsed)["a"][3], "éé");
  EXPECT_FALSE(ParseStrictJson(R"({"a":Infinity})").ok());
  EXPECT_FALSE(ParseStrictJson(R"({"a":1,})").ok());
  EXPECT_FALSE(ParseStrictJson(R"({"a":"\ud800"})").ok());
}

}  // namespace
}  // namespace expertmesh
