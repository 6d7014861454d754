// adam: Adam (Kingma and Ba 2015) with weight decay added to the gradient, as in torch.optim.Adam.
#include "kernel/update_rules/adam_loop.h"

namespace poseidon::kernel {

BuiltInRule adam() { return adam_rule<Decay::of_gradient>("adam"); }

}  // namespace poseidon::kernel
