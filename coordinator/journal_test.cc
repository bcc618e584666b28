#include "coordinator/journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>

#include "common/error.h"
#include "common/files.h"

namespace muster {
namespace {

class JournalTest : public testing::Test {
 protected:
  JournalTest() : path_(dir_.path() + "/journal.sqlite") {}
  TempDir dir_;
  std::string path_;
};

TEST_F(JournalTest, RemembersAcrossStarts) {
  {
    Journal journal(path_);
    EXPECT_EQ(journal.last_generation(), 0u);
    EXPECT_EQ(journal.last_step(), 0);
    journal.set_run("name", "demo");
    journal.set_run("name", "demo 2");
    journal.begin_generation(1, 2, 0, "start", "[]");
    journal.commit_step(1, 1, 100, 5.5);
    journal.commit_step(2, 1, 100, std::numeric_limits<double>::quiet_NaN());
    journal.commit_checkpoint(2, 1);
    journal.add_event("checkpoint", "it's \"quoted\"");
  }
  Journal journal(path_);
  EXPECT_EQ(journal.last_generation(), 1u);
  EXPECT_EQ(journal.last_step(), 2);
}

TEST_F(JournalTest, AGenerationForgetsTheStepsItRedoes) {
  Journal journal(path_);
  journal.begin_generation(1, 1, 0, "start", "[]");
  for (int64_t step = 1; step <= 5; ++step) journal.commit_step(step, 1, 10, 1.0);
  journal.begin_generation(2, 1, 3, "resume", "[]");
  EXPECT_EQ(journal.last_step(), 3);
}

TEST_F(JournalTest, MayBeReadWhileOpen) {
  Journal writer(path_);
  writer.begin_generation(1, 1, 0, "start", "[]");
  writer.commit_step(1, 1, 10, 1.0);
  const Journal reader(path_);
  EXPECT_EQ(reader.last_step(), 1);
}

TEST_F(JournalTest, RefusesWhatIsNoDatabase) {
  std::ofstream(path_) << std::string(4096, 'x');
  try {
    Journal journal(path_);
    FAIL();
  } catch (const IoError& e) {
    EXPECT_THAT(e.what(), testing::HasSubstr(path_));
    EXPECT_THAT(e.what(), testing::HasSubstr("move it away"));
  }
}

TEST_F(JournalTest, NamesAPathItCannotOpen) {
  EXPECT_THROW(Journal(dir_.path() + "/none/journal.sqlite"), IoError);
}

}  // namespace
}  // namespace muster
