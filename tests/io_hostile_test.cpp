// SPDX-License-Identifier: Apache-2.0
// Files with faults: each gives an Error that names the file and the fault.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <ostream>
#include <string>

#include "fuzz/walk_tensors.h"
#include "io_files.h"
#include "tilesieve/io.h"

namespace tilesieve::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Fault {
  std::string name;
  std::string bytes;
  std::string fault;  // what the message must hold
};

// Megabytes, which only their own test makes: before main they would hold up every test of the binary, 40 ms each.
struct DeepFault {
  std::string name;
  std::string (*bytes)();
  std::string fault;
};

void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }
void PrintTo(const DeepFault& fault, std::ostream* out) { *out << fault.name; }

std::string repeat(const std::string& text, int times) {
  std::string result;
  for (int i = 0; i < times; ++i) result += text;
  return result;
}

// A safetensors file with the one tensor "a", and eight bytes of data.
std::string with_tensor(const std::string& members) { return safetensors("{\"a\":{" + members + "}}", "12345678"); }

std::string with_shape(const std::string& shape) {
  return with_tensor(R"("dtype":"F32","data_offsets":[0,8],"shape":)" + shape);
}

std::string with_offsets(const std::string& offsets) {
  return with_tensor(R"("dtype":"F32","shape":[2],"data_offsets":)" + offsets);
}

std::string with_dtype(const std::string& dtype) {
  return with_tensor(R"("shape":[2],"data_offsets":[0,8],"dtype":)" + dtype);
}

// Two tensors of bytes over ten bytes of data.
std::string with_two(const std::string& a_shape, const std::string& a, const std::string& b_shape,
                     const std::string& b) {
  return safetensors(R"({"a":{"dtype":"U8","shape":)" + a_shape + R"(,"data_offsets":)" + a +
                         R"(},"b":{"dtype":"U8","shape":)" + b_shape + R"(,"data_offsets":)" + b + "}}",
                     "0123456789");
}

const std::string kTensor = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";

