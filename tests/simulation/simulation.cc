#include "simulation/simulation.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "simulation/simulated_server.h"
#include "simulation/simulated_slot.h"

namespace poseidon::testing {

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kPause{2};
constexpr auto kCalmPatience = seconds(20);  // in calm everybody has gone on by then
constexpr auto kEndPatience = seconds(20);   // for threads to end
constexpr std::uint64_t kCalmSteps = 3;

enum Salt : std::uint64_t {
  kWorkers = 41,
  kOnFailure,
  kTimeout,
  kCores,
  kFlows,
  kClasses,
  kChunkBytes,
  kGroupBytes,
  kWeather,
  kDelays,
  kAggregation,
  kServers,
  kOrder,
  kAssignment,
  kWorkerCores,
  kHosts,
  kRacks,
};

/// One scenario's choices.
class Choice {
 public:
  explicit Choice(std::uint64_t seed) : seed_(seed) {}
  std::uint64_t below(std::uint64_t bound, Salt salt) const { return mix(mix(seed_, salt), 0) % bound; }
  template <typename T>
  T of(std::initializer_list<T> values, Salt salt) const {
    return *(values.begin() + below(values.size(), salt));
  }

 private:
  const std::uint64_t seed_;
};

/// Dedicated servers have the slots after the workers'.
int server_slot(const Options& options, std::size_t server) { return options.world_size + static_cast<int>(server); }

/// The slots of one run.
class Cluster {
 public:
  explicit Cluster(const Scenario& scenario) : scenario_(scenario), shared_(scenario.seed, scenario.options) {
    shared_.network = std::make_shared<FaultyNetwork>(
        FaultyNetwork::Settings{scenario.seed, scenario.rates, scenario.longest_delay, scenario.longest_partition});
    shared_.host_count = scenario.host_count;
    shared_.in_racks = scenario.in_racks;
    shared_.computing = scenario.computing;
    shared_.store = std::make_shared<SimulatedStore>(shared_.network, scenario.options.timeout);
    for (int slot = 0; slot < scenario.options.world_size; ++slot)
      slots_.push_back(std::make_unique<SimulatedSlot>(shared_, slot));
    for (std::size_t i = 0; i < scenario.options.servers.size(); ++i)
      servers_.push_back(std::make_unique<SimulatedServer>(shared_, server_slot(scenario.options, i)));
  }

  SimulationResult run() {
    supervise_until(Clock::now() + scenario_.longest_storm, [this] {
      return shared_.network->log().total() >= scenario_.fault_budget || most_committed() >= scenario_.most_storm_steps;
    });
    shared_.network->calm();
    const std::uint64_t goal = most_committed() + kCalmSteps;
    const auto all_go_on = [&] { return least_committed() >= goal && all_together(); };
    supervise_until(Clock::now() + kCalmPatience, all_go_on);
    if (!all_go_on() && shared_.errors().empty())
      shared_.report("a hang: in calm not everybody has committed " + std::to_string(goal) +
                     " steps in one generation");
    const std::string before_end = describe_slots();
    end();
    check_histories();
    return result(before_end);
  }

 private:
  /// Until the condition holds, or something is wrong.
  template <typename Condition>
  void supervise_until(Clock::time_point deadline, const Condition& condition) {
    while (!condition() && Clock::now() < deadline && shared_.errors().empty()) {
      for (const auto& slot : slots_) slot->supervise();
      for (const auto& server : servers_) server->supervise();
      pause_for(kPause);
    }
  }

  std::uint64_t least_committed() const {
    std::uint64_t least = ~std::uint64_t{0};
    for (const auto& slot : slots_) least = std::min(least, slot->present().committed());
    return least;
  }
  std::uint64_t most_committed() const {
    std::uint64_t most = 0;
    for (const auto& slot : slots_) most = std::max(most, slot->present().committed());
    return most;
  }

  bool all_together() const {
    return std::ranges::all_of(slots_, [this](const auto& slot) {
      return slot->present().generation() == slots_.front()->present().generation();
    });
  }

