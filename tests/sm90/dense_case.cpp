// SPDX-License-Identifier: Apache-2.0
#include "sm90/dense_case.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>

#include "base/number_formats.h"
#include "base/rounding.h"
#include "sage_attention_sm90.h"

namespace tilesieve::testing {

namespace {

void must(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

constexpr uint16_t kNanBits = 0x7fff;  // of bf16 and of f16

Tensor random_tensor(DType dtype, int64_t tokens, int64_t heads, int64_t dim, float offset, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const Tensor tensor(dtype, {tokens, heads, dim});
  std::vector<float> offsets(static_cast<size_t>(heads * dim));
  for (float& x : offsets) x = offset * normal(random);
  for (int64_t i = 0; i < tokens * heads * dim; ++i) {
    const float x = offsets[static_cast<size_t>(i % (heads * dim))] + normal(random);
    tensor.as<uint16_t>()[i] = dtype == DType::bf16 ? bf16_from_f32(x) : f16_from_f32(x);
  }
  return tensor;
}

}  // namespace

AttentionInputs DenseCase::inputs() const {
  AttentionInputs inputs;
  inputs.q = q.view();
  inputs.k = k.view();
  inputs.v = v.view();
  return inputs;
}

DenseCase make_dense_case(const std::string& line, uint32_t seed, float k_offset, float v_offset) {
  DenseCase c;
  c.problem = Problem::parse(line);
  const Problem& p = c.problem;
  std::mt19937 random(seed);
  c.q = random_tensor(p.q_dtype, p.total_q(), p.num_q_heads, p.head_dim, 0.3f, random);
  c.k = random_tensor(p.kv_dtype, p.total_kv(), p.num_kv_heads, p.head_dim, k_offset, random);
  c.v = random_tensor(p.kv_dtype, p.total_kv(), p.num_kv_heads, p.head_dim, v_offset, random);
  c.o_dtype = p.q_dtype;
  return c;
}

bool DenseResult::operator==(const DenseResult& other) const {
  const auto same = [](const TensorView& a, const TensorView& b) {
    return std::memcmp(a.data, b.data, static_cast<size_t>(a.num_elements() * size_in_bytes(a.dtype))) == 0;
  };
  return same(o.view(), other.o.view()) && same(lse.view(), other.lse.view());
}

DenseDevice::DenseDevice(const DenseCase& c, DenseForm form) : case_(c), form_(form) {
  inputs_ = {place(c.q.view(), c.q_token_stride, q_), place(c.k.view(), c.kv_token_stride, k_),
             place(c.v.view(), c.kv_token_stride, v_)};
  const Problem& p = c.problem;
  const Tensor o(c.o_dtype, {p.total_q(), p.num_q_heads, p.head_dim});
  outputs_.o = place(o.view(), c.q_token_stride, o_);
  o_.fill(0xff);
  const int64_t n = c.num_sequences(), tokens = p.total_q() / n, heads = p.num_q_heads;
  lse_ = DeviceMemory(4 * p.total_q() * heads);
  lse_.fill(0xff);
  outputs_.lse = c.hnd ? device_view(lse_.data(), DType::f32, {n, heads, tokens})
                       : device_view(lse_.data(), DType::f32, {n, tokens, heads});
  options_.layout = c.hnd ? sm90::DenseLayout::hnd : sm90::DenseLayout::nhd;
  options_.causal = p.causal;
  options_.groups = c.groups;
  options_.softmax_scale = p.scale();
  options_.rounding = form == DenseForm::relaxed ? sm90::SageRounding::relaxed : sm90::SageRounding::exact;
  if (form == DenseForm::bf16) return;
  workspace_ = DeviceMemory(sm90::sage_attention_workspace(inputs_, outputs_, options_));
  workspace_.fill(0xff);
}

// Strides of [num_sequences, tokens, heads] in a layout with gaps; sizes of the view in the order of the layout.
TensorView DenseDevice::place(const TensorView& host, int64_t far_stride, DeviceMemory& memory) {
  const int64_t n = case_.num_sequences(), tokens = host.sizes[0] / n, heads = host.sizes[1], dim = host.sizes[2];
  const int64_t row = dim + case_.gap;
  const int64_t token_stride = far_stride != 0 ? far_stride : case_.hnd ? row : heads * row;
  const int64_t head_stride = case_.hnd ? tokens * row : row, sequence_stride = tokens * heads * row;
  const int64_t end = far_stride != 0 ? (tokens - 1) * far_stride + dim : n * sequence_stride;
  memory = DeviceMemory(2 * std::max<int64_t>(end, 8));
  if (far_stride != 0) {
    must(cudaMemcpy2D(memory.data(), static_cast<size_t>(far_stride * 2), host.data, static_cast<size_t>(dim * 2),
                      static_cast<size_t>(dim * 2), static_cast<size_t>(tokens), cudaMemcpyHostToDevice));
  } else {
    std::vector<uint16_t> staged(static_cast<size_t>(end), kNanBits);
    for (int64_t t = 0; t < n * tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        std::copy_n(host.as<uint16_t>() + (t * heads + h) * dim, dim,
                    staged.data() + t / tokens * sequence_stride + t % tokens * token_stride + h * head_stride);
      }
    }
    memory.upload(staged.data(), 2 * end);
  }
  if (case_.hnd) {
    return device_view(memory.data(), host.dtype, {n, heads, tokens, dim},
                       {sequence_stride, head_stride, token_stride, 1});
  }
  return device_view(memory.data(), host.dtype, {n, tokens, heads, dim},
                     {sequence_stride, token_stride, head_stride, 1});
}

void DenseDevice::launch(cudaStream_t stream) const {
  if (form_ == DenseForm::bf16) {
    sm90::dense_attention(inputs_, outputs_, options_, stream);
  } else {
    sm90::sage_attention(inputs_, outputs_, options_, workspace_.data(), workspace_.bytes(), stream);
  }
}

DenseResult DenseDevice::result() const {
  must(cudaDeviceSynchronize());
  const Problem& p = case_.problem;
  const int64_t n = case_.num_sequences(), tokens = p.total_q() / std::max<int64_t>(n, 1), heads = p.num_q_heads;
  DenseResult result = {Tensor(case_.o_dtype, {p.total_q(), heads, p.head_dim}),
                        Tensor(DType::f32, {p.total_q(), heads})};
  const TensorView& o = outputs_.o;
  const int64_t token_stride = o.strides[case_.hnd ? 2 : 1], head_stride = o.strides[case_.hnd ? 1 : 2];
  if (case_.q_token_stride != 0) {
    must(cudaMemcpy2D(result.o.view().data, static_cast<size_t>(p.head_dim * 2), o.data,
                      static_cast<size_t>(token_stride * 2), static_cast<size_t>(p.head_dim * 2),
                      static_cast<size_t>(tokens), cudaMemcpyDeviceToHost));
  } else {
    std::vector<uint16_t> staged(static_cast<size_t>(o_.bytes() / 2));
    o_.download(staged.data(), o_.bytes());
    for (int64_t t = 0; t < n * tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        std::copy_n(staged.data() + t / tokens * o.strides[0] + t % tokens * token_stride + h * head_stride, p.head_dim,
                    result.o.as<uint16_t>() + (t * heads + h) * p.head_dim);
      }
    }
  }
  std::vector<float> lse(static_cast<size_t>(p.total_q() * heads));
  lse_.download(lse.data(), lse_.bytes());
  for (int64_t t = 0; t < n * tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = case_.hnd ? (t / tokens * heads + h) * tokens + t % tokens : t * heads + h;
      result.lse.as<float>()[t * heads + h] = lse[static_cast<size_t>(at)];
    }
  }
  return result;
}