const Fault kSafetensorsFaults[] = {
    {"EmptyFile", "", "empty"},
    {"EndsInsideLength", std::string(7, '\0'), "inside the header length"},
    {"HeaderLengthZero", safetensors(""), "does not begin with '{'"},
    {"HeaderOverLimit", little_endian(uint64_t{100'000'001}) + "{}", "limit of 100000000"},
    {"HeaderLengthAllOnes", std::string(8, '\xff') + "{}", "limit of 100000000"},
    {"HeaderBeyondFile", little_endian(uint64_t{3}) + "{}", "beyond the end of the file"},
    {"TextFile", "just some words, and not a tensor in sight", "expected a safetensors or .npy file"},
    {"HeaderBeginsWithSpace", safetensors(" {}"), "does not begin with '{'"},
    {"HeaderBeginsWithByteOrderMark", safetensors("\xef\xbb\xbf{}"), "does not begin with '{'"},
    {"HeaderIsAnArray", safetensors("[]"), "does not begin with '{'"},
    {"HeaderJsonCut", safetensors("{" + kTensor, "12345678"), "not JSON"},
    {"HeaderJsonComment", safetensors("{/**/}"), "not JSON"},
    {"HeaderTrailingText", safetensors("{} {}"), "not JSON"},
    {"HeaderZeroByte", safetensors(std::string("{}\0 garbage", 11)), "zero byte"},
    {"NameNotUtf8", safetensors("{\"a\xff\":{}}"), "UTF-8"},
    {"MetadataNotUtf8", safetensors("{\"__metadata__\":{\"k\":\"\xc0\x80\"}}"), "UTF-8"},
    {"NameTwice", safetensors("{" + kTensor + "," + kTensor + "}", "12345678"), "'a' comes twice"},
    {"NameTwiceInOtherWriting", safetensors("{" + kTensor + R"(,"\u0061":{}})", "12345678"), "'a' comes twice"},
    {"MetadataTwice", safetensors(R"({"__metadata__":{},"__metadata__":{}})"), "'__metadata__' comes twice"},
    {"MetadataKeyTwice", safetensors(R"({"__metadata__":{"k":"1","k":"2"}})"), "'k' twice"},
    {"DtypeTwice", with_dtype(R"("F64","dtype":"F32")"), "'dtype' twice"},
    {"ShapeTwice", with_shape(R"([1],"shape":[2])"), "'shape' twice"},
    {"OffsetsTwice", with_offsets(R"([0,4],"data_offsets":[0,8])"), "'data_offsets' twice"},
    {"UnknownKey", with_shape(R"([2],"strides":[1])"), "unknown key 'strides'"},
    {"MetadataIsAString", safetensors(R"({"__metadata__":"k"})"), "'__metadata__' is the string 'k'"},
    {"MetadataIsNull", safetensors(R"({"__metadata__":null})"), "'__metadata__' is null"},
    {"MetadataHoldsANumber", safetensors(R"({"__metadata__":{"k":1}})"), "__metadata__ 'k' is the number 1"},
    {"MetadataHoldsAnObject", safetensors(R"({"__metadata__":{"k":{}}})"), "__metadata__ 'k' is an object"},
    {"TensorIsNull", safetensors(R"({"a":null})"), "'a' is null"},
    {"TensorIsABoolean", safetensors(R"({"a":true})"), "'a' is a boolean"},
    {"TensorIsANumber", safetensors(R"({"a":7})"), "'a' is the number 7"},
    {"TensorIsAnArray", safetensors(R"({"a":[]})"), "'a' is an array"},
    {"DtypeUnknown", with_dtype(R"("F4")"), "unknown dtype 'F4'"},
    {"DtypeComplex", with_dtype(R"("C64")"), "unknown dtype 'C64'"},
    {"DtypeLowerCase", with_dtype(R"("f32")"), "unknown dtype 'f32'"},
    {"DtypeANumber", with_dtype("32"), "dtype is the number 32"},
    {"DtypeNull", with_dtype("null"), "dtype is null"},
    {"DtypeMissing", with_tensor(R"("shape":[2],"data_offsets":[0,8])"), "has no dtype"},
    {"ShapeMissing", with_tensor(R"("dtype":"F32","data_offsets":[0,8])"), "has no shape"},
    {"ShapeAString", with_shape(R"("2")"), "shape is the string '2'"},
    {"ShapeNegative", with_shape("[-2]"), "negative number -2"},
    {"ShapeNegativeZero", with_shape("[-0]"), "negative number"},
    {"ShapeFraction", with_shape("[2.0]"), "number '2.0'"},
    {"ShapeExponent", with_shape("[2e0]"), "number '2e0'"},
    {"ShapeHoldsAString", with_shape(R"(["2"])"), "shape holds the string '2'"},
    {"ShapeHoldsNull", with_shape("[null]"), "shape holds null"},
    {"ShapeBeyond63Bits", with_shape("[9223372036854775808]"), "exceeds 2^63"},
    {"ShapeBeyond64Bits", with_shape("[18446744073709551618]"), "number '18446744073709551618'"},
    {"ShapeBeyondDouble", with_shape("[" + repeat("9", 400) + "]"), "not JSON"},
    {"ShapeProductWrapsToZero", with_shape("[4294967296,4294967296]"), "exceed 2^62 bytes"},
    {"ShapeProductWrapsToTwo", with_shape("[9223372036854775807,2,3,6148914691236517206]"), "exceed 2^62 bytes"},
    {"ShapeBytesWrap", with_shape("[4611686018427387906]"), "exceed 2^62 bytes"},
    {"ShapeWrapsBesideZero", with_shape("[4294967296,4294967296,0]"), "exceed 2^62 bytes"},
    {"NineDims", with_shape("[1,1,1,1,1,1,1,1,2]"), "more than 8 dimensions"},
    {"OffsetsMissing", with_tensor(R"("dtype":"F32","shape":[2])"), "has 0 data_offsets"},
    {"OffsetsOne", with_offsets("[0]"), "has 1 data_offsets"},
    {"OffsetsThree", with_offsets("[0,8,8]"), "more than two numbers"},
    {"OffsetsNegative", with_offsets("[-1,8]"), "negative number -1"},
    {"OffsetsFraction", with_offsets("[0,8.5]"), "number '8.5'"},
    {"OffsetsBackwards", with_offsets("[8,0]"), "run backwards"},
    {"OffsetsBeyondFile", with_offsets("[0,9]"), "beyond the end of the file"},
    {"OffsetsAllOnes", with_offsets("[18446744073709551607,18446744073709551615]"), "beyond the end of the file"},
    {"OffsetsBeyond64Bits", with_offsets("[0,18446744073709551616]"), "number '18446744073709551616'"},
    {"OffsetsTooFewBytes", with_shape("[3]"), "takes 12 bytes"},
    {"OffsetsTooManyBytes", with_shape("[1]"), "takes 4 bytes"},
    {"OffsetsBytesForScalar", with_shape("[]"), "takes 4 bytes"},
    {"OffsetsBytesForZeroSize", with_shape("[2,0]"), "takes 0 bytes"},
    {"Overlap", with_two("[6]", "[0,6]", "[5]", "[5,10]"), "overlap"},
    {"SameBytes", with_two("[10]", "[0,10]", "[10]", "[0,10]"), "overlap"},
    {"ZeroSizeInsideAnother", with_two("[10]", "[0,10]", "[0]", "[5,5]"), "overlap"},
    {"Hole", with_two("[4]", "[0,4]", "[5]", "[5,10]"), "hole"},
    {"HoleAtTheFront", with_two("[4]", "[1,5]", "[5]", "[5,10]"), "hole"},
    {"TrailingBytes", with_two("[4]", "[0,4]", "[5]", "[4,9]"), "1 trailing bytes"},
    {"DataWithoutTensors", safetensors("{}", "garbage"), "7 trailing bytes"},
};

