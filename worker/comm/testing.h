// Helpers of tests that need several ranks: stores, and ranks as threads of one process.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "common/files.h"
#include "worker/comm/groups.h"

namespace muster::testing {

// Ranks of one process.
class InMemoryStore : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    {
      const std::lock_guard lock(mutex_);
      values_[key] = value;
    }
    changed_.notify_all();
  }
  std::string get(const std::string& key, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_until(lock, deadline.at(), [&] { return values_.count(key) > 0; })) {
      throw TimeoutError("key " + key + " of the in-memory store was not set in time");
    }
    return values_[key];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

// Ranks that are processes: a file per key; inotify says when one has come.
class FolderStore : public Store {
 public:
  explicit FolderStore(std::string folder) : folder_(std::move(folder)) {}
  void set(const std::string& key, const std::string& value) override {
    write_file_atomic(path(key), value);
  }
  std::string get(const std::string& key, Deadline deadline) override {
    const Fd watch(inotify_init1(IN_CLOEXEC));
    if (inotify_add_watch(watch.get(), folder_.c_str(), IN_MOVED_TO) < 0) {
      throw IoError("cannot watch " + folder_);
    }
    while (access(path(key).c_str(), R_OK) != 0) {
      pollfd event{watch.get(), POLLIN, 0};
      if (poll(&event, 1, static_cast<int>(deadline.left().count())) == 0) {
        throw TimeoutError("no key " + key + " in " + folder_);
      }
      char events[4096];
      if (read(watch.get(), events, sizeof(events)) < 0) throw IoError("cannot read inotify");
    }
    return read_file(path(key));
  }

 private:
  std::string path(std::string key) const {
    for (char& c : key) c = c == '/' ? '_' : c;
    return folder_ + "/" + key;
  }
  std::string folder_;
};

// Runs f(*make(options, store)) as every rank of a world, each in its own thread with its own
// connections. The first exception of any rank is rethrown once all have ended; it aborts the
// others. The options' timeout is 20 s.
template <typename Make, typename F>
void run_ranks_of(int world_size, const Make& make, const F& f) {
  InMemoryStore store;
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(world_size));
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      decltype(make(CommunicatorOptions(), store)) communicator;
      try {
        CommunicatorOptions options;
        options.rank = rank;
        options.world_size = world_size;
        options.timeout_s = 20.0;
        communicator = make(options, store);
        f(*communicator);
      } catch (const std::exception& e) {
        {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        if (communicator) communicator->abort(e.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

// f(communicator) as every rank of a world.
inline void run_ranks(int world_size, const std::function<void(Communicator&)>& f,
                      double timeout_s = 20.0, const std::string& backend = "auto") {
  const auto make = [&](CommunicatorOptions options, Store& store) {
    options.backend = backend;
    options.timeout_s = timeout_s;
    return make_communicator(options, store);
  };
  run_ranks_of(world_size, make, f);
}

// The same with shard groups of `shard_group` ranks; f takes a GroupedCommunicator.
inline void run_groups(int world_size, int shard_group,
                       const std::function<void(GroupedCommunicator&)>& f) {
  const auto make = [&](const CommunicatorOptions& options, Store& store) {
    return std::make_unique<GroupedCommunicator>(options, shard_group, store);
  };
  run_ranks_of(world_size, make, f);
}

}  // namespace muster::testing
