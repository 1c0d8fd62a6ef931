// SPDX-License-Identifier: Apache-2.0
// The Hopper prefill, stage by stage and as a whole call, at a model's shapes; prints a table and writes JSON rows.
//   prefill_sm90_bench OUT.json [--only SUBSTRING] [--triton FILE] [--commit NAME]
// Bursts: one timed launch at a time after a pause, median of 11; sustained: half a second back to back. Every launch
// of attend, combine and call moves gigabytes, many times the L2; before map the L2 is flushed.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/launch.h"
#include "sparse_prefill_sm90.h"

namespace {

using tilesieve::DType;
using tilesieve::TensorView;
using tilesieve::cuda::check;
using tilesieve::sm90::PrefillCall;

constexpr int64_t kBlock = 128, kDim = 128, kKvHeads = 4;

struct Freed {
  void operator()(void* p) const { cudaFree(p); }
};
using Memory = std::unique_ptr<void, Freed>;

Memory allocate(int64_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, static_cast<size_t>(bytes)), "cudaMalloc");
  return Memory(p);
}

// About normal: the sum of four uniform 16-bit numbers.
template <class T>
__global__ void fill_kernel(T* out, int64_t count, uint64_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    uint64_t x = (static_cast<uint64_t>(i) + seed) * 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    float sum = 0;
    for (int j = 0; j < 4; ++j) sum += static_cast<float>(x >> (16 * j) & 0xffff);
    out[i] = T((sum / 65536.0f - 2.0f) * 1.7320508f);
  }
}

Memory random_values(DType dtype, int64_t count, uint64_t seed) {
  Memory memory = allocate(count * tilesieve::size_in_bytes(dtype));
  if (dtype == DType::bf16) {
    fill_kernel<<<2048, 256>>>(static_cast<__nv_bfloat16*>(memory.get()), count, seed);
  } else {
    fill_kernel<<<2048, 256>>>(static_cast<__nv_fp8_e4m3*>(memory.get()), count, seed);
  }
  check(cudaDeviceSynchronize(), "fill");
  return memory;
}

// `total` distinct ids below `visible`, the local one among them; the first `shared` from the generator of neighbours.
std::vector<int32_t> picks_of(const std::string& selection, int64_t visible, int64_t top_k, std::mt19937& own,
                              std::mt19937 neighbours) {
  std::vector<int32_t> ids;
  const auto add = [&](int64_t id) {
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(static_cast<int32_t>(id));
  };
  if (visible <= top_k) {
    for (int64_t b = 0; b < visible; ++b) add(b);
    return ids;
  }
  add(visible - 1);
  if (selection == "sink") {
    for (int64_t b = 0; static_cast<int64_t>(ids.size()) < top_k; ++b) add(b);
  }
  // Four neighbours share seven of eight: 14 + 4 x 2 = 22 distinct of 64.
  while (selection == "overlapping" && static_cast<int64_t>(ids.size()) < top_k * 7 / 8) add(neighbours() % visible);
  while (static_cast<int64_t>(ids.size()) < top_k) add(own() % visible);
  std::sort(ids.begin(), ids.end());
  return ids;
}

struct Shape {
  int64_t kv_len, q_len, q_heads, top_k;
  std::string selection;
  std::string dtype;  // "e4m3", "bf16", "bf16-e4m3"
  std::string name(const std::string& what) const {
    return "m3/" + what + "/" + dtype + "/" + std::to_string(kv_len) + "x" + std::to_string(q_len) + "/" + selection +
           (q_heads == 32 ? "/hq32" : "") + (top_k == 8 ? "/top8" : "");
  }
};

TensorView device_view(const Memory& memory, DType dtype, std::initializer_list<int64_t> sizes) {
  TensorView view = tilesieve::contiguous_view(memory.get(), dtype, sizes);
  view.device.kind = tilesieve::DeviceKind::cuda;
  return view;
}

