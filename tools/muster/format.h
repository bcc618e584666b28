// Numbers and progress as people read them.
#pragma once

#include <string>
#include <vector>

namespace muster {

namespace proto {
class Status;
}

// "4.2 s", "3 min 5 s", "2 h 7 min".
std::string format_duration(double seconds);
// "950", "12.3 k", "4.56 M", "7.89 G".
std::string format_count(double count);
// "step 120/1500 (8 %), loss 3.214, held-out 3.301, 12.3 k tokens/s"; parts that are not known yet
// are left out.
std::string progress_line(const proto::Status& status);
// How many workers have a rank in the generation.
int training_workers(const proto::Status& status);
// "2 files could not be used and were skipped; of 1 file some lines were left out"; "" where all
// were used whole.
std::string unused_files(const proto::Status& status);
// "[#####---------------]", `width` characters between the brackets.
std::string progress_bar(double share, int width);
// The argument as a POSIX shell reads it back.
std::string shell_quoted(const std::string& argument);
// "muster NAME ARGUMENTS…", as it is typed.
std::string command_line(const std::string& name, const std::vector<std::string>& arguments);

}  // namespace muster
