// SPDX-License-Identifier: Apache-2.0
// Fuzzes the safetensors reader: any bytes give tensors inside the file or an Error that names it.
#include <cstring>
#include <string_view>
#include <vector>

#include "io/safetensors.h"
#include "tilesieve/error.h"
#include "walk_tensors.h"

namespace {

void parse(const uint8_t* bytes, size_t size) {
  try {
    tilesieve::walk_tensors(tilesieve::parse_safetensors(bytes, size, "fuzzed.safetensors"));
  } catch (const tilesieve::Error& error) {
    if (std::strstr(error.what(), "fuzzed.safetensors: ") != error.what()) abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  parse(bytes, size);
  // Once more as a header, up to its last brace, and data: a mutation that changes the length of the header would else
  // need to hit the length field at the same time.
  const auto text = std::string_view(reinterpret_cast<const char*>(bytes), size);
  const uint64_t header_size = text.rfind('}') + 1;  // 0 where there is none
  std::vector<uint8_t> file(sizeof header_size + size);
  std::memcpy(file.data(), &header_size, sizeof header_size);
  if (size > 0) std::memcpy(file.data() + sizeof header_size, bytes, size);
  parse(file.data(), file.size());
  return 0;
}
