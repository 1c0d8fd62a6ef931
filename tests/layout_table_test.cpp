// SPDX-License-Identifier: Apache-2.0
// The table of boxes for the heads of a model: its text, its limits, and the layouts that it gives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "io_files.h"
#include "tilesieve/layout.h"

namespace tilesieve::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const LayoutTable kSmall = {{2, 3, 4}, {{}, {1, 2, 2}, {2, 3, 1}}, {{0, 1, 2}, {2, 2, 0}}};

TEST(LayoutTable, SaysWhatItSays) {
  const LayoutTable table = LayoutTable::parse(
      R"({"box_of_head": [[0, 1]], "menu": ["raster", "4x4x4"], "grid": [37, 24, 42], "format": "tilesieve-layout-1"})");
  EXPECT_EQ(table, (LayoutTable{{37, 24, 42}, {{}, {4, 4, 4}}, {{0, 1}}}));
  EXPECT_EQ(table.to_json(), R"({
  "format": "tilesieve-layout-1",
  "grid": [37, 24, 42],
  "menu": ["raster", "4x4x4"],
  "box_of_head": [
    [0, 1]
  ]
}
)");
}

TEST(LayoutTable, JsonRoundTrip) {
  EXPECT_EQ(LayoutTable::parse(kSmall.to_json()), kSmall);
  std::mt19937_64 random(3);
  LayoutTable h3 = {{37, 24, 42}, box_menu({37, 24, 42}, 64, 0.2), {}};
  h3.box_of_head.assign(50, std::vector<int32_t>(56));
  for (auto& heads : h3.box_of_head) {
    for (int32_t& box : heads) box = static_cast<int32_t>(random() % h3.menu.size());
  }
  EXPECT_EQ(LayoutTable::parse(h3.to_json()), h3);
  const LayoutTable largest = {{1, 1, INT32_MAX},
                               std::vector<Box>(256, Box{1, 1, 1}),
                               std::vector<std::vector<int32_t>>(1024, std::vector<int32_t>(4, 255))};
  EXPECT_EQ(LayoutTable::parse(largest.to_json()), largest);
}

struct Refusal {
  std::string json;
  const char* names;
};

// A table with one field changed, or left out where the text is empty.
std::string with(const std::string& field, const std::string& text) {
  std::string json;
  for (const auto& [name, value] :
       std::vector<std::pair<std::string, std::string>>{{"format", R"("tilesieve-layout-1")"},
                                                        {"grid", "[2, 3, 4]"},
                                                        {"menu", R"(["raster", "1x2x2"])"},
                                                        {"box_of_head", "[[0, 1]]"}}) {
    const std::string& shown = name == field ? text : value;
    if (!shown.empty()) json += (json.empty() ? "{\"" : ", \"") + name + "\": " + shown;
  }
  return json + "}";
}

std::string repeated(const std::string& text, int64_t count) {
  std::string all;
  for (int64_t i = 0; i < count; ++i) all += text;
  return all;
}