constexpr int kDepth = 1'000'000;
const DeepFault kDeepFaults[] = {
    {"Arrays", [] { return safetensors("{\"a\":" + repeat("[", kDepth)); }, "'a' is an array"},
    {"Objects", [] { return safetensors(repeat("{\"a\":", kDepth)); }, "tensor 'a' has the unknown key 'a'"},
    {"Shape", [] { return with_shape(repeat("[", kDepth) + repeat("]", kDepth)); }, "shape holds an array"},
    {"Offsets", [] { return with_offsets(repeat("[", kDepth) + repeat("]", kDepth)); }, "data_offsets holds an array"},
    {"Metadata", [] { return safetensors("{\"__metadata__\":" + repeat("{\"k\":", kDepth)); }, "'k' is an object"},
};

const std::string kDescr = "'descr': '<f4', ", kOrder = "'fortran_order': False, ", kShape = "'shape': (2,), ";

// A .npy file with eight bytes of data.
std::string with_header(const std::string& header) { return npy(header, "12345678"); }

std::string with_descr(const std::string& descr) {
  return with_header("{'descr': " + descr + ", " + kOrder + kShape + "}");
}

std::string with_npy_shape(const std::string& shape) {
  return with_header("{" + kDescr + kOrder + "'shape': " + shape + "}");
}

const std::string kNpyMagic = "\x93NUMPY";

