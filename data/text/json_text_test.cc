#include "data/text/json_text.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace muster {
namespace {

std::string text_of(const std::string& line) {
  std::string text = "stale";
  const char* why = parse_json_text(line, text);
  EXPECT_EQ(why, nullptr) << line << ": " << why;
  return text;
}

std::string why(const std::string& line) {
  std::string text;
  const char* reason = parse_json_text(line, text);
  EXPECT_NE(reason, nullptr) << line;
  return reason == nullptr ? "" : reason;
}

TEST(JsonText, FindsTheTopLevelText) {
  EXPECT_EQ(text_of(R"({"text":"hello"})"), "hello");
  EXPECT_EQ(text_of(R"(  {"id": 7, "text" : "hello", "meta": {"text": "inner", "a": [1, {}]}} )"),
            "hello");
  EXPECT_EQ(text_of(R"({"a":[-0.5e+3,true,false,null,[],"\"}"],"text":"x"})"), "x");
  EXPECT_EQ(text_of(R"({"text":"first","text":"last"})"), "last");
  EXPECT_EQ(text_of("{\"te\\u0078t\":\"escaped key\"}\r"), "escaped key");
}

TEST(JsonText, DecodesEscapesAsAnIndependentParserDoes) {
  for (const std::string line :
       {R"({"text":"a\"\\\/\b\f\n\r\tz"})", R"({"text":"\u0041\u00e9\u20AC\ud83d\ude00"})",
        R"({"text":"\u0000 in the middle"})", R"({"text":"direct é € 😀"})"}) {
    EXPECT_EQ(text_of(line), nlohmann::json::parse(line)["text"].get<std::string>()) << line;
  }
}

TEST(JsonText, KeepsBytesThatAreNoUtf8AndReplacesLoneSurrogates) {
  EXPECT_EQ(text_of("{\"text\":\"a\xff\xfe\x80z\"}"), "a\xff\xfe\x80z");
  EXPECT_EQ(text_of(R"({"text":"\ud83dx"})"), "\xEF\xBF\xBDx");
  EXPECT_EQ(text_of(R"({"text":"\ude00"})"), "\xEF\xBF\xBD");
  EXPECT_EQ(text_of(R"({"text":"\ud83d\u0041"})"),
            "\xEF\xBF\xBD"
            "A");
}

TEST(JsonText, NamesWhatIsWrong) {
  EXPECT_EQ(why("[1]"), "not a JSON object");
  EXPECT_EQ(why("plain words"), "not a JSON object");
  EXPECT_EQ(why("{}"), "no \"text\"");
  EXPECT_EQ(why(R"({"a":{"text":"x"}})"), "no \"text\"");
  EXPECT_EQ(why(R"({"text":7})"), "\"text\" is not a string");
  EXPECT_EQ(why(R"({"text":""})"), "empty \"text\"");
}

TEST(JsonText, RefusesWhatAnIndependentParserRefuses) {
  for (const std::string line :
       {R"({"text":"x")", R"({"text":"x"}})", R"({"text":"x",})", R"({"text" "x"})",
        R"({"text":"\x41"})", R"({"text":"\u12"})", R"({"text":"\u12g4"})", "{\"text\":\"a\tb\"}",
        R"({"n":01,"text":"x"})", R"({"n":1.,"text":"x"})", R"({"n":+1,"text":"x"})",
        R"({"n":tru,"text":"x"})", R"({"n":[1 2],"text":"x"})", R"({"text":"x)",
        R"({'text':"x"})"}) {
    EXPECT_FALSE(nlohmann::json::accept(line)) << line;
    EXPECT_EQ(why(line), "not valid JSON") << line;
  }
  EXPECT_EQ(why("{\"a\":" + std::string(100'000, '[') + "}"), "not valid JSON") << "no deep stack";
}

}  // namespace
}  // namespace muster