TEST(LayoutTable, RefusesJsonByNamingTheField) {
  ASSERT_NO_THROW(LayoutTable::parse(with("", "")));
  const std::string big = "18446744073709551616";
  for (const auto& [json, names] : std::vector<Refusal>{
           // no such object at all
           {"", "not JSON"},
           {"null", "does not begin with"},
           {"[]", "does not begin with"},
           {"\xef\xbb\xbf" + with("", ""), "does not begin with"},
           {with("", "") + std::string(1, '\0'), "zero byte"},
           {with("", "") + "{", "not JSON"},
           {with("", "").substr(0, 60), "not JSON"},
           {repeated("{\"grid\":", 100000), "grid: got an object"},
           {"{}", "format is missing"},
           // fields
           {with("format", ""), "format is missing"},
           {with("grid", ""), "grid is missing"},
           {with("menu", ""), "menu is missing"},
           {with("box_of_head", ""), "box_of_head is missing"},
           {with("grid", "[2, 3, 4], \"grid\": [2, 3, 4]"), "grid comes twice"},
           {with("grid", "[2, 3, 4], \"size\": 1"), "unknown field 'size'"},
           {with("grid", "[2, 3, 4], \"\x1b\": 1"), "not JSON"},
           {with("grid", "[2, 3, 4], \"\\u001b\": 1"), "unknown field '\\x1b'"},
           // format
           {with("format", "\"tilesieve-layout-2\""), "format: got 'tilesieve-layout-2'"},
           {with("format", "1"), "format: got the number 1"},
           {with("format", "[]"), "format: got an array"},
           {with("format", "{}"), "format: got an object"},
           // grid
           {with("grid", "[2, 3]"), "grid: got 2 numbers"},
           {with("grid", "[2, 3, 4, 5]"), "grid: got more than three"},
           {with("grid", "[0, 3, 4]"), "grid: got 0x3x4"},
           {with("grid", "[-2, 3, 4]"), "grid: got the negative number -2"},
           {with("grid", "[2.0, 3, 4]"), "grid: got the number '2.0'"},
           {with("grid", "[2147483648, 3, 4]"), "grid: got the number 2147483648"},
           {with("grid", "[65536, 65536, 1]"), "grid: got 65536x65536x1"},
           {with("grid", "[" + big + ", 1, 1]"),
            "grid: got the number '"
            "18446744073709551616'"},
           {with("grid", "[1e999, 1, 1]"), "grid: not JSON"},
           {with("grid", "[null, 3, 4]"), "grid: got null"},
           {with("grid", "[[2], 3, 4]"), "grid: got an array"},
           {with("grid", "\"2x3x4\""), "grid: got the string '2x3x4'"},
           {with("grid", "true"), "grid: got true"},
           // menu
           {with("menu", "[]"), "menu: got 0 boxes"},
           {with("menu", "[\"4x4\"]"), "menu[0]: box: got '4x4'"},
           {with("menu", "[\"raster\", \"0x1x1\"]"), "menu[1]: box: got 0x1x1"},
           {with("menu", "[\"raster\", [1, 2, 2]]"), "menu[1]: got an array"},
           {with("menu", "[\"raster\", 4]"), "menu[1]: got the number 4"},
           {with("menu", "[\"raster\", {}]"), "menu[1]: got an object"},
           {with("menu", "[\"\xff\"]"), "menu: not JSON"},
           {with("menu", "[\"raster\"" + repeated(",\"raster\"", 256) + "]"), "menu[256]: got more than 256"},
           // box_of_head
           {with("box_of_head", "[]"), "box_of_head: got 0 layers"},
           {with("box_of_head", "[[]]"), "box_of_head[0]: got 0 heads"},
           {with("box_of_head", "[[0, 1], [0]]"), "box_of_head[1]: got 1 heads"},
           {with("box_of_head", "[[0, 2]]"), "box_of_head[0][1]: got 2"},
           {with("box_of_head", "[[0, -1]]"), "box_of_head[0][1]: got the negative number -1"},
           {with("box_of_head", "[[0], [4294967296]]"), "box_of_head[1][0]: got the number 4294967296"},
           {with("box_of_head", "[[0, \"1\"]]"), "box_of_head[0][1]: got the string '1'"},
           {with("box_of_head", "[0, 1]"), "box_of_head[0]: got the number 0"},
           {with("box_of_head", "[[[0]]]"), "box_of_head[0][0]: got an array"},
           {with("box_of_head", repeated("[", 100000)), "box_of_head[0][0]: got an array"},
           {with("box_of_head", "[[0" + repeated(",0", 4096) + "]]"), "box_of_head[0][4096]: got more than 4096"},
           {with("box_of_head", "[[0]" + repeated(",[0]", 1024) + "]"), "box_of_head[1024]: got more than 1024"}}) {
    EXPECT_THAT(error_of([&, text = json] { LayoutTable::parse(text); }), HasSubstr(names)) << json.substr(0, 200);
  }
  const std::string error = error_of([] { LayoutTable::parse(with("menu", "[\"" + repeated("x", 1000000) + "\"]")); });
  EXPECT_LT(error.size(), 300u) << "what a message shows is cut";
}

// Every prefix of a table, and every table with one byte changed, is a table or an Error.
TEST(LayoutTable, SurvivesDamage) {
  const std::string json = kSmall.to_json();
  for (size_t size = 0; size + 2 < json.size(); ++size) {
    EXPECT_THROW(LayoutTable::parse(json.substr(0, size)), Error) << size;
  }
  int64_t num_refused = 0;
  for (size_t i = 0; i < json.size(); ++i) {
    for (int byte = 0; byte < 256; ++byte) {
      std::string damaged = json;
      damaged[i] = static_cast<char>(byte);
      try {
        LayoutTable::parse(damaged).validate();
      } catch (const Error&) {
        ++num_refused;
      }
    }
  }
  EXPECT_GT(num_refused, 9 * static_cast<int64_t>(json.size()) * 256 / 10);
}

