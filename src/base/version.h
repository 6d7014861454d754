// The version that ranks compare before they talk.
#pragma once

namespace poseidon {

inline constexpr const char* kVersionText = "0.1.0";

}  // namespace poseidon
