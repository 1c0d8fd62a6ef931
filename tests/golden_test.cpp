// SPDX-License-Identifier: Apache-2.0
// Real tensors: a committed capture of a language model, and golden sets of other projects in a folder that the
// variable TILESIEVE_TEST_DATA names (llm/ and golden/ below it); without it these tests are skipped.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "real_tensors.h"
#include "test_acceptance.h"

namespace tilesieve::testing {
namespace {

using nlohmann::json;

class Golden : public RealTensors {};

// A tensor of any element type, as doubles in row-major order.
struct Array {
  std::vector<int64_t> shape;
  std::vector<double> data;
};

Array array_in(const std::string& file, const json& tensor) {
  static const std::map<std::string, DType> kFloats = {
      {"float32", DType::f32}, {"float64", DType::f64}, {"float16", DType::f16}};
  Array array{tensor.at("shape").get<std::vector<int64_t>>(), {}};
  const std::string bytes = file.substr(tensor.at("offset").get<size_t>(), tensor.at("nbytes").get<size_t>());
  const std::string dtype = tensor.at("dtype");
  if (dtype == "bool") {
    array.data.assign(bytes.begin(), bytes.end());
  } else if (dtype == "int64" || dtype == "float64") {
    for (size_t i = 0; i < bytes.size(); i += 8) {
      int64_t integer;
      double real;
      std::memcpy(&integer, bytes.data() + i, 8);
      std::memcpy(&real, bytes.data() + i, 8);
      array.data.push_back(dtype == "int64" ? static_cast<double>(integer) : real);
    }
  } else {
    Tensor raw(kFloats.at(dtype), std::span<const int64_t>(array.shape));
    std::memcpy(raw.view().data, bytes.data(), bytes.size());
    const Tensor f32 = to_f32(raw.view());
    array.data.assign(f32.as<float>(), f32.as<float>() + f32.view().num_elements());
  }
  return array;
}

// Runs all runners (dense, or sparse with the case's block index) and holds the first want_dim channels of o to `want`.
void expect_outputs(const Case& c, bool dense_too, const std::vector<double>& want, int64_t want_dim, double tolerance,
                    const std::vector<double>& want_lse = {}) {
  for (const Runner& runner : dense_too ? all_runners() : sparse_runners()) {
    const Output output = run(runner, c);
    double o_error = 0, lse_error = 0;
    for (int64_t t = 0; t < c.problem.total_q(); ++t) {
      for (int64_t h = 0; h < c.problem.num_q_heads; ++h) {
        const size_t row = static_cast<size_t>(t * c.problem.num_q_heads + h);
        for (int64_t d = 0; d < want_dim; ++d) {
          const double error = std::abs(static_cast<double>(output.o.at(t, h, d)) -
                                        want[row * static_cast<size_t>(want_dim) + static_cast<size_t>(d)]);
          o_error = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(o_error, error);
        }
        if (!want_lse.empty()) {
          lse_error = std::max(lse_error, std::abs(static_cast<double>(output.lse.at(t, h)) - want_lse[row]));
        }
      }
    }
    EXPECT_LE(o_error, tolerance) << "o of " << trace(runner, c.problem);
    EXPECT_LE(lse_error, 2e-5) << "lse of " << trace(runner, c.problem);
  }
}

void fill(const GuardedTensor& tensor, const std::vector<double>& values) {
  size_t i = 0;
  for (int64_t t = 0; t < tensor.view().sizes[0]; ++t) {
    for (int64_t h = 0; h < tensor.view().sizes[1]; ++h) {
      for (int64_t d = 0; d < tensor.view().sizes[2]; ++d) tensor.at(t, h, d) = static_cast<float>(values.at(i++));
    }
  }
}

// A trained decoder (5 layers, 8 query and 4 KV heads of 8 channels) on 512 tokens; o and lse in float64.
TEST_F(Golden, TrainedDecoderLayersMatchTheirFloat64) {
  const json header = json::parse(bytes_of_file(folder_ / "llm/stories260k_qkvo_T512.json"));
  const std::string file = bytes_of_file(folder_ / "llm/stories260k_qkvo_T512.bin");
  std::map<std::string, Array> arrays;
  for (const json& tensor : header.at("tensors")) {
    if (tensor.at("dtype") == "float32") arrays[tensor.at("name")] = array_in(file, tensor);
  }
  Case c = make_case("hq=8 hkv=4 d=8 q=512 block=16 topk=32", 1);
  int num_layers = 0;
  for (; arrays.contains("l" + std::to_string(num_layers) + ".q"); ++num_layers) {
    const std::string layer = "l" + std::to_string(num_layers) + ".";
    SCOPED_TRACE(layer);
    fill(c.q, arrays.at(layer + "q").data);
    fill(c.k, arrays.at(layer + "k").data);
    fill(c.v, arrays.at(layer + "v").data);
    set_rows(c, full_rows(c.problem));
    const std::vector<double>& o = arrays.at(layer + "o").data;
    double largest = 0;
    for (double x : o) largest = std::max(largest, std::abs(x));
    expect_outputs(c, true, o, 8, 5e-6 * largest, arrays.at(layer + "lse").data);
    // And sparse, by the model's own attention, against our reference.
    if (num_layers % 2 == 1) continue;
    RouteOptions options;
    options.router = Router::mean_pool;
    c.problem.top_k = 6;
    const Tensor picks = route(c.problem, {c.q.view(), c.k.view(), {}, {}}, options);
    set_rows(c, rows_of(BlockIndex::from(picks.view())));
    c.problem.top_k = 32;
    expect_accepted(c);
  }
  EXPECT_EQ(num_layers, 5);
}

std::vector<double> base64_floats(const json& tensor) {
  const std::string text = tensor.at("data");
  std::string bytes;
  uint32_t bits = 0;
  int num_bits = 0;
  for (char ch : text) {
    static const std::string kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const size_t digit = kDigits.find(ch);
    if (digit == std::string::npos) break;
    bits = bits << 6 | static_cast<uint32_t>(digit);
    if ((num_bits += 6) >= 8) bytes.push_back(static_cast<char>(bits >> (num_bits -= 8) & 0xff));
  }
  std::vector<double> values;
  for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
    float value;
    std::memcpy(&value, bytes.data() + i, 4);
    values.push_back(static_cast<double>(value));
  }
  return values;
}

// [batch, heads, tokens, channels] as [batch * tokens, heads, channels].
std::vector<double> tokens_first(const std::vector<double>& x, int64_t batch, int64_t heads, int64_t tokens,
                                 int64_t dim) {
  std::vector<double> result;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const auto begin = x.begin() + ((b * heads + h) * tokens + t) * dim;
        result.insert(result.end(), begin, begin + dim);
      }
    }
  }
  return result;
}

