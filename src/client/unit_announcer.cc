#include "client/unit_announcer.h"

#include <utility>

#include "wire/messages/units.h"

namespace poseidon {

void UnitAnnouncer::announce(const Plan& plan, const Links& links) {
  one_thread_.check();
  if (links.rank != 0) return;
  wire::StoredUnits units{run_, restored_version_, {}};
  for (const Unit& unit : plan.units) {
    if (!plan.layers[unit.layers.front()].stored || unit.chunks.empty()) continue;
    std::string name = unit.name.substr(0, wire::kMaxUnitNameBytes / 2);
    // Two models of one job may have layers of the same name. Their order tells them apart.
    if (const std::size_t before = names_[name]++; before > 0) name += concat(" (", before + 1, ")");
    const auto kept_bytes = [&unit](std::size_t bytes) { return unit.bytes_as(unit.value_dtype, bytes); };
    units.units.push_back({unit.id, unit.value_dtype, kept_bytes(unit.size_bytes),
                           kept_bytes(unit.chunks.front().size_bytes), std::move(name)});
  }
  for (const wire::TextMessage& message : units.make(links.rank))
    for (const auto& lanes : links.servers)
      for (Flow* flow : lanes) flow->send(message.header, {message.payload()}, [text = message.text](const Status&) {});
}

}  // namespace poseidon
