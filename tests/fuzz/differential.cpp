// SPDX-License-Identifier: Apache-2.0
// Random problems for as long as one likes: every kernel, loop order and walk against float64 within a bound that must
// hold, and the same bits from one thread as from two; every router against a float64 rule.
//   differential --seconds 60 --seed 1         the first failure ends it with one line, by which it can be replayed:
//   differential --problem "q=3 kv=90 ..." --seed 17
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <set>

#include "test_inputs.h"
#include "test_route.h"

// Of the sanitizers, where the program is built with them.
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace tilesieve::testing {
namespace {

constexpr double kUnit = 0x1p-24;  // the relative error of one rounding to f32
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::string present_case;  // "--problem ... --seed ..."
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
  Problem p;
  do {
    p = Problem{};
    const int64_t sequences = random.one_in(64) ? 0 : 1 + random.below(4);
    for (int64_t s = 0; s < sequences; ++s) {
      p.q_lens.push_back(random.one_in(20)  ? random.below(1400)
                         : random.one_in(2) ? random.of(kLens)
                                            : random.below(70));
      p.kv_lens.push_back(random.one_in(2) ? random.of(kLens) : random.below(600));
    }
    p.num_kv_heads = 1 + random.below(4);
    p.num_q_heads = p.num_kv_heads * random.of(kGroups);
    p.head_dim = 8 * (1 + random.below(random.one_in(2) ? 4 : 32));
    p.kv_block_size = random.one_in(4) ? 8 * (1 + random.below(128)) : random.of(kBlocks);
    p.top_k = random.of(kTopKs);
    p.causal = !random.one_in(3);
    if (random.one_in(3))
      p.softmax_scale = random.one_in(8) ? 1e-30 : std::exp2(static_cast<double>(random.below(60)) / 4 - 12);
  } while (p.total_q() * p.num_q_heads * p.head_dim * (p.total_kv() + 16) > int64_t{1} << 22);
  return p;
}

struct Row {
  std::vector<double> o_bound;
  double lse_bound;
};

// What the roundings of f32 can do to a row at the most, whatever the order of its sums. A weight exp(s_j - max s) goes
// through the dot product (head_dim roundings of A_j = scale sum |q k|), the scale and the differences with running
// maxima (3 |s| and 3 |max s| are more than enough), an exponential for its block and one for each rescaling (4 units
// each), and as a term of the sums, num_keys additions and the factors of each block. So every term of
// sum w v / sum w is off by a factor of at most exp(+-eta_j), and:
//   |o - exact| <= sum_j w_j |v_j| max(exp(eta_j) / sum w exp(-eta) - 1, 1 - exp(-eta_j) / sum w exp(eta))
//   |lse - exact| <= the larger of log sum w exp(eta) and -log sum w exp(-eta), and the roundings of m + log l
// with the exact softmax w. Flushing below 2^-126 adds what is far below 1e-36 for a key.
Row row_bounds(const Case& c, int64_t token, int64_t head, double exact_lse) {
  const Problem& p = c.problem;
  const int64_t kv_head = head / p.group_size(), visible = num_visible_keys(p, token), first = first_key_of(p, token);
  const std::vector<int32_t>& row = c.rows[static_cast<size_t>(kv_head * p.total_q() + token)];
  std::vector<int64_t> keys;
  int64_t num_blocks = 0;
  for (int64_t id : std::set<int64_t>(row.begin(), row.end())) {
    for (int64_t j = id * p.kv_block_size; id >= 0 && j < std::min(visible, (id + 1) * p.kv_block_size); ++j) {
      num_blocks += j % p.kv_block_size == 0;
      keys.push_back(first + j);
    }
  }
  std::vector<double> scores, etas;
  double largest = 0;  // of |s|
  for (int64_t key : keys) {
    double dot = 0, magnitude = 0;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      const double product = static_cast<double>(c.q.at(token, head, d)) * static_cast<double>(c.k.at(key, kv_head, d));
      dot += product;
      magnitude += std::abs(product);
    }
    scores.push_back(dot * p.scale());
    etas.push_back(static_cast<double>(p.head_dim + 4) * magnitude * p.scale() + 3 * std::abs(scores.back()));
    largest = std::max(largest, std::abs(scores.back()));
  }
  const double num_keys = static_cast<double>(keys.size());
  double low = 0, high = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const double others = 3 * largest + num_keys + 8 * static_cast<double>(num_blocks) + 16;
    etas[i] = std::min(50.0, 1.01 * kUnit * (etas[i] + others));  // beyond that the bound says nothing anyway
    low += std::exp(scores[i] - exact_lse - etas[i]);
    high += std::exp(scores[i] - exact_lse + etas[i]);
  }
  Row bounds{std::vector<double>(static_cast<size_t>(p.head_dim), 1e-36 * num_keys), 0};
  bounds.lse_bound = std::max(std::log(high), -std::log(low)) + 8 * kUnit * (largest + std::log(num_keys) + 1);
  for (size_t i = 0; i < keys.size(); ++i) {
    const double factor = std::max(std::exp(etas[i]) / low - 1, 1 - std::exp(-etas[i]) / high);
    const double weight = std::exp(scores[i] - exact_lse) * factor + 1e-36;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      bounds.o_bound[static_cast<size_t>(d)] += weight * std::abs(static_cast<double>(c.v.at(keys[i], kv_head, d)));
    }
  }
  return bounds;
}