class Setup {
 public:
  explicit Setup(const Shape& shape) : shape_(shape) {
    const DType q_dtype = shape.dtype == "e4m3" ? DType::f8_e4m3 : DType::bf16;
    const DType kv_dtype = shape.dtype == "bf16" ? DType::bf16 : DType::f8_e4m3;
    const int64_t pages = (shape.kv_len + kBlock - 1) / kBlock;
    q_ = random_values(q_dtype, shape.q_len * shape.q_heads * kDim, 1);
    k_ = random_values(kv_dtype, pages * kBlock * kKvHeads * kDim, uint64_t{1} << 40);
    v_ = random_values(kv_dtype, pages * kBlock * kKvHeads * kDim, uint64_t{1} << 41);
    ids_.resize(static_cast<size_t>(kKvHeads * shape.q_len * shape.top_k), -1);
    std::mt19937 own(5);
    for (int64_t h = 0; h < kKvHeads; ++h) {
      for (int64_t t = 0; t < shape.q_len; ++t) {
        const int64_t visible = (shape.kv_len - shape.q_len + t) / kBlock + 1;
        const auto row =
            picks_of(shape.selection, visible, shape.top_k, own, std::mt19937(static_cast<uint32_t>(h << 20 | t / 4)));
        std::copy(row.begin(), row.end(), ids_.begin() + (h * shape.q_len + t) * shape.top_k);
        picks_ += static_cast<int64_t>(row.size());
      }
    }
    index_ = upload(ids_);
    cu_q_ = upload({0, static_cast<int32_t>(shape.q_len)});
    lens_ = upload({static_cast<int32_t>(shape.kv_len)});
    std::vector<int32_t> table(static_cast<size_t>(pages));
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
    std::shuffle(table.begin(), table.end(), own);
    table_ = upload(table);
    o_ = allocate(shape.q_len * shape.q_heads * kDim * 2);
    lse_ = allocate(shape.q_len * shape.q_heads * 4);
    inputs.q = device_view(q_, q_dtype, {shape.q_len, shape.q_heads, kDim});
    inputs.k = device_view(k_, kv_dtype, {pages, kBlock, kKvHeads, kDim});
    inputs.v = device_view(v_, kv_dtype, {pages, kBlock, kKvHeads, kDim});
    inputs.block_index = device_view(index_, DType::i32, {kKvHeads, shape.q_len, shape.top_k});
    inputs.cu_seqlens_q = device_view(cu_q_, DType::i32, {2});
    inputs.kv_lens = device_view(lens_, DType::i32, {1});
    inputs.block_table = device_view(table_, DType::i32, {1, pages});
    outputs.o = device_view(o_, DType::bf16, {shape.q_len, shape.q_heads, kDim});
    outputs.lse = device_view(lse_, DType::f32, {shape.q_len, shape.q_heads});
    page_of_ = table;
  }

  double flop() const { return 4.0 * static_cast<double>(shape_.q_heads / kKvHeads * kDim * kBlock * picks_); }
  // What attend writes and combine reads: bf16 partials with their m and l.
  double partial_bytes() const { return static_cast<double>(picks_ * (shape_.q_heads / kKvHeads) * (kDim * 2 + 8)); }
  double output_bytes() const { return static_cast<double>(shape_.q_len * shape_.q_heads * (kDim * 2 + 4)); }

  // Largest difference of o to float64 on a few rows, over the root mean square of those rows.
  double error() const;

  tilesieve::sm90::PrefillInputs inputs;
  tilesieve::sm90::PrefillOutputs outputs;

