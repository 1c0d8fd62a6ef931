// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.h"

#include "base/fail.h"
#include "cpu/block_stats.h"

namespace tilesieve {

TILESIEVE_ISA_TABLE(BlockStats, kBlockStats)

std::string_view name_of(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return "portable";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::best:
      return "best";
  }
  return "unknown";
}

Isa parse_isa(std::string_view name) {
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::best}) {
    if (name == name_of(isa)) return isa;
  }
  fail("isa: got '{}', expected portable, avx2, avx512 or best", name);
}

bool is_available(Isa isa) {
  switch (isa) {
    case Isa::portable:
    case Isa::best:
      return true;
#if defined(TILESIEVE_HAS_avx2)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#if defined(TILESIEVE_HAS_avx512)
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    default:
      return false;
  }
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
    if (is_available(isa)) isas.push_back(isa);
  }
  return isas;
}

Isa best_isa() { return available_isas().back(); }

Isa resolve_isa(Isa isa) {
  if (isa == Isa::best) return best_isa();
  if (!is_available(isa)) {
    std::string names;
    for (Isa other : available_isas()) names += fmt::format(" {}", name_of(other));
    fail("execution.isa: {} is not available here; this machine and build have{}", name_of(isa), names);
  }
  return isa;
}

const BlockStats& block_stats(Isa isa) { return TILESIEVE_ISA_PICK(isa, kBlockStats); }

}  // namespace tilesieve