// A trained minGPT that sorts letters: three sequences of 11 tokens, three heads; its y, and its probabilities as the
// oracle's block scores.
TEST_F(Golden, SortingTransformerMatchesItsOutputAndProbabilities) {
  const json file = json::parse(bytes_of_file(folder_ / "llm/llmviz_nano_sort_partials.json"));
  ASSERT_EQ(file.at("q").at("shape"), json({3, 3, 11, 16}));
  Case c = make_case("hq=3 hkv=3 d=16 q=11,11,11 block=8 topk=2", 1);
  fill(c.q, tokens_first(base64_floats(file.at("q")), 3, 3, 11, 16));
  fill(c.k, tokens_first(base64_floats(file.at("k")), 3, 3, 11, 16));
  fill(c.v, tokens_first(base64_floats(file.at("v")), 3, 3, 11, 16));
  set_rows(c, full_rows(c.problem));
  expect_outputs(c, true, base64_floats(file.at("y")), 16, 2e-5);

  const std::vector<double> probabilities = base64_floats(file.at("attSm"));  // [3, 3, 11, 11]
  RouteOptions options;
  options.router = Router::oracle;
  const Tensor scores = route_scores(c.problem, {c.q.view(), c.k.view(), {}, {}}, options);  // [3 heads, 33, 2 blocks]
  for (int64_t b = 0; b < 3; ++b) {
    for (int64_t h = 0; h < 3; ++h) {
      for (int64_t t = 0; t < 11; ++t) {
        double mass[2] = {0, 0};
        for (int64_t j = 0; j <= t; ++j) {
          mass[j / 8] += probabilities[static_cast<size_t>(((b * 3 + h) * 11 + t) * 11 + j)];
        }
        const float* got = scores.as<float>() + (h * 33 + b * 11 + t) * 2;
        EXPECT_NEAR(got[0], mass[0], 2e-5);
        if (t >= 8) {
          EXPECT_NEAR(got[1], mass[1], 2e-5);
        }
      }
    }
  }
}

