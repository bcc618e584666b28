#include "common/config/config.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <sstream>

#include "common/config/fields.h"
#include "common/config/resolve.h"
#include "common/config/suggest.h"
#include "common/error.h"
#include "common/files.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

constexpr const char* kOverrideOrigin = "--set";

// Builds a Config from a file's text and then from overrides, and remembers where each key came
// from.
class ConfigReader {
 public:
  explicit ConfigReader(std::string origin) : origin_(std::move(origin)) {}

  void read_file(const std::string& text);
  void read_override(const std::string& assignment);
  void resolve_sources(const fs::path& folder);
  Config finish();

 private:
  void read_section(const std::string& section, const toml::table& table);
  void assign(const ConfigField& field, const toml::node& value, const std::string& place);
  std::string at(const toml::source_region& source) const;

  std::string origin_;
  Config config_;
  std::map<std::string, std::string> places_;  // key → "FILE:LINE" or "--set"
};

std::string type_name(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::table:
      return "a table";
    case toml::node_type::array:
      return "a list";
    case toml::node_type::string:
      return "a string";
    case toml::node_type::integer:
      return "a whole number";
    case toml::node_type::floating_point:
      return "a number with a fraction";
    case toml::node_type::boolean:
      return "true or false";
    default:
      return "a date or time";
  }
}

[[noreturn]] void fail(const std::string& place, const std::string& key, const std::string& why) {
  throw ConfigError(fmt::format("{}: {}: {}", place, key, why));
}

[[noreturn]] void unknown_key(const std::string& place, const std::string& section,
                              const std::string& name) {
  const std::string guess = nearest_config_key(section, name);
  const std::string key = section.empty() ? name : section + "." + name;
  if (!guess.empty()) fail(place, key, fmt::format("unknown key; did you mean {}?", guess));
  fail(place, key, "unknown key; `muster train --help` lists all keys");
}

[[noreturn]] void unknown_section(const std::string& place, const std::string& section) {
  std::vector<std::string> sections;
  for (const ConfigField& field : config_fields()) {
    if (sections.empty() || sections.back() != field.section) sections.push_back(field.section);
  }
  const std::string guess = nearest(section, sections);
  if (!guess.empty()) {
    fail(place, "[" + section + "]", fmt::format("unknown section; did you mean [{}]?", guess));
  }
  fail(place, "[" + section + "]", "unknown section; `muster train --help` lists all keys");
}

// Whether this is a whole number as TOML writes them, of more digits than its 64 bits hold.
bool has_too_many_digits(std::string text) {
  std::erase(text, '_');
  if (text.starts_with('+')) text.erase(0, 1);
  int64_t number = 0;
  const char* end = text.data() + text.size();
  const std::from_chars_result result = std::from_chars(text.data(), end, number);
  return result.ec == std::errc::result_out_of_range && result.ptr == end;
}

bool is_number(const ConfigField& field) {
  Config scratch;
  const ConfigSlot slot = field.slot(scratch);
  return std::holds_alternative<int64_t*>(slot) || std::holds_alternative<uint64_t*>(slot) ||
         std::holds_alternative<double*>(slot);
}

[[noreturn]] void too_many_digits(const std::string& place, const ConfigField& field,
                                  const std::string& number) {
  const bool unbounded = !std::isfinite(field.max);
  fail(place, field.key(),
       fmt::format(
           "{} is out of range: {}{}{}", number,
           unbounded ? fmt::format("{:.12g} to {}", field.min, std::numeric_limits<int64_t>::max())
                     : allowed_values(field),
           field.unit.empty() ? "" : " ", field.unit));
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r") + 1 - begin);
}

