// SPDX-License-Identifier: Apache-2.0
// Random problems in every storage format, flat and paged, with scales, for as long as one likes: every kernel, loop
// order and walk against float64 within a bound that must hold, the same bits from one thread as from two, and every
// router against a float64 rule.
//   differential --seconds 60 --seed 1         the first failure ends it with one line, which replays it:
//   differential --problem "q=3 kv=90 ..." --seed 17
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>

#include "rounding_bound.h"
#include "stored_numbers.h"
#include "test_inputs.h"
#include "test_route.h"

// Of the sanitizers, where the program is built with them: what they call, or are told to call, when they find a fault.
extern "C" [[gnu::visibility("default")]] void __ubsan_on_report();
extern "C" [[gnu::weak]] void __sanitizer_set_death_callback(void (*callback)());

namespace tilesieve::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::string present_case;  // as it can be replayed
int64_t num_runs = 0;
double worst_o = 0, worst_lse = 0;  // errors, as shares of their bounds

struct Failure {
  std::string what;
};

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <class T, size_t N>
  T of(const T (&values)[N]) {
    return values[below(N)];
  }

 private:
  std::mt19937_64 engine_;
};

Problem random_problem(Random& random) {
  constexpr int64_t kLens[] = {0, 1, 2, 7, 8, 9, 31, 63, 64, 65, 127, 128, 129};
  constexpr int64_t kGroups[] = {1, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 48, 49, 100, 512};
  constexpr int64_t kBlocks[] = {8, 8, 16, 24, 64, 128};
  constexpr int64_t kTopKs[] = {1, 2, 3, 4, 8, 16, 200};
  constexpr double kScales[] = {0, 0, 0, 1e-30, 0.001, 0.01, 0.3, 1, 6};
  Problem p;
  do {
    p = Problem{};
    for (int64_t s = random.one_in(64) ? 0 : 1 + random.below(4); s > 0; --s) {
      const int64_t most = random.one_in(20) ? 1400 : 70;
      p.q_lens.push_back(random.one_in(2) ? random.of(kLens) : random.below(most));
      p.kv_lens.push_back(random.one_in(2) ? random.of(kLens) : random.below(600));
    }
    p.num_kv_heads = 1 + random.below(4);
    p.num_q_heads = p.num_kv_heads * random.of(kGroups);
    p.head_dim = 8 * (1 + random.below(random.one_in(2) ? 4 : 32));
    p.kv_block_size = random.one_in(4) ? 8 * (1 + random.below(128)) : random.of(kBlocks);
    p.top_k = random.of(kTopKs);
    p.causal = !random.one_in(3);
    p.softmax_scale = random.of(kScales);
    p.kv_dtype = random.of(kStorageDTypes);
    p.q_dtype = random.one_in(3) ? random.of(kStorageDTypes) : p.kv_dtype;
  } while (p.total_q() * p.num_q_heads * p.head_dim * (p.total_kv() + 16) > int64_t{1} << 22);
  return p;
}

void judge(const std::string& name, const Reference& exact, const std::vector<RowBound>& bounds, const Output& one,
           const Output& two) {
  num_runs += 2;
  for (const GuardedTensor* tensor : {&one.o, &one.lse, &two.o, &two.lse}) {
    if (const std::string fault = tensor->fault(); !fault.empty()) throw Failure{name + ": " + fault};
  }
  if (one.bits() != two.bits()) throw Failure{name + ": one thread and two give different bits"};
  const int64_t heads = one.o.view().sizes[1], dim = one.o.view().sizes[2];
  for (int64_t i = 0; i < static_cast<int64_t>(bounds.size()); ++i) {
    const auto check = [&](const char* what, int64_t d, float value, double want, double bound, double& worst) {
      const double got = static_cast<double>(value);
      if (std::isnan(want) ? !std::isnan(got) : got != want && !(std::abs(got - want) <= bound)) {
        throw Failure{fmt::format("{}: {}[{}, {}, {}] is {:.9g}, float64 {:.9g}, may differ by {:.3g}", name, what,
                                  i / heads, i % heads, d, got, want, bound)};
      }
      if (bound > 0 && got != want) worst = std::max(worst, std::abs(got - want) / bound);
    };
    const RowBound& bound = bounds[static_cast<size_t>(i)];  // zeros where the row is empty or NaN
    check("lse", 0, one.lse.at(i / heads, i % heads), exact.lse[static_cast<size_t>(i)], bound.lse, worst_lse);
    for (int64_t d = 0; d < dim; ++d) {
      check("o", d, one.o.at(i / heads, i % heads, d), exact.o[static_cast<size_t>(i * dim + d)],
            bound.o[static_cast<size_t>(d)], worst_o);
    }
  }
}

