// SPDX-License-Identifier: Apache-2.0
// Reading and writing files of tensors. Files with faults are in io_hostile_test.cpp.
#include "tilesieve/io.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <numeric>
#include <vector>

#include "io_files.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr DType kDTypes[] = {DType::f64,     DType::f32, DType::f16, DType::bf16, DType::f8_e4m3,
                             DType::f8_e5m2, DType::i64, DType::i32, DType::i16,  DType::i8,
                             DType::u64,     DType::u32, DType::u16, DType::u8,   DType::boolean};

// Elements whose bytes all differ from those of their neighbours.
Tensor numbered(DType dtype, std::initializer_list<int64_t> sizes) {
  Tensor tensor(dtype, sizes);
  const int64_t bytes = tensor.view().num_elements() * size_in_bytes(dtype);
  std::iota(tensor.as<uint8_t>(), tensor.as<uint8_t>() + bytes, uint8_t{1});
  return tensor;
}

// The elements in row-major order, one by one from the definition of strides.
std::string bytes_of(const TensorView& view) {
  const int64_t bytes = size_in_bytes(view.dtype);
  std::string result;
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    int64_t rest = i, offset = 0;
    for (int d = view.num_dims - 1; d >= 0; --d) {
      offset += rest % view.sizes[d] * view.strides[d];
      rest /= view.sizes[d];
    }
    result.append(static_cast<const char*>(view.data) + offset * bytes, static_cast<size_t>(bytes));
  }
  return result;
}

std::vector<int64_t> sizes_of(const TensorView& view) {
  return {view.sizes.begin(), view.sizes.begin() + view.num_dims};
}

void expect_same(const TensorView& got, const TensorView& want) {
  EXPECT_EQ(got.dtype, want.dtype);
  EXPECT_EQ(sizes_of(got), sizes_of(want));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(got.data) % static_cast<uintptr_t>(size_in_bytes(got.dtype)), 0u);
  EXPECT_EQ(bytes_of(got), bytes_of(want));
}

struct NamedView {
  std::string name;
  TensorView view;
};

// Views of every kind over `whole`, which is [4, 6, 5].
std::vector<NamedView> views_of(const Tensor& whole) {
  const TensorView& view = whole.view();
  const auto make = [&](int64_t first, std::initializer_list<int64_t> sizes, std::initializer_list<int64_t> strides) {
    TensorView made = view;
    made.data = whole.as<uint8_t>() + first * size_in_bytes(view.dtype);
    made.num_dims = static_cast<int>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), made.sizes.begin());
    std::copy(strides.begin(), strides.end(), made.strides.begin());
    return made;
  };
  return {{"whole", view},
          {"transposed", make(0, {5, 6, 4}, {1, 5, 30})},
          {"slice", make(7, {3, 2, 3}, {30, 10, 1})},
          {"every_second", make(1, {60}, {2})},
          {"backwards", make(119, {120}, {-1})},
          {"repeated", make(2, {3, 4}, {0, 1})},
          {"scalar", make(8, {}, {})},
          {"zero_size", make(0, {2, 0, 3}, {3, 3, 1})},
          {"zero_size_strided", make(0, {0, 5}, {7, 2})},
          {"eight_dims", make(0, {1, 2, 1, 2, 1, 2, 1, 2}, {1, 60, 1, 30, 1, 5, 1, 1})}};
}

class IoEveryDType : public ::testing::TestWithParam<DType> {
 protected:
  Folder folder_;
};

TEST_P(IoEveryDType, SafetensorsRoundTrip) {
  const Tensor whole = numbered(GetParam(), {4, 6, 5});
  std::vector<std::pair<std::string, TensorView>> tensors;
  for (const auto& [name, view] : views_of(whole)) tensors.emplace_back(name, view);
  const std::string path = folder_.file("all.safetensors");
  write_safetensors(path, tensors);
  const TensorFile file = read_tensors(path);
  ASSERT_EQ(file.tensors.size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    SCOPED_TRACE(tensors[i].first);
    EXPECT_EQ(file.tensors[i].first, tensors[i].first);
    expect_same(file.tensors[i].second, tensors[i].second);
  }
  EXPECT_EQ(folder_.num_files(), 1);
}