// If the line (from 1) of a text that is no TOML gives a key of ours too large a whole number:
// throws ConfigError with the key's range, where the parser would speak of its own types.
void explain_large_number(const std::string& text, size_t line, const std::string& place) {
  std::istringstream lines(text);
  std::string section, current;
  for (size_t i = 0; i < line && std::getline(lines, current); ++i) {
    current = trimmed(current.substr(0, current.find('#')));
    if (current.starts_with('[') && current.ends_with(']')) {
      section = trimmed(current.substr(1, current.size() - 2));
    }
  }
  const size_t equals = current.find('=');
  if (equals == std::string::npos) return;
  const ConfigField* field = find_config_field(section, trimmed(current.substr(0, equals)));
  const std::string number = trimmed(current.substr(equals + 1));
  if (field == nullptr || !is_number(*field) || !has_too_many_digits(number)) return;
  too_many_digits(place, *field, number);
}

bool is_section(std::string_view name) {
  return std::any_of(config_fields().begin(), config_fields().end(),
                     [&](const ConfigField& field) { return field.section == name; });
}

// Stores a TOML value into the field's slot; throws ConfigError with the place on another type or
// range.
class Assigner {
 public:
  Assigner(const ConfigField& field, const toml::node& value, const std::string& place)
      : field_(field), value_(value), place_(place) {}

  void operator()(bool* slot) const { *slot = typed<bool>("true or false"); }
  void operator()(int64_t* slot) const { *slot = whole_number(); }
  void operator()(uint64_t* slot) const { *slot = static_cast<uint64_t>(whole_number()); }
  void operator()(double* slot) const {
    // TOML's 1 is as good as 1.0 here.
    const double number = value_.is_integer() ? static_cast<double>(*value_.value_exact<int64_t>())
                                              : typed<double>("a number");
    check_range(number);
    *slot = number;
  }
  void operator()(std::string* slot) const {
    auto text = typed<std::string>("a string");
    if (!is_choice(field_, text)) {
      const std::string guess = nearest(text, field_.choices);
      fail(place_, field_.key(),
           fmt::format("\"{}\" is not one of {}{}", text, allowed_values(field_),
                       guess.empty() ? "" : fmt::format("; did you mean \"{}\"?", guess)));
    }
    *slot = std::move(text);
  }
  void operator()(std::vector<std::string>* slot) const {
    slot->clear();
    if (const auto text = value_.value_exact<std::string>()) {  // one needs no brackets
      slot->push_back(*text);
      return;
    }
    const toml::array* items = value_.as_array();
    if (items == nullptr) wrong_type("a list of strings", type_name(value_));
    for (const toml::node& item : *items) {
      const auto text = item.value_exact<std::string>();
      if (!text) wrong_type("a list of strings", type_name(item) + " in it");
      slot->push_back(*text);
    }
  }

 private:
  template <typename T>
  T typed(const char* wanted) const {
    const auto value = value_.value_exact<T>();
    if (!value) wrong_type(wanted, type_name(value_));
    return *value;
  }
  int64_t whole_number() const {
    const auto number = typed<int64_t>("a whole number");
    check_range(static_cast<double>(number));
    return number;
  }
  void check_range(double number) const {
    if (std::isfinite(number) && number >= field_.min && number <= field_.max) return;
    fail(place_, field_.key(),
         fmt::format("{} is out of range: {}{}{}", number, allowed_values(field_),
                     field_.unit.empty() ? "" : " ", field_.unit));
  }
  [[noreturn]] void wrong_type(const std::string& wanted, const std::string& found) const {
    fail(place_, field_.key(), fmt::format("must be {}, not {}", wanted, found));
  }

  const ConfigField& field_;
  const toml::node& value_;
  const std::string& place_;
};

std::string ConfigReader::at(const toml::source_region& source) const {
  return fmt::format("{}:{}", origin_, source.begin.line);
}

void ConfigReader::read_file(const std::string& text) {
  toml::table root;
  try {
    root = toml::parse(text, origin_);
  } catch (const toml::parse_error& error) {
    explain_large_number(text, error.source().begin.line, at(error.source()));
    throw ConfigError(fmt::format("{}: not valid TOML: {}", at(error.source()),
                                  std::string(error.description())));
  }
  for (const auto& [key, value] : root) {
    const std::string section(key.str());
    const toml::table* table = value.as_table();
    if (table == nullptr) {
      if (is_section(section)) {
        fail(at(key.source()), section, "is a section, write [" + section + "] on its own line");
      }
      unknown_key(at(key.source()), "", section);
    }
    if (!is_section(section)) unknown_section(at(key.source()), section);
    read_section(section, *table);
  }
}

