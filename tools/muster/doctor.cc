// muster doctor.
#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "common/error.h"
#include "common/files.h"
#include "common/process.h"
#include "common/transport/transport.h"
#include "kernels/cuda/gpu.h"
#include "tools/muster/command.h"
#include "tools/muster/options.h"
#include "worker/agent/agent.h"
#include "worker/comm/nccl_communicator.h"

namespace muster {
namespace {

enum class Verdict { kGood, kWarning, kBad };

struct Finding {
  std::string what;
  std::string value;
  Verdict verdict = Verdict::kGood;
  std::string advice = {};  // what is wrong and what to do about it
};

constexpr double kGiB = 1 << 30;

// First line of the form "NAME : VALUE" in a file under /proc; "" when there is none.
std::string proc_value(const std::string& path, const std::string& name) {
  std::istringstream text(read_file(path));
  for (std::string line; std::getline(text, line);) {
    if (!line.starts_with(name)) continue;
    const size_t begin = line.find_first_not_of(" \t:", name.size());
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

// "max 100000" or "200000 100000" → cores; 0 when there is no limit.
double cgroup_cores() {
  try {
    std::istringstream text(read_file("/sys/fs/cgroup/cpu.max"));
    double quota = 0, period = 0;
    return text >> quota >> period ? quota / period : 0.0;
  } catch (const IoError&) {
    return 0.0;  // no cgroup v2 here
  }
}

Finding check_cores() {
  cpu_set_t allowed;
  const int cores = ::sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  const double limit = cgroup_cores();
  Finding finding{"CPU cores", std::to_string(cores)};
  const std::string model = proc_value("/proc/cpuinfo", "model name");
  if (!model.empty()) finding.value += " (" + model + ")";
  if (limit > 0 && limit < cores) {
    finding.verdict = Verdict::kWarning;
    finding.advice =
        fmt::format("the container may use {:.1f} of them only: set parallel.threads", limit);
  } else if (cores < 2) {
    finding.verdict = Verdict::kWarning;
    finding.advice = "coordinator, data service and worker share one core";
  }
  return finding;
}

Finding check_vectors() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) {
    return {"vector instructions", "AVX-512"};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {"vector instructions", "AVX2"};
  }
  return {"vector instructions", "no AVX2", Verdict::kWarning, "training on this CPU is slow"};
}

Finding check_memory() {
  const double total = std::stod(proc_value("/proc/meminfo", "MemTotal")) * 1024 / kGiB;
  const double available = std::stod(proc_value("/proc/meminfo", "MemAvailable")) * 1024 / kGiB;
  Finding finding{"memory", fmt::format("{:.1f} GiB, {:.1f} GiB available", total, available)};
  if (available < 1.0) {
    finding.verdict = Verdict::kWarning;
    finding.advice = "less than 1 GiB is available: close programs or lower data.cache_mib";
  }
  return finding;
}

Finding check_open_files() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  Finding finding{"open files", fmt::format("{} (at most {})", limit.rlim_cur, limit.rlim_max)};
  constexpr rlim_t kEnough = 1024;
  if (limit.rlim_cur < kEnough) {
    finding.verdict = Verdict::kWarning;
    finding.advice = fmt::format("many workers need more: ulimit -n {}", kEnough);
  }
  return finding;
}

// Tries something that every run needs.
Finding check_by_doing(const std::string& what, const std::string& advice,
                       const std::function<void()>& action) {
  try {
    action();
    return {what, "works"};
  } catch (const Error& error) {
    return {what, error.what(), Verdict::kBad, advice};
  }
}

Finding check_kernel() {
  utsname name{};
  ::uname(&name);
  Finding finding{"Linux", name.release};
  if (!open_pidfd(::getpid()).valid()) {
    finding.verdict = Verdict::kBad;
    finding.advice = "child processes cannot be watched (pidfd): Linux 5.9 or newer is needed";
  }
  return finding;
}

// By making a context on it, as a worker would.
Finding check_gpu_by_doing(const GpuInfo& gpu) {
  GpuProbe probe = probe_gpu(gpu.index);
  Finding finding{fmt::format("GPU {}", gpu.index),
                  fmt::format("{}, compute capability {}.{}, {:.1f} GiB", gpu.name, gpu.major,
                              gpu.minor, static_cast<double>(gpu.memory_bytes) / kGiB)};
  if (probe.gpu.free_bytes >= 0) {
    finding.value +=
        fmt::format(", {:.1f} GiB free", static_cast<double>(probe.gpu.free_bytes) / kGiB);
  }
  finding.value += ", " + gpu.uuid;
  if (probe.problem == GpuProblem::kNone && probe.gpu.free_bytes < kLeastGpuMemory) {
    probe.problem = GpuProblem::kFull;
  }
  if (probe.problem != GpuProblem::kNone) {
    finding.verdict = Verdict::kWarning;
    finding.advice = explain_gpu(probe, gpu.index, kLeastGpuMemory);
  }
  return finding;
}

Finding check_nccl(bool needed) {
  const NcclReport report = find_nccl();
  if (report.problem.empty()) return {"NCCL", report.version};
  return {"NCCL", "none", needed ? Verdict::kWarning : Verdict::kGood,
          needed ? report.problem : ""};
}

Finding check_driver(const NvmlReport& report) {
  Finding finding{"NVIDIA driver", report.driver.empty() ? "none" : report.driver};
  if (!report.problem.empty()) {
    finding.verdict = Verdict::kWarning;
    finding.advice = report.problem;
  }
  return finding;
}

std::vector<Finding> check_gpus() {
  const NvmlReport report = ask_nvml();
  const std::vector<GpuInfo> usable = list_gpus();
  std::vector<Finding> findings;
  for (const GpuInfo& gpu : usable) findings.push_back(check_gpu_by_doing(gpu));
  if (usable.empty()) {
    for (const NvmlGpu& gpu : report.gpus) {
      findings.push_back(
          {fmt::format("GPU {}", findings.size()),
           fmt::format("{}, {:.1f} GiB", gpu.name, static_cast<double>(gpu.memory_bytes) / kGiB),
           Verdict::kWarning, explain_gpu(probe_gpu(0), static_cast<int>(findings.size()), 0)});
    }
  }
  if (findings.empty()) findings.push_back({"GPU", "none"});
  findings.push_back(check_driver(report));
#ifdef MUSTER_WITH_CUDA
  findings.push_back({"GPU code", "built in"});
#else
  findings.push_back({"GPU code", "not built in"});
#endif
  findings.push_back(check_nccl(usable.size() > 1));
  return findings;
}

Finding check_cache() {
  const std::string dir = default_cache_dir();
  return check_by_doing("cache " + dir, "set data.cache_dir to a folder that can be written", [&] {
    make_dirs(dir);
    const std::string probe = fmt::format("{}/.doctor-{}", dir, ::getpid());
    write_file_atomic(probe, "");
    ::unlink(probe.c_str());
  });
}

std::vector<Finding> examine() {
  std::vector<Finding> findings = {{"muster", kBuildVersion}, check_kernel(), check_cores(),
                                   check_vectors(),           check_memory(), check_open_files()};
  findings.push_back(check_by_doing("shared memory (memfd)", "a sandbox forbids memfd_create",
                                    [] { SharedMemory::create("muster-doctor", 1 << 20); }));
  findings.push_back(check_by_doing("loopback network", "bring the interface lo up",
                                    [] { Server("tcp://127.0.0.1:0", Security{}); }));
  findings.push_back(check_cache());
  for (Finding& finding : check_gpus()) findings.push_back(std::move(finding));
  findings.push_back({"workers by default", std::to_string(default_workers())});
  return findings;
}

const char* mark(Verdict verdict) {
  switch (verdict) {
    case Verdict::kGood:
      return "ok";
    case Verdict::kWarning:
      return "warning";
    case Verdict::kBad:
      return "bad";
  }
  return "";
}

}  // namespace

int doctor_command(const Arguments& arguments) {
  Options options("doctor [--json]",
                  "Shows what this machine can run, and what is wrong with it.\n"
                  "Exits with 1 when something keeps every run from working.");
  options.add()("json", "print one JSON object");
  if (!options.parse(arguments)) return 0;
  const std::vector<Finding> findings = examine();
  bool bad = false;
  nlohmann::ordered_json json;
  for (const Finding& finding : findings) {
    bad = bad || finding.verdict == Verdict::kBad;
    json[finding.what] = {
        {"value", finding.value}, {"verdict", mark(finding.verdict)}, {"advice", finding.advice}};
    if (options.has("json")) continue;
    fmt::print("{:<8} {:<22} {}\n", mark(finding.verdict), finding.what, finding.value);
    if (!finding.advice.empty()) fmt::print("{:<8} {:<22} → {}\n", "", "", finding.advice);
  }
  if (options.has("json")) fmt::print("{}\n", json.dump(2));
  return bad ? 1 : 0;
}

}  // namespace muster
