// SPDX-License-Identifier: Apache-2.0
#include "tensor_statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace tilesieve::cli {

namespace {

constexpr int64_t kChunk = int64_t{1} << 18;  // elements converted at a time

template <class Element>
void read_elements(const TensorView& chunk, std::vector<double>& values) {
  const Element* data = chunk.as<const Element>();
  for (int64_t i = 0; i < chunk.sizes[0]; ++i) values.push_back(static_cast<double>(data[i * chunk.strides[0]]));
}

void read_narrow_floats(const TensorView& chunk, std::vector<double>& values) {
  const Tensor widened = to_f32(chunk);
  read_elements<float>(widened.view(), values);
}

using ReadElements = void (*)(const TensorView&, std::vector<double>&);

ReadElements reader_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return read_elements<double>;
    case DType::f32:
      return read_elements<float>;
    case DType::f16:
    case DType::bf16:
    case DType::f8_e4m3:
      return read_narrow_floats;
    case DType::i64:
      return read_elements<int64_t>;
    case DType::i32:
      return read_elements<int32_t>;
    case DType::i16:
      return read_elements<int16_t>;
    case DType::i8:
      return read_elements<int8_t>;
    case DType::u64:
      return read_elements<uint64_t>;
    case DType::u32:
      return read_elements<uint32_t>;
    case DType::u16:
      return read_elements<uint16_t>;
    case DType::u8:
      return read_elements<uint8_t>;
    case DType::f8_e5m2:
    case DType::f8_e4m3fnuz:
    case DType::f8_e5m2fnuz:
    case DType::boolean:
      return nullptr;
  }
  return nullptr;
}

// Tensors of files lie in C or Fortran order: without a gap, so that their order does not matter here.
bool is_without_gaps(const TensorView& view) {
  TensorView reversed = view;
  std::reverse(reversed.sizes.begin(), reversed.sizes.begin() + view.num_dims);
  std::reverse(reversed.strides.begin(), reversed.strides.begin() + view.num_dims);
  return view.is_contiguous() || reversed.is_contiguous();
}

}  // namespace

std::optional<TensorStatistics> statistics_of(const TensorView& view, int64_t max_elements) {
  const ReadElements read = reader_of(view.dtype);
  if (read == nullptr || !is_without_gaps(view)) return std::nullopt;
  const int64_t total = view.num_elements();
  const int64_t step = std::max<int64_t>(1, total / max_elements + (total % max_elements != 0));

  TensorStatistics result;
  result.num_measured = total / step + (total % step != 0);
  double min = std::numeric_limits<double>::infinity(), max = -min, sum = 0;
  int64_t num_counted = 0;
  std::vector<double> values;
  for (int64_t done = 0; done < result.num_measured; done += kChunk) {
    TensorView chunk = view;
    chunk.num_dims = 1;
    chunk.sizes[0] = std::min(kChunk, result.num_measured - done);
    chunk.strides[0] = step;
    chunk.data = view.as<uint8_t>() + done * step * size_in_bytes(view.dtype);
    values.clear();
    read(chunk, values);
    for (double value : values) {
      if (std::isnan(value)) {
        ++result.num_nan;
        continue;
      }
      result.num_infinite += std::isinf(value);
      min = std::min(min, value);
      max = std::max(max, value);
      sum += value;
      ++num_counted;
    }
  }
  const double none = std::numeric_limits<double>::quiet_NaN();
  result.min = num_counted > 0 ? min : none;
  result.max = num_counted > 0 ? max : none;
  result.mean = num_counted > 0 ? sum / static_cast<double>(num_counted) : none;
  return result;
}

}  // namespace tilesieve::cli
