// One tensor to synchronize: what is known of it, what is wished for it, and what it may therefore do.
//
// src/plan/layer_rules.cc decides it, for plans, exchanges, adapters and predictions alike
// (docs/decisions/0064-layer-rules.md). These are pure functions: the same inputs give the same terms on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "poseidon/dtype.h"
#include "poseidon/options.h"
#include "poseidon/scheme.h"
#include "poseidon/status.h"

namespace poseidon {

/// How lossy schemes and wire formats compress a layer (docs/lossy.md, docs/wire-formats.md).
struct Compression {
  Scheme allowed = Scheme::automatic;  // the lossy scheme that `auto` may choose beside the exact ones; automatic: none
  double topk_fraction = 0.01;         // topk: the part of the elements that a worker sends, above 0 and at most 1
  std::size_t powersgd_rank = 4;       // powersgd: the rank of what a worker sends
  std::size_t rows = 0;  // powersgd: rows of the layer as a matrix, which divide its elements; 0: it is none
  std::optional<WireFormat> factor_wire{};  // how factors travel; nullopt: as dense gradients; never int8
  // A worker keeps what the wire format has rounded off a dense gradient, and adds it to the next one. Layers of a
  // group then travel as they are.
  bool error_feedback = false;
};

/// One tensor to synchronize, as the framework sees it.
struct Layer {
  std::string name;
  DType dtype = DType::float32;
  std::size_t element_count = 0;
  // M and N of the weight, if the layer's gradient is a sum of `factor_count` outer products, or if it has
  // `row_gradient`. Otherwise both are 0 (convolutions, biases, norms).
  std::size_t rows = 0;
  std::size_t cols = 0;
  Scheme scheme = Scheme::automatic;
  bool stored = false;  // servers keep its value (push, pull, updates); it takes scheme ps and is never in a group
  bool whole = false;   // it is one chunk on one server core (LAMB needs the norms of the whole layer)
  WireFormat wire = WireFormat::fp32;            // how the gradients of a float32 layer travel
  WireFormat parameter_wire = WireFormat::fp32;  // stored float32: how a rule's value comes back; fp32 or bf16
  bool float32_value = false;      // stored bfloat16: servers keep the value and the states of its rule in float32
  bool row_gradient = false;       // the gradient has few of the layer's rows, as an embedding's has
  bool zeros_are_missing = false;  // row_gradient: a row that no worker has is the same as one of zeros, so that `auto`
                                   // may choose a scheme without rows
  Compression compression{};

  /// Whether the gradient is a sum of outer products, and its size in bytes.
  bool factorable() const { return rows > 0 && cols > 0 && !row_gradient; }
  std::size_t size_bytes() const { return element_count * dtype_bytes(dtype); }
};

/// Whether a gradient has few of its layer's rows, as an embedding's has, and how it comes then.
enum class RowGradient : std::uint8_t {
  none,    // it has all rows
  zeros,   // the other rows are zeros
  sparse,  // only these rows come, and a missing row is something else than one of zeros
};

/// What a framework knows of a tensor whose gradient is exchanged.
struct LayerFacts {
  std::string name;
  std::string who;         // as messages call it, such as "parameter fc.weight"; empty: layer "fc.weight"
  std::string dtype_text;  // as messages call its type, such as "torch.float32"; empty: as the core does
  DType dtype = DType::float32;
  std::size_t element_count = 0;
  std::size_t rows = 0;        // of the tensor as a matrix: the length of its first dimension; 0: it has only one
  bool gives_factors = false;  // its gradient may come as factors: the tensor is a matrix
  RowGradient gives_rows = RowGradient::none;  // not none: the tensor is a matrix
  bool stored = false;                         // servers hold and update it
  bool whole = false;                          // as Layer::whole
};

/// What a user wishes for a tensor. A wish may be made for many tensors at once: what a tensor has no use for is left
/// out, and what it would have to do and cannot is refused.
struct LayerWishes {
  Scheme scheme = Scheme::automatic;
  WireFormat wire = WireFormat::fp32;
  bool wire_is_given = true;   // false: `wire` is a default, and `lossy_wire` takes its place
  bool wire_if_float = false;  // tensors that are not float32 travel as they are, and are not refused
  // What `auto` may lose, as Compression::allowed says, or a format that float32 gradients take then.
  Scheme lossy = Scheme::automatic;
  std::optional<WireFormat> lossy_wire{};
  double topk_fraction = Compression().topk_fraction;
  std::size_t powersgd_rank = Compression().powersgd_rank;
  std::optional<WireFormat> factor_wire{};
  bool error_feedback = false;
  WireFormat parameter_wire = WireFormat::fp32;  // of a stored float32 tensor
  bool float32_value = false;                    // a stored bfloat16 tensor has a float32 value on the servers
  // Frameworks that compile a step choose schemes once, by the factors of the first step. Factors count only where the
  // wish leaves them a choice. `settled`: what "auto" has become for good; automatic: it is open yet.
  bool settles = false;
  Scheme settled = Scheme::automatic;
};

/// A set of schemes.
class SchemeSet {
 public:
  /// Puts a scheme in.
  constexpr void add(Scheme scheme) { bits_ |= 1u << static_cast<unsigned>(scheme); }
  /// Whether it is one of them.
  constexpr bool contains(Scheme scheme) const { return (bits_ >> static_cast<unsigned>(scheme) & 1u) != 0; }
  constexpr bool operator==(const SchemeSet&) const = default;
  /// Its schemes, in the order of schemes.def.
  std::vector<Scheme> list() const;

