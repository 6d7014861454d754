// RowList: the payload of a rows message, and every payload that is refused.
#include "wire/messages/rows.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace poseidon::wire {
namespace {

Contribution rows_of(std::uint32_t row_count, std::uint32_t rows, std::uint32_t cols) {
  Contribution about;
  about.kind = Kind::rows;
  about.factor_count = row_count;
  about.rows = rows;
  about.cols = cols;
  return about;
}

TEST(RowList, SizesCountIndexesZerosAndValues) {
  EXPECT_EQ(RowList::payload_bytes(rows_of(0, 10, 3)), 0u);
  EXPECT_EQ(RowList::payload_bytes(rows_of(2, 10, 3)), 8u + 2 * 12);
  EXPECT_EQ(RowList::payload_bytes(rows_of(3, 10, 3)), 16u + 3 * 12) << "values begin at a multiple of 8";
  EXPECT_EQ(RowList::payload_bytes(rows_of(11, 10, 3)), std::nullopt) << "more rows than the layer has";
  EXPECT_EQ(RowList::payload_bytes(rows_of(0xffffffff, 0xffffffff, 0xffffffff)), std::nullopt);
  EXPECT_EQ(RowList::payload_bytes(rows_of(0, 0, 0)), 0u);
}

TEST(RowList, ReadsIndexesAndValues) {
  const Contribution about = rows_of(3, 10, 2);
  std::vector<std::uint32_t> payload{0, 4, 9, 0, 1, 2, 3, 4, 5, 6};
  const auto bytes = std::as_bytes(std::span(payload));
  ASSERT_EQ(bytes.size(), RowList::payload_bytes(about));
  const auto list = RowList::read(about, bytes);
  ASSERT_TRUE(list.ok()) << list.status().message();
  EXPECT_EQ(std::vector(list.value().indexes.begin(), list.value().indexes.end()),
            (std::vector<std::uint32_t>{0, 4, 9}));
  EXPECT_EQ(list.value().values.data(), bytes.data() + 16);
  EXPECT_EQ(list.value().values.size(), 24u);
}

TEST(RowList, RefusesIndexesThatAreTooLargeTwiceOrOutOfOrder) {
  const auto refused = [](std::vector<std::uint32_t> indexes) {
    const Status status = check_indexes(indexes, 10);
    EXPECT_EQ(status.code(), ErrorCode::mismatch);
    return status.message();
  };
  EXPECT_NE(refused({1, 10}).find("no row 10"), std::string::npos);
  EXPECT_NE(refused({0xffffffff}).find("no row"), std::string::npos);
  EXPECT_NE(refused({3, 3}).find("ascending"), std::string::npos);
  EXPECT_NE(refused({3, 2}).find("ascending"), std::string::npos);
  EXPECT_TRUE(check_indexes(std::vector<std::uint32_t>{0, 9}, 10).ok());
  std::vector<std::uint32_t> payload{5, 5, 0, 0, 0, 0};
  EXPECT_EQ(RowList::read(rows_of(2, 10, 2), std::as_bytes(std::span(payload))).status().code(), ErrorCode::mismatch);
}

}  // namespace
}  // namespace poseidon::wire