// One node test of ONNX, [batch, heads, tokens, channels] throughout.
struct OnnxCase {
  std::string name;
  int64_t batch = 0, q_heads = 0, kv_heads = 0, q_len = 0, kv_len = 0, dim = 0, v_dim = 0;
  std::vector<double> q, k, v, y;
  double scale = 0;
  std::vector<std::vector<bool>> allowed;  // [batch * q_heads * q_len][kv_len]
  std::vector<std::vector<double>> bias;   // likewise; empty where there is none
  double tolerance = 2e-6;
};

// [batch, tokens, heads * channels] as [batch, heads, tokens, channels].
Array heads_first(const Array& x, int64_t heads) {
  if (x.shape.size() == 4) return x;
  const int64_t batch = x.shape[0], tokens = x.shape[1], dim = x.shape[2] / heads;
  Array result{{batch, heads, tokens, dim}, {}};
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        const auto begin = x.data.begin() + (b * tokens + t) * x.shape[2] + h * dim;
        result.data.insert(result.data.end(), begin, begin + dim);
      }
    }
  }
  return result;
}

Array joined(const Array& past, const Array& now) {
  Array result{{now.shape[0], now.shape[1], past.shape[2] + now.shape[2], now.shape[3]}, {}};
  for (int64_t i = 0; i < now.shape[0] * now.shape[1]; ++i) {
    for (const Array* part : {&past, &now}) {
      const int64_t size = part->shape[2] * part->shape[3];
      const auto begin = part->data.begin() + i * size;
      result.data.insert(result.data.end(), begin, begin + size);
    }
  }
  return result;
}

