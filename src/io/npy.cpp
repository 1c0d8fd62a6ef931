// SPDX-License-Identifier: Apache-2.0
#include "io/npy.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/fail.h"
#include "base/show_name.h"
#include "io/element_bytes.h"
#include "io/replaced_file.h"

namespace tilesieve {

namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kAlignment = 64;  // where the elements of a written file begin

struct TypeCode {
  std::string_view code;  // kind and bytes, after the byte order
  DType dtype;
};
constexpr TypeCode kTypeCodes[] = {{"f8", DType::f64}, {"f4", DType::f32}, {"f2", DType::f16}, {"i8", DType::i64},
                                   {"i4", DType::i32}, {"i2", DType::i16}, {"i1", DType::i8},  {"u8", DType::u64},
                                   {"u4", DType::u32}, {"u2", DType::u16}, {"u1", DType::u8},  {"b1", DType::boolean}};
constexpr std::string_view kAccepted = "little-endian f8, f4, f2, i8, i4, i2, i1, u8, u4, u2, u1 or b1";

// The header: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }. A Python dict of just these members, in any
// order, in either kind of quotes.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  std::optional<DType> dtype;
  std::optional<bool> fortran_order;
  std::optional<std::vector<int64_t>> sizes;

  void read() {
    expect('{', "a dict");
    while (!take('}')) {
      const std::string_view key = string();
      expect(':', "':'");
      if (key == "descr") {
        once(dtype.has_value(), key);
        dtype = read_dtype();
      } else if (key == "fortran_order") {
        once(fortran_order.has_value(), key);
        fortran_order = read_bool();
      } else if (key == "shape") {
        once(sizes.has_value(), key);
        sizes = read_shape();
      } else {
        fail("{}: header has the unknown key {}, expected descr, fortran_order and shape", path_, show_name(key));
      }
      if (take(',')) continue;
      expect('}', "',' or '}'");
      break;
    }
    skip_space();
    if (position_ != text_.size()) malformed("nothing after the dict");
    if (!dtype) fail("{}: header has no descr", path_);
    if (!fortran_order) fail("{}: header has no fortran_order", path_);
    if (!sizes) fail("{}: header has no shape", path_);
  }

 private:
  [[noreturn]] void malformed(std::string_view expected) const {
    fail("{}: header is malformed at byte {}: got {}, expected {}", path_, position_,
         position_ < text_.size() ? show_name(text_.substr(position_, 8)) : "its end", expected);
  }

  void once(bool seen, std::string_view key) const {
    if (seen) fail("{}: header has the key {} twice", path_, show_name(key));
  }

  void skip_space() {
    while (position_ < text_.size() && std::string_view(" \t\n\r").find(text_[position_]) != std::string_view::npos) {
      ++position_;
    }
  }

  // The next character after white space, or 0 at the end.
  char peek() {
    skip_space();
    return position_ < text_.size() ? text_[position_] : '\0';
  }

  bool take(char wanted) {
    if (peek() != wanted || position_ == text_.size()) return false;
    ++position_;
    return true;
  }

  void expect(char wanted, std::string_view what) {
    if (!take(wanted)) malformed(what);
  }

  std::string_view string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') malformed("a string");
    const size_t begin = position_ + 1;
    const size_t end = text_.find(quote, begin);
    if (end == text_.npos) malformed("a string that ends");
    const std::string_view value = text_.substr(begin, end - begin);
    if (value.find('\\') != value.npos) malformed("a string without escapes");
    position_ = end + 1;
    return value;
  }

  DType read_dtype() {
    if (peek() == '[' || peek() == '(') fail("{}: structured dtypes are not supported, expected {}", path_, kAccepted);
    const std::string_view descr = string();
    const std::string shown = show_name(descr);
    if (descr.size() < 2) fail("{}: unknown dtype {}, expected {}", path_, shown, kAccepted);
    const std::string_view code = descr.substr(1);
    if (code.front() == 'O') fail("{}: object dtype {} is not supported, expected {}", path_, shown, kAccepted);
    const auto row = std::find_if(std::begin(kTypeCodes), std::end(kTypeCodes),
                                  [&](const auto& known) { return known.code == code; });
    const bool has_order = descr.front() == '<' || descr.front() == '>' || descr.front() == '|';
    if (row == std::end(kTypeCodes) || !has_order) {
      fail("{}: unknown dtype {}, expected {}", path_, shown, kAccepted);
    }
    // One byte has no order, whatever sign stands there.
    if (size_in_bytes(row->dtype) > 1 && descr.front() != '<') {
      fail("{}: {} dtype {} is not supported, expected {}", path_, descr.front() == '>' ? "big-endian" : "orderless",
           shown, kAccepted);
    }
    return row->dtype;
  }

  bool read_bool() {
    skip_space();
    for (const auto& [word, value] : {std::pair{std::string_view("True"), true}, {std::string_view("False"), false}}) {
      if (text_.substr(position_, word.size()) == word) {
        position_ += word.size();
        return value;
      }
    }
    malformed("fortran_order True or False");
  }

  std::vector<int64_t> read_shape() {
    expect('(', "a shape in parentheses");
    std::vector<int64_t> shape;
    while (!take(')')) {
      if (shape.size() == kMaxDims) fail("{}: shape has more than {} dimensions", path_, kMaxDims);
      shape.push_back(read_size());
      if (take(',')) continue;
      // Without a comma, Python's parentheses round one number are no tuple.
      if (shape.size() == 1) malformed("',' after the only size of a shape");
      expect(')', "',' or ')' in the shape");
      break;
    }
    return shape;
  }

  int64_t read_size() {
    if (peek() < '0' || peek() > '9') malformed("an integer size from 0");
    int64_t value = 0;
    for (; position_ < text_.size() && text_[position_] >= '0' && text_[position_] <= '9'; ++position_) {
      const int digit = text_[position_] - '0';
      if (value > (INT64_MAX - digit) / 10) fail("{}: shape holds a size that exceeds 2^63", path_);
      value = value * 10 + digit;
    }
    return value;
  }

  std::string_view text_;
  const std::string& path_;
  size_t position_ = 0;
};

}  // namespace

