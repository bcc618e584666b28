#include "common/transport/codec.h"

#include <fmt/format.h>

#include <limits>

#include "common/check.h"
#include "common/transport/transport.h"

namespace muster {

const char* const kBuildVersion = "0.1.0";

namespace transport {

void stamp(proto::Envelope* envelope) {
  envelope->set_version(kProtocolVersion);
  envelope->set_build(kBuildVersion);
}

zmq::message_t encode(const proto::Envelope& envelope) {
  zmq::message_t frame(envelope.ByteSizeLong());
  MUSTER_CHECK(envelope.SerializeToArray(frame.data(), static_cast<int>(frame.size())));
  return frame;
}

FrameKind decode(const zmq::message_t& frame, proto::Envelope* envelope) {
  if (frame.size() == 0 || frame.size() > size_t{std::numeric_limits<int>::max()} ||
      !envelope->ParseFromArray(frame.data(), static_cast<int>(frame.size()))) {
    return FrameKind::kGarbage;
  }
  // Random bytes sometimes parse as an envelope of unknown fields; a real one always names version
  // and build.
  if (envelope->version() == 0 || envelope->build().empty()) return FrameKind::kGarbage;
  if (envelope->version() != kProtocolVersion) return FrameKind::kOtherVersion;
  return envelope->body_case() == proto::Envelope::BODY_NOT_SET ? FrameKind::kGarbage
                                                                : FrameKind::kGood;
}

std::string version_mismatch(const proto::Envelope& theirs) {
  return fmt::format(
      "the peer speaks protocol {} (build {}), this process speaks protocol {} (build {}): run the "
      "same muster everywhere",
      theirs.version(), theirs.build().substr(0, 40), kProtocolVersion, kBuildVersion);
}

}  // namespace transport
}  // namespace muster