// Left out: softcap (the operator has none) and rotary embeddings (not attention).
std::optional<OnnxCase> onnx_case(const json& node, const std::string& file) {
  const json& attrs = node.at("attrs");
  if (node.at("op") != "Attention" && node.at("op") != "FlexAttention") return std::nullopt;
  if (attrs.value("softcap", 0.0) != 0.0) return std::nullopt;
  std::map<std::string, Array> in;
  for (const json& tensor : node.at("inputs")) in[tensor.at("name")] = array_in(file, tensor);
  OnnxCase c;
  c.name = node.at("name");
  const Array q = heads_first(in.at("Q"), attrs.value("q_num_heads", 1));
  Array k = heads_first(in.at("K"), attrs.value("kv_num_heads", 1));
  Array v = heads_first(in.at("V"), attrs.value("kv_num_heads", 1));
  const int64_t past = in.contains("past_key") ? in["past_key"].shape[2] : 0;
  if (past > 0) k = joined(in["past_key"], k), v = joined(in["past_value"], v);
  c.batch = q.shape[0], c.q_heads = q.shape[1], c.q_len = q.shape[2], c.dim = q.shape[3];
  c.kv_heads = k.shape[1], c.kv_len = k.shape[2], c.v_dim = v.shape[3];
  c.scale = attrs.value("scale", 1.0 / std::sqrt(static_cast<double>(c.dim)));
  const Array y = heads_first(array_in(file, node.at("outputs")[0]), c.q_heads);
  c.q = q.data, c.k = k.data, c.v = v.data, c.y = y.data;
  if (node.at("outputs")[0].at("dtype") == "float16") c.tolerance = 1e-3;

  const bool causal = attrs.value("is_causal", 0) == 1;
  const bool has_mask = in.contains("attn_mask"), is_bool = has_mask && node.at("inputs")[3].at("dtype") == "bool";
  for (int64_t b = 0; b < c.batch; ++b) {
    const int64_t length = in.contains("nonpad_kv_seqlen")
                               ? static_cast<int64_t>(in["nonpad_kv_seqlen"].data[static_cast<size_t>(b)])
                               : c.kv_len;
    // Causal is aligned at the top left behind the past, or at the end of the keys that are no padding.
    const int64_t offset = in.contains("nonpad_kv_seqlen") ? length - c.q_len : past;
    for (int64_t h = 0; h < c.q_heads; ++h) {
      for (int64_t i = 0; i < c.q_len; ++i) {
        std::vector<bool> allowed(static_cast<size_t>(c.kv_len));
        std::vector<double> bias(static_cast<size_t>(c.kv_len), 0);
        for (int64_t j = 0; j < c.kv_len; ++j) {
          double mask = is_bool || !has_mask ? 1 : 0;
          if (has_mask) {  // broadcast from the right
            const Array& m = in["attn_mask"];
            const size_t dims = m.shape.size();
            int64_t place = i * c.kv_len + j;
            if (dims >= 3 && m.shape[dims - 3] > 1) place += h * c.q_len * c.kv_len;
            if (dims == 4 && m.shape[0] > 1) place += b * m.shape[1] * c.q_len * c.kv_len;
            mask = m.data.at(static_cast<size_t>(place));
          }
          const size_t key = static_cast<size_t>(j);
          allowed[key] = j < length && (!causal || j <= offset + i) && (!(is_bool || !has_mask) || mask != 0);
          if (has_mask && !is_bool) bias[key] = mask;
        }
        c.allowed.push_back(allowed);
        if (has_mask && !is_bool) c.bias.push_back(bias);
      }
    }
  }
  return c;
}

float float_at(const std::vector<double>& values, int64_t place) {
  return static_cast<float>(values.at(static_cast<size_t>(place)));
}

