// SPDX-License-Identifier: Apache-2.0
// Fuzzes the .npy reader: any bytes give a tensor inside the file or an Error that names it.
#include <cstring>
#include <string_view>
#include <vector>

#include "io/npy.h"
#include "tilesieve/error.h"
#include "walk_tensors.h"

namespace {

void parse(const uint8_t* bytes, size_t size) {
  try {
    tilesieve::walk_tensors(tilesieve::parse_npy(bytes, size, "fuzzed.npy", "fuzzed"));
  } catch (const tilesieve::Error& error) {
    if (std::strstr(error.what(), "fuzzed.npy: ") != error.what()) abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  parse(bytes, size);
  // Once more as a header, up to its last brace, and data: a mutation that changes the length of the header would else
  // need to hit the length field at the same time.
  const auto text = std::string_view(reinterpret_cast<const char*>(bytes), size);
  const auto header_size = static_cast<uint32_t>(text.rfind('}') + 1);  // 0 where there is none
  constexpr std::string_view kMagicAndVersion("\x93NUMPY\x02\x00", 8);
  std::vector<uint8_t> file(kMagicAndVersion.begin(), kMagicAndVersion.end());
  file.resize(file.size() + sizeof header_size);
  std::memcpy(file.data() + kMagicAndVersion.size(), &header_size, sizeof header_size);
  file.insert(file.end(), bytes, bytes + size);
  parse(file.data(), file.size());
  return 0;
}
