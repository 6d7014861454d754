// Collectives: what the ranks of a client exchange without declaring it before. Reductions, gathers, broadcasts, and
// messages from one rank to another, of any size and type, which may change from call to call.
//
// A Communicator is a set of a client's ranks. Its ranks make the same calls in the same order, but for send and recv.
// Each rank gets the same bits of a reduction: parts are combined in rank order, first those of a machine, then those
// of a rack, then all. The chunks of a large reduction are combined by different ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "poseidon/dtype.h"
#include "poseidon/status.h"

namespace poseidon {

/// How the elements of all ranks become one; the last three combine bits.
enum class ReduceOp : std::uint8_t { sum = 1, product, min, max, band, bor, bxor };

/// What a reduction combines. Collectives that reduce nothing take bytes, as uint8 or as what they are: coding saves
/// bytes of floating-point numbers alone (Options::coding).
enum class Element : std::uint8_t { float32 = 1, float64, float16, bfloat16, int8, uint8, int16, int32, int64 };

/// "sum", …; "unknown" otherwise.
std::string_view reduce_op_name(ReduceOp op);
/// "float32", … as numpy spells it.
std::string_view element_name(Element element);
/// Bytes of an element.
std::size_t element_bytes(Element element);
/// The type of gradients that is the same, if there is one.
std::optional<DType> dtype_of(Element element);

/// ErrorCode::invalid_argument: the operation is not defined for the type, such as bit operations for floating-point
/// numbers; or `divisor` is 0, or not 1 for what is not a sum of floating-point numbers.
Status check_reduction(ReduceOp op, Element element, std::uint32_t divisor);

/// Which collective it is.
enum class CollectiveKind : std::uint8_t {
  all_reduce = 1,  // one input and one output of the same size, which may be the same memory
  reduce,          // the same; only the root has an output
  reduce_scatter,  // an input for each rank; one output: the reduction of all ranks' inputs for this rank
  all_gather,      // one input; an output for each rank
  gather,          // one input; the root has an output for each rank
  broadcast,       // the root has one input, the others one output
  scatter,         // the root has an input for each rank; one output
  all_to_all,      // an input and an output for each rank
  barrier,         // neither
};
/// "all_reduce", …; "unknown" otherwise.
std::string_view collective_name(CollectiveKind kind);

/// One call. The memory must stay valid until the collective has completed, the inputs unchanged and the outputs
/// untouched. Arrays may be empty. An output may overlap inputs: those that it does not replace are copied before.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::barrier;
  std::vector<std::span<const std::byte>> inputs{};
  std::vector<std::span<std::byte>> outputs{};
  Element element = Element::uint8;
  ReduceOp op = ReduceOp::sum;
  std::uint32_t divisor = 1;  // of a sum of floating-point numbers
  std::uint32_t root = 0;     // a rank of the communicator
  /// A number that stands for what else all ranks must have alike, such as a type that is no Element.
  std::uint32_t label = 0;
  /// How urgent it is: 0 to 1, as LayerPriority::urgency. What is more urgent overtakes what is less so.
  double urgency = 0.5;
};

/// Which messages a receive takes.
struct MessageKind {
  std::uint32_t tag = 0;
  std::uint32_t label = 0;  // the same at sender and receiver, like that of a call: otherwise the job ends
};

/// The source of a message from whoever sends one.
inline constexpr std::uint32_t kAnySource = ~std::uint32_t{0};

}  // namespace poseidon
