#include "wire/messages/collective.h"

#include "wire/body.h"

namespace poseidon::wire {

namespace {

constexpr auto kPieceFields = [](auto& body, auto& message) {
  body.dtype(message.dtype);
  body.flag(1, message.is_result);
  body.flag(2, message.is_sent);
  body.number(message.total_bytes);
  body.number(message.offset_bytes);
  body.number(message.tag);
  body.number(message.signature);
};

constexpr auto kReadyFields = [](auto& body, auto& message) {
  body.flag(1, message.is_sent);
  body.number(message.takes_bytes);
  body.number(message.gives_bytes);
  body.number(message.signature);
};

}  // namespace

constinit const BodyShape BodyShapes::piece = shape_of<Piece>(kPieceFields);
constinit const BodyShape BodyShapes::ready = shape_of<Ready>(kReadyFields);

Piece Piece::read(const Header& header) { return read_body<Piece>(header, kPieceFields); }

Header Piece::make(const Envelope& about) const { return make_header(about, Kind::piece, *this, kPieceFields); }

Ready Ready::read(const Header& header) { return read_body<Ready>(header, kReadyFields); }

Header Ready::make(const Envelope& about) const { return make_header(about, Kind::ready, *this, kReadyFields); }

}  // namespace poseidon::wire