class Judge {
 public:
  explicit Judge(const Case& c)
      : case_(c), exact_(reference_attention(c.problem, c.q.view(), c.k.view(), c.v.view(), &c.block_index.view())) {
    for (size_t row = 0; row < exact_.lse.size(); ++row) {
      const int64_t heads = c.problem.num_q_heads, i = static_cast<int64_t>(row);
      rows_.push_back(std::isfinite(exact_.lse[row]) ? row_bounds(c, i / heads, i % heads, exact_.lse[row]) : Row{});
    }
  }

  void judge(const std::string& name, const Output& one, const Output& two) const {
    num_runs += 2;
    for (const GuardedTensor* tensor : {&one.o, &one.lse, &two.o, &two.lse}) {
      if (const std::string fault = tensor->fault(); !fault.empty()) throw Failure{name + ": " + fault};
    }
    if (one.bits() != two.bits()) throw Failure{name + ": one thread and two give different bits"};
    const int64_t heads = case_.problem.num_q_heads, dim = case_.problem.head_dim;
    for (size_t row = 0; row < exact_.lse.size(); ++row) {
      const int64_t token = static_cast<int64_t>(row) / heads, head = static_cast<int64_t>(row) % heads;
      const double want_lse = exact_.lse[row];
      const auto check = [&](const char* what, int64_t d, double got, double want, double bound, double& worst) {
        const bool right = std::isnan(want) ? std::isnan(got) : got == want || std::abs(got - want) <= bound;
        if (!right) {
          throw Failure{fmt::format("{}: {}[{}, {}, {}] is {:.9g}, float64 {:.9g}, may differ by {:.3g}", name, what,
                                    token, head, d, got, want, bound)};
        }
        if (got != want && bound > 0) worst = std::max(worst, std::abs(got - want) / bound);
      };
      check("lse", 0, static_cast<double>(one.lse.at(token, head)), want_lse, rows_[row].lse_bound, worst_lse);
      for (int64_t d = 0; d < dim; ++d) {
        const double want = exact_.o[row * static_cast<size_t>(dim) + static_cast<size_t>(d)];
        const double bound = std::isfinite(want_lse) ? rows_[row].o_bound[static_cast<size_t>(d)] : 0;
        check("o", d, static_cast<double>(one.o.at(token, head, d)), want, bound, worst_o);
      }
    }
  }

 private:
  const Case& case_;
  Reference exact_;
  std::vector<Row> rows_;
};

void check_attention(const Problem& p, uint32_t seed) {
  Random random(seed);
  constexpr Values kValues[] = {Values::normal, Values::normal, Values::outliers, Values::large_logits, Values::equal};
  const Values values = random.of(kValues);
  const Layout layout = random.of(kLayouts), out_layout = random.of(kLayouts);
  Case c = make_case(p, seed, values, layout, random.of(kIndexLayouts));
  const bool full = random.one_in(5);
  if (full) set_rows(c, full_rows(p));
  poison_unseen(c);
  // A NaN in a key or a query reaches the rows that see it. One in a value may reach others of its tile: not here.
  if (random.one_in(8) && p.total_kv() > 0) {
    c.k.at(random.below(p.total_kv()), random.below(p.num_kv_heads), random.below(p.head_dim)) = kNan;
  }
  if (random.one_in(8) && p.total_q() > 0) {
    c.q.at(random.below(p.total_q()), random.below(p.num_q_heads), random.below(p.head_dim)) = kNan;
  }
  const Judge judge(c);
  for (Runner runner : full ? all_runners() : sparse_runners()) {
    const Output two = run(runner, c, out_layout);
    runner.execution.num_threads = 1;
    judge.judge(runner.name, run(runner, c, random.of(kLayouts)), two);
  }
  for (Isa isa : available_isas()) {  // and as the library itself plans it
    const Output one = make_output(p, out_layout), two = make_output(p, out_layout);
    AttentionOptions options;
    options.execution = {1, isa};
    sparse_attention(p, c.inputs(), c.block_index.view(), one.views(), options);
    options.execution = {2, isa};
    sparse_attention(p, c.inputs(), c.block_index.view(), two.views(), options);
    judge.judge(fmt::format("{} automatic", name_of(isa)), one, two);
  }
}

