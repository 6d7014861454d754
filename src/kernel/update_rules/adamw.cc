// adamw: Adam with weight decay that is decoupled from the gradient (Loshchilov and Hutter 2019), as in
// torch.optim.AdamW.
#include "kernel/update_rules/adam_loop.h"

namespace poseidon::kernel {

BuiltInRule adamw() { return adam_rule<Decay::of_parameters>("adamw"); }

}  // namespace poseidon::kernel