  void end() {
    shared_.stop = true;
    const auto deadline = Clock::now() + kEndPatience;
    for (const auto& slot : slots_) {
      while (!slot->all_ended() && Clock::now() < deadline) pause_for(kPause);
      if (slot->all_ended()) continue;
      std::fprintf(stderr, "a simulated process does not end\n%s\n%s", describe(scenario_).c_str(), report().c_str());
      std::abort();
    }
  }

  /// All agree on who took part in which step.
  void check_histories() {
    const auto newest = std::ranges::max_element(slots_, {}, [](const auto& slot) {
      return std::pair(slot->present().agreed_generation(), slot->present().state().committed());
    });
    const SimulatedWorker& reference = (*newest)->present();
    for (const auto& slot : slots_) {
      const SimulatedWorker& worker = slot->present();
      // Others may have gone on without it (shrink) just before the end.
      if (worker.agreed_generation() != reference.agreed_generation()) continue;
      const auto& members = worker.state().members;
      if (!std::equal(members.begin(), members.end(), reference.state().members.begin()))
        shared_.report("the others have other steps than " + worker.describe());
    }
  }

  std::string describe_slots() const {
    std::string text;
    for (const auto& slot : slots_) text += slot->describe();
    return text;
  }

  std::string report() const { return describe_slots() + "the last faults:\n" + shared_.network->log().last(); }

  SimulationResult result(const std::string& before_end) const {
    SimulationResult result;
    result.faults = shared_.network->log().counts();
    result.step_count = least_committed();
    for (const auto& slot : slots_)
      result.generation_count = std::max(result.generation_count, slot->generation_count());
    for (const std::string& error : shared_.errors()) result.failure += error + "\n";
    if (!result.failure.empty())
      result.failure += describe(scenario_) + "\nbefore the end:\n" + before_end + "after it:\n" + report();
    return result;
  }

  const Scenario scenario_;
  SimulatedCluster shared_;
  std::vector<std::unique_ptr<SimulatedServer>> servers_;
  std::vector<std::unique_ptr<SimulatedSlot>> slots_;
};

}  // namespace