TEST(LayoutTable, ValidatesWhatWasNotParsed) {
  const auto fault = [](auto change) {
    LayoutTable table = kSmall;
    change(table);
    const std::string text = error_of([&] { table.validate(); });
    EXPECT_EQ(error_of([&] { table.to_json(); }), text);
    return text;
  };
  EXPECT_THAT(error_of([] { LayoutTable{}.validate(); }), HasSubstr("grid: got 0x0x0"));
  EXPECT_THAT(fault([](LayoutTable& t) { t.menu[1].h = 0; }), HasSubstr("menu[1]: got 1x0x2"));
  EXPECT_THAT(fault([](LayoutTable& t) { t.menu.clear(); }), HasSubstr("menu: got 0 boxes"));
  EXPECT_THAT(fault([](LayoutTable& t) { t.menu.resize(257); }), HasSubstr("menu: got 257 boxes"));
  EXPECT_THAT(fault([](LayoutTable& t) { t.box_of_head.clear(); }), HasSubstr("box_of_head: got 0 layers"));
  EXPECT_THAT(fault([](LayoutTable& t) { t.box_of_head[1].pop_back(); }), HasSubstr("box_of_head[1]: got 2 heads"));
  EXPECT_THAT(fault([](LayoutTable& t) { t.box_of_head[1][2] = -1; }), HasSubstr("box_of_head[1][2]: got -1"));
  EXPECT_THAT(fault([](LayoutTable& t) { t.box_of_head[0][0] = 3; }), HasSubstr("box_of_head[0][0]: got 3"));
}

std::vector<int32_t> order(const TokenLayout& layout, int64_t head) {
  return {layout.order(head).begin(), layout.order(head).end()};
}

TEST(LayoutTable, GivesTheHeadsOfALayer) {
  const TokenSequence sequence = TokenSequence::parse("text:5,video:2x3x4");
  const TokenLayout all = kSmall.layout(sequence, 0), some = kSmall.layout(sequence, 0, 1, 2);
  EXPECT_EQ(all.num_heads(), 3);
  EXPECT_EQ(some.num_heads(), 2);
  for (int64_t head = 0; head < 3; ++head) {
    const std::vector<Box> box = {kSmall.menu[static_cast<size_t>(head)]};
    EXPECT_EQ(order(all, head), order(TokenLayout(sequence, box), 0));
  }
  for (int64_t head = 0; head < 2; ++head) EXPECT_EQ(order(some, head), order(all, head + 1)) << "a head offset";
  EXPECT_TRUE(kSmall.layout(sequence, 1).is_identity(2));
  EXPECT_EQ(kSmall.layout(sequence, 1, 2).num_heads(), 1);
  EXPECT_EQ(kSmall.layout(sequence, 1, 3).num_heads(), 0);
  EXPECT_EQ(kSmall.layout(TokenSequence::parse("text:5"), 1).num_tokens(), 5) << "no video";
}

TEST(LayoutTable, RefusesWhatItDoesNotHave) {
  const TokenSequence sequence = TokenSequence::parse("text:5,video:2x3x4");
  const TokenSequence other = TokenSequence::parse("text:5,video:2x3x4,video:2x4x3");
  EXPECT_THAT(error_of([&] { kSmall.layout(other, 0); }), HasSubstr("segments[2].grid: got 2x4x3"));
  EXPECT_THAT(error_of([&] { kSmall.layout(sequence, 2); }), HasSubstr("layer: got 2"));
  EXPECT_THAT(error_of([&] { kSmall.layout(sequence, -1); }), HasSubstr("layer: got -1"));
  EXPECT_THAT(error_of([&] { kSmall.layout(sequence, 0, -1); }), HasSubstr("head_begin: got -1"));
  EXPECT_THAT(error_of([&] { kSmall.layout(sequence, 0, 4); }), HasSubstr("head_begin: got 4"));
  EXPECT_THAT(error_of([&] { kSmall.layout(sequence, 0, 1, 3); }), HasSubstr("num_heads: got 3"));
  EXPECT_THAT(error_of([&] { kSmall.layout(sequence, 0, 1, INT64_MAX); }), HasSubstr("num_heads: got"));
  EXPECT_THAT(error_of([&] { kSmall.layout(sequence, 0, 1, -2); }), HasSubstr("num_heads: got -2"));
}

}  // namespace
}  // namespace tilesieve::testing
