#include "worker/comm/gloo_mesh.h"

#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <signal.h>

#include <cmath>
#include <cstdio>

#include "common/error.h"
#include "worker/comm/loop_queue.h"

namespace muster {
namespace {

// Gloo writes to sockets without MSG_NOSIGNAL. A thread inherits the mask of the thread that
// starts it, so blocking SIGPIPE while Gloo starts its event loop keeps a dead peer from killing
// this process, whatever the rest of the process does with the signal. One that this thread itself
// has brought about is taken back at the end, before it could be delivered.
class BlockSigpipe {
 public:
  BlockSigpipe() {
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  ~BlockSigpipe() {
    constexpr timespec kNoWait{};
    if (sigismember(&before_, SIGPIPE) == 0) {
      while (sigtimedwait(&sigpipe_, nullptr, &kNoWait) > 0) continue;
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockSigpipe(const BlockSigpipe&) = delete;
  BlockSigpipe& operator=(const BlockSigpipe&) = delete;

 private:
  sigset_t sigpipe_;
  sigset_t before_;
};

// Gloo waits five times the timeout of a pair for a connection.
constexpr double kGlooConnectTimeouts = 5.0;

}  // namespace

GlooMesh::GlooMesh(const CommunicatorOptions& options, Store& store)
    : rank_(options.rank),
      world_size_(options.world_size),
      names_(options.names),
      timeout_(options.timeout_s),
      traffic_(options.world_size) {
  MUSTER_CHECK(world_size_ > 0 && rank_ >= 0 && rank_ < world_size_);
  const std::string address = local_address(options.interface_name, options.route_to);
  const BlockSigpipe block;
  try {
    device_ = std::dynamic_pointer_cast<gloo::transport::tcp::Device>(
        gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(address.c_str())));
  } catch (const std::exception& e) {
    throw IoError("cannot listen on " + address + ": " + e.what());
  }
  try {
    meet(options, store);
  } catch (const PeerError&) {
    if (options.interrupt) options.interrupt->check();
    throw;
  }
  if (options.interrupt) options.interrupt->check();  // Gloo takes a closed connection for one
  loop_ = std::make_unique<LoopQueue>(device_);
  watch_ =
      std::make_unique<PeerWatch>(context_, [this](const std::set<int>& lost, const auto& why) {
        abort("lost " + name(lost) + " (" + why + ")");
      });
  if (options.interrupt) {
    interrupted_ = options.interrupt->on_fire([this](const std::string& why) { abort(why); });
  }
}

void GlooMesh::meet(const CommunicatorOptions& options, Store& store) {
  const double timeout_s =
      options.rendezvous_timeout_s > 0 ? options.rendezvous_timeout_s : options.timeout_s;
  const Deadline deadline = Deadline::after(std::chrono::duration<double>(timeout_s));
  context_ = device_->createContext(rank_, world_size_);
  const double connect_ms = std::ceil(timeout_s * 1000.0 / kGlooConnectTimeouts);
  context_->setTimeout(std::chrono::milliseconds(static_cast<int64_t>(connect_ms)));

  connect(options, store, deadline);
}

// Every rank publishes one value, its listening addresses in rank order (Gloo listens once per
// peer), and reads those of the others.
void GlooMesh::connect(const CommunicatorOptions& options, Store& store, Deadline deadline) {
  const auto key = [&](int rank) { return options.store_prefix + "gloo/" + std::to_string(rank); };
  std::vector<std::vector<char>> own(world_size_);
  size_t address_bytes = 0;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    own[peer] = context_->createPair(peer)->address().bytes();
    address_bytes = own[peer].size();
  }
  std::string published;
  for (std::vector<char>& one : own) {
    one.resize(address_bytes);
    published.append(one.begin(), one.end());
  }
  store.set(key(rank_), published);
  // A connection that is closed ends the wait for it.
  const Interrupt::Handle closing = options.interrupt
                                        ? options.interrupt->on_fire([this](const std::string&) {
                                            for (int peer = 0; peer < world_size_; ++peer) {
                                              if (peer != rank_) context_->getPair(peer)->close();
                                            }
                                          })
                                        : Interrupt::Handle();

  // All ranks connect in the same order, so that nobody waits in a circle.
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    const std::string who =
        name({peer}) + (names_.empty() ? " of " + std::to_string(world_size_) : "");
    std::string theirs;
    try {
      theirs = store.get(key(peer), deadline);
    } catch (const TimeoutError& e) {
      throw TimeoutError("rendezvous: " + who + " did not arrive: " + e.what());
    }
    if (theirs.size() != published.size()) {
      throw PeerError("rendezvous: " + who + " published addresses of another format");
    }
    const auto begin = theirs.begin() + static_cast<int64_t>(address_bytes) * rank_;
    try {
      context_->getPair(peer)->connect({begin, begin + static_cast<int64_t>(address_bytes)});
    } catch (const std::exception& e) {
      const std::string message = "rendezvous: cannot connect to " + who + ": " + e.what();
      if (deadline.passed()) throw TimeoutError(message);
      throw PeerError(message);
    }
  }
}

GlooMesh::~GlooMesh() {
  interrupted_.release();
  MUSTER_CHECK(buffers_.empty(), "an exchange outlives its mesh");
  bool aborted = false;
  {
    const std::lock_guard lock(mutex_);
    aborted = aborted_;
  }
  // A peer may have left already.
  const BlockSigpipe block;
  if (!aborted) watch_->say_goodbye();
}

void GlooMesh::abort(const std::string& reason) noexcept {
  try {
    {
      const std::lock_guard lock(mutex_);
      if (aborted_) return;
      aborted_ = true;
      reason_ = reason;
      for (gloo::transport::UnboundBuffer* buffer : buffers_) {
        buffer->abortWaitRecv();
        buffer->abortWaitSend();
      }
    }
    // Gloo closes a connection with its lock held until the loop's thread has come round, which
    // would never be if that thread were waiting for the lock to post a message. So what is being
    // posted comes first; nothing is posted after it.
    const auto posted = std::make_shared<std::promise<void>>();
    std::future<void> idle = posted->get_future();
    loop_->post([posted] { posted->set_value(); });
    idle.wait();
    // Closing resets the connections, which is how the peers learn of it.
    for (int peer = 0; peer < world_size_; ++peer) {
      if (peer != rank_) context_->getPair(peer)->close();
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "aborting the communicator of rank %d: %s\n", rank_, e.what());
  }
}

void GlooMesh::check_alive() const {
  const std::lock_guard lock(mutex_);
  if (aborted_) throw PeerError(reason_);
}

std::string GlooMesh::departed() const {
  const std::vector<int> ranks = watch_->departed();
  return name({ranks.begin(), ranks.end()});
}

std::string GlooMesh::name(const std::set<int>& peers) const {
  if (peers.empty()) return "";
  std::string text = peers.size() == 1 ? "rank " : "ranks ";
  bool first = true;
  for (const int peer : peers) {
    text += (first ? "" : ", ") + std::to_string(names_.empty() ? peer : names_[peer]);
    first = false;
  }
  return text;
}

}  // namespace muster
