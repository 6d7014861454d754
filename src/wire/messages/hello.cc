#include "wire/messages/hello.h"

#include <algorithm>
#include <limits>
#include <sstream>
#include <utility>

namespace poseidon::wire {

bool is_job_name(const std::string& name) {
  return !name.empty() && name.size() <= kMaxJobNameBytes && name.find('\n') == std::string::npos;
}

TextMessage Hello::make() const {
  Header header;
  header.kind = Kind::hello;
  header.rank = rank;
  header.worker_count = worker_count;
  header.chunk = flow;
  header.rows = priority_class;
  header.step = generation;
  if (pace) write_pace(*pace, header);
  std::string text = job + '\n' + run;
  for (const auto& address : other_cores) text += '\n' + address;
  return with_text(header, std::move(text));
}

Hello Hello::read(const Header& header, std::span<const std::byte> payload) {
  constexpr std::uint64_t last = std::numeric_limits<std::uint32_t>::max();
  const auto generation = static_cast<std::uint32_t>(std::min(header.step, last));
  Hello hello{header.rank, header.worker_count, {}, header.chunk, {}, header.rows, generation, read_pace(header), {}};
  std::istringstream lines(as_text(payload));
  std::getline(lines, hello.job);
  std::getline(lines, hello.run);
  for (std::string address; std::getline(lines, address);) hello.other_cores.push_back(address);
  return hello;
}

}  // namespace poseidon::wire
