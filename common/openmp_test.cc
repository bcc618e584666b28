#include "common/openmp.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace muster {
namespace {

TEST(OpenmpTest, WhatTheUserHasSetStands) {
  for (const char* name : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}) {
    const char* before = std::getenv(name);
    const std::string saved = before == nullptr ? "" : before;
    ::setenv(name, "1", 1);
    EXPECT_TRUE(openmp_environment().empty()) << name;
    ::unsetenv(name);
    if (before != nullptr) ::setenv(name, saved.c_str(), 1);
  }
}

TEST(OpenmpTest, ThreadsSpinLessByDefault) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) {
    GTEST_SKIP() << "the environment has a setting of its own";
  }
  EXPECT_TRUE(openmp_environment().contains("GOMP_SPINCOUNT"));
}

}  // namespace
}  // namespace muster
