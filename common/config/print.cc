// Config → text: the resolved file of a run, and the table of --help.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "common/config/config.h"
#include "common/config/fields.h"

namespace muster {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\u{:04x}", byte);
    } else {
      out += c;
    }
  }
  return out + "\"";
}

struct ToToml {
  std::string operator()(const bool* value) const { return *value ? "true" : "false"; }
  std::string operator()(const int64_t* value) const { return std::to_string(*value); }
  std::string operator()(const uint64_t* value) const { return std::to_string(*value); }
  std::string operator()(const double* value) const {
    // The shortest digits that read back to the same double; a TOML float needs a point or an
    // exponent.
    std::string text = fmt::format("{}", *value);
    if (text.find_first_of(".e") == std::string::npos) text += ".0";
    return text;
  }
  std::string operator()(const std::string* value) const { return quoted(*value); }
  std::string operator()(const std::vector<std::string>* value) const {
    std::vector<std::string> items;
    items.reserve(value->size());
    for (const std::string& item : *value) items.push_back(quoted(item));
    return fmt::format("[{}]", fmt::join(items, ", "));
  }
};

// Calls visit(field, "key = value") for every field, and begin(section) before the first of each
// section.
template <typename Begin, typename Visit>
void for_each_field(const Config& config, Begin begin, Visit visit) {
  Config copy = config;  // slots are mutable; reading through them needs an object of our own
  std::string section;
  for (const ConfigField& field : config_fields()) {
    if (field.section != section) begin(section = field.section);
    visit(field, fmt::format("{} = {}", field.name, std::visit(ToToml{}, field.slot(copy))));
  }
}

}  // namespace

std::string to_toml(const Config& config) {
  std::string out;
  for_each_field(
      config,
      [&](const std::string& section) {
        out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", section);
      },
      [&](const ConfigField&, const std::string& line) { out += line + "\n"; });
  return out;
}

std::string describe_config() {
  constexpr size_t kIndent = 34;  // where a line's meaning starts
  std::string out;
  for_each_field(
      Config{},
      [&](const std::string& section) {
        out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", section);
      },
      [&](const ConfigField& field, const std::string& line) {
        std::string allowed = allowed_values(field);
        if (!field.unit.empty()) allowed += (allowed.empty() ? "" : " ") + field.unit;
        out += fmt::format("  {:<{}}{}{}\n", line, kIndent, field.doc,
                           allowed.empty() ? "" : fmt::format(" ({})", allowed));
      });
  return out;
}

}  // namespace muster
