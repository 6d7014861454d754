#include "server/pace/arrivals.h"

#include <algorithm>
#include <span>

namespace poseidon {

namespace {

// The standard deviation of normally distributed times, relative to their median absolute deviation.
constexpr double kDeviationsPerMedian = 1.4826;

/// Returns the median, or the upper one of the two if the count is even. Reorders the values.
std::int64_t median_of(std::span<std::int64_t> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

bool Arrivals::add(std::uint32_t rank, std::int64_t time_ns) {
  one_thread_.check();
  const bool before = more_than_half();
  if (times_ns_[rank] == kNotYet) ++count_;
  times_ns_[rank] = time_ns;
  return !before && more_than_half();
}

void Arrivals::remove(std::uint32_t rank) {
  one_thread_.check();
  if (times_ns_[rank] != kNotYet) --count_;
  times_ns_[rank] = kNotYet;
}

std::int64_t Arrivals::deviation_ns() const {
  one_thread_.check();
  std::vector<std::int64_t> values = times_ns_;
  const std::int64_t median_ns = median_of(values);
  for (auto& value : values)
    if (value != kNotYet) value = value > median_ns ? value - median_ns : median_ns - value;
  return median_of(values);
}

void Arrivals::reset() {
  one_thread_.check();
  std::fill(times_ns_.begin(), times_ns_.end(), kNotYet);
  count_ = 0;
}

void ArrivalSpread::add(std::int64_t deviation_ns) {
  one_thread_.check();
  deviations_ns_[added_count_++ % kWindow] = deviation_ns;
  auto known = deviations_ns_;
  usual_ns_ = median_of(std::span(known).first(std::min(added_count_, kWindow)));
}

std::int64_t ArrivalSpread::wait_ns(double factor) const {
  one_thread_.check();
  const double wait_ns = factor * kDeviationsPerMedian * static_cast<double>(usual_ns_);
  return std::max(kLeastWaitNs, static_cast<std::int64_t>(std::min(wait_ns, 1e15)));
}

std::optional<std::int64_t> ArrivalSpread::deadline_ns(std::uint64_t step, std::int64_t median_ns,
                                                       double factor) const {
  one_thread_.check();
  if (step <= kLearningSteps) return std::nullopt;
  return median_ns + wait_ns(factor);
}

}  // namespace poseidon
