// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>

#include "base/fail.h"
#include "base/json_fault.h"
#include "base/show_name.h"
#include "io/element_bytes.h"
#include "io/replaced_file.h"

namespace tilesieve {

namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr uint64_t kAlignment = 8;                 // where the data of a written file begins
constexpr int64_t kMaxDataBytes = int64_t{1} << 62;
constexpr std::string_view kMetadata = "__metadata__";

struct DTypeName {
  std::string_view name;
  DType dtype;
};
constexpr DTypeName kDTypes[] = {{"BOOL", DType::boolean},    {"U8", DType::u8},           {"I8", DType::i8},
                                 {"F8_E5M2", DType::f8_e5m2}, {"F8_E4M3", DType::f8_e4m3}, {"I16", DType::i16},
                                 {"U16", DType::u16},         {"F16", DType::f16},         {"BF16", DType::bf16},
                                 {"I32", DType::i32},         {"U32", DType::u32},         {"F32", DType::f32},
                                 {"F64", DType::f64},         {"I64", DType::i64},         {"U64", DType::u64}};

std::string_view format_name_of(DType dtype) {
  return std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& row) { return row.dtype == dtype; })
      ->name;
}

// One tensor as the header describes it.
struct Entry {
  std::string name;
  std::optional<DType> dtype;
  bool has_shape = false;
  int num_dims = 0;
  std::array<int64_t, kMaxDims> sizes{};
  int num_offsets = 0;
  std::array<uint64_t, 2> offsets{};  // begin and end in the data; both there when num_offsets is 2
};

// Takes the header's JSON event by event, so that nothing of it is built that the format does not allow: nesting ends
// where the format's does, and a name that comes twice is seen.
class HeaderReader : public nlohmann::json::json_sax_t {
 public:
  explicit HeaderReader(const std::string& path) : path_(path) {}

  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;

  bool null() override { refuse("null"); }
  bool boolean(bool) override { refuse("a boolean"); }
  bool number_integer(number_integer_t value) override { refuse(fmt::format("the negative number {}", value)); }
  bool number_float(number_float_t, const string_t& text) override { refuse("the number " + show_name(text)); }
  bool binary(binary_t&) override { refuse("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::shape) {
      Entry& entry = entries.back();
      if (entry.num_dims == kMaxDims) refuse(fmt::format("more than {} dimensions", kMaxDims));
      if (value > static_cast<uint64_t>(INT64_MAX)) refuse(fmt::format("the size {}, which exceeds 2^63", value));
      entry.sizes[entry.num_dims++] = static_cast<int64_t>(value);
    } else if (place_ == Place::offsets) {
      Entry& entry = entries.back();
      if (entry.num_offsets == 2) refuse("more than two numbers");
      entry.offsets[entry.num_offsets++] = value;
    } else {
      refuse(fmt::format("the number {}", value));
    }
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata) {
      metadata[key_] = std::move(value);
    } else if (place_ == Place::tensor && key_ == "dtype") {
      const auto row =
          std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& known) { return known.name == value; });
      if (row == std::end(kDTypes)) refuse("the unknown dtype " + show_name(value));
      entries.back().dtype = row->dtype;
    } else {
      refuse("the string " + show_name(value));
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::outside) {
      place_ = Place::top;
    } else if (place_ == Place::top && key_ == kMetadata) {
      place_ = Place::metadata;
      keys_.clear();
    } else if (place_ == Place::top) {
      place_ = Place::tensor;
      keys_.clear();
      entries.emplace_back().name = key_;
    } else {
      refuse("an object");
    }
    return true;
  }

  bool key(string_t& value) override {
    auto& seen = place_ == Place::top ? names_ : keys_;
    if (!seen.insert(value).second) {
      if (place_ == Place::top) fail("{}: header: the name {} comes twice", path_, show_name(value));
      fail("{}: header: {} has the key {} twice", path_, owner(), show_name(value));
    }
    if (place_ == Place::tensor && value != "dtype" && value != "shape" && value != "data_offsets") {
      fail("{}: header: {} has the unknown key {}, expected dtype, shape and data_offsets", path_, owner(),
           show_name(value));
    }
    key_ = std::move(value);
    return true;
  }

  bool end_object() override {
    place_ = place_ == Place::top ? Place::outside : Place::top;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::tensor && key_ == "shape") {
      place_ = Place::shape;
      entries.back().has_shape = true;
    } else if (place_ == Place::tensor && key_ == "data_offsets") {
      place_ = Place::offsets;
    } else {
      refuse("an array");
    }
    return true;
  }

  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    fail("{}: header is not JSON: {}", path_, json_fault(error.what()));
  }

 private:
  enum class Place { outside, top, metadata, tensor, shape, offsets };

  std::string owner() const {
    return place_ == Place::metadata ? std::string(kMetadata) : "tensor " + show_name(entries.back().name);
  }

  // A value at a place where the format has something else.
  [[noreturn]] void refuse(const std::string& what) const {
    switch (place_) {
      case Place::outside:
        fail("{}: header is {}, expected an object", path_, what);
      case Place::top:
        fail("{}: header: {} is {}, expected an object", path_, show_name(key_), what);
      case Place::metadata:
        fail("{}: header: __metadata__ {} is {}, expected a string", path_, show_name(key_), what);
      case Place::tensor:
        fail("{}: header: {}: {} is {}, expected {}", path_, owner(), key_, what,
             key_ == "dtype"
                 ? "one of BOOL, U8, I8, F8_E5M2, F8_E4M3, I16, U16, F16, BF16, I32, U32, F32, F64, I64, U64"
                 : "an array");
      case Place::shape:
        fail("{}: header: {}: shape holds {}, expected at most {} integers from 0", path_, owner(), what, kMaxDims);
      case Place::offsets:
        fail("{}: header: {}: data_offsets holds {}, expected two integers from 0", path_, owner(), what);
    }
    fail("{}: header holds {}", path_, what);
  }

  const std::string& path_;
  Place place_ = Place::outside;
  std::string key_;
  std::set<std::string> names_;  // of tensors
  std::set<std::string> keys_;   // of the object inside
};

