// SPDX-License-Identifier: Apache-2.0
#include "arrays.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "dlpack.h"
#include "tilesieve/error.h"
#include "values.h"

namespace tilesieve::python {

namespace {

// CUDA's handles of its default stream: as a pointer, and as DLPack writes it, to whom 0 means nothing.
void* const kDefaultStream = nullptr;
constexpr int64_t kDlpackDefaultStream = 1;

std::string text_of(nb::handle object) { return nb::cast<std::string>(nb::str(object)); }

[[noreturn]] void no_array(const char* argument, nb::handle object) {
  const std::string name = kind_of(object);
  nb::raise_type_error(
      "%s: got %s, expected an array of NumPy (bfloat16 and float8_e4m3fn as of ml_dtypes), or of any library with "
      "__dlpack__, such as PyTorch, CuPy and JAX",
      argument, name.c_str());
}

// Looked up once and kept for good: NumPy is never unloaded.
PyObject* numpy_array_type() {
  static PyObject* const type = nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr();
  return type;
}

bool is_numpy(nb::handle object) {
  return object.type().ptr() == numpy_array_type() || PyObject_IsInstance(object.ptr(), numpy_array_type()) == 1;
}

// float, int, or one number of NumPy's, which is no array.
bool is_number(nb::handle object) {
  return !object.is_none() && PyNumber_Check(object.ptr()) == 1 && !is_numpy(object) &&
         !nb::hasattr(object.type(), "__dlpack__");
}

// Of a NumPy array: what derives from it may mean more than its memory says.
void refuse_mask(const char* argument, nb::handle array) {
  if (array.type().ptr() == numpy_array_type()) return;
  if (PyObject_IsInstance(array.ptr(), nb::module_::import_("numpy").attr("ma").attr("MaskedArray").ptr()) != 1) return;
  nb::raise_type_error(
      "%s: got MaskedArray, whose mask would not be heeded; expected a plain array, such as of .filled()", argument);
}

struct NamedType {
  std::string_view name;
  DType dtype;
};

// Types that the buffer protocol has no letter for, as ml_dtypes names them.
constexpr NamedType kUnletteredTypes[] = {{"bfloat16", DType::bf16},
                                          {"float8_e4m3fn", DType::f8_e4m3},
                                          {"float8_e5m2", DType::f8_e5m2},
                                          {"float8_e4m3fnuz", DType::f8_e4m3fnuz},
                                          {"float8_e5m2fnuz", DType::f8_e5m2fnuz}};

std::optional<DType> whole_type(bool is_signed, int64_t bytes) {
  switch (bytes) {
    case 1:
      return is_signed ? DType::i8 : DType::u8;
    case 2:
      return is_signed ? DType::i16 : DType::u16;
    case 4:
      return is_signed ? DType::i32 : DType::u32;
    case 8:
      return is_signed ? DType::i64 : DType::u64;
  }
  return {};
}

std::optional<DType> float_type(int64_t bytes) {
  switch (bytes) {
    case 2:
      return DType::f16;
    case 4:
      return DType::f32;
    case 8:
      return DType::f64;
  }
  return {};
}

// Of a buffer's format: one letter, perhaps behind a sign of this machine's byte order.
std::optional<DType> type_of_format(const char* format, int64_t bytes) {
  std::string_view text = format == nullptr ? "B" : format;
  if (text.size() == 2 && (text[0] == '@' || text[0] == '=' || text[0] == '<')) text.remove_prefix(1);
  if (text.size() != 1) return {};
  if (std::string_view("bhilq").find(text[0]) != std::string_view::npos) return whole_type(true, bytes);
  if (std::string_view("BHILQ").find(text[0]) != std::string_view::npos) return whole_type(false, bytes);
  if (std::string_view("efd").find(text[0]) != std::string_view::npos) return float_type(bytes);
  if (text[0] == '?') return DType::boolean;
  return {};
}

std::optional<DType> type_of(const dlpack::DataType& type) {
  if (type.lanes != 1 || type.bits % 8 != 0) return {};
  switch (type.code) {
    case dlpack::kInt:
    case dlpack::kUInt:
      return whole_type(type.code == dlpack::kInt, type.bits / 8);
    case dlpack::kFloat:
      return float_type(type.bits / 8);
    case dlpack::kBfloat:
      return type.bits == 16 ? std::optional(DType::bf16) : std::nullopt;
    case dlpack::kBool:
      return type.bits == 8 ? std::optional(DType::boolean) : std::nullopt;
    case dlpack::kFloat8E4m3fn:
      return DType::f8_e4m3;
    case dlpack::kFloat8E4m3fnuz:
      return DType::f8_e4m3fnuz;
    case dlpack::kFloat8E5m2:
      return DType::f8_e5m2;
    case dlpack::kFloat8E5m2fnuz:
      return DType::f8_e5m2fnuz;
  }
  return {};
}

DType known(const char* argument, std::optional<DType> dtype, nb::handle array) {
  if (dtype) return *dtype;
  const std::string name = text_of(nb::getattr(array, "dtype", nb::none()));
  throw Error(std::string(argument) + ": got elements of type " + name +
              "; the types that exist are float64, float32, float16, bfloat16, float8_e4m3fn, whole numbers and bool");
}

void check_dims(const char* argument, int num_dims) {
  if (num_dims > kMaxDims) {
    throw Error(std::string(argument) + ": got " + std::to_string(num_dims) + " dimensions, expected at most " +
                std::to_string(kMaxDims));
  }
}

bool is_cuda(const dlpack::Device& device) {
  return device.type == dlpack::kCuda || device.type == dlpack::kCudaManaged;
}

tilesieve::Device device_of(const char* argument, const dlpack::Device& device) {
  if (is_cuda(device)) return {DeviceKind::cuda, device.id};
  if (device.type == dlpack::kCpu || device.type == dlpack::kCudaHost) return {DeviceKind::cpu, 0};
  throw Error(std::string(argument) + ": lies on a device of DLPack's type " + std::to_string(device.type) +
              ", expected the CPU (1) or CUDA (2)");
}

TensorView view_of(const char* argument, const dlpack::Tensor& tensor, nb::handle array) {
  check_dims(argument, tensor.num_dims);
  TensorView view;
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.dtype = known(argument, type_of(tensor.dtype), array);
  view.device = device_of(argument, tensor.device);
  view.num_dims = tensor.num_dims;
  std::copy_n(tensor.sizes, tensor.num_dims, view.sizes.begin());
  int64_t packed = 1;
  for (int i = tensor.num_dims - 1; i >= 0; --i) {
    view.strides[i] = tensor.strides != nullptr ? tensor.strides[i] : packed;
    packed *= tensor.sizes[i];
  }
  return view;
}

// The function table of the array's type; nullptr where it has none (PyTorch before 2.10, CuPy, JAX).
const dlpack::ExchangeApi* exchange_api(nb::handle array) {
  nb::object capsule = nb::getattr(array.type(), "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api != nullptr && api->version.major != 1) api = api->previous;
  return api;
}

void* current_stream(const dlpack::ExchangeApi& api, const dlpack::Device& device) {
  void* stream = nullptr;
  if (api.current_work_stream(device.type, device.id, &stream) != 0) throw nb::python_error();
  return stream;
}

// The capsule of __dlpack__, with its read-only flag where the library knows version 1 of DLPack.
nb::object dlpack_capsule(nb::handle array, Stream stream) {
  nb::object method = array.attr("__dlpack__");
  nb::dict arguments;
  if (stream) {
    const auto number = reinterpret_cast<intptr_t>(*stream);
    arguments["stream"] = *stream == kDefaultStream ? kDlpackDefaultStream : static_cast<int64_t>(number);
  }
  arguments["max_version"] = nb::make_tuple(1, 0);
  try {
    return method(**arguments);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  PyDict_DelItemString(arguments.ptr(), "max_version");
  return method(**arguments);
}

// __dlpack__ refuses what a gradient is to flow through; the table of functions does not.
void refuse_gradient(const char* argument, nb::handle array) {
  if (!nb::cast<bool>(nb::getattr(array, "requires_grad", nb::bool_(false)))) return;
  if (!nb::cast<bool>(nb::module_::import_("torch").attr("is_grad_enabled")())) return;
  throw Error(std::string(argument) +
              ": requires a gradient, and there is no backward pass; expected a call under "
              "torch.no_grad(), or argument.detach()");
}

dlpack::Device dlpack_device(nb::handle array) {
  const nb::tuple device = nb::cast<nb::tuple>(array.attr("__dlpack_device__")());
  return {static_cast<dlpack::DeviceType>(nb::cast<int>(device[0])), nb::cast<int32_t>(device[1])};
}

}  // namespace

// Delegates so that the destructor runs where a check throws with a buffer already borrowed.
BorrowedArray::BorrowedArray(const char* argument, nb::handle object, Access access, Stream stream) : BorrowedArray() {
  if (object.is_none()) return;
  if (is_numpy(object)) {
    refuse_mask(argument, object);
    borrow_buffer(argument, object, access);
  } else if (nb::hasattr(object.type(), "__dlpack__")) {
    try {
      borrow_dlpack(argument, object, access, stream);
    } catch (const nb::python_error& error) {  // sparse, quantised, lazy, on a device that DLPack does not know
      const std::string text = text_of(error.value());
      throw Error(std::string(argument) + ": " + kind_of(object) +
                  " cannot be borrowed: " + text.substr(0, text.find('\n')));
    } catch (const std::bad_cast&) {
      throw Error(std::string(argument) + ": " + kind_of(object) +
                  " cannot be borrowed: its __dlpack_device__ gives no pair of whole numbers");
    }
  } else {
    no_array(argument, object);
  }
}

BorrowedArray::~BorrowedArray() {
  if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
}

BorrowedArray& BorrowedArray::operator=(BorrowedArray&& other) noexcept {
  std::swap(view_, other.view_);
  std::swap(buffer_, other.buffer_);
  std::swap(owner_, other.owner_);
  return *this;
}

void BorrowedArray::borrow_buffer(const char* argument, nb::handle array, Access access) {
  const int flags = PyBUF_STRIDES | PyBUF_FORMAT;
  std::optional<DType> dtype;
  if (PyObject_GetBuffer(array.ptr(), &buffer_, flags) != 0) {
    // A type of ml_dtypes, most likely: its bytes can be borrowed where its numbers cannot.
    PyErr_Clear();
    const std::string name = text_of(nb::object(array.attr("dtype")));
    const auto* named = std::find_if(std::begin(kUnletteredTypes), std::end(kUnletteredTypes),
                                     [&](const NamedType& type) { return type.name == name; });
    if (named == std::end(kUnletteredTypes)) known(argument, {}, array);
    dtype = named->dtype;
    owner_ = array.attr("view")(size_in_bytes(*dtype) == 2 ? "u2" : "u1");
    if (PyObject_GetBuffer(owner_.ptr(), &buffer_, flags) != 0) throw nb::python_error();
  }
  if (access == Access::write && buffer_.readonly) throw Error(std::string(argument) + ": is read-only");
  check_dims(argument, buffer_.ndim);
  view_.data = buffer_.buf;
  view_.dtype = dtype ? *dtype : known(argument, type_of_format(buffer_.format, buffer_.itemsize), array);
  view_.num_dims = buffer_.ndim;
  for (int i = 0; i < buffer_.ndim; ++i) {
    view_.sizes[i] = buffer_.shape[i];
    view_.strides[i] = buffer_.strides[i] / buffer_.itemsize;
    if (buffer_.strides[i] % buffer_.itemsize != 0) {
      throw Error(std::string(argument) + ": got a stride of " + std::to_string(buffer_.strides[i]) +
                  " bytes, expected a multiple of the element size, " + std::to_string(buffer_.itemsize));
    }
  }
}

void BorrowedArray::borrow_dlpack(const char* argument, nb::handle object, Access access, Stream stream) {
  if (const dlpack::ExchangeApi* api = exchange_api(object)) {
    dlpack::Tensor tensor;
    if (api->tensor_from_object(object.ptr(), &tensor) != 0) throw nb::python_error();
    if (access == Access::read) refuse_gradient(argument, object);
    if (!is_cuda(tensor.device) || !stream || current_stream(*api, tensor.device) == *stream) {
      view_ = view_of(argument, tensor, object);
      return;
    }
  }
  owner_ = dlpack_capsule(object, is_cuda(dlpack_device(object)) ? stream : Stream());
  const dlpack::Tensor* tensor = nullptr;
  uint64_t flags = 0;
  if (PyCapsule_IsValid(owner_.ptr(), "dltensor_versioned")) {
    const auto* managed =
        static_cast<const dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(owner_.ptr(), "dltensor_versioned"));
    if (managed->version.major != 1) {
      throw Error(std::string(argument) + ": got DLPack " + std::to_string(managed->version.major) + ", expected 1");
    }
    tensor = &managed->tensor;
    flags = managed->flags;
  } else if (PyCapsule_IsValid(owner_.ptr(), "dltensor")) {
    tensor = &static_cast<const dlpack::ManagedTensor*>(PyCapsule_GetPointer(owner_.ptr(), "dltensor"))->tensor;
  } else {
    no_array(argument, object);
  }
  if (access == Access::write && (flags & dlpack::kReadOnly) != 0) {
    throw Error(std::string(argument) + ": is read-only");
  }
  view_ = view_of(argument, *tensor, object);
}

BorrowedScale::BorrowedScale(const char* argument, nb::handle object, Stream stream)
    : array_(argument, !stream && is_number(object) ? nb::handle(Py_None) : object, Access::read, stream),
      is_number_(!stream && is_number(object)) {
  if (is_number_) number_ = static_cast<float>(real_number(argument, object));
}

TensorView BorrowedScale::view() const {
  if (is_number_) return contiguous_view(const_cast<float*>(&number_), DType::f32, {1});
  TensorView view = array_.view();
  if (view.num_dims == 0 && view.data != nullptr) {  // a number alone is one for all heads
    view.num_dims = 1;
    view.sizes[0] = view.strides[0] = 1;
  }
  return view;
}

Stream stream_of(nb::handle array) {
  if (cuda_device_of(array) < 0) return {};
  const dlpack::Device device = dlpack_device(array);
  if (const dlpack::ExchangeApi* api = exchange_api(array)) return current_stream(*api, device);
  const std::string module = nb::cast<std::string>(array.type().attr("__module__"));
  const auto is_of = [&](std::string_view name) { return module.substr(0, module.find('.')) == name; };
  nb::object number = nb::int_(0);
  if (is_of("torch")) {
    number = nb::module_::import_("torch").attr("cuda").attr("current_stream")(device.id).attr("cuda_stream");
  } else if (is_of("cupy")) {
    number = nb::module_::import_("cupy").attr("cuda").attr("get_current_stream")().attr("ptr");
  }
  return reinterpret_cast<void*>(nb::cast<intptr_t>(number));
}

void require(const char* argument, const BorrowedArray& array, const char* expected) {
  if (array.is_absent()) throw Error(std::string(argument) + ": got None, expected " + expected);
}

void refuse_unread(const char* argument, bool is_absent, std::string_view router) {
  if (is_absent) return;
  throw Error(std::string(argument) + ": got an array, which the router '" + std::string(router) +
              "' does not read; expected None, or the router 'index'");
}

std::vector<int64_t> whole_numbers(const char* argument, nb::handle object) {
  std::vector<int64_t> numbers;
  const bool is_array = is_numpy(object) || nb::hasattr(object.type(), "__dlpack__");
  if (!is_array && PySequence_Check(object.ptr()) && !PyUnicode_Check(object.ptr()) && !PyBytes_Check(object.ptr())) {
    for (nb::handle item : object) {
      const std::string element = std::string(argument) + "[" + std::to_string(numbers.size()) + "]";
      numbers.push_back(whole_number(element.c_str(), item));
    }
    return numbers;
  }
  const BorrowedArray array(argument, object);
  const TensorView& view = array.view();
  if (view.num_dims != 1 || view.device.kind != DeviceKind::cpu ||
      (view.dtype != DType::i32 && view.dtype != DType::i64)) {
    throw Error(std::string(argument) + ": got " + view.describe() +
                (view.device.kind == DeviceKind::cpu ? "" : " on a CUDA device") +
                ", expected i32 or i64 of one dimension on the CPU");
  }
  numbers.resize(static_cast<size_t>(view.sizes[0]));
  for (int64_t i = 0; i < view.sizes[0]; ++i) {
    numbers[i] = view.dtype == DType::i32 ? view.as<const int32_t>()[i * view.strides[0]]
                                          : view.as<const int64_t>()[i * view.strides[0]];
  }
  return numbers;
}

int cuda_device_of(nb::handle array) {
  if (is_numpy(array) || !nb::hasattr(array.type(), "__dlpack_device__")) return -1;
  try {
    const dlpack::Device device = dlpack_device(array);
    return is_cuda(device) ? device.id : -1;
  } catch (const nb::python_error&) {  // whoever borrows it will say more
    return -1;
  } catch (const std::bad_cast&) {
    return -1;
  }
}

}  // namespace tilesieve::python
