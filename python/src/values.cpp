// SPDX-License-Identifier: Apache-2.0
#include "values.h"

#include "tilesieve/error.h"

namespace tilesieve::python {

namespace {

[[noreturn]] void wrong_type(const char* argument, nb::handle object, const char* expected) {
  const std::string got = kind_of(object);
  nb::raise_type_error("%s: got %s, expected %s", argument, got.c_str(), expected);
}

[[noreturn]] void out_of_range(const char* argument, nb::handle object, const char* expected) {
  PyErr_Clear();
  throw Error(std::string(argument) + ": got " + nb::cast<std::string>(nb::str(object)) + ", expected " + expected);
}

int64_t value_of(const char* argument, nb::handle object, nb::handle number) {
  const long long value = PyLong_AsLongLong(number.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) out_of_range(argument, object, "a whole number below 2^63");
  return value;
}

}  // namespace

std::string kind_of(nb::handle object) {
  return object.is_none() ? "None" : nb::cast<std::string>(nb::type_name(object.type()));
}

int64_t whole_number(const char* argument, nb::handle object) {
  if (PyLong_CheckExact(object.ptr())) return value_of(argument, object, object);
  if (PyBool_Check(object.ptr()) || !PyIndex_Check(object.ptr())) wrong_type(argument, object, "a whole number");
  const nb::object number = nb::steal(PyNumber_Index(object.ptr()));
  if (!number.is_valid()) {  // an array of more than one element, say
    PyErr_Clear();
    wrong_type(argument, object, "a whole number");
  }
  return value_of(argument, object, number);
}

int64_t count_or(const char* argument, nb::handle object, int64_t none) {
  if (object.is_none()) return none;
  const int64_t count = whole_number(argument, object);
  if (count < 1) out_of_range(argument, object, "1 or more, or None");
  return count;
}

double real_number(const char* argument, nb::handle object) {
  if (PyFloat_CheckExact(object.ptr())) return PyFloat_AS_DOUBLE(object.ptr());
  if (PyBool_Check(object.ptr())) wrong_type(argument, object, "a number");
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    if (PyErr_ExceptionMatches(PyExc_OverflowError)) out_of_range(argument, object, "a number below 1e308");
    PyErr_Clear();
    wrong_type(argument, object, "a number");
  }
  return value;
}

bool flag(const char* argument, nb::handle object) {
  if (object.ptr() == Py_True) return true;
  if (object.ptr() == Py_False) return false;
  const std::string_view name = Py_TYPE(object.ptr())->tp_name;  // before NumPy 2 with an underscore
  if (name != "numpy.bool" && name != "numpy.bool_") wrong_type(argument, object, "bool");
  return PyObject_IsTrue(object.ptr()) == 1;
}

std::string_view text(const char* argument, nb::handle object) {
  if (!PyUnicode_Check(object.ptr())) wrong_type(argument, object, "str");
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (bytes == nullptr) {  // half a character, as in the name of a file that is no UTF-8
    PyErr_Clear();
    wrong_type(argument, object, "str of whole characters");
  }
  return {bytes, static_cast<size_t>(size)};
}

double softmax_scale_of(nb::handle object) {
  if (object.is_none()) return 0;
  const double scale = real_number("softmax_scale", object);
  if (!(scale > 0)) out_of_range("softmax_scale", object, "a positive number, or None for 1 / sqrt(head_dim)");
  return scale;
}

uint64_t seed_of(nb::handle object) {
  const int64_t number = whole_number("seed", object);
  if (number < 0) throw Error("seed: got " + std::to_string(number) + ", expected 0 or more");
  return static_cast<uint64_t>(number);
}

void check_dense_loop_order(LoopOrder loop_order) {
  if (loop_order != LoopOrder::kv_outer) return;
  throw Error("loop_order: got 'kv_outer' without a block_index; attention over all keys is q_outer");
}

nb::object decoded(std::string_view bytes, const char* errors) {
  nb::object text = nb::steal(PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), errors));
  if (!text.is_valid()) throw nb::python_error();
  return text;
}

}  // namespace tilesieve::python
