// The one list of every configuration key. Parsing, printing, --help and the suggestion of a
// nearest key all walk it; a key that is not here does not exist.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "common/config/config.h"

namespace muster {

// Where a key's value lies in a Config.
using ConfigSlot =
    std::variant<bool*, int64_t*, uint64_t*, double*, std::string*, std::vector<std::string>*>;

struct ConfigField {
  std::string section;
  std::string name;
  std::function<ConfigSlot(Config&)> slot;
  // Inclusive bounds of a number. Unused for other types.
  double min = 0;
  double max = 0;
  // The words a string may be; empty: any. A choice that ends in ":N" stands for a whole number N
  // >= 1.
  std::vector<std::string> choices;
  std::string unit;  // "s", "steps", …; empty for plain numbers and strings
  std::string doc;   // one line

  std::string key() const { return section + "." + name; }
};

// Every field, in the order of the structs; sections are contiguous.
const std::vector<ConfigField>& config_fields();
// nullptr when there is no such key.
const ConfigField* find_config_field(std::string_view section, std::string_view name);
// Whether `value` is one of the field's choices.
bool is_choice(const ConfigField& field, const std::string& value);
// "1 to 64", "0 or more", "llama | gpt2"; empty when anything goes.
std::string allowed_values(const ConfigField& field);

}  // namespace muster
