#include "wire/messages/hello.h"

#include <charconv>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/utf8.h"
#include "wire/body.h"

namespace poseidon::wire {

namespace {

/// What a hello says in the header, beside the rank.
struct HelloBody {
  PaceNumbers pace;
  std::uint32_t worker_count = 0;
  std::uint32_t generation = 0;
  std::uint32_t flow = 0;
  std::uint32_t priority_class = 0;
};

constexpr std::string_view kHostLine = "host ";
constexpr std::string_view kOf = " of ";
constexpr std::string_view kSavesLine = "saves";

/// Takes a number off the beginning of the text. Returns false if there is none.
bool take_number(std::string_view& text, std::uint32_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return true;
}

/// Reads a text such as "0 of 2". Empty unless it is one.
std::optional<Hello::Host> host_from(std::string_view text) {
  Hello::Host host;
  if (!take_number(text, host.index) || !text.starts_with(kOf)) return std::nullopt;
  text.remove_prefix(kOf.size());
  return take_number(text, host.count) && text.empty() ? std::optional(host) : std::nullopt;
}

constexpr auto kHelloFields = [](auto& body, auto& message) {
  body.code(message.pace.choice);
  body.number(message.worker_count);
  body.number(message.generation);
  body.number(message.flow);
  body.number(message.priority_class);
  body.number(message.pace.bound);
  body.number(message.pace.factor);
};

}  // namespace

constinit const BodyShape BodyShapes::hello = shape_of<HelloBody>(kHelloFields);

bool is_job_name(const std::string& name) {
  return !name.empty() && name.size() <= kMaxJobNameBytes && is_printable(name);
}

TextMessage Hello::make() const {
  Envelope about;
  about.rank = rank;
  const HelloBody body{numbers_of(pace.value_or(Pace())), worker_count, generation, flow, priority_class};
  std::string text = job + '\n' + run;
  if (host) text += concat('\n', kHostLine, host->index, kOf, host->count);
  if (saves) text += concat('\n', kSavesLine);
  for (const auto& address : other_cores) text += '\n' + address;
  return with_text(make_header(about, Kind::hello, body, kHelloFields), std::move(text));
}

Hello Hello::read(const Header& header, std::span<const std::byte> payload) {
  const auto body = read_body<HelloBody>(header, kHelloFields);
  Hello hello;
  hello.rank = header.rank;
  hello.worker_count = body.worker_count;
  hello.flow = body.flow;
  hello.priority_class = body.priority_class;
  hello.generation = body.generation;
  hello.pace = pace_of(body.pace);
  std::istringstream lines(as_text(payload));
  std::getline(lines, hello.job);
  std::getline(lines, hello.run);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(kHostLine))
      hello.host = host_from(std::string_view(line).substr(kHostLine.size()));
    else if (line == kSavesLine)
      hello.saves = true;
    else
      hello.other_cores.push_back(line);
  }
  return hello;
}

}  // namespace poseidon::wire