TEST_P(IoEveryDType, NpyRoundTripOrRefusal) {
  const Tensor whole = numbered(GetParam(), {4, 6, 5});
  const bool exists = GetParam() != DType::bf16 && GetParam() != DType::f8_e4m3 && GetParam() != DType::f8_e5m2;
  for (const NamedView& named : views_of(whole)) {
    const std::string& name = named.name;
    const TensorView& view = named.view;
    SCOPED_TRACE(name);
    const std::string path = folder_.file(name + ".npy");
    if (exists) {
      write_npy(path, view);
      EXPECT_EQ(read_bytes(path).size() % 64, bytes_of(view).size() % 64)
          << "elements are to begin at a multiple of 64";
      const TensorFile file = read_tensors(path);
      ASSERT_EQ(file.tensors.size(), 1u);
      EXPECT_EQ(file.tensors[0].first, name);
      expect_same(file.tensors[0].second, view);
    } else {
      EXPECT_THAT(error_of([&] { write_npy(path, view); }),
                  AllOf(StartsWith(path + ": "), HasSubstr(std::string(name_of(GetParam())))));
      EXPECT_EQ(folder_.num_files(), 0);
    }
  }
}

// Data that follows an odd header and odd tensors is misaligned for everything but bytes, and is read all the same.
TEST_P(IoEveryDType, MisalignedDataIsReadAligned) {
  constexpr std::pair<DType, const char*> kNames[] = {
      {DType::f64, "F64"},         {DType::f32, "F32"},         {DType::f16, "F16"},     {DType::bf16, "BF16"},
      {DType::f8_e4m3, "F8_E4M3"}, {DType::f8_e5m2, "F8_E5M2"}, {DType::i64, "I64"},     {DType::i32, "I32"},
      {DType::i16, "I16"},         {DType::i8, "I8"},           {DType::u64, "U64"},     {DType::u32, "U32"},
      {DType::u16, "U16"},         {DType::u8, "U8"},           {DType::boolean, "BOOL"}};
  const Tensor want = numbered(GetParam(), {3, 2});
  const std::string bytes = bytes_of(want.view());
  for (int before = 0; before < 8; ++before) {
    SCOPED_TRACE(before);
    const char* name = std::find_if(std::begin(kNames), std::end(kNames), [](const auto& row) {
                         return row.first == GetParam();
                       })->second;
    const std::string header = R"({"odd":{"dtype":"U8","shape":[)" + std::to_string(before) +
                               R"(],"data_offsets":[0,)" + std::to_string(before) + R"(]},"x":{"dtype":")" + name +
                               R"(","shape":[3,2],"data_offsets":[)" + std::to_string(before) + "," +
                               std::to_string(before + static_cast<int>(bytes.size())) + "]}}";
    const std::string path =
        folder_.write("odd.safetensors", safetensors(header, std::string(static_cast<size_t>(before), 'o') + bytes));
    TensorView view;
    TensorFile copy;
    {
      const TensorFile file = read_tensors(path);
      view = file.at("x");
      copy = file;
    }
    expect_same(view, want.view());
  }
}

INSTANTIATE_TEST_SUITE_P(Files, IoEveryDType, ::testing::ValuesIn(kDTypes),
                         [](const auto& row) { return std::string(name_of(row.param)); });

class Io : public ::testing::Test {
 protected:
  Folder folder_;
};