 private:
  static Memory upload(const std::vector<int32_t>& values) {
    Memory memory = allocate(static_cast<int64_t>(values.size() * 4));
    check(cudaMemcpy(memory.get(), values.data(), values.size() * 4, cudaMemcpyHostToDevice), "upload");
    return memory;
  }
  std::vector<double> row(const TensorView& view, int64_t offset) const {
    const size_t bytes = static_cast<size_t>(tilesieve::size_in_bytes(view.dtype));
    std::vector<uint8_t> raw(kDim * bytes);
    check(cudaMemcpy(raw.data(), static_cast<uint8_t*>(view.data) + offset * static_cast<int64_t>(bytes), raw.size(),
                     cudaMemcpyDeviceToHost),
          "row");
    std::vector<double> out;
    for (int64_t d = 0; d < kDim; ++d) {
      if (bytes == 2) {
        __nv_bfloat16 x;
        std::memcpy(&x, &raw[static_cast<size_t>(d) * 2], 2);
        out.push_back(static_cast<double>(__bfloat162float(x)));
      } else {
        __nv_fp8_e4m3 x;
        x.__x = raw[static_cast<size_t>(d)];
        out.push_back(static_cast<double>(float(x)));
      }
    }
    return out;
  }

  Shape shape_;
  int64_t picks_ = 0;
  std::vector<int32_t> ids_, page_of_;
  Memory q_, k_, v_, index_, cu_q_, lens_, table_, o_, lse_;
};

double Setup::error() const {
  double worst = 0, squares = 0;
  int64_t count = 0;
  for (int64_t sample = 0; sample < 4; ++sample) {
    const int64_t t = (shape_.q_len - 1) * (sample + 1) / 4, head = (sample * 29 + 3) % shape_.q_heads;
    const int64_t kv_head = head / (shape_.q_heads / kKvHeads), position = shape_.kv_len - shape_.q_len + t;
    const std::vector<double> q = row(inputs.q, (t * shape_.q_heads + head) * kDim);
    std::vector<double> sum(kDim, 0.0);
    double total = 0;
    for (int64_t i = 0; i < shape_.top_k; ++i) {
      const int64_t id = ids_[static_cast<size_t>((kv_head * shape_.q_len + t) * shape_.top_k + i)];
      for (int64_t j = id * kBlock; id >= 0 && j <= std::min(position, id * kBlock + kBlock - 1); ++j) {
        const int64_t at = ((page_of_[static_cast<size_t>(id)] * kBlock + j % kBlock) * kKvHeads + kv_head) * kDim;
        const std::vector<double> k = row(inputs.k, at), v = row(inputs.v, at);
        double dot = 0;
        for (size_t d = 0; d < kDim; ++d) dot += q[d] * k[d];
        const double p = std::exp(dot / std::sqrt(static_cast<double>(kDim)));
        total += p;
        for (size_t d = 0; d < kDim; ++d) sum[d] += p * v[d];
      }
    }
    const std::vector<double> got = row(outputs.o, (t * shape_.q_heads + head) * kDim);
    for (size_t d = 0; d < kDim; ++d) {
      worst = std::max(worst, std::abs(got[d] - sum[d] / total));
      squares += sum[d] / total * (sum[d] / total);
      ++count;
    }
  }
  return worst / std::sqrt(squares / static_cast<double>(count));
}

class Timer {
 public:
  Timer() {
    check(cudaEventCreate(&begin_), "event");
    check(cudaEventCreate(&end_), "event");
    flush_ = allocate(kFlushBytes);
  }
  // Median of single launches in milliseconds.
  double burst(const std::function<void()>& launch, bool flush = false) {
    std::vector<double> times;
    for (int i = 0; i < 14; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      if (flush) check(cudaMemsetAsync(flush_.get(), i, kFlushBytes), "flush");
      times.push_back(once(launch, 1));
    }
    std::sort(times.begin() + 3, times.end());
    return times[8];
  }
  // About half a second back to back.
  double sustained(const std::function<void()>& launch, double expected) {
    const int count = std::max(3, static_cast<int>(500 / expected));
    return once(launch, count) / count;
  }

 private:
  double once(const std::function<void()>& launch, int count) {
    check(cudaEventRecord(begin_), "record");
    for (int i = 0; i < count; ++i) launch();
    check(cudaEventRecord(end_), "record");
    check(cudaEventSynchronize(end_), "launch");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_), "elapsed");
    return static_cast<double>(ms);
  }
  static constexpr int64_t kFlushBytes = int64_t{256} << 20;
  cudaEvent_t begin_, end_;
  Memory flush_;
};

