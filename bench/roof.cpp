// SPDX-License-Identifier: Apache-2.0
#include <omp.h>

#include <chrono>

#include "bench_case.h"

#if defined(TILESIEVE_HAS_ONEDNN)
#include <dnnl.hpp>
#endif

namespace tilesieve::bench {

#if defined(TILESIEVE_HAS_ONEDNN)

namespace {

// A product of fixed inputs, set up once: the primitive is compiled when it is made.
struct Matmul {
  Matmul(int64_t m, int64_t n, int64_t k) : engine(dnnl::engine::kind::cpu, 0), stream(engine) {
    const auto descriptor = [](int64_t rows, int64_t columns) {
      return dnnl::memory::desc({rows, columns}, dnnl::memory::data_type::f32, dnnl::memory::format_tag::ab);
    };
    const dnnl::memory::desc a = descriptor(m, k), b = descriptor(k, n), c = descriptor(m, n);
    primitive = dnnl::matmul(dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), engine));
    const auto memory = [&](const dnnl::memory::desc& what, float value) {
      dnnl::memory result(what, engine);
      float* data = static_cast<float*>(result.get_data_handle());
      for (size_t i = 0; i < what.get_size() / sizeof(float); ++i) data[i] = value * static_cast<float>(i % 7);
      return result;
    };
    arguments = {{DNNL_ARG_SRC, memory(a, 0.1f)}, {DNNL_ARG_WEIGHTS, memory(b, 0.2f)}, {DNNL_ARG_DST, memory(c, 0.0f)}};
  }

  dnnl::engine engine;
  dnnl::stream stream;
  dnnl::matmul primitive;
  std::unordered_map<int, dnnl::memory> arguments;
};

}  // namespace

double onednn_matmul_seconds(int64_t m, int64_t n, int64_t k, int num_threads) {
  static std::map<std::vector<int64_t>, std::unique_ptr<Matmul>> made;
  const int threads_before = omp_get_max_threads();
  if (num_threads > 0) omp_set_num_threads(num_threads);
  std::unique_ptr<Matmul>& matmul = made[{m, n, k}];
  const auto run = [&] {
    matmul->primitive.execute(matmul->stream, matmul->arguments);
    matmul->stream.wait();
  };
  if (!matmul) {
    matmul = std::make_unique<Matmul>(m, n, k);
    run();
  }
  const auto begin = std::chrono::steady_clock::now();
  run();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  omp_set_num_threads(threads_before);
  return seconds.count();
}

#else

double onednn_matmul_seconds(int64_t, int64_t, int64_t, int) { return -1.0; }

#endif

}  // namespace tilesieve::bench
