#include "wire/messages/stored.h"

namespace poseidon::wire {

Assign Assign::read(const Header& header) { return {header.dtype, header.rows, header.step}; }

Header Assign::make(Header header) const {
  header.kind = Kind::assign;
  header.dtype = dtype;
  header.flags = kStored;
  header.rows = array;
  header.step = update_count;
  return header;
}

Pull Pull::read(const Header& header) { return {header.rows}; }

Header Pull::make(Header header) const {
  header.kind = Kind::pull;
  header.flags = kStored;
  header.rows = array;
  return header;
}

Restore Restore::read(const Header& header) { return {header.dtype, header.step}; }

Header Restore::make(Header header) const {
  header.kind = Kind::restore;
  header.flags = kStored;
  header.dtype = dtype;
  header.step = version_limit;
  return header;
}

Value Value::read(const Header& header) {
  return {header.dtype, (header.flags & kAbsent) != 0, header.rows, header.step, header.cols};
}

Header Value::make(Header header) const {
  header.kind = Kind::value;
  header.dtype = dtype;
  header.flags = absent ? kAbsent : 0;
  header.rows = array;
  header.step = update_count;
  header.cols = static_cast<std::uint32_t>(version);
  return header;
}

}  // namespace poseidon::wire
