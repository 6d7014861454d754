#include "base/json_writer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

namespace poseidon {
namespace {

TEST(JsonWriter, NestsAndSeparates) {
  JsonWriter json;
  json.begin_object().field("a", 1).field("b", "x").key("list").begin_array();
  json.value(true).value(-2).begin_object().end_object().begin_array().end_array().null().end_array();
  json.field("c", UINT64_MAX).end_object();
  EXPECT_EQ(json.text(), R"({"a":1,"b":"x","list":[true,-2,{},[],null],"c":18446744073709551615})");
}

TEST(JsonWriter, NumbersThatJsonDoesNotKnowAreNull) {
  JsonWriter json;
  json.begin_array().value(0.5).value(-1e-9).value(std::numeric_limits<double>::infinity());
  json.value(std::numeric_limits<double>::quiet_NaN()).end_array();
  EXPECT_EQ(json.text(), "[0.500,-0.000,null,null]");
  JsonWriter largest;
  largest.value(std::numeric_limits<double>::max());
  EXPECT_EQ(largest.text().size(), 313u);
}

std::string quoted(const std::string& text) {
  JsonWriter json;
  json.value(text);
  return json.text();
}

TEST(JsonWriter, EscapesWhatMayNotStandInText) {
  EXPECT_EQ(quoted("a\"b\\c\n\x01"), "\"a\\\"b\\\\c\\u000a\\u0001\"");
  EXPECT_EQ(quoted(std::string(1, '\0')), "\"\\u0000\"");
}

TEST(JsonWriter, KeepsUtf8AndReplacesWhatIsNone) {
  for (const std::string text : {"h\xc3\xa4", "\xe2\x82\xac", "\xf0\x9f\x8e\x89", "\xed\x9f\xbf", "\xf4\x8f\xbf\xbf"})
    EXPECT_EQ(quoted(text), '"' + text + '"');
  const std::string bad = "\xef\xbf\xbd";
  EXPECT_EQ(quoted("\xc3"), '"' + bad + '"');                                // cut
  EXPECT_EQ(quoted("\xc3(x"), '"' + bad + "(x\"");                           // no continuation
  EXPECT_EQ(quoted("\x80"), '"' + bad + '"');                                // a continuation alone
  EXPECT_EQ(quoted("\xc0\xaf"), '"' + bad + bad + '"');                      // too long a form
  EXPECT_EQ(quoted("\xe0\x80\xaf"), '"' + bad + bad + bad + '"');            // the same
  EXPECT_EQ(quoted("\xed\xa0\x80"), '"' + bad + bad + bad + '"');            // a surrogate
  EXPECT_EQ(quoted("\xf4\x90\x80\x80"), '"' + bad + bad + bad + bad + '"');  // past U+10FFFF
  EXPECT_EQ(quoted("\xff"), '"' + bad + '"');
}

}  // namespace
}  // namespace poseidon