class Report {
 public:
  Report(std::string path, std::string commit, const std::string& triton) : path_(std::move(path)) {
    cudaDeviceProp prop;
    check(cudaGetDeviceProperties(&prop, 0), "device");
    int driver = 0;
    check(cudaDriverGetVersion(&driver), "driver");
    char date[16];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%d", std::localtime(&now));
    json_ = {{"device", prop.name},
             {"date", date},
             {"driver", std::to_string(driver)},
             {"commit", commit},
             {"rows", nlohmann::json::array()}};
    if (!triton.empty()) {
      std::ifstream file(triton);
      for (const auto& row : nlohmann::json::parse(file)) triton_[row["case"]] = row["value"];
    }
  }
  // `bound`: the value that the measured roof allows.
  void add(const std::string& name, const std::string& metric, double value, double bound = 0) {
    nlohmann::json row = {{"case", name}, {"metric", metric}, {"value", value}};
    const bool rate = metric == "TFLOP/s" || metric == "GB/s";
    if (bound > 0) {
      row["baseline"] = "bound";
      row["ratio"] = rate ? value / bound : bound / value;
    }
    json_["rows"].push_back(row);
    std::printf("%-52s %9.2f %-8s", name.c_str(), value, metric.c_str());
    if (bound > 0) std::printf(" bound %9.2f", bound);
    const auto found = triton_.find(name);
    if (found != triton_.end()) {
      json_["rows"].push_back({{"case", name},
                               {"metric", metric},
                               {"value", value},
                               {"baseline", "triton"},
                               {"ratio", value / found->second}});
      std::printf(" triton %7.1f x %.2f", found->second, value / found->second);
    }
    std::printf("\n");
    std::fflush(stdout);
    std::ofstream(path_) << json_.dump(2) << "\n";
  }

 private:
  std::string path_;
  nlohmann::json json_;
  std::map<std::string, double> triton_;
};

// Bytes a millisecond that a large copy moves, reads and writes counted.
double copy_rate(Timer& timer) {
  const int64_t bytes = int64_t{2} << 30;
  const Memory a = allocate(bytes), b = allocate(bytes);
  check(cudaMemset(a.get(), 1, bytes), "memset");
  return 2.0 * static_cast<double>(bytes) /
         timer.burst([&] { check(cudaMemcpyAsync(b.get(), a.get(), bytes, cudaMemcpyDeviceToDevice), "copy"); });
}

