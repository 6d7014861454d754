// How a thread treats very small floating-point numbers.
#pragma once

namespace poseidon {

/// Makes the calling thread keep denormal numbers, whatever the thread that started it does (torch.set_flush_denormal).
/// Every replica and every server has to compute the same bits.
void keep_denormals();

}  // namespace poseidon
