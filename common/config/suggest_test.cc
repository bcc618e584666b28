#include "common/config/suggest.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(SuggestTest, EditDistance) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("hedas", "heads"), 1);  // a swap counts once
  EXPECT_EQ(edit_distance("heads", "heads"), 0);
}

TEST(SuggestTest, NearestKey) {
  EXPECT_EQ(nearest_config_key("model", "hedas"), "model.heads");
  EXPECT_EQ(nearest_config_key("train", "lr"), "optimizer.lr");
  EXPECT_EQ(nearest_config_key("", "global_batch"), "train.global_batch");
  EXPECT_EQ(nearest_config_key("data", "thread"), "data.threads");  // not parallel.threads
  EXPECT_EQ(nearest_config_key("parallel", "thread"), "parallel.threads");
  EXPECT_EQ(nearest_config_key("model", "zzzzzz"), "");
  EXPECT_EQ(nearest_config_key("model", "q"), "");
}

TEST(SuggestTest, NearestWord) {
  EXPECT_EQ(nearest("cosin", {"cosine", "constant"}), "cosine");
  EXPECT_EQ(nearest("bert-large", {"llama", "gpt2"}), "");
  EXPECT_EQ(nearest("x", {}), "");
}

}  // namespace
}  // namespace muster