// All sums and means that the routers form of these inputs are exact in f32: small integers, queries that are multiples
// of their group, and for mean-pool blocks of equal keys wherever a mean would not be exact. So float64 must rank
// alike.
class RouteCase {
 public:
  RouteCase(const Problem& p, Random& random)
      : range_(1 + random.below(3)),
        index_dim_(8 * (1 + random.below(16))),
        q_({p.total_q(), p.num_q_heads, p.head_dim}, random.of(kLayouts)),
        k_({p.total_kv(), p.num_kv_heads, p.head_dim}, random.of(kLayouts)),
        pooled_k_({p.total_kv(), p.num_kv_heads, p.head_dim}, random.of(kLayouts)),
        index_q_({p.total_q(), p.num_kv_heads, index_dim_}, random.of(kLayouts)),
        index_k_({p.total_kv(), 1, index_dim_}, random.of(kLayouts)) {
    const auto integer = [&] { return static_cast<float>(random.below(2 * range_ + 1) - range_); };
    q_.fill([&] { return static_cast<float>(p.group_size()) * integer(); });
    k_.fill(integer);
    index_q_.fill(integer);
    index_k_.fill(integer);
    bool exact_means = !p.causal && std::has_single_bit(static_cast<uint64_t>(p.kv_block_size)) &&
                       9 * p.group_size() * p.head_dim * p.kv_block_size <= int64_t{1} << 24;
    for (int64_t len : p.kv_lens) exact_means = exact_means && len % p.kv_block_size == 0;
    const bool some_nan = random.one_in(3);
    int64_t first = 0;
    for (size_t s = 0; s < p.kv_lens.size(); first += p.kv_lens[s++]) {
      for (int64_t j = p.kv_lens[s] - 1; j >= 0; --j) {  // backwards: the first key of a block is copied, then poisoned
        const bool poisoned = p.q_lens[s] == 0 || (some_nan && random.one_in(p.total_kv()));
        for (int64_t h = 0; h < p.num_kv_heads; ++h) {
          for (int64_t d = 0; d < p.head_dim; ++d) {
            const int64_t source = exact_means ? j : j / p.kv_block_size * p.kv_block_size;
            pooled_k_.at(first + j, h, d) = poisoned ? kNan : k_.at(first + source, h, d);
            if (poisoned) k_.at(first + j, h, d) = kNan;
          }
        }
        if (poisoned) index_k_.at(first + j, 0, random.below(index_dim_)) = kNan;
      }
    }
  }

  RouteInputs inputs(Router router) const {
    TensorView index_k = index_k_.view();
    index_k.num_dims = 2;
    index_k.sizes[1] = index_k.sizes[2];
    index_k.strides[1] = index_k.strides[2];
    return {q_.view(), router == Router::mean_pool ? pooled_k_.view() : k_.view(), index_q_.view(), index_k};
  }

  // What the roundings of f32 can change in a mass at the most: as in row_bounds, with sum |q k| at its largest.
  double mass_bound(const Problem& p) const {
    const double dim = static_cast<double>(p.head_dim), range = static_cast<double>(range_);
    const double magnitude = dim * range * range * static_cast<double>(p.group_size()) * p.scale();
    const double rest = static_cast<double>(p.total_kv() + 8 * p.total_kv_blocks() + p.group_size() + 16);
    return std::expm1(std::min(50.0, 2.02 * kUnit * ((dim + 10) * magnitude + rest)));
  }

 private:
  int64_t range_, index_dim_;
  GuardedTensor q_, k_, pooled_k_, index_q_, index_k_;
};