// The view that an entry describes. `cursor` is where the tensors before it end, and moves to its end.
TensorView place(const Entry& entry, const uint8_t* data, uint64_t data_size, uint64_t& cursor,
                 const std::string& what) {
  if (!entry.dtype) fail("{}: has no dtype", what);
  if (!entry.has_shape) fail("{}: has no shape", what);
  if (entry.num_offsets != 2) fail("{}: has {} data_offsets, expected two", what, entry.num_offsets);
  const auto [begin, end] = entry.offsets;
  if (begin > end) fail("{}: data_offsets [{}, {}] run backwards", what, begin, end);
  if (end > data_size) {
    fail("{}: data_offsets [{}, {}] go beyond the end of the file, which holds {} bytes of data", what, begin, end,
         data_size);
  }
  if (begin < cursor)
    fail("{}: data_offsets [{}, {}] overlap another tensor, which ends at {}", what, begin, end, cursor);
  if (begin > cursor) fail("{}: data_offsets [{}, {}] leave a hole after {}", what, begin, end, cursor);
  cursor = end;

  TensorView view;
  const std::span<const int64_t> sizes(entry.sizes.data(), static_cast<size_t>(entry.num_dims));
  try {
    view = contiguous_view(const_cast<uint8_t*>(data + begin), *entry.dtype, sizes);
  } catch (const Error& error) {
    fail("{}: {}", what, error.what());
  }
  const auto bytes = static_cast<uint64_t>(view.num_elements() * size_in_bytes(view.dtype));
  if (bytes != end - begin) {
    fail("{}: {} takes {} bytes, but data_offsets [{}, {}] give it {}", what, view.describe(), bytes, begin, end,
         end - begin);
  }
  return view;
}

// Text as JSON has it, in quotes.
std::string json_string(const std::string& text, const std::string& what) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    fail("{}: is not UTF-8, which safetensors needs", what);
  }
}

}  // namespace

