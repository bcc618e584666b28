#include "tools/muster/observer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "common/error.h"
#include "common/files.h"
#include "common/run_dir.h"

namespace muster {
namespace {

using testing::HasSubstr;

constexpr std::chrono::seconds kPatience(10);

// Answers one message of a kind with what `answer` puts into the reply, and gives the message back.
proto::Envelope answer_one(Server& server, void (*answer)(proto::Envelope&)) {
  const auto received = server.receive(Deadline::after(kPatience));
  if (!received) return {};
  proto::Envelope reply;
  reply.set_request_id(received->envelope.request_id());
  answer(reply);
  server.send(received->peer, reply);
  return received->envelope;
}

void answer_status(proto::Envelope& reply) {
  reply.mutable_status()->set_step(42);
}
void accept(proto::Envelope& reply) {
  reply.mutable_accepted();
}

TEST(ObserverTest, AsksForTheStatus) {
  Server server("tcp://127.0.0.1:0", {});
  std::thread coordinator([&] {
    EXPECT_TRUE(answer_one(server, answer_status).has_status_request());
    EXPECT_TRUE(answer_one(server, answer_status).has_status_request());
  });
  Observer observer({server.endpoint(), {}});
  EXPECT_EQ(observer.status(Deadline::after(kPatience)).step(), 42);
  observer.ask_status(Deadline::after(kPatience));
  EXPECT_EQ(observer.receive(Deadline::after(kPatience), nullptr)->step(), 42);
  coordinator.join();
  EXPECT_EQ(observer.receive(Deadline::after(std::chrono::milliseconds(10)), nullptr),
            std::nullopt);
}

TEST(ObserverTest, AsksToStop) {
  Server server("tcp://127.0.0.1:0", {});
  std::thread coordinator([&] {
    const proto::Envelope request = answer_one(server, accept);
    EXPECT_EQ(request.stop_request().reason(), "enough");
    EXPECT_TRUE(request.stop_request().immediately());
  });
  Observer observer({server.endpoint(), {}});
  observer.stop("enough", /*immediately=*/true, Deadline::after(kPatience));
  coordinator.join();
}

TEST(ObserverTest, ASilentCoordinatorIsNamed) {
  Server server("tcp://127.0.0.1:0", {});
  Observer observer({server.endpoint(), {}});
  try {
    observer.status(Deadline::after(std::chrono::milliseconds(50)));
    FAIL();
  } catch (const TimeoutError& error) {
    EXPECT_THAT(error.what(), HasSubstr(server.endpoint()));
  }
}

TEST(FindRunTest, TakesEndpointsAsTheyAre) {
  const Security key{generate_run_key()};
  const RunAddress address = find_run("tcp://head:29400", key);
  EXPECT_EQ(address.endpoint, "tcp://head:29400");
  EXPECT_EQ(address.security.run_key, key.run_key);
}

TEST(FindRunTest, ReadsTheRunDirectory) {
  const TempDir dir;
  const RunDir run{dir.path()};
  write_file_atomic(run.endpoint(), "tcp://127.0.0.1:1234\n");
  EXPECT_EQ(find_run(run.root, {}).endpoint, "tcp://127.0.0.1:1234");
  EXPECT_FALSE(find_run(run.root, {}).security.enabled());
  // A coordinator that others can reach has its key in the directory.
  const std::string key = generate_run_key();
  write_file_atomic(run.run_key(), key);
  std::filesystem::permissions(run.run_key(), std::filesystem::perms::owner_read);
  write_file_atomic(run.endpoint(), "tcp://0.0.0.0:1234\n");
  EXPECT_EQ(find_run(run.root, {}).endpoint, "tcp://127.0.0.1:1234");
  EXPECT_EQ(find_run(run.root, {}).security.run_key, key);
}

TEST(FindRunTest, SaysThatNobodyIsThere) {
  const TempDir dir;
  EXPECT_THROW(find_run(dir.path() + "/none", {}), UsageError);
  try {
    find_run(dir.path(), {});
    FAIL();
  } catch (const PeerError& error) {
    EXPECT_THAT(error.what(), HasSubstr(dir.path() + ": no coordinator runs there"));
  }
}

}  // namespace
}  // namespace muster