void check_routes(const Problem& p, uint32_t seed) {
  Random random(seed ^ 0x9e3779b9u);
  const RouteCase c(p, random);
  RouteOptions options{Router::index, random.below(4), random.below(4), static_cast<uint64_t>(random.below(1000))};
  for (Router router : {Router::index, Router::qk_max, Router::mean_pool, Router::oracle, Router::random}) {
    const RouteInputs inputs = c.inputs(router);
    options.router = router;
    std::vector<std::vector<double>> want;
    if (router != Router::random) want = reference_scores(p, inputs, router);
    for (Isa isa : available_isas()) {
      num_runs += 2;
      const std::string name = fmt::format("{} {}", name_of(isa), name_of(router));
      const Tensor ids = route(p, inputs, options, {1, isa}), again = route(p, inputs, options, {2, isa});
      const Tensor scores = route_scores(p, inputs, options, {2, isa});
      if (!std::equal(ids.as<int32_t>(), ids.as<int32_t>() + ids.view().num_elements(), again.as<int32_t>())) {
        throw Failure{name + ": one thread and two choose different blocks"};
      }
      for (int64_t row = 0; row < p.num_kv_heads * p.total_q(); ++row) {
        const int64_t q = row % p.total_q();
        const float* got = scores.as<float>() + row * scores.view().sizes[2];
        std::vector<double> ranked(got, got + num_visible_blocks(p, q));
        // Only the oracle's scores round; there, and where they are random, the choice is held against its own scores.
        for (size_t b = 0; b < ranked.size() && router != Router::random; ++b) {
          const double exact = want[static_cast<size_t>(row)][b];
          const double bound = router == Router::oracle ? c.mass_bound(p) : 0;
          if (!(std::isnan(exact) ? std::isnan(ranked[b]) : std::abs(ranked[b] - exact) <= bound)) {
            throw Failure{fmt::format("{}: score [{}, {}] is {:.9g}, float64 {:.9g}", name, row, b, ranked[b], exact)};
          }
        }
        const std::vector<int32_t> expected = reference_top_k(p, q, ranked, options);
        if (!std::equal(expected.begin(), expected.end(), ids.as<int32_t>() + row * p.top_k)) {
          throw Failure{fmt::format("{}: row {} of the block index is not the float64 choice", name, row)};
        }
      }
    }
  }
}

// Empty, or what is wrong.
std::string fault_of(const Problem& problem, uint32_t seed) {
  present_case = fmt::format("--problem \"{}\" --seed {}", problem.to_line(), seed);
  try {
    check_attention(problem, seed);
    check_routes(problem, seed);
  } catch (const Failure& failure) {
    return failure.what;
  } catch (const std::exception& error) {
    return fmt::format("exception: {}", error.what());
  }
  return "";
}

int differential(double seconds, uint32_t seed, const std::string& line) {
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  std::string fault;
  int64_t num_problems = 0;
  Random random(seed);
  do {
    const Problem problem = line.empty() ? random_problem(random) : Problem::parse(line);
    fault = fault_of(problem, line.empty() ? static_cast<uint32_t>(random.below(int64_t{1} << 32)) : seed);
    ++num_problems;
  } while (fault.empty() && line.empty() && elapsed() < seconds);
  if (!fault.empty()) {
    fmt::print("differential {}  # {}\n", present_case, fault);
    return 1;
  }
  fmt::print("{} problems, {} runs, {:.0f} s; largest errors: {:.2f} of the bound of o, {:.2f} of lse's\n",
             num_problems, num_runs, elapsed(), worst_o, worst_lse);
  return 0;
}

}  // namespace
}  // namespace tilesieve::testing

int main(int argc, char** argv) {
  using namespace tilesieve;
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback([] { fmt::print(stderr, "differential {}\n", testing::present_case); });
  }
  double seconds = 60;
  uint32_t seed = 1;
  std::string line;
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    if (i + 1 == argc || (option != "--seconds" && option != "--seed" && option != "--problem")) {
      fmt::print(stderr, "usage: differential [--seconds N] [--seed S] [--problem LINE]\n");
      return 2;
    }
    if (option == "--seconds") seconds = std::atof(argv[i + 1]);
    if (option == "--seed") seed = static_cast<uint32_t>(std::strtoul(argv[i + 1], nullptr, 10));
    if (option == "--problem") line = argv[i + 1];
  }
  return testing::differential(seconds, seed, line);
}
