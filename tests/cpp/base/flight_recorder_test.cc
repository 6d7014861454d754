#include "base/flight_recorder.h"

#include <gtest/gtest.h>

#include <string>

namespace poseidon {
namespace {

FlightEvent event_of(std::uint64_t step) {
  FlightEvent event;
  event.kind = FlightEvent::Kind::sent;
  event.what = "push";
  event.step = step;
  return event;
}

TEST(FlightRecorder, KeepsTheLastEventsInOrder) {
  FlightRecorder recorder;
  EXPECT_TRUE(recorder.events().events.empty());
  for (std::uint64_t step = 1; step <= 3; ++step) recorder.note(event_of(step));
  EXPECT_EQ(recorder.events().events.size(), 3u);
  EXPECT_EQ(recorder.events().forgotten_count, 0u);
  for (std::uint64_t step = 4; step <= FlightRecorder::kEventCount + 10; ++step) recorder.note(event_of(step));
  const FlightEvents kept = recorder.events();
  ASSERT_EQ(kept.events.size(), FlightRecorder::kEventCount);
  EXPECT_EQ(kept.forgotten_count, 10u);
  for (std::size_t i = 0; i < kept.events.size(); ++i) EXPECT_EQ(kept.events[i].step, i + 11);
}

TEST(FlightRecorder, NotesWhen) {
  FlightRecorder recorder;
  const std::int64_t before_ns = now_ns();
  recorder.note(event_of(1));
  FlightEvent timed = event_of(2);
  timed.time_ns = 42;
  recorder.note(timed);
  EXPECT_GE(recorder.events().events[0].time_ns, before_ns);
  EXPECT_LE(recorder.events().events[0].time_ns, now_ns());
  EXPECT_EQ(recorder.events().events[1].time_ns, 42);
}

TEST(FlightRecorder, WritesRowsUnderTheirColumns) {
  FlightEvent event = event_of(7);
  event.time_ns = 1'000'000;
  event.party = FlightEvent::Party::peer;
  event.index = 3;
  event.lane = 1;
  event.bytes = 64;
  JsonWriter json;
  write_events(json, "client", {{event}, 5}, 3'000'000);
  EXPECT_EQ(json.text(),
            R"({"loop":"client","forgotten":5,"columns":["time_us","event","what","party","index","lane","unit",)"
            R"("chunk","step","bytes"],"events":[[-2000,"sent","push","peer",3,1,null,null,7,64]]})");
}

TEST(FlightRecorder, HasANameForEveryKind) {
  EXPECT_EQ(flight_event_name(FlightEvent::Kind::connected), "connected");
  EXPECT_EQ(flight_event_name(FlightEvent::Kind::failed), "failed");
  EXPECT_EQ(flight_party_name(FlightEvent::Party::worker), "worker");
}

}  // namespace
}  // namespace poseidon
