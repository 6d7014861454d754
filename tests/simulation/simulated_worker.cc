#include "simulation/simulated_worker.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>

#include "base/thread.h"
#include "simulation/simulated_world.h"
#include "transport/spread/spread_transport.h"
#include "worker/join.h"

namespace poseidon::testing {

namespace {

constexpr std::size_t kEndsKept = 12;
constexpr std::size_t kFactCount = 3;  // of each rank

constexpr std::uint32_t kCommunicator = 7;
constexpr std::uint64_t kStepsPerCollective = 3;

enum : std::uint64_t { kFirstStarted = 31, kChoice = 37, kCollective = 43 };

Layer numbers_layer(const std::string& name, std::size_t count) {
  Layer layer;
  layer.name = name;
  layer.dtype = DType::int64;
  layer.element_count = count;
  layer.scheme = Scheme::ps;
  return layer;
}

template <typename T>
std::span<std::byte> bytes_of(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

}  // namespace

void SimulatedCluster::report(const std::string& error) {
  const std::lock_guard lock(mutex_);
  errors_.push_back(error);
}

std::vector<std::string> SimulatedCluster::errors() const {
  const std::lock_guard lock(mutex_);
  return errors_;
}

SimulatedWorker::SimulatedWorker(SimulatedCluster& cluster, int slot)
    : cluster_(cluster),
      slot_(slot),
      node_(cluster.network->add_node(slot, slot != 0)),  // the store would be there twice
      state_(initial_state(cluster.seed)) {
  if (slot_ == 0) cluster_.store->serve(node_);
  store_ = cluster_.store->open(node_);
}

void SimulatedWorker::run() {
  bool has_place = true;
  while (alive() && has_place) {
    const Status status = take_part();
    has_place = status.message().find("is another process now") == std::string::npos;
    if (status.code() == ErrorCode::invalid_argument)
      cluster_.report(node_->name + ": " + status.message());  // nobody has done anything wrong
    const std::lock_guard lock(mutex_);
    ends_.push_back("in generation " + std::to_string(generation_) + ", " + phase_ + ": " +
                    std::string(error_code_name(status.code())) + ": " + status.message());
    if (ends_.size() > kEndsKept) ends_.erase(ends_.begin());
    phase_ = "between generations";
  }
  const std::string wrong = first_difference(state_, cluster_.closed_form.state(state_.members));
  if (!wrong.empty()) cluster_.report(node_->name + " ends with " + wrong);
  set_phase("ended");
  ended_ = true;
}

std::string SimulatedWorker::describe() const {
  const std::lock_guard lock(mutex_);
  const std::string_view fate = node_->dead ? ", killed, " : node_->replaced ? ", replaced, " : ", ";
  std::string text =
      node_->name + std::string(fate) + std::to_string(committed()) + " steps committed: " + phase_ + "\n";
  for (const std::string& end : ends_) text += "  " + end + "\n";
  return text;
}

void SimulatedWorker::set_phase(const std::string& phase) {
  const std::lock_guard lock(mutex_);
  phase_ = phase;
}

/// One generation, until it ends.
Status SimulatedWorker::take_part() {
  Generation generation;
  Status status = form(generation);
  if (status.ok()) status = agree(generation);
  while (status.ok() && alive()) status = step(generation);
  return status;
}

Status SimulatedWorker::form(Generation& generation) {
  set_phase("connecting");
  Options options = cluster_.options;
  options.rank = slot_;
  const int machine = slot_ % cluster_.host_count;
  options.machine = std::to_string(machine);
  if (cluster_.in_racks) options.rack = machine == 0 ? "first" : "second";
  options.generation = generation_;
  const auto keep_waiting = [this] { return alive(); };
  WorkerTransports transports;
  transports.networks.push_back(cluster_.network->transport(node_));
  if (options.worker_cores > 0)
    transports.spread.push_back(
        make_spread_transport(*transports.networks.front(), static_cast<std::size_t>(options.worker_cores)));
  auto client = join_job(options, store_, keep_waiting, std::move(transports));
  if (!client.ok()) return client.status();
  generation.client = std::move(client.value());
  if (generation.client->generation() <= generation_)
    cluster_.report(node_->name + " is in generation " + std::to_string(generation_) + " again");
  generation_ = generation.client->generation();
  ++generation_count_;

  set_phase("adding layers");
  auto model = generation.client->add_layers(model_layers(), false, keep_waiting);
  if (!model.ok()) return model.status();
  const auto world_size = static_cast<std::size_t>(generation.client->world_size());
  auto control = generation.client->add_layers({numbers_layer("facts", kFactCount * world_size)}, true, keep_waiting);
  if (!control.ok()) return control.status();
  generation.first_layer = model.value().first_layer;
  generation.facts_layer = control.value().first_layer;
  std::vector<std::uint32_t> ranks(world_size);
  std::iota(ranks.begin(), ranks.end(), 0u);
  return generation.client->add_communicator(kCommunicator, std::move(ranks));
}

/// All ranks learn who has committed how much, and take the state that counts.
Status SimulatedWorker::agree(Generation& generation) {
  set_phase("agreeing on the step");
  Client& client = *generation.client;
  const auto world_size = static_cast<std::size_t>(client.world_size());
  std::vector<std::int64_t> facts(kFactCount * world_size, 0);
  const auto mine = facts.begin() + static_cast<std::ptrdiff_t>(kFactCount * static_cast<std::size_t>(client.rank()));
  mine[0] = slot_;
  mine[1] = agreed_generation_;
  mine[2] = static_cast<std::int64_t>(state_.committed());
  Status status = client.start(generation.facts_layer, bytes_of(facts), 1);
  if (const Status waited = client.wait_all([this] { return alive(); }); status.ok()) status = waited;
  if (!status.ok()) return status;
  std::vector<Version> versions;
  for (std::size_t rank = 0; rank < world_size; ++rank) {
    generation.members |= 1u << facts[kFactCount * rank];
    versions.push_back({facts[kFactCount * rank + 1], facts[kFactCount * rank + 2]});
  }
  const auto [oldest, newest] = std::minmax_element(versions.begin(), versions.end());
  if (*oldest != *newest)
    status = share_state(generation, *newest, static_cast<std::size_t>(newest - versions.begin()));
  if (status.ok()) agreed_generation_ = generation_;
  return status;
}

Status SimulatedWorker::share_state(Generation& generation, const Version& newest, std::size_t source) {
  set_phase("taking the state of rank " + std::to_string(source));
  Client& client = *generation.client;
  const bool gives = static_cast<std::size_t>(client.rank()) == source;
  TrainingState shared = gives ? state_ : initial_state(cluster_.seed);
  std::vector<std::int64_t> history(shared.members.begin(), shared.members.end());
  history.resize(static_cast<std::size_t>(newest.committed), 0);
  auto added = client.add_layers({numbers_layer("history", history.size())}, true, [this] { return alive(); });
  if (!added.ok()) return added.status();
  const auto share = [&](std::uint32_t layer, std::span<std::byte> data) {
    return gives ? client.start(layer, data, 1) : client.start_absent(layer, data, 1);
  };
  Status status = share(added.value().first_layer, bytes_of(history));
  for (std::size_t layer = 0; layer < shared.parameters.size() && status.ok(); ++layer)
    status = share(generation.first_layer + static_cast<std::uint32_t>(layer), bytes_of(shared.parameters[layer]));
  if (const Status waited = client.wait_all([this] { return alive(); }); status.ok()) status = waited;
  if (!status.ok() || gives) return status;
  shared.members.assign(history.begin(), history.end());
  adopt(std::move(shared), newest);
  return {};
}

/// What it is given has the right bits, and a step that it has committed is not undone, unless others went on without
/// it (shrink).
void SimulatedWorker::adopt(TrainingState state, const Version& version) {
  const std::string who = node_->name + " in generation " + std::to_string(generation_);
  const bool left_out = cluster_.options.on_failure == OnFailure::shrink && version.agreed > agreed_generation_;
  const bool undone = state.committed() < state_.committed() ||
                      !std::ranges::equal(state_.members, std::span(state.members).first(state_.committed()));
  if (undone && !left_out)
    cluster_.report(who + ": a step that it has committed is undone by the state that it is given");
  const std::string wrong = first_difference(state, cluster_.closed_form.state(state.members));
  if (!wrong.empty()) cluster_.report(who + ": the state that it is given has " + wrong);
  state_ = std::move(state);
  committed_ = state_.committed();
}

Status SimulatedWorker::step(Generation& generation) {
  const std::uint64_t number = state_.committed();
  set_phase("step " + std::to_string(number));
  Client& client = *generation.client;
  const std::uint32_t wanted = generation_wanted(*store_, cluster_.options.job);
  if (wanted != 0 && wanted != generation_) {
    client.abort("a worker joins");
    return {ErrorCode::aborted, "a worker joins"};
  }
  pause_for(cluster_.computing);
  const std::size_t layer_count = state_.parameters.size();
  std::vector<SimulatedGradient> gradients;
  StepResults results;
  for (std::size_t layer = 0; layer < layer_count; ++layer) {
    gradients.push_back(gradient_of(cluster_.seed, slot_, number, layer));
    results.push_back(gradients.back().absent ? std::vector<float>(gradients.back().dense.size(), 0.0F)
                                              : gradients.back().dense);
  }
  choose_schemes(generation, number);
  // Every rank begins with another layer: nothing depends on the order.
  const std::size_t first = mix(mix(cluster_.seed, kFirstStarted), number * 32 + static_cast<std::uint64_t>(slot_));
  Status status;
  for (std::size_t i = 0; i < layer_count && status.ok(); ++i) {
    const std::size_t layer = (first % layer_count + i) % layer_count;
    status = start(generation, layer, gradients[layer], results[layer]);
  }
  if (status.ok()) status = call_collective(generation, number);
  if (const Status waited = client.wait_all([this] { return alive(); }); status.ok()) status = waited;
  if (!status.ok()) return status;
  commit(generation, results);
  return {};
}

/// In some steps all ranks call a collective, with the step's exchanges under way.
Status SimulatedWorker::call_collective(Generation& generation, std::uint64_t number) {
  const std::uint64_t key = mix(mix(cluster_.seed, kCollective), number);
  if (key % kStepsPerCollective != 0) return {};
  Client& client = *generation.client;
  const auto rank = static_cast<std::size_t>(client.rank());
  const auto ranks = static_cast<std::size_t>(client.world_size());
  const RandomCall random = random_calls(ranks, 1, static_cast<unsigned>(key)).front();
  generation.calls.push_back(prepare(random, number, rank, ranks));
  const auto call = client.start_collective(kCommunicator, generation.calls.back().call);
  if (!call.ok()) return call.status();
  const auto source = client.wait_collective(call.value(), std::chrono::milliseconds(0), [this] { return alive(); });
  if (!source.ok()) return source.status();
  const Prepared done = std::move(generation.calls.back());
  generation.calls.pop_back();
  if (done.outputs != done.expected)
    cluster_.report(node_->name + " in generation " + std::to_string(generation_) + ", step " + std::to_string(number) +
                    ": wrong result of " + std::string(collective_name(random.kind)));
  return {};
}

/// Every rank makes the same choices in the same step, also in one that is made again in another generation.
void SimulatedWorker::choose_schemes(const Generation& generation, std::uint64_t number) {
  const std::uint64_t key = mix(mix(cluster_.seed, kChoice), number);
  const std::span<const Scheme> schemes = all_schemes();
  for (std::size_t layer = 0; layer < simulated_model().size(); ++layer) {
    const std::uint64_t draw = mix(key, layer);
    const Scheme scheme = draw % 2 == 0 ? Scheme::automatic : schemes[draw / 2 % schemes.size()];
    // What a layer cannot take is refused, on every rank alike.
    static_cast<void>(
        generation.client->choose(generation.first_layer + static_cast<std::uint32_t>(layer), {scheme, 1}));
  }
}

Status SimulatedWorker::start(Generation& generation, std::size_t layer, const SimulatedGradient& gradient,
                              std::vector<float>& result) {
  const SimulatedLayer& of = simulated_model()[layer];
  const auto id = generation.first_layer + static_cast<std::uint32_t>(layer);
  Client& client = *generation.client;
  if (gradient.absent) return client.start_absent(id, bytes_of(result), of.divisor);
  const Scheme scheme = client.next_scheme(id);
  if (gradient.as_factors && traits_of(scheme).takes_factors) {
    std::fill(result.begin(), result.end(), 0.0F);
    const FactorRows rows{reinterpret_cast<const std::byte*>(gradient.left.data()),
                          reinterpret_cast<const std::byte*>(gradient.right.data()), of.factor_count};
    return client.start_factors(id, DType::float32, {rows}, bytes_of(result), of.divisor, false);
  }
  if (gradient.as_rows && traits_of(scheme).takes_rows) {
    const LayerRows rows{.indexes = gradient.row_indexes, .values = std::as_bytes(std::span(gradient.row_values))};
    return client.start_rows(id, rows, bytes_of(result), of.divisor);
  }
  return client.start(id, bytes_of(result), of.divisor, gradient.as_factors ? of.factor_count : kNotFactorable);
}

/// The step is done as a whole: its results are in, at this rank.
void SimulatedWorker::commit(const Generation& generation, StepResults& results) {
  const std::uint64_t number = state_.committed();
  const auto expected = cluster_.closed_form.results(number, generation.members);
  for (std::size_t layer = 0; layer < results.size(); ++layer) {
    for (float& value : results[layer]) value += 0.0F;  // a zero has no sign here
    const std::string wrong = first_difference(results[layer], (*expected)[layer]);
    if (!wrong.empty())
      cluster_.report(node_->name + " in generation " + std::to_string(generation_) + ", step " +
                      std::to_string(number) + ": result of layer '" + simulated_model()[layer].layer.name + "', " +
                      wrong);
  }
  apply(state_, results, generation.members);
  note_in_trace("commits step " + std::to_string(number) + " in generation " + std::to_string(generation_) + ": " +
                std::to_string(digest_of(state_)));
  committed_ = state_.committed();
}

}  // namespace poseidon::testing
