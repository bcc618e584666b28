#include "worker/generate/generate.h"

#include <fmt/format.h>

#include <cstdio>

#include "tools/muster/command.h"
#include "tools/muster/options.h"

namespace muster {

namespace po = boost::program_options;

int generate_command(const Arguments& arguments) {
  const GenerateOptions defaults;
  Options options(
      "generate CHECKPOINT --prompt TEXT",
      "Prints TEXT and continues it. CHECKPOINT is a checkpoint's folder, or a run directory,\n"
      "whose newest whole checkpoint is taken.");
  options.positional("CHECKPOINT");
  options.add()("prompt", po::value<std::string>()->value_name("TEXT"),
                "what to continue (required)")(
      "tokens", po::value<int64_t>()->value_name("N")->default_value(defaults.tokens),
      "at most this many tokens")(
      "temperature",
      po::value<double>()->value_name("T")->default_value(defaults.sampling.temperature),
      "above 1: more surprising; 0: always the likeliest token")(
      "top-k", po::value<int64_t>()->value_name("K")->default_value(defaults.sampling.top_k),
      "only among the K likeliest tokens; 0: all")(
      "seed", po::value<uint64_t>()->value_name("N")->default_value(defaults.seed),
      "the same seed gives the same text");
  if (!options.parse(arguments)) return 0;
  const std::string checkpoint = options.required("CHECKPOINT");
  const std::string prompt = options.required("prompt");
  GenerateOptions generation;
  generation.tokens = options.get<int64_t>("tokens");
  generation.sampling.temperature = options.get<double>("temperature");
  generation.sampling.top_k = options.get<int64_t>("top-k");
  generation.seed = options.get<uint64_t>("seed");
  bool prompt_printed = false;  // not before the model is there: an error should stand alone
  generate(checkpoint, prompt, generation, [&](std::string_view bytes) {
    if (!prompt_printed) fmt::print("{}", prompt);
    prompt_printed = true;
    std::fwrite(bytes.data(), 1, bytes.size(), stdout);
    std::fflush(stdout);
  });
  if (!prompt_printed) fmt::print("{}", prompt);
  fmt::print("\n");
  return 0;
}

}  // namespace muster
