// How a thread treats floating-point numbers that are very small.
#pragma once

namespace poseidon {

/// Denormal numbers are kept on the calling thread, whatever the thread that made it does with them
/// (torch.set_flush_denormal): every replica and every server has to compute the same bits.
void keep_denormals();

}  // namespace poseidon