void check_attention(const Problem& p, uint32_t seed) {
  Random random(seed);
  constexpr Values kValues[] = {Values::normal, Values::normal, Values::outliers, Values::large_logits, Values::equal};
  const Values values = random.of(kValues);
  const Layout layout = random.of(kLayouts);
  Case c = make_case(p, seed, values, layout, random.of(kIndexLayouts));
  const bool full = random.one_in(5);  // as dense kernels need it
  if (full) set_rows(c, full_rows(p));
  poison_unseen(c);
  for (Tensor* scale : {&c.q_scale, &c.k_scale, &c.v_scale}) {
    if (!random.one_in(3)) continue;
    *scale = Tensor(DType::f32, {random.one_in(2) ? 1 : p.num_kv_heads});
    for (int64_t h = 0; h < scale->view().num_elements(); ++h) {
      scale->as<float>()[h] = 0.01f * static_cast<float>(1 + random.below(300));
    }
  }
  // A NaN in a key or a query reaches just the rows that see it. One in a value may reach others of its tile: not here.
  for (GuardedTensor* x : {&c.q, &c.k}) {
    const auto& sizes = x->view().sizes;
    if (sizes[0] == 0 || !random.one_in(8)) continue;
    x->at(random.below(sizes[0]), random.below(sizes[1]), random.below(sizes[2])) = kNan;
  }
  const Reference exact = reference_attention(p, c.inputs(), &c.block_index.view());
  std::map<DType, std::vector<RowBound>> bounds_of;  // by the arithmetic of the kernel
  const auto bounds_for = [&](DType arithmetic) -> const std::vector<RowBound>& {
    std::vector<RowBound>& bounds = bounds_of[arithmetic];
    for (int64_t i = std::ssize(bounds); i < p.total_q() * p.num_q_heads; ++i) {
      const double lse = exact.lse[static_cast<size_t>(i)];
      bounds.push_back(std::isfinite(lse) ? row_bound(c, arithmetic, i / p.num_q_heads, i % p.num_q_heads, lse)
                                          : RowBound{std::vector<double>(static_cast<size_t>(p.head_dim), 0), 0});
    }
    return bounds;
  };
  if (random.one_in(3)) page(c, random.of(kPagings), seed);
  for (Runner runner : full ? all_runners(p) : sparse_runners(p)) {
    const std::vector<RowBound>& bounds = bounds_for(runner.arithmetic);
    const Output two = run(runner, c, random.of(kLayouts));
    runner.execution.num_threads = 1;
    judge(runner.name, exact, bounds, run(runner, c, random.of(kLayouts)), two);
  }
}