void ConfigReader::read_section(const std::string& section, const toml::table& table) {
  for (const auto& [key, value] : table) {
    const std::string name(key.str());
    const ConfigField* field = find_config_field(section, name);
    if (field == nullptr) unknown_key(at(key.source()), section, name);
    assign(*field, value, at(key.source()));
  }
}

void ConfigReader::assign(const ConfigField& field, const toml::node& value,
                          const std::string& place) {
  std::visit(Assigner(field, value, place), field.slot(config_));
  places_[field.key()] = place;
}

// The value as TOML; what is no TOML, and a bare word for a string key, is taken as a string.
toml::table parse_override_value(const std::string& text, const ConfigField& field,
                                 const std::string& key) {
  Config scratch;
  const bool is_string = std::holds_alternative<std::string*>(field.slot(scratch));
  const bool is_bare = text.empty() || std::string("\"'[{").find(text.front()) == std::string::npos;
  if (is_string && is_bare) return toml::table{{"value", text}};
  try {
    return toml::parse("value = " + text, std::string_view(kOverrideOrigin));
  } catch (const toml::parse_error& error) {
    if (has_too_many_digits(text) && is_number(field))
      too_many_digits(kOverrideOrigin, field, text);
    if (is_bare) return toml::table{{"value", text}};
    fail(kOverrideOrigin, key,
         fmt::format("{} is not a TOML value: {}", text, std::string(error.description())));
  }
}

void ConfigReader::read_override(const std::string& assignment) {
  const size_t equals = assignment.find('=');
  const size_t dot = assignment.find('.');
  if (equals == std::string::npos || dot == std::string::npos || dot > equals ||
      assignment.find('\n') != std::string::npos) {
    throw ConfigError(fmt::format("{}: \"{}\" must have the form section.key=value",
                                  kOverrideOrigin, assignment));
  }
  const std::string section = assignment.substr(0, dot);
  const std::string name = assignment.substr(dot + 1, equals - dot - 1);
  const ConfigField* field = find_config_field(section, name);
  if (field == nullptr) unknown_key(kOverrideOrigin, section, name);
  const toml::table parsed =
      parse_override_value(assignment.substr(equals + 1), *field, field->key());
  assign(*field, *parsed.get("value"), kOverrideOrigin);
}

void ConfigReader::resolve_sources(const fs::path& folder) {
  // A path typed on the command line is relative to where it was typed, one in a file to the file.
  const auto place = places_.find("data.sources");
  const bool from_override = place != places_.end() && place->second == kOverrideOrigin;
  const fs::path base = from_override ? fs::current_path() : fs::current_path() / folder;
  for (std::string& source : config_.data.sources) {
    if (!source.empty()) source = (base / source).lexically_normal().string();
  }
}

Config ConfigReader::finish() {
  check_config(config_, [this](const std::string& key) {
    const auto place = places_.find(key);
    return (place == places_.end() ? origin_ : place->second) + ": " + key;
  });
  return config_;
}

}  // namespace

Config load_config(const std::string& path, const std::vector<std::string>& overrides) {
  std::string text;
  if (std::error_code error; fs::exists(path, error) && !fs::is_regular_file(path, error)) {
    throw ConfigError(path + ": is not a regular file");
  }
  try {
    text = read_file(path);
  } catch (const IoError& error) {
    throw ConfigError(error.what());
  }
  ConfigReader reader(path);
  reader.read_file(text);
  for (const std::string& assignment : overrides) reader.read_override(assignment);
  reader.resolve_sources(fs::path(path).parent_path());
  return reader.finish();
}

Config parse_config(const std::string& toml, const std::string& origin,
                    const std::vector<std::string>& overrides) {
  ConfigReader reader(origin);
  reader.read_file(toml);
  for (const std::string& assignment : overrides) reader.read_override(assignment);
  return reader.finish();
}

}  // namespace muster
