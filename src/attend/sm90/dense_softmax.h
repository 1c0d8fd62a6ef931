// SPDX-License-Identifier: Apache-2.0
// The softmax of a bf16 consumer's rows, block by block. Of each thread two rows: row_of_thread() and 8 below.
#pragma once

#include "attend/sm90/dense_tile.h"
#include "attend/sm90/tile.h"

namespace tilesieve::sm90 {

template <class Config>
class DenseSoftmax {
 public:
  __device__ void begin() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      m_[half] = kLowest;
      l_[half][0] = l_[half][1] = 0.0f;
    }
  }

  // s, masked, becomes the weights. True when o is to shrink by alpha.
  __device__ bool weigh(float logit_scale, float (&s)[Config::kScores], float (&alpha)[2]) {
    float peak[2];
    row_peaks(s, peak);
    peak[0] *= logit_scale;
    peak[1] *= logit_scale;
    const bool grows = __any_sync(0xffffffffu, peak[0] > m_[0] + kSlack || peak[1] > m_[1] + kSlack);
    if (grows) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float m = fmaxf(m_[half], peak[half]);
        alpha[half] = cuda::exp2_approx(m_[half] - m);
        m_[half] = m;
        l_[half][0] *= alpha[half];
        l_[half][1] *= alpha[half];
      }
    }
    const float scale[2] = {logit_scale, logit_scale}, shift[2] = {-m_[0], -m_[1]};
    exponentials(scale, shift, s, l_);
    return grows;
  }

  static __device__ void shrink(const float (&alpha)[2], float (&o)[Config::kOutputs]) {
#pragma unroll
    for (int i = 0; i < Config::kOutputs; ++i) o[i] *= alpha[i / 2 % 2];
  }

  // o and the LSE of one row, by the lanes that share it.
  template <RowWrites kWrites>
  __device__ void store(const DenseArgs& args, const RowPlace& place, int half, float sum, bool sees,
                        const float (&o)[Config::kOutputs]) const {
    const float inverse = 1.0f / sum;
    store_row<kWrites, Config::kHeadDim>(args, place, sees, [&](int j) {
      return make_float2(o[4 * j + 2 * half] * inverse, o[4 * j + 2 * half + 1] * inverse);
    });
    if (args.lse.data == nullptr || threadIdx.x % 4 != 0 || !place.exists) return;
    static_cast<float*>(args.lse.data)[place.lse] = sees ? natural_lse(sum, m_[half]) : -INFINITY;
  }

  // All lanes of a warp together.
  __device__ float sum(int half) const { return row_sum(l_[half]); }

 private:
  static constexpr float kLowest = -1e30f;
  // A row's maximum is followed when weights would pass 2^8; bf16 and f32 do not care.
  static constexpr float kSlack = 8.0f;

  float m_[2], l_[2][2];  // l: the parts that this thread has
};

}  // namespace tilesieve::sm90