void measure(const Shape& shape, Timer& timer, Report& report, double bytes_per_ms) {
  Setup setup(shape);
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "device");
  tilesieve::sm90::PrefillOptions options, unlimited;
  unlimited.workspace_limit = int64_t{16} << 30;
  const PrefillCall call(setup.inputs, setup.outputs, options, sms),
      stages(setup.inputs, setup.outputs, unlimited, sms);
  const Memory workspace = allocate(std::max(call.layout().bytes, stages.layout().bytes));
  check(cudaMemset(workspace.get(), 0xff, static_cast<size_t>(call.layout().bytes)), "memset");
  void* const w = workspace.get();
  call.run(w, nullptr);
  check(cudaDeviceSynchronize(), "call");
  const double error = setup.error(), limit = shape.dtype == "bf16" ? 0.03 : 0.25;
  if (!(error < limit)) {
    std::fprintf(stderr, "%s: error %.3g of the root mean square, at most %.3g\n", shape.name("call").c_str(), error,
                 limit);
    std::exit(1);
  }
  const double flop = setup.flop(), partials = setup.partial_bytes();
  const double mib = static_cast<double>(call.layout().bytes) / (1 << 20);
  const auto rate = [&](double ms) { return flop / ms * 1e-9; };

  const double call_ms = timer.burst([&] { call.run(w, nullptr); });
  // The partials are written once and read once; o once.
  report.add(shape.name("call"), "TFLOP/s", rate(call_ms), rate((2 * partials + setup.output_bytes()) / bytes_per_ms));
  std::printf(
      "    workspace %.0f MiB, error %.2g, %.3f ms, unlimited workspace %.0f MiB: %.1f TFLOP/s; sustained %.1f "
      "TFLOP/s\n",
      mib, error, call_ms, static_cast<double>(stages.layout().bytes) / (1 << 20),
      rate(timer.burst([&] { stages.run(w, nullptr); })),
      rate(timer.sustained([&] { call.run(w, nullptr); }, call_ms)));

  if (stages.quantizes_q()) {
    stages.quantize(w, 0, nullptr);
    std::printf("    quantise q %.1f us\n", 1e3 * timer.burst([&] { stages.quantize(w, 0, nullptr); }));
  }
  stages.sequence_rows(w, nullptr);
  stages.map(w, 0, nullptr);
  const tilesieve::KvOuterInputs attend_inputs = stages.attend_inputs(w, 0);
  const tilesieve::KvOuterMaps maps(stages.sizes(), attend_inputs);
  const auto attend = [&] { stages.attend(w, attend_inputs, maps, 0, nullptr); };
  const double attend_ms = timer.burst(attend);
  const double attend_bound = rate(partials / bytes_per_ms);
  report.add(shape.name("attend"), "TFLOP/s", rate(attend_ms), attend_bound);
  report.add(shape.name("attend-sustained"), "TFLOP/s", rate(timer.sustained(attend, attend_ms)), attend_bound);
  const double combine_ms = timer.burst([&] { stages.combine(w, 0, 0, nullptr); });
  report.add(shape.name("combine"), "GB/s", (partials + setup.output_bytes()) / combine_ms * 1e-6, bytes_per_ms * 1e-6);
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  call.sequence_rows(w, stream);
  call.map(w, 0, stream);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&replay, graph, 0), "graph");
  report.add(shape.name("map"), "us",
             1e3 * timer.burst([&] { check(cudaGraphLaunch(replay, nullptr), "graph"); }, true));
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);

  std::vector<double> host;
  for (int i = 0; i < 21; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    tilesieve::sm90::sparse_prefill(setup.inputs, setup.outputs, options, w, call.layout().bytes, nullptr);
    host.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    check(cudaDeviceSynchronize(), "call");
  }
  std::sort(host.begin(), host.end());
  report.add(shape.name("host"), "us", host[10]);
}

}  // namespace

int main(int argc, char** argv) {
  std::string path, only, triton, commit = "unknown";
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--only" && i + 1 < argc)
      only = argv[++i];
    else if (arg == "--triton" && i + 1 < argc)
      triton = argv[++i];
    else if (arg == "--commit" && i + 1 < argc)
      commit = argv[++i];
    else
      path = arg;
  }
  if (path.empty()) {
    std::fprintf(stderr, "usage: prefill_sm90_bench OUT.json [--only SUBSTRING] [--triton FILE] [--commit NAME]\n");
    return 2;
  }
  Timer timer;
  Report report(path, commit, triton);
  const double bytes_per_ms = copy_rate(timer);
  std::printf("copy %.2f TB/s\n", bytes_per_ms * 1e-9);
  const std::pair<int64_t, int64_t> sizes[] = {{16384, 16384}, {32768, 8192}, {131072, 8192}};
  for (const auto& [kv_len, q_len] : sizes) {
    for (const char* selection : {"uniform", "overlapping", "sink"}) {
      for (const char* dtype : {"e4m3", "bf16", "bf16-e4m3"}) {
        for (int64_t q_heads : {64, 32}) {
          for (int64_t top_k : {16, 8}) {
            if ((q_heads == 32 || top_k == 8) && std::string(selection) != "uniform") continue;
            if (q_heads == 32 && top_k == 8) continue;
            const Shape shape = {kv_len, q_len, q_heads, top_k, selection, dtype};
            if ((shape.name("call") + "$").find(only) == std::string::npos) continue;
            measure(shape, timer, report, bytes_per_ms);
          }
        }
      }
    }
  }
  return 0;
}