// All sums and means that the routers form of these inputs are exact in f32: small integers, queries that are multiples
// of their group, for mean-pool blocks of equal keys: float64 must choose alike. The oracle's masses do round, and
// random has no other scores: these two are held against their own.
void check_routes(Problem p, uint32_t seed) {
  Random random(seed);
  p.q_dtype = p.kv_dtype = DType::f32;  // multiples of the group are not exact in the others
  const int64_t range = 1 + random.below(3), index_dim = 8 * (1 + random.below(16)), total_kv = p.total_kv();
  GuardedTensor q({p.total_q(), p.num_q_heads, p.head_dim}, random.of(kLayouts));
  GuardedTensor k({total_kv, p.num_kv_heads, p.head_dim}, random.of(kLayouts));
  GuardedTensor pooled_k({total_kv, p.num_kv_heads, p.head_dim}, random.of(kLayouts));
  GuardedTensor index_q({p.total_q(), p.num_kv_heads, index_dim}, random.of(kLayouts), random.of(kStorageDTypes));
  GuardedTensor index_k({total_kv, 1, index_dim}, random.of(kLayouts), random.of(kStorageDTypes));
  const auto integer = [&] { return static_cast<float>(random.below(2 * range + 1) - range); };
  q.fill([&] { return static_cast<float>(p.group_size()) * integer(); });
  for (GuardedTensor* x : {&k, &index_q, &index_k}) x->fill(integer);
  const bool some_nan = random.one_in(3);
  for (int64_t s = 0, first = 0; s < p.num_sequences(); first += p.kv_lens[static_cast<size_t>(s++)]) {
    for (int64_t j = p.kv_lens[static_cast<size_t>(s)] - 1; j >= 0; --j) {  // a block's first key is poisoned last
      const bool poisoned = p.q_lens[static_cast<size_t>(s)] == 0 || (some_nan && random.one_in(total_kv));
      for (int64_t i = 0; i < p.num_kv_heads * p.head_dim; ++i) {
        const int64_t head = i / p.head_dim, d = i % p.head_dim;
        pooled_k.at(first + j, head, d) =
            poisoned ? kNan : k.at(first + j / p.kv_block_size * p.kv_block_size, head, d);
        if (poisoned) k.at(first + j, head, d) = kNan;
      }
      if (poisoned) index_k.at(first + j, 0, random.below(index_dim)) = kNan;
    }
  }
  RouteInputs inputs{q.view(), k.view(), index_q.view(), index_k.view()};
  inputs.index_k.num_dims = 2;
  inputs.index_k.sizes[1] = index_dim;
  inputs.index_k.strides[1] = 1;
  RouteOptions options{Router::index, random.below(4), random.below(4), static_cast<uint64_t>(random.below(1000))};
  for (Router router : {Router::index, Router::qk_max, Router::mean_pool, Router::oracle, Router::random}) {
    inputs.k = router == Router::mean_pool ? pooled_k.view() : k.view();
    options.router = router;
    const bool exact = router != Router::oracle && router != Router::random;
    std::vector<std::vector<double>> want;
    if (exact) want = reference_scores(p, inputs, router);
    for (Isa isa : available_isas()) {
      num_runs += 2;
      const std::string name = fmt::format("{} {}", name_of(isa), name_of(router));
      const Tensor ids = route(p, inputs, options, {1, isa}), again = route(p, inputs, options, {2, isa});
      const Tensor scores = exact ? Tensor() : route_scores(p, inputs, options, {2, isa});
      for (int64_t row = 0; row < p.num_kv_heads * p.total_q(); ++row) {
        const int32_t *got = ids.as<int32_t>() + row * p.top_k, *got_again = again.as<int32_t>() + row * p.top_k;
        if (!exact) {
          const float* own = scores.as<float>() + row * scores.view().sizes[2];
          want.emplace_back(own, own + num_visible_blocks(p, row % p.total_q()));
        }
        const std::vector<double>& ranked = exact ? want[static_cast<size_t>(row)] : want.back();
        const std::vector<int32_t> expected = reference_top_k(p, row % p.total_q(), ranked, options);
        if (!std::equal(expected.begin(), expected.end(), got) || !std::equal(got, got + p.top_k, got_again)) {
          throw Failure{fmt::format("{}: row {} is [{}], with two threads [{}], not [{}] as in float64", name, row,
                                    fmt::join(got, got + p.top_k, " "), fmt::join(got_again, got_again + p.top_k, " "),
                                    fmt::join(expected, " "))};
        }
      }
    }
  }
}

int differential(double seconds, uint32_t seed, const std::string& line) {
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  Random random(seed);
  int64_t num_problems = 0;
  do {
    const Problem problem = line.empty() ? random_problem(random) : Problem::parse(line);
    const uint32_t case_seed = line.empty() ? static_cast<uint32_t>(random.below(int64_t{1} << 32)) : seed;
    present_case = fmt::format("differential --problem \"{}\" --seed {}", problem.to_line(), case_seed);
    std::string fault;
    try {
      check_attention(problem, case_seed);
      check_routes(problem, case_seed);
    } catch (const Failure& failure) {
      fault = failure.what;
    } catch (const std::exception& error) {
      fault = error.what();
    }
    if (!fault.empty()) {
      fmt::print("{}  # {}\n", present_case, fault);
      return 1;
    }
    ++num_problems;
  } while (line.empty() && elapsed() < seconds);
  fmt::print("{} problems, {} runs, {:.0f} s; largest errors: {:.2f} of the bound of o, {:.2f} of lse's\n",
             num_problems, num_runs, elapsed(), worst_o, worst_lse);
  return 0;
}

}  // namespace
}  // namespace tilesieve::testing

void __ubsan_on_report() { fmt::print(stderr, "{}\n", tilesieve::testing::present_case); }

int main(int argc, char** argv) {
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(__ubsan_on_report);
  double seconds = 60;
  uint32_t seed = 1;
  std::string line;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--seconds") seconds = std::atof(argv[i + 1]);
    if (option == "--seed") seed = static_cast<uint32_t>(std::strtoul(argv[i + 1], nullptr, 10));
    if (option == "--problem") line = argv[i + 1];
  }
  return tilesieve::testing::differential(seconds, seed, line);
}