// The bytes as written by hand from the format's description, so that a fault shared by reader and writer shows.
TEST_F(Io, SafetensorsBytes) {
  const Tensor tensor = numbered(DType::f16, {1, 2});
  const std::string path = folder_.file("a.safetensors");
  write_safetensors(path, {{"q\"\n", tensor.view()}}, {{"k", "v"}});
  const std::string header = R"({"__metadata__":{"k":"v"},"q\"\n":{"dtype":"F16","shape":[1,2],"data_offsets":[0,4]}})";
  ASSERT_EQ(header.size() % 8, 5u);
  EXPECT_EQ(read_bytes(path), safetensors(header + "   ", "\x01\x02\x03\x04"));
}

TEST_F(Io, NpyBytes) {
  const Tensor tensor = numbered(DType::i16, {2});
  const std::string path = folder_.file("a.npy");
  write_npy(path, tensor.view());
  const std::string dict = "{'descr': '<i2', 'fortran_order': False, 'shape': (2,), }";
  EXPECT_EQ(read_bytes(path), npy(dict + std::string(117 - dict.size(), ' ') + "\n", "\x01\x02\x03\x04"));
}

TEST_F(Io, SafetensorsMetadataAndNames) {
  const Tensor tensor = numbered(DType::i8, {3});
  const std::map<std::string, std::string> metadata = {{"", ""}, {"Größe\t\"x\"", "a\\b\n\x01"}, {"zero", {"\0z", 2}}};
  const std::string name = "layer.0.ключ \"quoted\"";
  const std::string path = folder_.file("names.safetensors");
  write_safetensors(path, {{name, tensor.view()}, {"", tensor.view()}}, metadata);
  const TensorFile file = read_tensors(path);
  EXPECT_EQ(file.metadata, metadata);
  EXPECT_EQ(file.path, path);
  EXPECT_TRUE(file.contains(name));
  EXPECT_TRUE(file.contains(""));
  EXPECT_FALSE(file.contains("layer.0"));
}

TEST_F(Io, SafetensorsWithoutTensors) {
  const std::string path = folder_.file("none.safetensors");
  write_safetensors(path, {});
  EXPECT_EQ(read_bytes(path), safetensors("{}      "));
  const TensorFile file = read_tensors(path);
  EXPECT_TRUE(file.tensors.empty());
  EXPECT_THAT(error_of([&] { file.at("q"); }), AllOf(StartsWith(path + ": "), HasSubstr("'q'"), HasSubstr("none")));
}

TEST_F(Io, LargerElementsComeFirst) {
  const Tensor bytes = numbered(DType::u8, {3}), floats = numbered(DType::f32, {3}),
               halves = numbered(DType::bf16, {3}), more_bytes = numbered(DType::i8, {1});
  const std::string path = folder_.file("mixed.safetensors");
  write_safetensors(path, {{"a", bytes.view()}, {"b", floats.view()}, {"c", more_bytes.view()}, {"d", halves.view()}});
  std::vector<std::string> names;
  for (const auto& [name, view] : read_tensors(path).tensors) names.push_back(name);
  EXPECT_THAT(names, ElementsAre("b", "d", "a", "c"));
}

TEST_F(Io, TensorsComeInTheOrderOfTheirData) {
  const std::string header = R"({"late":{"dtype":"U8","shape":[1],"data_offsets":[2,3]},)"
                             R"("early":{"dtype":"I16","shape":[1],"data_offsets":[0,2]}})";
  const TensorFile file = read_tensors(folder_.write("a.safetensors", safetensors(header, "abc")));
  ASSERT_EQ(file.tensors.size(), 2u);
  EXPECT_EQ(file.tensors[0].first, "early");
  EXPECT_EQ(file.tensors[1].first, "late");
  EXPECT_EQ(*file.at("late").as<char>(), 'c');
}

TEST_F(Io, ReadByContentWhateverTheName) {
  const Tensor tensor = numbered(DType::f32, {2});
  write_npy(folder_.file("a.b.safetensors"), tensor.view());
  write_safetensors(folder_.file("c.npy"), {{"x", tensor.view()}});
  expect_same(read_tensors(folder_.file("a.b.safetensors")).at("a.b"), tensor.view());
  expect_same(read_tensors(folder_.file("c.npy")).at("x"), tensor.view());
}