const Fault kNpyFaults[] = {
    {"EndsAfterMagic", kNpyMagic, "inside the version"},
    {"EndsInsideVersion", kNpyMagic + "\x01", "inside the version"},
    {"EndsInsideLength1", kNpyMagic + std::string("\x01\0\x01", 3), "inside the header length"},
    {"EndsInsideLength2", kNpyMagic + std::string("\x02\0\x01\0\0", 5), "inside the header length"},
    {"Version0", npy("{}", "", 0), "version 0.0"},
    {"Version4", npy("{}", "", 4), "version 4.0"},
    {"Version1Point1", kNpyMagic + "\x01\x01\x02" + std::string("\0{}", 3), "version 1.1"},
    {"HeaderBeyondFile1", kNpyMagic + std::string("\x01\0\x03\0{}", 6), "beyond the end of the file"},
    {"HeaderBeyondFile2", kNpyMagic + std::string("\x02\0\xff\xff\xff\xff{}", 8), "beyond the end of the file"},
    {"HeaderEmpty", npy(""), "expected a dict"},
    {"HeaderAList", npy("[]"), "expected a dict"},
    {"HeaderNoKeys", with_header("{}"), "no descr"},
    {"HeaderCut", with_header("{" + kDescr), "expected a string"},
    {"HeaderStringCut", with_header("{'descr"), "expected a string that ends"},
    {"HeaderTrailingText", with_header("{" + kDescr + kOrder + kShape + "} x"), "nothing after the dict"},
    {"HeaderZeroByte", with_header("{" + kDescr + kOrder + kShape + "}" + '\0'), "nothing after the dict"},
    {"HeaderNoColon", with_header("{'descr' '<f4'}"), "expected ':'"},
    {"HeaderNoComma", with_header("{'descr': '<f4' 'shape': (2,)}"), "expected ',' or '}'"},
    {"HeaderOnlyComma", with_header("{,}"), "expected a string"},
    {"HeaderEscape", with_header("{'de\\x73cr': '<f4'}"), "without escapes"},
    {"KeyNotAString", with_header("{1: 2}"), "expected a string"},
    {"DescrMissing", with_header("{" + kOrder + kShape + "}"), "no descr"},
    {"OrderMissing", with_header("{" + kDescr + kShape + "}"), "no fortran_order"},
    {"ShapeMissing", with_header("{" + kDescr + kOrder + "}"), "no shape"},
    {"DescrTwice", with_header("{" + kDescr + kDescr + kOrder + kShape + "}"), "'descr' twice"},
    {"OrderTwice", with_header("{" + kDescr + kOrder + kOrder + kShape + "}"), "'fortran_order' twice"},
    {"ShapeTwice", with_header("{" + kDescr + kOrder + kShape + kShape + "}"), "'shape' twice"},
    {"UnknownKey", with_header("{" + kDescr + kOrder + kShape + "'x': 1}"), "unknown key 'x'"},
    {"BigEndian", with_descr("'>f4'"), "big-endian dtype '>f4'"},
    {"Orderless", with_descr("'|f4'"), "orderless dtype '|f4'"},
    {"NativeOrder", with_descr("'=f4'"), "unknown dtype '=f4'"},
    {"NoOrder", with_descr("'f4'"), "unknown dtype 'f4'"},
    {"Object", with_descr("'|O'"), "object dtype '|O'"},
    {"ObjectOfEight", with_descr("'|O8'"), "object dtype '|O8'"},
    {"Complex", with_descr("'<c8'"), "unknown dtype '<c8'"},
    {"Text", with_descr("'<U2'"), "unknown dtype '<U2'"},
    {"Void", with_descr("'|V2'"), "unknown dtype '|V2'"},
    {"Time", with_descr("'<M8[ns]'"), "unknown dtype '<M8[ns]'"},
    {"LongFloat", with_descr("'<f16'"), "unknown dtype '<f16'"},
    {"DescrEmpty", with_descr("''"), "unknown dtype ''"},
    {"Structured", with_descr("[('x', '<f4')]"), "structured"},
    {"DescrANumber", with_descr("4"), "expected a string"},
    {"OrderANumber", with_header("{" + kDescr + "'fortran_order': 0, " + kShape + "}"), "True or False"},
    {"ShapeAList", with_npy_shape("[2]"), "shape in parentheses"},
    {"ShapeANumber", with_npy_shape("2"), "shape in parentheses"},
    {"ShapeNoTuple", with_npy_shape("(2)"), "expected ','"},
    {"ShapeOnlyComma", with_npy_shape("(,)"), "integer size"},
    {"ShapeNested", with_npy_shape(repeat("(", 60'000)), "integer size"},
    {"ShapeNegative", with_npy_shape("(-2,)"), "integer size"},
    {"ShapeFraction", with_npy_shape("(2.0,)"), "expected ','"},
    {"ShapeFractionInside", with_npy_shape("(1, 2.0)"), "expected ',' or ')'"},
    {"ShapeUnderscore", with_npy_shape("(1, 0_2)"), "expected ',' or ')'"},
    {"ShapeCut", with_npy_shape("(2, "), "integer size"},
    {"ShapeBeyond63Bits", with_npy_shape("(9223372036854775808,)"), "exceeds 2^63"},
    {"ShapeBeyond64Bits", with_npy_shape("(18446744073709551618,)"), "exceeds 2^63"},
    {"ShapeProductWrapsToZero", with_npy_shape("(4294967296, 4294967296)"), "exceed 2^62 bytes"},
    {"ShapeBytesWrap", with_npy_shape("(4611686018427387906,)"), "exceed 2^62 bytes"},
    {"NineDims", with_npy_shape("(1, 1, 1, 1, 1, 1, 1, 1, 2)"), "more than 8 dimensions"},
    {"DataCut", with_npy_shape("(3,)"), "ends after 8 of them"},
    {"DataMissing", npy("{" + kDescr + kOrder + kShape + "}"), "ends after 0 of them"},
    {"TrailingBytes", with_npy_shape("(1,)"), "4 trailing bytes"},
    {"TrailingBytesAfterZeroSize", with_npy_shape("(0, 3)"), "8 trailing bytes"},
};

void expect_refused(const std::string& bytes, const std::string& fault) {
  const Folder folder;
  const std::string path = folder.write("faulty", bytes);
  const std::string text = error_of([&] { read_tensors(path); });
  EXPECT_THAT(text, AllOf(StartsWith(path + ": "), HasSubstr(fault)));
  EXPECT_LT(text.size(), 600u) << "however long the file's names are";
}

class FaultyFile : public ::testing::TestWithParam<Fault> {};
TEST_P(FaultyFile, IsRefusedByNameAndFault) { expect_refused(GetParam().bytes, GetParam().fault); }

class DeepFile : public ::testing::TestWithParam<DeepFault> {};
TEST_P(DeepFile, IsRefusedByNameAndFault) { expect_refused(GetParam().bytes(), GetParam().fault); }

INSTANTIATE_TEST_SUITE_P(Safetensors, FaultyFile, ::testing::ValuesIn(kSafetensorsFaults),
                         [](const auto& row) { return row.param.name; });
INSTANTIATE_TEST_SUITE_P(Safetensors, DeepFile, ::testing::ValuesIn(kDeepFaults),
                         [](const auto& row) { return row.param.name; });
INSTANTIATE_TEST_SUITE_P(Npy, FaultyFile, ::testing::ValuesIn(kNpyFaults),
                         [](const auto& row) { return row.param.name; });

class HostileFile : public ::testing::Test {
 protected:
  std::string error_of_read(const std::string& path) const {
    const std::string text = error_of([&] { read_tensors(path); });
    EXPECT_THAT(text, StartsWith(path + ": "));
    return text;
  }

  // A valid file of each format.
  std::string valid_safetensors() const {
    const Tensor x(DType::f32, {2, 2}), y(DType::u8, {3}), z(DType::i64, {0});
    write_safetensors(folder_.file("valid"), {{"x", x.view()}, {"y", y.view()}, {"z", z.view()}}, {{"key", "value"}});
    return read_bytes(folder_.file("valid"));
  }
  std::string valid_npy() const {
    const Tensor x(DType::f32, {2, 2});
    write_npy(folder_.file("valid"), x.view());
    return read_bytes(folder_.file("valid"));
  }

  Folder folder_;
};

TEST_F(HostileFile, Missing) {
  const std::string path = folder_.file("missing");
  EXPECT_THAT(error_of_read(path), HasSubstr("No such file"));
  try {
    read_tensors(path);
  } catch (const FileError& error) {
    EXPECT_EQ(error.code, ENOENT);
    EXPECT_EQ(error.path, path);
    EXPECT_EQ(error.what(), path + ": " + error.fault);
  }
  try {
    write_npy(path + "/below.npy", Tensor(DType::f32, {1}).view());
    ADD_FAILURE() << "a file below no folder";
  } catch (const FileError& error) {
    EXPECT_EQ(error.code, ENOENT);
  }
}

TEST_F(HostileFile, Directory) { EXPECT_THAT(error_of_read(folder_.file("")), HasSubstr("is a directory")); }

TEST_F(HostileFile, NamedPipe) {
  ASSERT_EQ(mkfifo(folder_.file("pipe").c_str(), 0600), 0);
  EXPECT_THAT(error_of_read(folder_.file("pipe")), HasSubstr("not a regular file"));
}

TEST_F(HostileFile, LongAndControlledNamesAreShownSafely) {
  const std::string name = "\\u001b]0;" + std::string(1'000'000, 'x');
  const std::string text = error_of_read(folder_.write("a", safetensors("{\"" + name + "\":1}")));
  EXPECT_THAT(text, HasSubstr("'\\x1b]0;xxx"));
  EXPECT_LT(text.size(), 400u);
}

TEST_F(HostileFile, CutAtEveryLength) {
  for (const std::string& whole : {valid_safetensors(), valid_npy()}) {
    EXPECT_NO_THROW(read_tensors(folder_.write("whole", whole)));
    for (size_t length = 0; length < whole.size(); ++length) {
      SCOPED_TRACE(length);
      error_of_read(folder_.write("cut", whole.substr(0, length)));
    }
  }
}

TEST_F(HostileFile, OneByteMore) {
  for (const std::string& whole : {valid_safetensors(), valid_npy()}) {
    EXPECT_THAT(error_of_read(folder_.write("more", whole + '\0')), HasSubstr("1 trailing bytes"));
  }
}

// Each byte before the data with each of its bits turned, and with all of them: an Error that names the file, or
// tensors that lie inside it.
TEST_F(HostileFile, EveryByteTurned) {
  const auto turn_all = [&](const std::string& whole, size_t header_end) {
    int64_t num_refused = 0;
    for (size_t place = 0; place < header_end; ++place) {
      for (const int mask : {1, 2, 4, 8, 16, 32, 64, 128, 255}) {
        SCOPED_TRACE(::testing::Message() << "byte " << place << " mask " << mask);
        std::string turned = whole;
        turned[place] = static_cast<char>(turned[place] ^ mask);
        const std::string path = folder_.write("turned", turned);
        try {
          walk_tensors(read_tensors(path));
        } catch (const Error& error) {
          EXPECT_THAT(error.what(), StartsWith(path + ": "));
          ++num_refused;
        }
      }
    }
    return num_refused;
  };
  const std::string safetensors_file = valid_safetensors(), npy_file = valid_npy();
  // Only names, metadata, the types of one size and white space can be turned into something else that is valid.
  EXPECT_GT(turn_all(safetensors_file, safetensors_file.size() - 19), 1500);
  EXPECT_GT(turn_all(npy_file, npy_file.size() - 16), 900);
}

}  // namespace
}  // namespace tilesieve::testing
