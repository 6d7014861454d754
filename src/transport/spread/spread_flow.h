// SpreadFlow: a flow that its owner uses on one loop, and whose bytes another loop moves.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "transport/spread/loop_gate.h"
#include "transport/transport.h"

namespace poseidon::spread {

class FarEnd;

/// The owner's loop is the near one; the flow beneath is used on the far loop only. The owner's receiver is asked on
/// the near loop for the memory of each payload, and the far loop receives into it. So a message takes two changes of
/// threads, and its bytes none.
///
/// Like the other flows, it is kept alive from set_receiver() to on_closed, at the longest until its loop ends.
class SpreadFlow final : public Flow, public std::enable_shared_from_this<SpreadFlow> {
 public:
  /// Takes over a flow of the far loop, on whose thread it is called. The far loop must outlive the returned flow.
  static std::shared_ptr<SpreadFlow> make(Loop& near, std::shared_ptr<LoopGate> gate, Loop& far,
                                          std::shared_ptr<Flow> flow);
  SpreadFlow(Loop& near, Loop& far, std::shared_ptr<FarEnd> far_end, std::string peer_name);
  ~SpreadFlow() override;

  void set_receiver(Receiver* receiver) override;
  void send(wire::Header header, Pieces payload, Done done) override;
  void close(std::chrono::milliseconds linger) override;
  void resume() override;
  Status set_traffic_class(const TrafficClass& traffic_class) override;
  const std::string& peer_name() const override { return peer_name_; }
  bool codes(std::size_t payload_bytes) const override;
  // These wait for the far loop.
  TrafficStats traffic() const override;
  std::uint64_t bytes_delivered() const override;
  Answer answer() const override;
  Delivery delivery() const override;
  void limit_rate(std::uint64_t bytes_per_second) override;
  void hold(std::chrono::microseconds time) override;

 private:
  friend class FarEnd;

  void on_far(const std::function<void(FarEnd&)>& task) const;
  template <typename Value>
  Value ask_far(Value (Flow::*method)() const) const;
  // What the far end posts:
  void ask_for_place(const wire::Header& header);
  void take(const wire::Header& header, std::span<const std::byte> payload, const std::function<void()>& release);
  void sent(const Done& done, const Status& status);
  void far_closed(const Status& status);

  void give_place();
  void fail(const Status& status);
  void settle();

  Loop& near_;
  Loop& far_;
  const std::shared_ptr<FarEnd> far_end_;
  const std::string peer_name_;
  Loop::TimerId registration_ = 0;  // a timer that never fires; 0: none
  Receiver* receiver_ = nullptr;
  std::optional<wire::Header> waiting_;  // a payload that the receiver does not want yet
  std::size_t outstanding_ = 0;          // sends that have not been done
  bool stopped_ = false;                 // nothing is delivered any more
  Status failure_;                       // the receiver's, which has ended the flow
  std::optional<Status> end_;            // of the flow beneath, once it has closed
};

}  // namespace poseidon::spread
