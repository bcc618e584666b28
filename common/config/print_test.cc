#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "common/config/config.h"
#include "common/config/fields.h"

namespace muster {
namespace {

// Gives every field a value that is not its default and stays in range.
void change(const ConfigField& field, Config& config) {
  struct Changer {
    const ConfigField& field;
    void operator()(bool* value) const { *value = !*value; }
    void operator()(int64_t* value) const { *value += *value < field.max ? 1 : -1; }
    void operator()(uint64_t* value) const { *value += 1; }
    void operator()(double* value) const { *value = (*value + field.max) / 3; }
    void operator()(std::string* value) const {
      if (field.choices.empty()) *value = "a \"quoted\" \\ path\nwith\ttabs \x7f é";
      if (field.choices.size() > 1) *value = field.choices[1];
    }
    void operator()(std::vector<std::string>* value) const { *value = {"a", "b c"}; }
  };
  std::visit(Changer{field}, field.slot(config));
}

TEST(PrintTest, EveryKeyReadsBackEqual) {
  // One key at a time: together they would contradict each other. These contradict the defaults
  // even alone.
  const std::set<std::string> not_alone = {"heads",    "width",         "kv_heads",
                                           "head_dim", "max_positions", "workers"};
  for (const ConfigField& field : config_fields()) {
    if (not_alone.contains(field.name)) continue;
    Config config;
    change(field, config);
    const std::string text = to_toml(config);
    const bool has_another_value = field.choices.size() != 1;
    EXPECT_EQ(text != to_toml(Config{}), has_another_value) << field.key();
    EXPECT_EQ(to_toml(parse_config(text, field.key())), text) << field.key();
  }
}

TEST(PrintTest, SomeConfigReadsBackEqual) {
  Config config;
  config.run.name = "naïve \"run\" \\ \x01";
  config.data.sources = {"/a b/*.txt", "/c\"d"};
  config.model.family = "gpt2";
  config.model.width = 96;
  config.model.heads = 6;
  config.model.kv_heads = 3;
  config.model.head_dim = 7;
  config.model.max_positions = 512;
  config.optimizer.lr = 0.1 + 0.2;
  config.optimizer.eps = 1e-17;
  config.run.seed = 0x7fffffffffffffff;
  const Config back = parse_config(to_toml(config), "back");
  EXPECT_EQ(to_toml(back), to_toml(config));
  EXPECT_EQ(back.run.name, config.run.name);
  EXPECT_EQ(back.data.sources, config.data.sources);
  EXPECT_EQ(back.optimizer.lr, config.optimizer.lr);
  EXPECT_EQ(back.run.seed, config.run.seed);
}

TEST(PrintTest, DescribesEveryKeyOnce) {
  const std::string text = describe_config();
  for (const ConfigField& field : config_fields()) {
    EXPECT_THAT(text, testing::HasSubstr("\n  " + field.name + " = ")) << field.key();
    EXPECT_THAT(text, testing::HasSubstr(field.doc)) << field.key();
  }
  EXPECT_THAT(text, testing::HasSubstr("layers = 4"));
  EXPECT_THAT(text, testing::HasSubstr("(none | block | selective | every:N)"));
  EXPECT_THAT(text, testing::HasSubstr("(1 to 1048576 samples)"));
}

}  // namespace
}  // namespace muster
