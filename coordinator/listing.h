// Names for people, of which there may be thousands: "a, b and 4094 more". Pure.
#pragma once

#include <cstddef>
#include <string>

namespace muster {

class Listing {
 public:
  // `name()` makes the text; only the first few are asked for it.
  template <typename Name>
  void add(Name name) {
    if (++count_ > kNamed) return;
    if (!text_.empty()) text_ += ", ";
    text_ += name();
  }
  bool empty() const { return count_ == 0; }
  std::string text() const {
    return count_ <= kNamed ? text_ : text_ + " and " + std::to_string(count_ - kNamed) + " more";
  }

 private:
  static constexpr size_t kNamed = 16;
  std::string text_;
  size_t count_ = 0;
};

}  // namespace muster
