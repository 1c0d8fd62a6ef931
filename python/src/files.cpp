// SPDX-License-Identifier: Apache-2.0
// Files of tensors. Arrays that are read lie in the mapped file; types that NumPy has no word for are handed over as
// whole numbers of their size, with their name beside.
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "tilesieve/io.h"
#include "values.h"

namespace tilesieve::python {

namespace {

nb::dlpack::dtype storage_of(DType type) {
  using nb::dtype;
  switch (type) {
    case DType::f64:
      return dtype<double>();
    case DType::f32:
      return dtype<float>();
    case DType::f16:
      return {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
    case DType::bf16:
    case DType::u16:
      return dtype<uint16_t>();
    case DType::f8_e4m3:
    case DType::f8_e5m2:
    case DType::f8_e4m3fnuz:
    case DType::f8_e5m2fnuz:
    case DType::u8:
      return dtype<uint8_t>();
    case DType::i64:
      return dtype<int64_t>();
    case DType::i32:
      return dtype<int32_t>();
    case DType::i16:
      return dtype<int16_t>();
    case DType::i8:
      return dtype<int8_t>();
    case DType::u64:
      return dtype<uint64_t>();
    case DType::u32:
      return dtype<uint32_t>();
    case DType::boolean:
      return dtype<bool>();
  }
  return dtype<uint8_t>();
}

// (array, name of its type) for each name, and the metadata.
nb::tuple read_file(const nb::bytes& path) {
  TensorFile file;
  {
    const nb::gil_scoped_release release;
    file = read_tensors({path.c_str(), path.size()});
  }
  auto* mapping = new std::shared_ptr<const void>(file.mapping);
  const nb::capsule owner(mapping, [](void* kept) noexcept { delete static_cast<std::shared_ptr<const void>*>(kept); });
  nb::dict tensors;
  for (const auto& [name, view] : file.tensors) {
    std::vector<size_t> sizes(view.sizes.begin(), view.sizes.begin() + view.num_dims);
    const nb::ndarray<nb::numpy, nb::ro> array(view.data, sizes.size(), sizes.data(), owner, view.strides.data(),
                                               storage_of(view.dtype));
    tensors[decoded(name)] = nb::make_tuple(nb::cast(array, nb::rv_policy::reference), name_of(view.dtype));
  }
  return nb::make_tuple(tensors, nb::cast(file.metadata));
}

void write_file(const nb::bytes& path, const nb::dict& tensors, const std::map<std::string, std::string>& metadata) {
  std::vector<BorrowedArray> arrays;
  std::vector<std::pair<std::string, TensorView>> views;
  for (const auto& [key, value] : tensors) {
    const std::string name = nb::cast<std::string>(key);
    const BorrowedArray& array = arrays.emplace_back(name.c_str(), value);
    require(name.c_str(), array, "an array");
    views.emplace_back(name, array.view());
  }
  const nb::gil_scoped_release release;
  write_safetensors({path.c_str(), path.size()}, views, metadata);
}

void write_one(const nb::bytes& path, nb::handle tensor) {
  const BorrowedArray array("tensor", tensor);
  require("tensor", array, "an array");
  const nb::gil_scoped_release release;
  write_npy({path.c_str(), path.size()}, array.view());
}

}  // namespace

void bind_files(nb::module_& module) {
  module.def("read_tensors", &read_file, nb::arg("path"));
  module.def("write_safetensors", &write_file, nb::arg("path"), nb::arg("tensors"), nb::arg("metadata"));
  module.def("write_npy", &write_one, nb::arg("path"), "tensor"_any);
}

}  // namespace tilesieve::python
