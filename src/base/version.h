// The version that ranks compare before they exchange anything.
#pragma once

namespace poseidon {

inline constexpr const char* kVersionText = "1.0.0";

}  // namespace poseidon