bool is_npy(const uint8_t* bytes, size_t size) {
  return size >= kMagic.size() && std::memcmp(bytes, kMagic.data(), kMagic.size()) == 0;
}

TensorFile parse_npy(const uint8_t* bytes, size_t size, const std::string& path, const std::string& name) {
  if (!is_npy(bytes, size)) fail("{}: the file does not begin as .npy files do", path);
  const size_t version_end = kMagic.size() + 2;
  if (size < version_end) fail("{}: the file ends after {} bytes, inside the version", path, size);
  const int major = bytes[version_end - 2], minor = bytes[version_end - 1];
  if (major < 1 || major > 3 || minor != 0) {
    fail("{}: .npy version {}.{} is not supported, expected 1.0, 2.0 or 3.0", path, major, minor);
  }
  const size_t length_bytes = major == 1 ? 2 : 4;
  const size_t header_begin = version_end + length_bytes;
  if (size < header_begin) fail("{}: the file ends after {} bytes, inside the header length", path, size);
  uint32_t header_size = 0;
  std::memcpy(&header_size, bytes + version_end, length_bytes);
  if (header_size > size - header_begin) {
    fail("{}: the header of {} bytes goes beyond the end of the file, which has {} bytes", path, header_size, size);
  }
  HeaderReader header({reinterpret_cast<const char*>(bytes + header_begin), header_size}, path);
  header.read();

  TensorView view;
  try {
    view = contiguous_view(const_cast<uint8_t*>(bytes + header_begin + header_size), *header.dtype, *header.sizes);
  } catch (const Error& error) {
    fail("{}: {}", path, error.what());
  }
  const uint64_t data_size = size - header_begin - header_size;
  const auto expected = static_cast<uint64_t>(view.num_elements() * size_in_bytes(view.dtype));
  if (data_size < expected) {
    fail("{}: {} takes {} bytes, but the file ends after {} of them", path, view.describe(), expected, data_size);
  }
  if (data_size > expected) fail("{}: {} trailing bytes after {}", path, data_size - expected, view.describe());
  if (*header.fortran_order) {
    int64_t stride = 1;
    for (int d = 0; d < view.num_dims; ++d) {
      view.strides[d] = stride;
      stride *= std::max<int64_t>(view.sizes[d], 1);
    }
  }
  std::vector<Tensor> copies;
  align_elements(view, copies, path);

  TensorFile file;
  file.path = path;
  file.tensors.emplace_back(name, view);
  if (!copies.empty()) file.mapping = std::make_shared<std::vector<Tensor>>(std::move(copies));
  return file;
}

void write_npy(const std::string& path, const TensorView& tensor) {
  const auto row = std::find_if(std::begin(kTypeCodes), std::end(kTypeCodes),
                                [&](const auto& known) { return known.dtype == tensor.dtype; });
  if (row == std::end(kTypeCodes)) {
    fail("{}: .npy has no {}, expected f64, f32, f16, an integer or bool; safetensors has it", path,
         name_of(tensor.dtype));
  }
  check_writable(tensor, path + ": tensor");
  const std::span<const int64_t> sizes(tensor.sizes.data(), static_cast<size_t>(tensor.num_dims));
  std::string header = fmt::format("{{'descr': '{}{}', 'fortran_order': False, 'shape': ({}{}), }}",
                                   size_in_bytes(tensor.dtype) == 1 ? '|' : '<', row->code, fmt::join(sizes, ", "),
                                   sizes.size() == 1 ? "," : "");
  // Version 1.0: its two bytes of length are more than eight sizes can take.
  const size_t before_header = kMagic.size() + 4;
  header.append((kAlignment - (before_header + header.size() + 1) % kAlignment) % kAlignment, ' ');
  header += '\n';
  const std::array<uint8_t, 4> version_and_length = {1, 0, static_cast<uint8_t>(header.size() & 255),
                                                     static_cast<uint8_t>(header.size() >> 8)};
  ReplacedFile file(path);
  file.write(kMagic.data(), kMagic.size());
  file.write(version_and_length.data(), version_and_length.size());
  file.write(header.data(), header.size());
  write_elements(file, tensor);
  file.commit();
}

}  // namespace tilesieve
