// The commands that are one process of a run each.
#include <fmt/format.h>

#include "common/error.h"
#include "common/logging.h"
#include "coordinator/coordinator.h"
#include "data/service.h"
#include "tools/muster/command.h"
#include "tools/muster/format.h"
#include "tools/muster/options.h"
#include "tools/muster/workers.h"
#include "worker/agent/agent.h"
#include "worker/worker.h"

namespace muster {

namespace po = boost::program_options;

namespace {

// "worker/3f2a": enough of an id to tell the lines of two processes apart.
std::string log_name(const char* role, const std::string& id) {
  return id.empty() ? role : fmt::format("{}/{}", role, id.substr(0, 4));
}

// A TCP address with a port, or an abstract socket, which leaves no file behind.
void check_listen(const std::string& endpoint) {
  if (endpoint.starts_with("ipc://@") && endpoint.size() > 7) return;
  const size_t colon = endpoint.rfind(':');
  const std::string port = endpoint.substr(colon == std::string::npos ? 0 : colon + 1);
  const bool is_port = !port.empty() && port.size() <= 5 &&
                       port.find_first_not_of("0123456789") == std::string::npos &&
                       std::stoi(port) <= 65535;
  if (endpoint.starts_with("tcp://") && colon > 6 && is_port) return;
  throw UsageError(fmt::format(
      "--listen {}: must be tcp://HOST:PORT (HOST * for all addresses, PORT 0 for a free one) or "
      "ipc://@NAME",
      endpoint));
}

void add_member_options(Options& options) {
  options.add_coordinator();
  options.add()("member-id", po::value<std::string>()->value_name("ID")->default_value(""),
                "this process's name in the run; empty: a random one")(
      "node-id", po::value<std::string>()->value_name("ID")->default_value(""),
      "the node agent's member id; empty when run by hand");
}

}  // namespace

int coordinator_command(const Arguments& arguments) {
  Options options(
      "coordinator CONFIG [--listen ENDPOINT] [--set section.key=value]…",
      "Runs the control plane of a run: admits workers, plans every step, commits checkpoints.\n"
      "Ctrl-C once: finish the step, save, leave; twice: leave now.");
  options.positional("CONFIG");
  options.add()(
      "listen", po::value<std::string>()->value_name("ENDPOINT")->default_value("tcp://*:29400"),
      "where to listen; beyond this machine only with the run's key, which is made in the "
      "run directory")("set", po::value<std::vector<std::string>>()->value_name("KEY=VALUE"),
                       "override a key of the config; may be repeated");
  options.add()("rejoin", po::value<bool>()->value_name("yes|no")->default_value(true, "yes"),
                "go on with the members of a coordinator that was killed in this run directory")(
      "resume-command", po::value<std::string>()->value_name("TEXT")->default_value(""),
      "what to tell people to type to go on with the run; empty: this command");
  options.add_run_key();
  if (!options.parse(arguments)) return 0;
  init_logging("coordinator");
  CoordinatorOptions coordinator;
  coordinator.config = load_config(options.required("CONFIG"), options.all("set"));
  coordinator.listen = options.get<std::string>("listen");
  check_listen(coordinator.listen);
  coordinator.security = options.security();
  coordinator.rejoin = options.get<bool>("rejoin");
  coordinator.resume_command = options.get<std::string>("resume-command");
  if (coordinator.resume_command.empty()) {
    coordinator.resume_command = command_line("coordinator", arguments);
  }
  return run_coordinator(coordinator);
}

int node_command(const Arguments& arguments) {
  Options options(
      "node --coordinator ENDPOINT [--workers N]",
      "Joins this machine to a run: starts its data service and workers and watches them.\n"
      "Ctrl-C once: its workers hand their state over, and the node leaves; twice: leave now.");
  options.add_coordinator();
  options.add()("workers", po::value<int>()->value_name("N")->default_value(0),
                "worker processes; 0: one per two CPU cores")(
      "connect-timeout", po::value<double>()->value_name("S")->default_value(30.0),
      "seconds to wait for the coordinator");
  if (!options.parse(arguments)) return 0;
  if (options.get<int>("workers") < 0) options.fail("--workers must be 0 or more");
  if (!(options.get<double>("connect-timeout") > 0)) {
    options.fail("--connect-timeout must be above 0");
  }
  init_logging("node");
  AgentOptions agent;
  agent.coordinator = options.required("coordinator");
  agent.security = options.security();
  agent.workers = options.get<int>("workers");
  if (agent.workers == 0) agent.workers = workers_of_machine({});
  agent.connect_timeout_s = options.get<double>("connect-timeout");
  return run_agent(agent);
}

int worker_command(const Arguments& arguments) {
  Options options(
      "worker --coordinator ENDPOINT",
      "Runs one worker. The node agent starts its workers by this command; a worker that is\n"
      "started by hand needs a data service of the same --node-id on its machine.");
  add_member_options(options);
  options.add()("workers-on-node", po::value<int>()->value_name("N")->default_value(1),
                "workers that share this machine's cores")(
      "local-rank", po::value<int>()->value_name("I")->default_value(0),
      "which of them this is, from 0: it takes the GPU of that number");
  if (!options.parse(arguments)) return 0;
  WorkerOptions worker;
  worker.coordinator = options.required("coordinator");
  worker.security = options.security();
  worker.member_id = options.get<std::string>("member-id");
  worker.node_id = options.get<std::string>("node-id");
  worker.workers_on_node = options.get<int>("workers-on-node");
  worker.local_rank = options.get<int>("local-rank");
  init_logging(log_name("worker", worker.member_id));
  return run_worker(worker);
}

int data_command(const Arguments& arguments) {
  Options options(
      "data --coordinator ENDPOINT",
      "Runs a node's data service: reads the text sources and hands micro-batches to the\n"
      "node's workers. The node agent starts it by this command.");
  add_member_options(options);
  if (!options.parse(arguments)) return 0;
  DataServiceOptions data;
  data.coordinator = options.required("coordinator");
  data.security = options.security();
  data.member_id = options.get<std::string>("member-id");
  data.node_id = options.get<std::string>("node-id");
  init_logging(log_name("data", data.member_id));
  return run_data_service(data);
}

}  // namespace muster