// Any mask as a block index: one key to a block of 8, whose other 7 keys have a logit of -inf; and any bias as channels
// behind the others: query i holds a 1 in channel i, the key its bias. KV heads are repeated for every query head where
// masks differ between the heads of a group.
Case spread(const OnnxCase& o) {
  const int64_t bias_channels = o.bias.empty() ? 0 : o.q_len, used = o.dim + bias_channels + 1;
  Problem p;
  p.q_lens.assign(static_cast<size_t>(o.batch), o.q_len);
  p.kv_lens.assign(static_cast<size_t>(o.batch), 8 * o.kv_len);
  p.num_q_heads = p.num_kv_heads = o.q_heads;
  p.head_dim = (std::max(used, o.v_dim) + 7) / 8 * 8;
  p.kv_block_size = 8;
  p.top_k = o.kv_len;
  p.causal = false;
  p.softmax_scale = o.scale;
  Case c = make_case(p, 1);
  c.q.fill([] { return 0.0f; });
  c.k.fill([] { return 0.0f; });
  c.v.fill([] { return 0.0f; });
  std::vector<std::vector<int32_t>> rows(static_cast<size_t>(p.num_kv_heads * p.total_q()));
  for (int64_t b = 0; b < o.batch; ++b) {
    for (int64_t h = 0; h < o.q_heads; ++h) {
      const int64_t kv_head = h / (o.q_heads / o.kv_heads);
      for (int64_t j = 0; j < 8 * o.kv_len; ++j) {
        c.k.at(b * 8 * o.kv_len + j, h, used - 1) = j % 8 == 0 ? 0.0f : -std::numeric_limits<float>::infinity();
      }
      for (int64_t j = 0; j < o.kv_len; ++j) {
        const int64_t key = (b * o.kv_len + j) * 8, from = (b * o.kv_heads + kv_head) * o.kv_len + j;
        for (int64_t d = 0; d < o.dim; ++d) c.k.at(key, h, d) = float_at(o.k, from * o.dim + d);
        for (int64_t d = 0; d < o.v_dim; ++d) c.v.at(key, h, d) = float_at(o.v, from * o.v_dim + d);
        for (int64_t i = 0; i < bias_channels; ++i) {
          const size_t row = static_cast<size_t>((b * o.q_heads + h) * o.q_len + i);
          c.k.at(key, h, o.dim + i) = static_cast<float>(o.bias[row][static_cast<size_t>(j)] / o.scale);
        }
      }
      for (int64_t i = 0; i < o.q_len; ++i) {
        const int64_t from = (b * o.q_heads + h) * o.q_len + i, q = b * o.q_len + i;
        for (int64_t d = 0; d < o.dim; ++d) c.q.at(q, h, d) = float_at(o.q, from * o.dim + d);
        if (bias_channels > 0) c.q.at(q, h, o.dim + i) = 1;
        c.q.at(q, h, used - 1) = 1;
        for (int64_t j = 0; j < o.kv_len; ++j) {
          if (o.allowed[static_cast<size_t>(from)][static_cast<size_t>(j)]) {
            rows[static_cast<size_t>(h * p.total_q() + q)].push_back(static_cast<int32_t>(j));
          }
        }
      }
    }
  }
  set_rows(c, rows);
  return c;
}

// The case as the operator would be called on it: grouped heads, dense or causal from the bottom right, keys cut where
// no query sees them. None where a mask or a bias says more, or where v has another head dimension than k.
std::optional<Case> direct(const OnnxCase& o) {
  if (!o.bias.empty() || o.dim != o.v_dim || o.dim % 8 != 0) return std::nullopt;
  const auto count = [](const std::vector<bool>& row) { return std::count(row.begin(), row.end(), true); };
  Problem p;
  p.q_lens.assign(static_cast<size_t>(o.batch), o.q_len);
  p.num_q_heads = o.q_heads;
  p.num_kv_heads = o.kv_heads;
  p.head_dim = o.dim;
  p.kv_block_size = 8;
  p.softmax_scale = o.scale;
  p.causal = count(o.allowed.front()) != count(o.allowed[static_cast<size_t>(o.q_len - 1)]);
  for (int64_t b = 0; b < o.batch; ++b) {
    p.kv_lens.push_back(count(o.allowed[static_cast<size_t>((b + 1) * o.q_heads * o.q_len - 1)]));
    for (int64_t row = b * o.q_heads * o.q_len; row < (b + 1) * o.q_heads * o.q_len; ++row) {
      const int64_t visible = p.kv_lens.back() - (p.causal ? o.q_len - 1 - row % o.q_len : 0);
      for (int64_t j = 0; j < o.kv_len; ++j) {
        if (o.allowed[static_cast<size_t>(row)][static_cast<size_t>(j)] != (j < visible)) return std::nullopt;
      }
    }
  }
  p.top_k = (o.kv_len + 7) / 8;
  Case c = make_case(p, 1);
  fill(c.q, tokens_first(o.q, o.batch, o.q_heads, o.q_len, o.dim));
  int64_t key = 0;
  for (int64_t b = 0; b < o.batch; ++b) {
    for (int64_t j = 0; j < p.kv_lens[static_cast<size_t>(b)]; ++j, ++key) {
      for (int64_t h = 0; h < o.kv_heads; ++h) {
        for (int64_t d = 0; d < o.dim; ++d) {
          const int64_t from = ((b * o.kv_heads + h) * o.kv_len + j) * o.dim + d;
          c.k.at(key, h, d) = float_at(o.k, from);
          c.v.at(key, h, d) = float_at(o.v, from);
        }
      }
    }
  }
  set_rows(c, full_rows(p));
  return c;
}

