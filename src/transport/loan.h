// Loans of the memory of payloads.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "base/pinned.h"

namespace poseidon {

/// Returns what a receiver gets as `release` with a lent payload: it calls `give_back` once, when it is called first or
/// when its last copy is destroyed. Any thread may do either.
template <typename GiveBack>
std::function<void()> make_loan(GiveBack give_back) {
  class Loan : private Pinned {
   public:
    explicit Loan(GiveBack give_back) : give_back_(std::move(give_back)) {}
    ~Loan() { end(); }
    void end() {
      if (!ended_.exchange(true)) give_back_();
    }

   private:
    GiveBack give_back_;
    std::atomic<bool> ended_{false};
  };
  return [loan = std::make_shared<Loan>(std::move(give_back))] { loan->end(); };
}

}  // namespace poseidon
