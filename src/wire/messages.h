// All messages. A message is a wire::Header and, for most kinds, a payload (docs/wire-format.md).
//
// The Header's Envelope says what a transport and a router need: kind, priority, payload_bytes, rank, unit, chunk,
// step. What else a kind says is in a struct of its own:
//
//   kind              struct        kind              struct
//   push, factors     Contribution  hello             Hello
//   result            StepResult    refuse            Refuse
//   assign            Assign        abort             Abort
//   pull              Pull          goodbye           Goodbye
//   restore           Restore       rule              Rule
//   value             Value         units             StoredUnits
//
// To send:     wire::Envelope about;                         // rank, unit, chunk, step, priority
//              flow.send(wire::Pull{.array = 1}.make(about), {}, done);
// To receive:  check_kind(header.kind, direction, header.payload_bytes), once for each message; then
//              const auto pull = wire::Pull::read(header);
//
// A new message is a value of Kind and a row in kinds.h, a struct in wire/messages/, and its handler.
//
// The read() of a struct that lies in the header cannot fail and costs a few loads: decode() has checked dtype and
// flags. The read() of a payload returns a Result where not every payload has a meaning.
#pragma once

#include "wire/messages/contribution.h"
#include "wire/messages/ending.h"
#include "wire/messages/hello.h"
#include "wire/messages/rule.h"
#include "wire/messages/stored.h"
#include "wire/messages/text_message.h"
#include "wire/messages/units.h"