TEST_F(Io, MissingTensorListsWhatIsThere) {
  const Tensor tensor = numbered(DType::f32, {2});
  std::vector<std::pair<std::string, TensorView>> tensors = {{"q", tensor.view()}, {"k\x1b[2J", tensor.view()}};
  for (int i = 0; i < 100; ++i) tensors.emplace_back("tensor" + std::to_string(i), tensor.view());
  write_safetensors(folder_.file("a.safetensors"), tensors);
  const TensorFile file = read_tensors(folder_.file("a.safetensors"));
  const std::string text = error_of([&] { file.at("v"); });
  EXPECT_THAT(text, AllOf(StartsWith(file.path + ": "), HasSubstr("'v'"), HasSubstr("'q'"), HasSubstr("'tensor0'")));
  EXPECT_THAT(text, AllOf(HasSubstr("'k\\x1b[2J'"), EndsWith(" and 78 more")));
}

TEST_F(Io, ViewsOutliveTheFileAndItsFirstOwner) {
  const Tensor tensor = numbered(DType::f64, {1000});
  const std::string path = folder_.file("a.safetensors");
  write_safetensors(path, {{"x", tensor.view()}});
  TensorFile kept;
  {
    const TensorFile file = read_tensors(path);
    kept = file;
  }
  std::filesystem::remove(path);
  expect_same(kept.at("x"), tensor.view());
}

TEST_F(Io, FortranOrderIsReadThroughStrides) {
  const std::string header = "{'descr': '<u2', 'fortran_order': True, 'shape': (2, 3), }\n";
  const Tensor elements = numbered(DType::u16, {6});
  for (const char version : {'\1', '\2', '\3'}) {
    const TensorFile file = read_tensors(folder_.write("f.npy", npy(header, bytes_of(elements.view()), version)));
    const TensorView& view = file.at("f");
    EXPECT_THAT(sizes_of(view), ElementsAre(2, 3));
    for (int64_t row = 0; row < 2; ++row) {
      for (int64_t column = 0; column < 3; ++column) {
        EXPECT_EQ(view.as<uint16_t>()[row * view.strides[0] + column * view.strides[1]],
                  elements.as<uint16_t>()[column * 2 + row]);
      }
    }
  }
}

TEST_F(Io, NpyHeadersAsPythonMayWriteThem) {
  for (const std::string header :
       {R"({"shape":(2,),"fortran_order":False,"descr":"|u1"})", "{'descr':'>u1','fortran_order':True,'shape':(2,)}",
        " {\t'descr' : '<u1' ,\n'fortran_order': False, 'shape': ( 1 , 2 , ) , } \n"}) {
    SCOPED_TRACE(header);
    const TensorFile file = read_tensors(folder_.write("x.npy", npy(header, "ab")));
    EXPECT_EQ(bytes_of(file.at("x")), "ab");
  }
}

