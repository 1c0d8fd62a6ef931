// SPDX-License-Identifier: Apache-2.0
#include "roof.h"

#include <fmt/format.h>
#include <omp.h>

#include <chrono>
#include <map>
#include <memory>

#include "base/number_formats.h"
#include "tilesieve/error.h"

#if defined(TILESIEVE_HAS_ONEDNN)
#include <dnnl.hpp>
#endif

namespace tilesieve::bench {

#if defined(TILESIEVE_HAS_ONEDNN)

namespace {

// A product of fixed inputs, set up once: the primitive is compiled, for the threads at hand, when it is made.
struct Matmul {
  using Types = dnnl::memory::data_type;
  using Layout = dnnl::memory::format_tag;

  explicit Matmul(DType factors) : engine(dnnl::engine::kind::cpu, 0), stream(engine) {
    const Types type = factors == DType::bf16 ? Types::bf16 : Types::f32;
    const auto square = [](Types dtype, Layout layout) {
      return dnnl::memory::desc({kRoofSize, kRoofSize}, dtype, layout);
    };
    const dnnl::memory::desc a = square(type, Layout::ab), b = square(type, Layout::any),
                             c = square(Types::f32, Layout::ab);
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc descriptor(engine, a, b, c);
#else
    const dnnl::matmul::primitive_desc descriptor(dnnl::matmul::desc(a, b, c), engine);
#endif
    primitive = dnnl::matmul(descriptor);
    implementation = descriptor.impl_info_str();
    arguments = {{DNNL_ARG_SRC, filled(a, factors)},
                 {DNNL_ARG_WEIGHTS, filled(descriptor.weights_desc(), factors)},
                 {DNNL_ARG_DST, dnnl::memory(c, engine)}};
  }

  // Numbers of no pattern, as those of attention: what is multiplied changes the power and with it the clock.
  dnnl::memory filled(const dnnl::memory::desc& what, DType dtype) {
    dnnl::memory result(what, engine);
    uint32_t state = 1;
    const auto next = [&] {
      state = state * 1664525u + 1013904223u;
      return static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
    };
    if (dtype == DType::bf16) {
      auto* data = static_cast<uint16_t*>(result.get_data_handle());
      for (size_t i = 0; i < what.get_size() / 2; ++i) data[i] = bf16_from_f32(next());
    } else {
      auto* data = static_cast<float*>(result.get_data_handle());
      for (size_t i = 0; i < what.get_size() / 4; ++i) data[i] = next();
    }
    return result;
  }

  double seconds() {
    const auto begin = std::chrono::steady_clock::now();
    primitive.execute(stream, arguments);
    stream.wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  dnnl::engine engine;
  dnnl::stream stream;
  dnnl::matmul primitive;
  std::string implementation;
  std::unordered_map<int, dnnl::memory> arguments;
};

// Calls `use` with the product for that format, on `num_threads` threads.
template <class Use>
auto with_matmul(DType factors, int num_threads, Use&& use) {
  static std::map<DType, std::unique_ptr<Matmul>> made;
  const int threads_before = omp_get_max_threads();
  if (num_threads > 0) omp_set_num_threads(num_threads);
  std::unique_ptr<Matmul>& matmul = made[factors];
  if (!matmul) {
    matmul = std::make_unique<Matmul>(factors);
    matmul->seconds();  // the first call is slower
  }
  const auto result = use(*matmul);
  omp_set_num_threads(threads_before);
  return result;
}

}  // namespace

bool has_roof() { return true; }

double roof_seconds(DType factors, int num_threads) {
  return with_matmul(factors, num_threads, [](Matmul& matmul) { return matmul.seconds(); });
}

std::string roof_implementation(DType factors, int num_threads) {
  return with_matmul(factors, num_threads, [](const Matmul& matmul) {
    const dnnl_version_t* version = dnnl::version();
    return fmt::format("oneDNN {}.{}.{} {}", version->major, version->minor, version->patch, matmul.implementation);
  });
}

#else

bool has_roof() { return false; }
double roof_seconds(DType, int) { throw Error("bench: built without oneDNN"); }
std::string roof_implementation(DType, int) { throw Error("bench: built without oneDNN"); }

#endif

}  // namespace tilesieve::bench