DenseResult run(const DenseCase& c, DenseForm form) {
  const DenseDevice device(c, form);
  device.launch();
  return device.result();
}

SageTensors sage_tensors_at(const void* workspace, int64_t workspace_bytes, const sm90::SagePlaces& at,
                            const Problem& p, const SageOptions& options, const SageSlots& slots) {
  must(cudaDeviceSynchronize());
  std::vector<uint8_t> bytes(static_cast<size_t>(workspace_bytes));
  must(cudaMemcpy(bytes.data(), workspace, bytes.size(), cudaMemcpyDeviceToHost));

  const int64_t n = p.num_sequences(), dim = sage_dim(p), heads = p.num_q_heads, kv_heads = p.num_kv_heads;
  const int64_t tiles = ceil_div(slots.q_slots, options.q_tile()), blocks = ceil_div(slots.k_slots, options.kv_block());
  const int64_t q_room = tiles * options.q_tile(), k_room = blocks * options.kv_block();
  SageTensors out;
  out.q = {Tensor(DType::i8, {heads, n * q_room, dim}), Tensor(DType::f32, {heads, n * tiles * options.q_groups()})};
  out.k = {Tensor(DType::i8, {kv_heads, n * k_room, dim}),
           Tensor(DType::f32, {kv_heads, n * blocks * options.kv_groups()})};
  out.v = {Tensor(DType::f8_e4m3, {kv_heads, dim, n * slots.v_slots}), Tensor(DType::f32, {n, kv_heads, dim})};
  out.k_mean = Tensor(p.kv_dtype, {n, kv_heads, p.head_dim});
  // `count` bytes of the workspace's [n, heads, ...] to [heads, n, ...].
  const auto turn = [&](int64_t from, int64_t num_heads, int64_t count, const Tensor& to, int64_t room) {
    for (int64_t i = 0; i < n * num_heads; ++i) {
      std::copy_n(bytes.data() + from + i * count, count,
                  to.as<uint8_t>() + (i % num_heads * n + i / num_heads) * room);
    }
  };
  turn(at.q, heads, slots.q_slots * dim, out.q.codes, q_room * dim);
  turn(at.k, kv_heads, slots.k_slots * dim, out.k.codes, k_room * dim);
  // Scales are there for each lane; where a group is of several, they have the same.
  const auto scales = [&](int64_t from, int64_t num_heads, int64_t count, int64_t lanes, const Tensor& to) {
    for (int64_t i = 0; i < n * num_heads * count; ++i) {
      std::vector<float> same(static_cast<size_t>(lanes));
      std::memcpy(same.data(), bytes.data() + from + 4 * i * lanes, static_cast<size_t>(4 * lanes));
      for (float scale : same) {
        if (scale != same[0]) throw std::runtime_error("scales of a group differ");
      }
      const int64_t row = i / count;
      to.as<float>()[(row % num_heads * n + row / num_heads) * count + i % count] = same[0];
    }
  };
  const int64_t q_lanes = options.q_tile() / 64 * 32;  // of a tile
  scales(at.q_scale, heads, tiles * options.q_groups(), q_lanes / options.q_groups(), out.q.scale);
  scales(at.k_scale, kv_heads, blocks * options.kv_groups(), 4 / options.kv_groups(), out.k.scale);
  for (int64_t i = 0; i < n * kv_heads * dim; ++i) {  // [n, heads, dim, keys] to [heads, dim, n, keys]
    const int64_t sequence = i / dim / kv_heads, head = i / dim % kv_heads;
    std::copy_n(bytes.data() + at.v + i * slots.v_slots, slots.v_slots,
                out.v.codes.as<uint8_t>() + ((head * dim + i % dim) * n + sequence) * slots.v_slots);
  }
  if (p.total_kv() > 0) {
    std::memcpy(out.v.scale.view().data, bytes.data() + at.v_scale, static_cast<size_t>(4 * n * kv_heads * dim));
    for (int64_t i = 0; i < n * kv_heads; ++i) {
      for (int64_t d = 0; d < p.head_dim; ++d) {
        float mean;
        std::memcpy(&mean, bytes.data() + at.k_mean + 4 * (i * dim + d), 4);
        out.k_mean.as<uint16_t>()[i * p.head_dim + d] =
            p.kv_dtype == DType::bf16 ? bf16_from_f32(mean) : f16_from_f32(mean);
      }
    }
  }
  return out;
}

SageTensors quantized_by_device(const DenseCase& c) {
  const DenseDevice device(c, DenseForm::exact);
  const sm90::SageCall call(device.inputs(), device.outputs(), device.options());
  call.quantize(device.workspace(), nullptr);
  const int64_t n = c.num_sequences(), kv_len = c.problem.total_kv() / n;
  return sage_tensors_at(device.workspace(), call.workspace_bytes(), call.places(), c.problem,
                         {.kernel = SageKernel::sm90, .groups = c.groups},
                         {c.problem.total_q() / n, kv_len, round_up(kv_len, 128)});
}

}  // namespace tilesieve::testing