TEST_F(Golden, OnnxNodeTests) {
  const json header = json::parse(bytes_of_file(folder_ / "golden/onnx_attention.json"));
  const std::string file = bytes_of_file(folder_ / "golden/onnx_attention.bin");
  int num_spread = 0, num_direct = 0, num_masked = 0, num_causal = 0, num_grouped = 0;
  for (const json& node : header.at("cases")) {
    const std::optional<OnnxCase> o = onnx_case(node, file);
    if (!o) continue;
    SCOPED_TRACE(o->name);
    const std::vector<double> want = tokens_first(o->y, o->batch, o->q_heads, o->q_len, o->v_dim);
    expect_outputs(spread(*o), false, want, o->v_dim, o->tolerance);
    ++num_spread;
    num_masked += node.dump().find("attn_mask") != std::string::npos;
    if (const std::optional<Case> c = direct(*o)) {
      expect_outputs(*c, true, want, o->v_dim, o->tolerance);
      ++num_direct;
      num_causal += c->problem.causal;
      num_grouped += c->problem.group_size() > 1;
    }
  }
  EXPECT_GE(num_spread, 30);
  EXPECT_GE(num_masked, 15);
  EXPECT_GE(num_direct, 8);
  EXPECT_GE(num_causal, 3);
  EXPECT_GE(num_grouped, 3);
}

// Windows of 24 queries of the committed capture (bf16, one KV head, three query heads of 64 channels), each with all
// the keys before it, routed by mean pooling and dense.
TEST(Capture, WindowsMatchTheReference) {
  const std::string path = std::string(TILESIEVE_EXAMPLES_DIR) + "/smollm2_layer9_group2.safetensors";
  ASSERT_TRUE(std::filesystem::exists(path)) << path << " is missing: the committed capture of a real model";
  const TensorFile file = read_tensors(path);
  const Tensor q = to_f32(file.at("layer.9.q")), k = to_f32(file.at("layer.9.k")), v = to_f32(file.at("layer.9.v"));
  ASSERT_EQ(q.view().num_dims, 3);
  const int64_t tokens = q.view().sizes[0];
  ASSERT_EQ(k.view().sizes[0], tokens);
  ASSERT_GE(tokens, 4096) << "the capture is meant to be long";
  constexpr int64_t kWindow = 24;
  for (int64_t begin : {int64_t{0}, int64_t{1000}, int64_t{3000}, tokens - kWindow}) {
    Case c;
    c.problem =
        Problem::parse("hq=3 hkv=1 d=64 q=24 block=64 topk=16 scale=0.125 kv=" + std::to_string(begin + kWindow));
    c.q = GuardedTensor({kWindow, 3, 64}, Layout::padded);
    c.k = GuardedTensor({begin + kWindow, 1, 64}, Layout::packed);
    c.v = GuardedTensor({begin + kWindow, 1, 64}, Layout::padded);
    size_t i = static_cast<size_t>(begin * 3 * 64);
    c.q.fill([&] { return q.as<float>()[i++]; });
    i = 0;
    c.k.fill([&] { return k.as<float>()[i++]; });
    i = 0;
    c.v.fill([&] { return v.as<float>()[i++]; });
    RouteOptions options;
    options.router = Router::mean_pool;
    const Tensor picks = route(c.problem, {c.q.view(), c.k.view(), {}, {}}, options);
    set_rows(c, rows_of(BlockIndex::from(picks.view())));
    expect_accepted(c);
    if (begin > 3000) continue;  // dense over the longest window takes seconds under a sanitizer
    const Expected expected = expected_of(c, true);
    for (const Runner& runner : dense_runners()) {
      Acceptance acceptance;
      acceptance.add(runner, c, expected, run(runner, c));
      acceptance.judge(runner.name, 2);
    }
  }
}

}  // namespace
}  // namespace tilesieve::testing