// Two rows of more than the buffer that strided elements pass through, of a size that does not divide it.
TEST_F(Io, LargeStridedTensor) {
  Tensor tensor(DType::i32, {3, 300'001, 2});
  std::iota(tensor.as<int32_t>(), tensor.as<int32_t>() + tensor.view().num_elements(), 0);
  TensorView column = tensor.view();
  column.num_dims = 2;
  write_npy(folder_.file("column.npy"), column);
  write_safetensors(folder_.file("column.safetensors"), {{"column", column}});
  for (const char* name : {"column.npy", "column.safetensors"}) {
    const TensorFile file = read_tensors(folder_.file(name));
    const auto* got = file.at("column").as<int32_t>();
    int64_t wrong = 0;
    for (int64_t i = 0; i < 900'003; ++i) wrong += got[i] != 2 * i;
    EXPECT_EQ(wrong, 0) << name;
  }
}

TEST_F(Io, OffsetsBeyondFourGiB) {
  constexpr int64_t kFirst = (int64_t{5} << 30) + 3;
  const std::string header = R"({"a":{"dtype":"U8","shape":[)" + std::to_string(kFirst) + R"(],"data_offsets":[0,)" +
                             std::to_string(kFirst) + R"(]},"b":{"dtype":"U8","shape":[2],"data_offsets":[)" +
                             std::to_string(kFirst) + "," + std::to_string(kFirst + 2) + "]}}";
  const std::string path = folder_.write("large.safetensors", safetensors(header));
  const auto data = static_cast<int64_t>(std::filesystem::file_size(path));
  // A file with a hole takes no room on the disk.
  if (truncate(path.c_str(), data + kFirst + 2) != 0) GTEST_SKIP() << "no files of 5 GiB here";
  std::fstream(path, std::ios::in | std::ios::out | std::ios::binary).seekp(data + kFirst - 1) << "xyz";
  const TensorFile file = read_tensors(path);
  EXPECT_EQ(file.at("a").as<char>()[0], 0);
  EXPECT_EQ(file.at("a").as<char>()[kFirst - 1], 'x');
  EXPECT_EQ(std::string(file.at("b").as<char>(), 2), "yz");
}

TEST_F(Io, FileIsReplacedByItsOwnTensors) {
  const Tensor x = numbered(DType::f32, {4096}), y = numbered(DType::i64, {7});
  const std::string path = folder_.file("a.safetensors");
  write_safetensors(path, {{"x", x.view()}});
  const TensorFile old = read_tensors(path);
  write_safetensors(path, {{"y", y.view()}, {"x2", old.at("x")}});
  expect_same(old.at("x"), x.view());
  const TensorFile now = read_tensors(path);
  expect_same(now.at("x2"), x.view());
  expect_same(now.at("y"), y.view());
  EXPECT_EQ(folder_.num_files(), 1);
}

TEST_F(Io, LinkIsFollowedAndPermissionsAreKept) {
  const Tensor tensor = numbered(DType::f32, {2});
  const std::string target = folder_.write("target.npy", "old"), link = folder_.file("link.npy");
  ASSERT_EQ(chmod(target.c_str(), 0604), 0);
  ASSERT_EQ(symlink("target.npy", link.c_str()), 0);
  write_npy(link, tensor.view());
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  expect_same(read_tensors(target).at("target"), tensor.view());
  struct stat facts;
  ASSERT_EQ(stat(target.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777u, 0604u);
}

// What the writers refuse; nothing may be left behind, and the file that was there stays.
class IoWriteFault : public Io {
 protected:
  IoWriteFault() { folder_.write("a.safetensors", "old"); }

  using Tensors = std::vector<std::pair<std::string, TensorView>>;
  std::string error_of_write(const Tensors& tensors, const std::map<std::string, std::string>& metadata = {}) const {
    const std::string path = folder_.file("a.safetensors");
    const std::string text = error_of([&] { write_safetensors(path, tensors, metadata); });
    EXPECT_THAT(text, StartsWith(path + ": "));
    EXPECT_EQ(read_bytes(path), "old");
    EXPECT_EQ(folder_.num_files(), 1);
    return text;
  }

  const Tensor tensor_ = numbered(DType::f32, {2, 3});
};

TEST_F(IoWriteFault, DuplicateName) {
  EXPECT_THAT(error_of_write({{"q", tensor_.view()}, {"k", tensor_.view()}, {"q", tensor_.view()}}),
              AllOf(HasSubstr("'q'"), HasSubstr("twice")));
}

TEST_F(IoWriteFault, ReservedName) {
  EXPECT_THAT(error_of_write({{"__metadata__", tensor_.view()}}),
              AllOf(HasSubstr("'__metadata__'"), HasSubstr("reserved")));
}

TEST_F(IoWriteFault, TensorOnTheGpu) {
  TensorView view = tensor_.view();
  view.device = {DeviceKind::cuda, 1};
  EXPECT_THAT(error_of_write({{"q", view}}), AllOf(HasSubstr("'q'"), HasSubstr("cuda:1"), HasSubstr("CPU")));
  const std::string path = folder_.file("q.npy");
  EXPECT_THAT(error_of([&] { write_npy(path, view); }), AllOf(StartsWith(path + ": "), HasSubstr("cuda:1")));
}

TEST_F(IoWriteFault, ViewsThatCannotBe) {
  TensorView view = tensor_.view();
  view.num_dims = 9;
  EXPECT_THAT(error_of_write({{"q", view}}), HasSubstr("9 dimensions"));
  view = tensor_.view();
  view.sizes[1] = -3;
  EXPECT_THAT(error_of_write({{"q", view}}), HasSubstr("dimension 1 is -3"));
  view = tensor_.view();
  view.sizes = {int64_t{1} << 40, int64_t{1} << 40};
  view.strides = {0, 0};
  EXPECT_THAT(error_of_write({{"q", view}}), HasSubstr("exceed"));
  view.sizes = {int64_t{1} << 30, int64_t{1} << 30};
  EXPECT_THAT(error_of_write({{"q", view}, {"k", view}}), AllOf(HasSubstr("'k'"), HasSubstr("exceed")));
  view = tensor_.view();
  view.data = nullptr;
  EXPECT_THAT(error_of_write({{"q", view}}), HasSubstr("no data"));
}

TEST_F(IoWriteFault, TextThatIsNotUtf8) {
  EXPECT_THAT(error_of_write({{"q\xff", tensor_.view()}}), AllOf(HasSubstr("tensor"), HasSubstr("UTF-8")));
  EXPECT_THAT(error_of_write({}, {{"key", "\xc3"}}), AllOf(HasSubstr("metadata 'key'"), HasSubstr("UTF-8")));
}

TEST_F(IoWriteFault, HeaderOverTheLimit) {
  EXPECT_THAT(error_of_write({}, {{"key", std::string(100'000'000, 'x')}}), HasSubstr("at most 100000000"));
}

TEST_F(IoWriteFault, MissingFolder) {
  const std::string path = folder_.file("missing/a.npy");
  EXPECT_THAT(error_of([&] { write_npy(path, tensor_.view()); }),
              AllOf(StartsWith(path + ": "), HasSubstr("No such file or directory")));
}

TEST_F(IoWriteFault, TargetIsADirectory) {
  const std::string path = folder_.file("folder");
  std::filesystem::create_directory(path);
  EXPECT_THAT(error_of([&] { write_npy(path, tensor_.view()); }), AllOf(StartsWith(path + ": "), HasSubstr("regular")));
  EXPECT_TRUE(std::filesystem::is_directory(path));
}

// Pipes and devices must not be replaced by files: root could do that to /dev/null.
TEST_F(IoWriteFault, TargetIsAPipe) {
  const std::string path = folder_.file("pipe");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(error_of([&] { write_npy(path, tensor_.view()); }), AllOf(StartsWith(path + ": "), HasSubstr("regular")));
  EXPECT_TRUE(std::filesystem::is_fifo(path));
}

// A limit on the size of files stands for a full disk: both let a write fail in the middle.
TEST_F(IoWriteFault, DiskFull) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1 << 16, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Tensor large(DType::f64, {1 << 16});
  TensorView strided = large.view();
  strided.sizes[0] /= 2;
  strided.strides[0] = 2;
  const std::string text = error_of_write({{"q", large.view()}});
  const std::string strided_text = error_of_write({{"q", strided}});
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, old_handler);
  EXPECT_THAT(text, HasSubstr("cannot write: File too large"));
  EXPECT_THAT(strided_text, HasSubstr("cannot write: File too large"));
}

}  // namespace
}  // namespace tilesieve::testing
