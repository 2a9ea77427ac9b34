// Mutations of a safetensors file. Few changes of a header survive that leave its length, in the
// first 8 bytes, or the number of bytes of data as they were: most are made to fit here.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  uint64_t length = 0;
  if (size >= sizeof(length)) std::memcpy(&length, data, sizeof(length));
  if (size < sizeof(length) || length > size - sizeof(length) || seed % 8 == 0) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  std::string header(reinterpret_cast<const char*>(data) + sizeof(length), length);
  size_t data_bytes = size - sizeof(length) - length;
  header.resize(max_size - sizeof(length));
  length = LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(header.data()), length, header.size());
  header.resize(length);

  // As many bytes of data as the largest number in the header (an end of the data, if it is right).
  if (seed % 2 == 0) {
    data_bytes = 0;
    size_t number = 0;
    for (const char c : header) {
      number = c >= '0' && c <= '9' ? std::min<size_t>(number * 10 + (c - '0'), max_size) : 0;
      if (number < max_size) data_bytes = std::max(data_bytes, number);
    }
  }
  data_bytes = std::min<size_t>(data_bytes, max_size - sizeof(length) - length);
  std::memcpy(data, &length, sizeof(length));
  std::memcpy(data + sizeof(length), header.data(), length);
  for (size_t i = 0; i < data_bytes; ++i) {
    data[sizeof(length) + length + i] = static_cast<uint8_t>(i);
  }
  return sizeof(length) + length + data_bytes;
}