 private:
  std::uint32_t bits_ = 0;
};

/// What a layer may do in a job, and how.
struct LayerTerms {
  Scheme scheme = Scheme::ps;           // that of all its exchanges, or automatic: each one's count decides
  SchemeSet schemes{};                  // that its exchanges may take
  bool grouped = false;                 // it is so small that it travels with others
  DType wire_dtype = DType::float32;    // of dense gradients in messages
  DType factor_dtype = DType::float32;  // of factors in messages, of what they add up to, and of the values of rows
  DType result_dtype = DType::float32;  // of what comes back from a step: the sum, or the stored value
  DType value_dtype = DType::float32;   // of what servers keep of a stored layer; otherwise the layer's
  bool keeps_rounding = false;          // keeps_rounding(), and
  std::size_t kept_count = 0;           // kept_count()
  std::string_view reason;              // why its scheme is what it is, where that is decided for good; else empty
};

/// The layer that a tensor becomes. ErrorCode::invalid_argument, naming tensor and remedy, if it cannot do what it
/// would have to.
Result<Layer> wished_layer(const LayerFacts& facts, const LayerWishes& wishes, const Options& options);

/// The terms of a layer of a plan. ErrorCode::invalid_argument for one that make_plan refuses.
Result<LayerTerms> layer_terms(Layer layer, const Cluster& cluster, const Options& options);

/// What `auto` is for good, if a layer's ranks have these numbers of factors (K), 0 or less where one has none.
Scheme settled_scheme(const Layer& layer, std::span<const std::int64_t> counts, const Cluster& cluster,
                      const Options& options);

/// Whether a rank may be ahead of another by a step or more.
bool ranks_drift(const Options& options);

/// The type in which values of `dtype` travel. Only float32 is converted.
DType wire_dtype(WireFormat format, DType dtype);

/// The type in which a layer's factors, the results of sharded_factors and the values of rows travel. 8 bits are too
/// few for factors, because their errors multiply: they travel as bfloat16 then.
DType factor_dtype_of(const Layer& layer);

/// The schemes among which `auto` chooses for the layer, in the order of schemes.def. Empty if the layer's scheme does
/// not depend on its factor count. A layer that is part of a group has no choice either, which this does not know.
std::vector<Scheme> automatic_schemes(const Layer& layer, const Cluster& cluster);

/// Whether `chosen` is the exact scheme that may be chosen for a layer that names a lossy one, whatever its factor
/// count.
bool chooses_exact(const Layer& layer, Scheme chosen);

/// Whether a part of the layer's gradients may wait for later steps, unless it is too small for that.
bool may_lose(const Layer& layer);

/// Whether a worker keeps what is rounded off the layer's dense gradients (Compression::error_feedback).
bool keeps_rounding(const Layer& layer);

/// The number of float32s that a worker keeps from step to step of a layer that takes a lossy scheme, or may come to
/// take one. 0 for other layers.
std::size_t kept_count(const Layer& layer);

}  // namespace poseidon