TensorFile parse_safetensors(const uint8_t* bytes, size_t size, const std::string& path) {
  if (size < kLengthBytes) fail("{}: the file ends after {} bytes, inside the header length", path, size);
  uint64_t header_size;
  std::memcpy(&header_size, bytes, kLengthBytes);
  if (header_size > kMaxHeaderBytes) {
    fail("{}: the header length {} exceeds the limit of {} bytes; expected a safetensors or .npy file", path,
         header_size, kMaxHeaderBytes);
  }
  if (header_size > size - kLengthBytes) {
    fail("{}: the header of {} bytes goes beyond the end of the file, which has {} bytes", path, header_size, size);
  }
  const uint64_t data_size = size - kLengthBytes - header_size;
  const auto* header = reinterpret_cast<const char*>(bytes + kLengthBytes);
  // The parser would skip a byte order mark and take a zero byte for the end of the text.
  if (header_size == 0 || header[0] != '{') fail("{}: the header does not begin with '{{'", path);
  if (std::memchr(header, 0, header_size) != nullptr) fail("{}: the header holds a zero byte", path);
  HeaderReader reader(path);
  nlohmann::json::sax_parse(header, header + header_size, &reader);

  auto& entries = reader.entries;
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return a.offsets < b.offsets; });
  TensorFile file;
  file.path = path;
  file.metadata = std::move(reader.metadata);
  const uint8_t* data = bytes + kLengthBytes + header_size;
  std::vector<Tensor> copies;
  uint64_t cursor = 0;
  for (Entry& entry : entries) {
    const std::string what = fmt::format("{}: tensor {}", path, show_name(entry.name));
    TensorView view = place(entry, data, data_size, cursor, what);
    align_elements(view, copies, what);
    file.tensors.emplace_back(std::move(entry.name), view);
  }
  if (cursor != data_size) {
    fail("{}: {} trailing bytes after the data of the last tensor", path, data_size - cursor);
  }
  if (!copies.empty()) file.mapping = std::make_shared<std::vector<Tensor>>(std::move(copies));
  return file;
}

void write_safetensors(const std::string& path, const std::vector<std::pair<std::string, TensorView>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::string header = "{";
  const auto add = [&](const std::string& member) { header += (header.size() > 1 ? "," : "") + member; };
  if (!metadata.empty()) {
    std::string members;
    for (const auto& [key, value] : metadata) {
      const std::string what = fmt::format("{}: metadata {}", path, show_name(key));
      members += fmt::format("{}{}:{}", members.empty() ? "" : ",", json_string(key, what), json_string(value, what));
    }
    add(fmt::format("\"{}\":{{{}}}", kMetadata, members));
  }

  // The largest elements come first: every tensor then begins at a multiple of its element.
  std::vector<const std::pair<std::string, TensorView>*> in_order;
  for (const auto& tensor : tensors) in_order.push_back(&tensor);
  std::stable_sort(in_order.begin(), in_order.end(), [](const auto* a, const auto* b) {
    return size_in_bytes(a->second.dtype) > size_in_bytes(b->second.dtype);
  });
  std::set<std::string_view> names;
  int64_t begin = 0;
  for (const auto* tensor : in_order) {
    const auto& [name, view] = *tensor;
    const std::string what = fmt::format("{}: tensor {}", path, show_name(name));
    if (name == kMetadata) fail("{}: the name is reserved", what);
    if (!names.insert(name).second) fail("{}: the name comes twice", what);
    const int64_t bytes = check_writable(view, what);
    if (bytes > kMaxDataBytes - begin) fail("{}: the tensors would exceed 2^62 bytes", what);
    const std::span<const int64_t> sizes(view.sizes.data(), static_cast<size_t>(view.num_dims));
    add(fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", json_string(name, what),
                    format_name_of(view.dtype), fmt::join(sizes, ","), begin, begin + bytes));
    begin += bytes;
  }
  header += "}";
  header.append((kAlignment - header.size() % kAlignment) % kAlignment, ' ');
  if (header.size() > kMaxHeaderBytes) {
    fail("{}: the header would take {} bytes, at most {} are allowed", path, header.size(), kMaxHeaderBytes);
  }

  ReplacedFile file(path);
  const uint64_t header_size = header.size();
  file.write(&header_size, kLengthBytes);
  file.write(header.data(), header.size());
  for (const auto* tensor : in_order) write_elements(file, tensor->second);
  file.commit();
}

}  // namespace tilesieve
