#include "poseidon/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "plan/partition.h"

namespace poseidon {
namespace {

Layer vector_layer(const std::string& name, std::size_t element_count, DType dtype = DType::float32) {
  return {name, dtype, element_count, 0, 0, Scheme::automatic};
}

Layer matrix_layer(const std::string& name, std::size_t rows, std::size_t cols, Scheme scheme = Scheme::automatic) {
  return {name, DType::float32, rows * cols, rows, cols, scheme};
}

Cluster colocated(int worker_count) { return {worker_count, worker_count, Placement::colocated}; }

Plan plan_of(std::vector<Layer> layers, const Cluster& cluster, const Options& options = {}, std::uint32_t first = 0) {
  Result<Plan> plan = make_plan(std::move(layers), cluster, options, first);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return plan.ok() ? std::move(plan.value()) : Plan{};
}

void expect_error(std::vector<Layer> layers, const Cluster& cluster, const std::string& part) {
  const Result<Plan> plan = make_plan(std::move(layers), cluster, {}, 0);
  ASSERT_FALSE(plan.ok()) << part;
  EXPECT_EQ(plan.status().code(), ErrorCode::invalid_argument);
  EXPECT_NE(plan.status().message().find(part), std::string::npos) << plan.status().message();
}

std::vector<Layer> random_layers(std::mt19937& random) {
  const auto below = [&random](std::size_t bound) { return std::size_t{random()} % bound; };
  constexpr std::array dtypes{DType::float32,  DType::float64, DType::float16,
                              DType::bfloat16, DType::int64,   DType::uint8};
  std::vector<Scheme> schemes{Scheme::automatic, Scheme::automatic};
  for (const Scheme scheme : all_schemes()) {
    const SchemeTraits& traits = traits_of(scheme);
    if (!traits.lossy && !traits.takes_rows && !traits.only_one_worker) schemes.push_back(scheme);
  }
  std::vector<Layer> layers;
  const std::size_t count = 1 + below(60);
  for (std::size_t i = 0; i < count; ++i) {
    Layer layer = vector_layer("layer" + std::to_string(i), below(below(4) == 0 ? 3'000'000 : 20'000),
                               dtypes[below(dtypes.size())]);
    if (below(3) == 0) {
      layer.rows = 1 + below(1500);
      layer.cols = 1 + below(1500);
      layer.element_count = layer.rows * layer.cols;
    }
    layer.scheme = schemes[below(schemes.size())];
    layers.push_back(layer);
  }
  return layers;
}

void expect_covered_once(const Plan& plan) {
  std::vector<std::size_t> server_bytes(plan.server_bytes.size(), 0);
  for (const Unit& unit : plan.units) {
    std::size_t end = 0;
    for (std::size_t i = 0; i < unit.chunks.size(); ++i) {
      const Chunk& chunk = unit.chunks[i];
      EXPECT_EQ(chunk.index, i);
      EXPECT_EQ(chunk.offset_bytes, end);
      EXPECT_GT(chunk.size_bytes, 0u);
      EXPECT_EQ(chunk.offset_bytes % dtype_bytes(unit.dtype), 0u);
      EXPECT_EQ(chunk.size_bytes % dtype_bytes(unit.dtype), 0u);
      ASSERT_LT(static_cast<std::size_t>(chunk.server), server_bytes.size());
      server_bytes[static_cast<std::size_t>(chunk.server)] += chunk.size_bytes;
      end += chunk.size_bytes;
    }
    EXPECT_EQ(end, unit.size_bytes);
  }
  EXPECT_EQ(server_bytes, plan.server_bytes);
}

/// The blocks of a unit cover its matrix once. Each is on another server, and they are equal but for one line.
void expect_blocks_tile_the_matrix(const Plan& plan, const Unit& unit) {
  const Layer& layer = plan.layers[unit.layers.front()];
  if (unit.grouped() || !layer.factorable() || !dtype_is_floating(layer.dtype)) {
    EXPECT_TRUE(unit.blocks.empty());
    return;
  }
  const bool by_rows = layer.rows >= layer.cols;
  const std::size_t length = by_rows ? layer.rows : layer.cols;
  std::set<int> servers;
  for (const Chunk& chunk : unit.chunks) servers.insert(chunk.server);
  ASSERT_EQ(unit.blocks.size(), std::min(servers.size(), length));
  std::size_t end = 0;
  for (const Block& block : unit.blocks) {
    ASSERT_LT(block.chunk, unit.chunks.size());
    EXPECT_EQ(servers.erase(unit.chunks[block.chunk].server), 1u) << "one block on each server";
    EXPECT_EQ(by_rows ? block.row : block.col, end);
    EXPECT_EQ(by_rows ? block.col : block.row, 0u);
    EXPECT_EQ(by_rows ? block.col_count : block.row_count, by_rows ? layer.cols : layer.rows);
    const std::size_t share = by_rows ? block.row_count : block.col_count;
    EXPECT_GE(share, length / unit.blocks.size());
    EXPECT_LE(share, length / unit.blocks.size() + 1);
    end += share;
  }
  EXPECT_EQ(end, length);
  EXPECT_TRUE(std::ranges::is_sorted(unit.blocks, {}, &Block::chunk));
}

void expect_units_hold_every_layer(const Plan& plan, std::uint32_t first_unit_id) {
  std::size_t member_count = 0;
  ASSERT_EQ(plan.unit_of_layer.size(), plan.layers.size());
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    const Unit& unit = plan.units[u];
    EXPECT_EQ(unit.id, first_unit_id + u);
    ASSERT_EQ(unit.layers.size(), unit.offsets_bytes.size());
    std::size_t offset = 0;
    for (std::size_t i = 0; i < unit.layers.size(); ++i, ++member_count) {
      const Layer& layer = plan.layers[unit.layers[i]];
      EXPECT_EQ(plan.unit_of_layer[unit.layers[i]], u);
      EXPECT_EQ(layer.dtype, unit.dtype);
      EXPECT_EQ(unit.offsets_bytes[i], offset);
      offset += layer.size_bytes();
    }
    EXPECT_EQ(unit.size_bytes, offset + (unit.grouped() ? unit.layers.size() * dtype_bytes(unit.dtype) : 0));
    EXPECT_TRUE(std::is_sorted(unit.layers.begin(), unit.layers.end()));
  }
  EXPECT_EQ(member_count, plan.layers.size());
}

TEST(Plan, PropertiesOfRandomModels) {
  std::mt19937 random(1);
  for (int round = 0; round < 100; ++round) {
    const std::vector<Layer> layers = random_layers(random);
    const bool dedicated = random() % 2 == 0;
    const int workers = 1 + static_cast<int>(random() % 8);
    const Cluster cluster =
        dedicated ? Cluster{workers, 1 + static_cast<int>(random() % 5), Placement::dedicated} : colocated(workers);
    Options options;
    options.chunk_bytes = std::size_t{100} << (random() % 16);
    options.partition = round % 5 == 0 ? Partition::coarse : Partition::balanced;
    const auto first = static_cast<std::uint32_t>(random() % 100);
    const Plan plan = plan_of(layers, cluster, options, first);
    expect_covered_once(plan);
    expect_units_hold_every_layer(plan, first);
    for (const Unit& unit : plan.units) expect_blocks_tile_the_matrix(plan, unit);
    EXPECT_EQ(plan_lines(plan), plan_lines(plan_of(layers, cluster, options, first)));
    if (options.partition == Partition::coarse) continue;
    std::size_t largest = 0;
    for (const Unit& unit : plan.units) {
      for (const Chunk& chunk : unit.chunks) largest = std::max(largest, chunk.size_bytes);
    }
    const auto total = std::accumulate(plan.server_bytes.begin(), plan.server_bytes.end(), std::size_t{0});
    const std::size_t mean = total / plan.server_bytes.size();
    EXPECT_LE(*std::max_element(plan.server_bytes.begin(), plan.server_bytes.end()), mean * 4 / 3 + largest);
  }
}

TEST(Plan, AMatrixHasABlockOnEveryServerButNoneWithoutALine) {
  Options options;
  options.chunk_bytes = kChunkAlignmentBytes;
  const Cluster many{2, 40, Placement::dedicated};
  for (const auto& [rows, cols, blocks] : {std::tuple(30, 50, 40), std::tuple(50, 30, 40), std::tuple(30, 31, 31)}) {
    const auto layer = matrix_layer("weight", std::size_t(rows), std::size_t(cols), Scheme::sharded_factors);
    const Plan plan = plan_of({layer}, many, options);
    EXPECT_EQ(plan.units[0].blocks.size(), static_cast<std::size_t>(blocks));
    expect_blocks_tile_the_matrix(plan, plan.units[0]);
  }
  Layer stored = matrix_layer("stored", 300, 200);
  stored.stored = true;
  EXPECT_TRUE(plan_of({stored}, colocated(2)).units[0].blocks.empty());
}

TEST(Plan, EveryLargeLayerIsSpreadEvenlyOverAllShards) {
  std::vector<Layer> layers{matrix_layer("fc6", 4096, 6272), matrix_layer("fc7", 4096, 4096),
                            matrix_layer("fc8", 1000, 4096), vector_layer("conv", 512 * 512 * 9),
                            vector_layer("odd", 1'234'567)};
  const Plan plan = plan_of(layers, colocated(8));
  for (const Unit& unit : plan.units) {
    std::vector<std::size_t> bytes(8, 0);
    for (const Chunk& chunk : unit.chunks) {
      EXPECT_LE(chunk.size_bytes, Options{}.chunk_bytes);
      bytes[static_cast<std::size_t>(chunk.server)] += chunk.size_bytes;
    }
    EXPECT_LE(*std::max_element(bytes.begin(), bytes.end()), unit.size_bytes / 8 * 101 / 100 + 64) << unit.name;
  }
}

TEST(Plan, ChunksOfADedicatedServerFitTheWindowOfAWorker) {
  const auto largest = [](const Cluster& cluster) {
    return plan_of({vector_layer("w", 8 << 20)}, cluster).units.at(0).chunks.at(0).size_bytes;
  };
  EXPECT_EQ(largest(colocated(16)), 256u << 10);
  EXPECT_EQ(largest({16, 2, Placement::dedicated}), 64u << 10);
  EXPECT_EQ(largest({8, 2, Placement::dedicated}), 128u << 10);
  EXPECT_EQ(largest({2, 2, Placement::dedicated}), 256u << 10);
  EXPECT_EQ(window_bytes(2), 512u << 10);
  EXPECT_EQ(window_bytes(1000), 64u << 10);
}

TEST(Plan, ADedicatedServerHasManyChunksOfASmallPlan) {
  const auto largest = [](const Cluster& cluster) {
    std::vector<Layer> layers;
    for (int i = 0; i < 400; ++i) layers.push_back(vector_layer("w" + std::to_string(i), 4096));
    return plan_of(layers, cluster).units.at(0).chunks.at(0).size_bytes;
  };
  // Shares of a group of somewhat more than 1 MiB, cut into pieces.
  EXPECT_EQ(largest(colocated(8)), (128u << 10) + 64);
  EXPECT_EQ(largest({16, 8, Placement::dedicated}), (16u << 10) + 64);
  EXPECT_EQ(largest({16, 64, Placement::dedicated}), (8u << 10) + 64);
}

TEST(Plan, DenseLoadsAreBalancedWithoutTheFactorableLayers) {
  std::vector<Layer> layers{matrix_layer("fc", 3, 1000)};
  for (int i = 0; i < 12; ++i) layers.push_back(vector_layer("conv" + std::to_string(i), 16 * 1024 / 4 * 3));
  Options options;
  options.small_bytes = 0;
  const Plan plan = plan_of(layers, colocated(4), options);
  std::vector<std::size_t> dense(4, 0);
  for (const Unit& unit : plan.units) {
    if (unit.name == "fc") continue;
    for (const Chunk& chunk : unit.chunks) dense[static_cast<std::size_t>(chunk.server)] += chunk.size_bytes;
  }
  EXPECT_EQ(dense, std::vector<std::size_t>(4, 12 * 3 * 16 * 1024 / 4));
}

TEST(Plan, SmallLayersOfOneDtypeShareAGroup) {
  const Plan plan =
      plan_of({vector_layer("a", 10), vector_layer("half", 6, DType::float16), vector_layer("b", 0),
               vector_layer("big", 100'000), vector_layer("count", 1, DType::int64), vector_layer("c", 3)},
              colocated(2), {}, 7);
  ASSERT_EQ(plan.units.size(), 4u);
  const Unit& group = plan.units[plan.unit_of_layer[0]];
  EXPECT_TRUE(group.grouped());
  EXPECT_EQ(group.layers, (std::vector<std::uint32_t>{0, 2, 5}));
  EXPECT_EQ(group.offsets_bytes, (std::vector<std::size_t>{0, 40, 40}));
  EXPECT_EQ(group.size_bytes, 13u * 4 + 3 * 4);
  EXPECT_EQ(group.name, "group " + std::to_string(group.id) + " (3 layers)");
  const Unit& half = plan.units[plan.unit_of_layer[1]];
  EXPECT_FALSE(half.grouped());
  EXPECT_EQ(half.size_bytes, 12u);
  EXPECT_EQ(half.name, "half");
  EXPECT_EQ(plan.units.front().id, 7u);
  EXPECT_EQ(plan.units.front().name, "big") << "groups come when their last member is done";
}

TEST(Plan, GroupsCloseAtTheirSize) {
  std::vector<Layer> layers;
  for (int i = 0; i < 10; ++i) layers.push_back(vector_layer("bias" + std::to_string(i), 100));
  Options options;
  options.group_bytes = 1200;  // three layers of 400 bytes
  const Plan plan = plan_of(layers, colocated(2), options);
  ASSERT_EQ(plan.units.size(), 4u);
  EXPECT_EQ(plan.units[0].layers.size(), 3u);
  EXPECT_EQ(plan.units[3].layers.size(), 1u);
  EXPECT_EQ(plan.units[3].size_bytes, 400u);
}

TEST(Plan, SmallLayersAreGroupedUnlessFactorsWereAskedFor) {
  const Plan plan =
      plan_of({matrix_layer("small", 10, 84), matrix_layer("large", 400, 400), vector_layer("bias", 10),
               matrix_layer("forced_sfb", 2, 500, Scheme::sfb), matrix_layer("forced_ps", 10, 84, Scheme::ps)},
              colocated(4));
  EXPECT_FALSE(plan.units[plan.unit_of_layer[1]].grouped());
  EXPECT_EQ(plan.layers[1].scheme, Scheme::automatic);
  EXPECT_FALSE(plan.units[plan.unit_of_layer[3]].grouped());
  EXPECT_EQ(plan.units[plan.unit_of_layer[0]].layers, (std::vector<std::uint32_t>{0, 2, 4}));
  EXPECT_EQ(plan.layers[0].scheme, Scheme::ps);
}

TEST(Plan, SchemesThatNeverChangeAreSettled) {
  std::vector<Layer> layers{matrix_layer("fc", 400, 400), vector_layer("bias", 10)};
  layers[1].scheme = Scheme::sfb;
  const Plan plan = plan_of(layers, colocated(4));
  EXPECT_EQ(plan.layers[0].scheme, Scheme::automatic);
  EXPECT_EQ(plan.layers[1].scheme, Scheme::ps);
  const Plan alone = plan_of(layers, colocated(1));
  for (const Layer& layer : alone.layers) EXPECT_EQ(layer.scheme, Scheme::local);
}

TEST(Plan, CoarseAndAdamKeepALayerWhole) {
  Options coarse;
  coarse.partition = Partition::coarse;
  const Plan round_robin = plan_of({vector_layer("a", 5'000'000), vector_layer("b", 90'000), vector_layer("c", 80'000)},
                                   colocated(2), coarse);
  for (std::size_t u = 0; u < 3; ++u) {
    ASSERT_EQ(round_robin.units[u].chunks.size(), 1u);
    EXPECT_EQ(round_robin.units[u].chunks[0].server, static_cast<int>(u % 2));
  }
  const Plan adam = plan_of(
      {matrix_layer("x", 2000, 2000, Scheme::project_adam), matrix_layer("y", 1000, 1000, Scheme::project_adam)},
      colocated(2));
  ASSERT_EQ(adam.units[0].chunks.size(), 1u);
  ASSERT_EQ(adam.units[1].chunks.size(), 1u);
  EXPECT_NE(adam.units[0].chunks[0].server, adam.units[1].chunks[0].server);
}

TEST(Plan, CentralGivesEverythingToTheFirstServer) {
  Options central;
  central.partition = Partition::central;
  const Plan plan = plan_of({vector_layer("a", 5'000'000), vector_layer("b", 90'000), matrix_layer("c", 2000, 1000)},
                            colocated(4), central);
  std::size_t bytes = 0;
  for (const Unit& unit : plan.units) {
    bytes += unit.size_bytes;
    for (const Chunk& chunk : unit.chunks) EXPECT_EQ(chunk.server, 0);
  }
  EXPECT_EQ(plan.server_bytes, (std::vector<std::size_t>{bytes, 0, 0, 0}));
}

TEST(Plan, NothingToSend) {
  EXPECT_TRUE(plan_of({}, colocated(4)).units.empty());
  const Plan empty = plan_of({vector_layer("empty", 0)}, colocated(4));
  ASSERT_EQ(empty.units.size(), 1u);
  EXPECT_TRUE(empty.units[0].chunks.empty());
  EXPECT_EQ(empty.units[0].size_bytes, 0u);
  EXPECT_EQ(plan_of({matrix_layer("no columns", 5, 0)}, colocated(4)).units[0].chunks.size(), 0u);
}

TEST(Plan, ErrorsNameTheLayer) {
  const Cluster cluster = colocated(2);
  expect_error({vector_layer("a", 1), vector_layer("", 1)}, cluster, "layer 1 has no name");
  expect_error({vector_layer("a", 1), vector_layer("a", 2)}, cluster, "two layers have the name \"a\"");
  expect_error({{"fc", DType::float32, 7, 2, 3, Scheme::ps}}, cluster,
               "layer \"fc\" has 7 elements, which is not 2 rows");
  expect_error({{"fc", DType::float32, 0, std::size_t{1} << 40, std::size_t{1} << 40, Scheme::ps}}, cluster, "\"fc\"");
  expect_error({vector_layer("huge", std::size_t{1} << 62)}, cluster, "layer \"huge\"");
  expect_error({vector_layer("odd", 1, static_cast<DType>(99))}, cluster, "layer \"odd\" has an unsupported dtype");
  expect_error({{"fc", DType::float32, 6, 2, 3, Scheme::local}}, cluster, "layer \"fc\" has scheme local");
  expect_error({{"fc", DType::float32, 6, 2, 3, static_cast<Scheme>(50)}}, cluster,
               "layer \"fc\" has an unknown scheme");
  expect_error({}, {0, 1, Placement::dedicated}, "needs a worker and a server");
  expect_error({}, {4, 2, Placement::colocated}, "colocated servers must be one per worker");
  Options options;
  options.chunk_bytes = 63;
  EXPECT_FALSE(make_plan({}, cluster, options, 0).ok());
}

TEST(Plan, WithoutLateWorkersTakesOnlySchemesThatCanEndAStepWithoutThem) {
  Options options;
  options.stragglers = Stragglers::drop;
  for (const Scheme scheme : all_schemes()) {
    if (traits_of(scheme).only_one_worker) continue;
    const auto plan = make_plan({matrix_layer("fc", 400, 400, scheme)}, colocated(4), options, 0);
    ASSERT_EQ(plan.ok(), traits_of(scheme).can_drop_late) << scheme_name(scheme);
    if (plan.ok()) {
      EXPECT_EQ(plan.value().layers[0].scheme, scheme);
      continue;
    }
    EXPECT_EQ(plan.status().code(), ErrorCode::invalid_argument);
    const std::string start = "layer \"fc\" has scheme " + std::string(scheme_name(scheme));
    EXPECT_TRUE(plan.status().message().starts_with(start)) << plan.status().message();
    EXPECT_NE(plan.status().message().find("; use auto"), std::string::npos);
    EXPECT_TRUE(plan.status().message().ends_with(" with stragglers=drop")) << plan.status().message();
  }
  const auto plan = make_plan({matrix_layer("fc", 400, 400)}, colocated(4), options, 0);
  EXPECT_EQ(plan.value().layers[0].scheme, Scheme::ps);
}

TEST(Plan, SaysInWhichTypesAStoredLayerTravelsAndIsKept) {
  Layer layer = vector_layer("w", 1000);
  layer.stored = true;
  layer.wire = WireFormat::int8;
  layer.parameter_wire = WireFormat::bf16;
  const auto types_of = [](const Layer& one, int worker_count) {
    const Unit unit = plan_of({one}, colocated(worker_count)).units[0];
    return std::vector{unit.dtype, unit.wire_dtype, unit.result_dtype, unit.value_dtype};
  };
  using enum DType;
  EXPECT_EQ(types_of(layer, 2), (std::vector{float32, int8_blocks, bfloat16, float32}));
  EXPECT_EQ(types_of(layer, 1), (std::vector{float32, float32, float32, float32})) << "nothing is sent";
  Layer half = vector_layer("h", 1000);
  half.dtype = bfloat16;
  half.stored = half.float32_value = true;
  EXPECT_EQ(types_of(half, 2), (std::vector{bfloat16, bfloat16, bfloat16, float32}));
  const auto refused = [](const Layer& one) { return !make_plan({one}, colocated(2), {}, 0).ok(); };
  half.dtype = float32;
  EXPECT_TRUE(refused(half)) << "it has no more digits on the servers";
  layer.stored = false;
  EXPECT_TRUE(refused(layer)) << "nothing comes back but its gradient";
  layer.stored = true;
  layer.parameter_wire = WireFormat::int8;
  EXPECT_TRUE(refused(layer)) << "too coarse for parameters";
}

TEST(Plan, FactorsHaveAFormatOfTheirOwn) {
  Layer layer = matrix_layer("fc", 400, 400);
  const auto factors_of = [&](int worker_count) {
    return plan_of({layer}, colocated(worker_count)).units[0].factor_dtype;
  };
  using enum WireFormat;
  layer.wire = int8;
  EXPECT_EQ(factors_of(2), DType::bfloat16) << "8 bits are too few";
  EXPECT_EQ(factors_of(1), DType::float32) << "nothing is sent";
  layer.compression.factor_wire = fp32;
  EXPECT_EQ(factors_of(2), DType::float32);
  layer.wire = fp32;
  layer.compression.factor_wire = fp16;
  EXPECT_EQ(factors_of(2), DType::float16);
  EXPECT_EQ(plan_of({layer}, colocated(2)).units[0].wire_dtype, DType::float32);
  const auto refused = [&] { return !make_plan({layer}, colocated(2), {}, 0).ok(); };
  layer.scheme = Scheme::project_adam;
  EXPECT_TRUE(refused()) << "it sends numbers as they are";
  layer.scheme = Scheme::automatic;
  EXPECT_FALSE(refused());
  layer.compression.factor_wire = int8;
  EXPECT_TRUE(refused());
}

TEST(PlanLines, DifferWhereThePlansDo) {
  const std::vector<Layer> layers{matrix_layer("fc", 400, 400), vector_layer("bias", 10), vector_layer("scale", 10)};
  const std::vector<std::string> lines = plan_lines(plan_of(layers, colocated(4)));
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_NE(lines[0].find("fc[400x400] auto"), std::string::npos) << lines[0];
  std::set<std::vector<std::string>> different{lines};
  different.insert(plan_lines(plan_of(layers, colocated(3))));
  different.insert(plan_lines(plan_of(layers, {4, 4, Placement::dedicated})));
  different.insert(plan_lines(plan_of(layers, colocated(4), {}, 1)));
  Options coarse;
  coarse.partition = Partition::coarse;
  different.insert(plan_lines(plan_of(layers, colocated(4), coarse)));
  for (const auto change : {0, 1, 2, 3}) {
    std::vector<Layer> changed = layers;
    if (change == 0) changed[0] = matrix_layer("fc", 200, 800);
    if (change == 1) changed[1].name = "offset";
    if (change == 2) changed[0].scheme = Scheme::ps;
    if (change == 3) std::swap(changed[1], changed[2]);
    different.insert(plan_lines(plan_of(changed, colocated(4))));
  }
  EXPECT_EQ(different.size(), 9u);
}

TEST(SpreadChunkBytes, SharesPiecesAndCaps) {
  EXPECT_EQ(spread_chunk_bytes(1000, 8, 2 << 20), kMinChunkBytes);
  EXPECT_EQ(spread_chunk_bytes(8 << 20, 8, 2 << 20), std::size_t{1} << 20);
  EXPECT_EQ(spread_chunk_bytes(24 << 20, 8, 2 << 20), std::size_t{3} << 19) << "two pieces of each 3 MiB share";
  EXPECT_EQ(spread_chunk_bytes(1 << 20, 8, 1000), 960u) << "a cap below the minimum holds, aligned";
  EXPECT_EQ(spread_chunk_bytes(1'000'001, 3, 2 << 20) % kChunkAlignmentBytes, 0u);
}

}  // namespace
}  // namespace poseidon
