// The version that ranks compare before they exchange anything.
#pragma once

namespace poseidon {

inline constexpr const char* kVersionText = "0.1.0";

}  // namespace poseidon
