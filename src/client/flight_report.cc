#include "client/flight_report.h"

#include <set>
#include <utility>

namespace poseidon {

namespace {

template <typename Values>
void write_list(JsonWriter& json, std::string_view name, const Values& values) {
  json.key(name).begin_array();
  for (const auto& value : values) json.value(value);
  json.end_array();
}

void write_link(JsonWriter& json, const LinkReport& link, std::int64_t now_ns) {
  json.begin_object().field("party", flight_party_name(link.party)).field("index", link.index);
  json.field("lane", link.lane).field("host", link.host).field("address", link.address);
  json.field("connected", link.connected).field("greeted", link.greeted).field("left", link.left);
  json.field("last_progress_ms", static_cast<double>(now_ns - link.last_progress_ns) / 1e6);
  json.field("bytes_sent", link.traffic.bytes_sent).field("bytes_received", link.traffic.bytes_received);
  json.key("receiving");
  if (link.receiving) {
    const wire::Header& header = *link.receiving;
    json.begin_object().field("kind", wire::kind_name(header.kind)).field("unit", header.unit);
    json.field("chunk", header.chunk).field("step", header.step).field("payload_bytes", header.payload_bytes);
    json.field("received_bytes", link.received_bytes).end_object();
  } else {
    json.null();
  }
  json.end_object();
}

void write_waiting(JsonWriter& json, const WaitingReport& waiting) {
  json.begin_object().field("layer", waiting.layer).field("unit", waiting.unit).field("scheme", waiting.scheme);
  json.field("step", waiting.step).field("for", waiting.waiting_for);
  write_list(json, "ranks", waiting.ranks);
  write_list(json, "servers", waiting.servers);
  json.field("chunks_missing", waiting.chunks_missing).field("sends_pending", waiting.sends_pending).end_object();
}

}  // namespace

WaitingReport report_of(const Exchange& exchange, std::string waiting_for) {
  WaitingReport report;
  report.layer = exchange.unit().name;
  report.unit = exchange.unit().id;
  report.scheme = scheme_name(exchange.outcome.scheme);
  report.step = exchange.step;
  report.waiting_for = std::move(waiting_for);
  const Progress& progress = exchange.progress;
  if (progress.answers) report.chunks_missing = progress.answers->missing_count;
  report.sends_pending = progress.sends_pending;
  if (progress.received) return report;
  if (const auto* const inbox = std::get_if<PeerInbox>(&progress.inbox))
    for (std::size_t rank = 0; rank < inbox->parts.size(); ++rank)
      if (!inbox->parts[rank].arrived) report.ranks.push_back(rank);
  std::set<std::size_t> servers;
  if (progress.answers)
    for (const Chunk& chunk : exchange.unit().chunks)
      if (progress.answers->chunks[chunk.index] != ChunkArrival::received)
        servers.insert(static_cast<std::size_t>(chunk.server));
  report.servers.assign(servers.begin(), servers.end());
  return report;
}

std::string to_json(const FlightReport& report, const std::function<void(JsonWriter&, std::int64_t)>& write_server) {
  JsonWriter json;
  write_head(json, report.head);
  json.field("not_linked", report.not_linked).field("waiting_count", report.waiting_count).key("waiting").begin_array();
  for (const WaitingReport& waiting : report.waiting) write_waiting(json, waiting);
  json.end_array().key("links").begin_array();
  for (const LinkReport& link : report.links) write_link(json, link, report.head.time_ns);
  json.end_array().key("units").begin_object();
  for (const auto& [id, name] : report.units) json.field(std::to_string(id), name);
  json.end_object().key("client");
  write_events(json, "client", report.events, report.head.time_ns);
  if (write_server) write_server(json.key("server"), report.head.time_ns);
  return json.end_object().text();
}

}  // namespace poseidon