Scenario make_scenario(std::uint64_t seed, std::size_t fault_budget) {
  const Choice choice(seed);
  Scenario scenario;
  scenario.seed = seed;
  scenario.fault_budget = fault_budget;
  Options& options = scenario.options;
  options.world_size = 2 + static_cast<int>(choice.below(4, kWorkers));
  scenario.host_count = choice.of({1, 2, 3}, kHosts);
  scenario.in_racks = choice.below(2, kRacks) == 0;
  options.interfaces = {"127.0.0.1"};
  options.transport = Medium::tcp;  // its place is the network's
  options.run = "a simulated run";  // whose processes may all be lost, while the store of their launcher is not
  options.on_failure = choice.below(4, kOnFailure) == 0 ? OnFailure::shrink : OnFailure::rejoin;
  options.timeout = milliseconds(70 + choice.below(130, kTimeout));
  options.server_cores = static_cast<int>(choice.below(3, kCores));
  options.worker_cores = choice.of({0, 0, 1, 2}, kWorkerCores);
  options.flows = 1 + static_cast<int>(choice.below(2, kFlows));
  options.priority_classes = 1 + static_cast<int>(choice.below(2, kClasses));
  options.chunk_bytes = choice.of<std::size_t>({256, 1024, 65'536}, kChunkBytes);
  options.small_bytes = 200;
  options.group_bytes = choice.of<std::size_t>({64, 4096}, kGroupBytes);
  options.aggregation = choice.of(
      {Aggregation::streaming, Aggregation::streaming, Aggregation::at_once, Aggregation::wide}, kAggregation);
  options.reduce_order = choice.of({ReduceOrder::rank, ReduceOrder::rank, ReduceOrder::arrival}, kOrder);
  if (choice.below(6, kAssignment) == 0) options.assignment = Assignment::worker;
  const std::size_t server_count = choice.of<std::size_t>({0, 0, 0, 1, 2}, kServers);
  for (std::size_t i = 0; i < server_count; ++i)
    options.servers.push_back(SimulatedServer::address_in(server_slot(options, i)));

  // Most messages are among some hundred of one step: a fault that ends the generation must not come in every step.
  const double weather = choice.of({0.3, 1.0, 2.0, 6.0}, kWeather);
  scenario.rates[Fault::drop] = 0.0008 * weather;
  scenario.rates[Fault::delay] = 0.002 * weather;
  scenario.rates[Fault::duplicate] = 0.0008 * weather;
  scenario.rates[Fault::reorder] = 0.002 * weather;
  scenario.rates[Fault::cut] = 0.0006 * weather;
  scenario.rates[Fault::half_cut] = 0.0003 * weather;
  scenario.rates[Fault::partition] = 0.0004 * weather;
  scenario.rates[Fault::refusal] = 0.02 * weather;
  scenario.rates[Fault::kill] = 0.0003 * weather;
  scenario.rates[Fault::replace] = 0.0001 * weather;
  scenario.longest_delay = milliseconds(choice.of({2, 10, 40}, kDelays));
  scenario.longest_partition = options.timeout * 3 / 2;
  return scenario;
}

Scenario make_hour(std::uint64_t seed) {
  Scenario scenario;
  scenario.seed = seed;
  scenario.computing = seconds(1);
  scenario.longest_storm = std::chrono::hours(1);
  scenario.fault_budget = scenario.most_storm_steps = ~std::uint64_t{0};
  scenario.longest_delay = milliseconds(300);
  scenario.longest_partition = seconds(6);
  Options& options = scenario.options;
  options.world_size = 4;
  options.interfaces = {"127.0.0.1"};
  options.transport = Medium::tcp;
  options.run = "a simulated run";
  options.on_failure = OnFailure::rejoin;
  options.timeout = seconds(4);
  options.chunk_bytes = 65'536;
  options.small_bytes = 200;
  options.group_bytes = 4096;
  for (const Fault fault : {Fault::drop, Fault::delay, Fault::duplicate, Fault::reorder}) scenario.rates[fault] = 1e-4;
  for (const Fault fault : {Fault::cut, Fault::half_cut, Fault::partition, Fault::kill}) scenario.rates[fault] = 2e-5;
  scenario.rates[Fault::refusal] = 0.02;
  scenario.rates[Fault::replace] = 1e-5;
  return scenario;
}

std::string describe(const Scenario& scenario) {
  const Options& options = scenario.options;
  const auto number = [](const char* name, std::size_t value) { return std::string(name) + std::to_string(value); };
  return number("SIMULATION_SEED=", scenario.seed) +
         number(": workers ", static_cast<std::size_t>(options.world_size)) +
         number(", machines ", static_cast<std::size_t>(scenario.host_count)) + (scenario.in_racks ? " in racks" : "") +
         number(", dedicated servers ", options.servers.size()) +
         (options.on_failure == OnFailure::shrink ? ", shrink" : ", rejoin") +
         number(", timeout ms ", static_cast<std::size_t>(options.timeout.count())) +
         number(", server_cores ", static_cast<std::size_t>(options.server_cores)) +
         number(", worker_cores ", static_cast<std::size_t>(options.worker_cores)) +
         number(", flows ", static_cast<std::size_t>(options.flows)) +
         number(", priority_classes ", static_cast<std::size_t>(options.priority_classes)) +
         number(", chunk_bytes ", options.chunk_bytes) + number(", group_bytes ", options.group_bytes) +
         number(", aggregation ", static_cast<std::size_t>(options.aggregation)) +
         number(", reduce_order ", static_cast<std::size_t>(options.reduce_order)) +
         number(", assignment ", static_cast<std::size_t>(options.assignment));
}

SimulationResult run(const Scenario& scenario, bool keeps_trace) {
  SimulatedWorld world(scenario.seed);
  if (keeps_trace) world.trace().keep();
  SimulationResult result;
  world.run([&] { result = Cluster(scenario).run(); });
  result.virtual_time = world.elapsed();
  result.turn_count = world.turn_count();
  result.trace = std::move(world.trace());
  return result;
}

}  // namespace poseidon::testing
