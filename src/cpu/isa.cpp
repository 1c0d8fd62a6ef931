// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa.h"

#include <algorithm>
#include <iterator>

#if defined(TILESIEVE_HAS_amx)
#include <cpuid.h>
#endif
#if defined(TILESIEVE_HAS_amx) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "base/fail.h"
#include "base/spelling.h"
#include "cpu/block_max.h"
#include "cpu/block_stats.h"

namespace tilesieve {

TILESIEVE_VECTOR_TABLE(BlockStats, kBlockStats)
TILESIEVE_IF_X86(TILESIEVE_DECLARE_IN(amx, BlockMaxOps, kBlockMaxOps))

namespace {

constexpr Isa kIsas[] = {Isa::portable, Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::avx512_bf16, Isa::amx};

bool has_avx512() {
#if defined(TILESIEVE_HAS_avx512)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

// The processor has tiles and their products of bf16 and int8, and Linux lets this process use them: it gives the 8 KiB
// of state to those who ask. Asking twice does no harm.
bool has_amx() {
#if defined(TILESIEVE_HAS_amx) && defined(__linux__)
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512() || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  return (d & kAmxBf16) != 0 && (d & kAmxTile) != 0 && (d & kAmxInt8) != 0 && __builtin_cpu_supports("avx512bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

std::string_view name_of(Isa isa) {
  switch (isa) {
    case Isa::portable:
      return "portable";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::avx512_vnni:
      return "avx512_vnni";
    case Isa::avx512_bf16:
      return "avx512_bf16";
    case Isa::amx:
      return "amx";
    case Isa::best:
      return "best";
  }
  return "unknown";
}

Isa parse_isa(std::string_view name) {
  for (Isa isa : kIsas) {
    if (is_spelling_of(name, name_of(isa))) return isa;
  }
  if (name == name_of(Isa::best)) return Isa::best;
  fail("isa: got '{}', expected portable, avx2, avx512, avx512_vnni, avx512_bf16, amx or best", name);
}

bool is_available(Isa isa) {
  switch (isa) {
    case Isa::portable:
    case Isa::best:
      return true;
#if defined(TILESIEVE_HAS_avx2)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
    case Isa::avx512:
      return has_avx512();
#if defined(TILESIEVE_HAS_avx512_vnni)
    case Isa::avx512_vnni:
      return has_avx512() && __builtin_cpu_supports("avx512vnni");
#endif
#if defined(TILESIEVE_HAS_avx512_bf16)
    case Isa::avx512_bf16:
      return has_avx512() && __builtin_cpu_supports("avx512bf16");
#endif
    case Isa::amx: {
      static const bool available = has_amx();
      return available;
    }
    default:
      return false;
  }
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  std::copy_if(std::begin(kIsas), std::end(kIsas), std::back_inserter(isas), is_available);
  return isas;
}

void check_available(Isa isa) {
  if (is_available(isa)) return;
  std::string names;
  for (Isa other : available_isas()) names += fmt::format(" {}", name_of(other));
  fail("execution.isa: {} is not available here; this machine and build have{}", name_of(isa), names);
}

Isa vector_isa(Isa isa) {
  if (isa == Isa::best) isa = available_isas().back();
  check_available(isa);
  return std::min(isa, Isa::avx512);
}

Isa int8_isa(Isa isa) {
  constexpr Isa kBestFirst[] = {Isa::amx, Isa::avx512_vnni, Isa::avx2, Isa::portable};
  if (isa == Isa::best) return *std::find_if(std::begin(kBestFirst), std::end(kBestFirst), is_available);
  check_available(isa);
  if (std::find(std::begin(kBestFirst), std::end(kBestFirst), isa) == std::end(kBestFirst)) {
    fail("execution.isa: {} has no kernels in int8", name_of(isa));
  }
  return isa;
}

const BlockMaxOps* block_max_ops([[maybe_unused]] Isa isa, [[maybe_unused]] DType rows, [[maybe_unused]] DType keys) {
#if defined(TILESIEVE_HAS_amx)
  const auto exact = [](DType dtype) { return dtype == DType::bf16 || dtype == DType::f8_e4m3; };
  if (isa == Isa::best && is_available(Isa::amx)) isa = Isa::amx;
  if (isa == Isa::amx && exact(rows) && exact(keys)) return &amx::kBlockMaxOps;
#endif
  return nullptr;
}

const BlockStats& block_stats(Isa isa) { return TILESIEVE_VECTOR_PICK(isa, kBlockStats); }

}  // namespace tilesieve
