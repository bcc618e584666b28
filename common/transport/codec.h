// Envelopes to frames and back. Internal to common/transport.
#pragma once

#include <string>
#include <zmq.hpp>

#include "common/protocol/muster.pb.h"

namespace muster::transport {

// How a frame from outside reads.
enum class FrameKind {
  kGood,          // an envelope of our version with a body
  kOtherVersion,  // an envelope of another protocol version; version and build are filled in
  kGarbage,       // anything else
};

// Version and build of this process.
void stamp(proto::Envelope* envelope);
zmq::message_t encode(const proto::Envelope& envelope);
// Never throws: what arrives is not trusted.
FrameKind decode(const zmq::message_t& frame, proto::Envelope* envelope);
// "peer speaks protocol 2 (build 0.2.0), we speak protocol 1 (build 0.1.0): …"
std::string version_mismatch(const proto::Envelope& theirs);

}  // namespace muster::transport
