// safetensors: what is written is read back; every damaged file is one clear
// error; a failed write leaves nothing.
#include "braid/train/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <random>

#include "tests/support/errors.h"
#include "tests/support/folders.h"
#include "tests/support/limits.h"
#include "tests/support/ranks.h"

namespace braid {
namespace {

using test::error_of;
using test::TemporaryFolder;
using testing::ElementsAre;
using testing::HasSubstr;

std::string with_header(const std::string& header, std::size_t data_bytes) {
  std::string text(8, '\0');
  const std::uint64_t size = header.size();
  std::memcpy(text.data(), &size, 8);
  return text + header + std::string(data_bytes, '\x01');
}

TEST(Safetensors, EveryDtypeAndShapeIsReadBack) {
  const TemporaryFolder folder;
  const std::vector<at::ScalarType> dtypes = {at::kByte,   at::kBFloat16, at::kHalf, at::kFloat,
                                              at::kDouble, at::kLong,     at::kInt,  at::kShort,
                                              at::kChar,   at::kBool};
  std::vector<TensorInfo> infos;
  std::vector<at::Tensor> values;
  for (std::size_t i = 0; i < dtypes.size(); ++i) {
    values.push_back((test::rank_values(static_cast<int>(i), {3, 5}) * 50).to(dtypes[i]));
    infos.push_back({fmt::format("t{}", i), dtypes[i], {3, 5}});
  }
  values.push_back(at::scalar_tensor(2.5));
  infos.push_back({"scalar", at::kFloat, {}});
  values.push_back(at::empty({0, 7}));
  infos.push_back({"empty", at::kFloat, {0, 7}});
  values.push_back(test::rank_values(9, {6, 4}).t().narrow(0, 1, 2));
  infos.push_back({"strided", at::kFloat, {2, 6}});
  const std::string path = folder / "x.safetensors";
  SafetensorsWriter writer(path, infos, {{"format", "pt"}, {"who", "test"}});
  for (std::size_t i = values.size(); i-- > 0;) writer.write(infos[i].name, values[i]);
  EXPECT_FALSE(std::filesystem::exists(path));
  writer.commit();
  EXPECT_THAT(test::names_in(folder.path()), ElementsAre("x.safetensors"));

  std::vector<at::Tensor> read;
  {
    const SafetensorsFile file(path);
    EXPECT_EQ(file.tensors().size(), infos.size());
    EXPECT_EQ(file.metadata().at("who"), "test");
    for (const TensorInfo& info : infos) read.push_back(file.tensor(info.name));
  }  // the tensors outlive the file, and its name
  std::filesystem::remove(path);
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(read[i].scalar_type(), values[i].scalar_type()) << infos[i].name;
    EXPECT_TRUE(at::equal(read[i], values[i])) << infos[i].name;
  }
}

TEST(Safetensors, WritingIntoAReadTensorChangesNoFile) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.safetensors";
  SafetensorsWriter writer(path, {{"a", at::kFloat, {2}}});
  writer.write("a", at::ones({2}));
  writer.commit();
  const SafetensorsFile file(path);
  file.tensor("a").fill_(7);
  EXPECT_TRUE(at::equal(SafetensorsFile(path).tensor("a"), at::ones({2})));
}

TEST(Safetensors, UnalignedDataIsReadBack) {
  const TemporaryFolder folder;
  const std::string header = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} )";
  ASSERT_NE(header.size() % 4, 0u);
  test::write_text(folder / "x", with_header(header, 4));
  const at::Tensor a = SafetensorsFile(folder / "x").tensor("a");
  EXPECT_EQ(a.view(at::kInt).item<int>(), 0x01010101);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data_ptr()) % 4, 0u);
}

TEST(Safetensors, EveryDamageIsOneErrorNamingTheFile) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.safetensors";
  const auto entry = [](const std::string& rest) {
    return R"({"a":{"dtype":"F32",)" + rest + "}}";
  };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "it has 0 bytes"},
      {"1234567", "it has 7 bytes"},
      {std::string(8, '\xff') + "{}", "18446744073709551615"},
      {std::string("\x40\0\0\0\0\0\0\0{}", 10),
       "is truncated: its header has 64 bytes, the file 10"},
      {with_header("", 0), "is no JSON"},
      {with_header("{\"a\"", 0), "is no JSON"},
      {with_header("{\"\xff\":1}", 0), "is no JSON"},
      {with_header("[1]", 0), "its header is a array"},
      {with_header(std::string(100'000, '['), 0), "is no JSON"},
      {with_header(R"({"__metadata__":{"format":1}})", 0), "__metadata__ \"format\" is a number"},
      {with_header(R"({"__metadata__":"pt"})", 0), "__metadata__ is a string"},
      {with_header(R"({"a":1})", 0), "tensor \"a\" lacks"},
      {with_header(R"({"a":{"dtype":"F32","shape":[1]}})", 4), "lacks"},
      {with_header(R"({"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}})", 4),
       "dtype \"F31\""},
      {with_header(R"({"a":{"dtype":{},"shape":[1],"data_offsets":[0,4]}})", 4), "dtype {}"},
      {with_header(entry(R"("shape":4,"data_offsets":[0,4])"), 4), "a shape that is a number"},
      {with_header(entry(R"("shape":[-1],"data_offsets":[0,4])"), 4), "a size of -1"},
      {with_header(entry(R"("shape":[1.0],"data_offsets":[0,4])"), 4), "a size of 1.0"},
      {with_header(entry(R"("shape":[4294967296,4294967296],"data_offsets":[0,4])"), 4),
       "larger than memory"},
      {with_header(entry(R"("shape":[9223372036854775808,0],"data_offsets":[0,0])"), 0),
       "larger than memory"},
      {with_header(entry(R"("shape":[1],"data_offsets":[0])"), 4), "data_offsets [0]"},
      {with_header(entry(R"("shape":[1],"data_offsets":[0,-4])"), 4), "data_offsets [0,-4]"},
      {with_header(entry(R"("shape":[1],"data_offsets":[4,0])"), 4), "bytes [4, 0)"},
      {with_header(entry(R"("shape":[2],"data_offsets":[0,8])"), 7),
       "the file holds 7 bytes of data"},
      {with_header(entry(R"("shape":[2],"data_offsets":[0,4])"), 4),
       "needs 8 bytes, its data_offsets give 4"},
      {with_header(entry(R"("shape":[1],"data_offsets":[0,4])"), 5), "end at byte 4 of 5"},
      {with_header(entry(R"("shape":[1],"data_offsets":[4,8])"), 8), "leave a gap at byte 0"},
      {with_header(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                   R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
                   6),
       "overlap at byte 2"},
  };
  for (const auto& [bytes, expected] : cases) {
    test::write_text(path, bytes);
    const std::string error = error_of<c10::ValueError>([&] { SafetensorsFile file(path); });
    EXPECT_THAT(error, HasSubstr(path)) << expected;
    EXPECT_THAT(error, HasSubstr(expected));
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  }
  EXPECT_THAT(error_of<c10::ValueError>([&] { SafetensorsFile file(folder.path()); }),
              HasSubstr("is not a file"));
  EXPECT_THAT(error_of<c10::ValueError>([&] { SafetensorsFile file(folder / "none"); }),
              HasSubstr("No such file"));
}

TEST(Safetensors, CutAndFlippedFilesNeverCrash) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.safetensors";
  SafetensorsWriter writer(path, {{"a", at::kFloat, {2, 3}}, {"b", at::kByte, {5}}});
  writer.write("a", at::ones({2, 3}));
  writer.write("b", at::ones({5}, at::kByte));
  writer.commit();
  const std::string whole = test::read_text(path);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    test::write_text(path, whole.substr(0, size));
    EXPECT_THAT(error_of<c10::ValueError>([&] { SafetensorsFile file(path); }), HasSubstr(path))
        << size;
  }
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::string flipped = whole;
    flipped[random() % (whole.size() - 29)] = static_cast<char>(random());  // in the header
    test::write_text(path, flipped);
    try {
      const SafetensorsFile file(path);
      for (const auto& [name, info] : file.tensors()) file.tensor(name).sum();
    } catch (const c10::ValueError&) {
    }
  }
}

TEST(Safetensors, TheWriterHoldsTheCallerToItsWord) {
  const TemporaryFolder folder;
  const std::string path = folder / "x";
  test::write_text(path, "before");
  {
    SafetensorsWriter writer(path, {{"a", at::kFloat, {2}}, {"b", at::kFloat, {2}}});
    EXPECT_THAT(error_of<c10::ValueError>([&] { writer.write("c", at::ones({2})); }),
                HasSubstr("c was not announced"));
    EXPECT_THAT(error_of<c10::ValueError>([&] { writer.write("a", at::ones({3})); }),
                HasSubstr("announced as Float [2] and is Float [3]"));
    EXPECT_THAT(error_of<c10::ValueError>([&] { writer.write("a", at::ones({2}, at::kHalf)); }),
                HasSubstr("Half"));
    writer.write("a", at::ones({2}));
    EXPECT_THAT(error_of<c10::ValueError>([&] { writer.write("a", at::ones({2})); }),
                HasSubstr("written before"));
    EXPECT_THAT(error_of<c10::ValueError>([&] { writer.commit(); }),
                HasSubstr("b was not written"));
  }
  EXPECT_THAT(test::names_in(folder.path()), ElementsAre("x"));
  EXPECT_EQ(test::read_text(path), "before");
  EXPECT_THAT(error_of<c10::ValueError>([&] {
                SafetensorsWriter(path, {{"a", at::kComplexFloat, {1}}});
              }),
              HasSubstr("ComplexFloat"));
  EXPECT_THAT(error_of<c10::Error>([&] { SafetensorsWriter(path + "/y", {}); }),
              HasSubstr("Not a directory"));
}

TEST(Safetensors, AFullDiskLeavesTheFileThatWasThere) {
  const TemporaryFolder folder;
  const std::string path = folder / "x";
  test::write_text(path, "before");
  std::optional<test::FileSizeLimit> limit(1000);
  const std::string error = error_of<c10::Error>([&] {
    SafetensorsWriter writer(path, {{"a", at::kFloat, {1000}}});
    writer.write("a", at::ones({1000}));
    writer.commit();
  });
  limit.reset();
  EXPECT_THAT(error, HasSubstr(fmt::format("can't write {}: File too large", path)));
  EXPECT_THAT(test::names_in(folder.path()), ElementsAre("x"));
  EXPECT_EQ(test::read_text(path), "before");
}

}  // namespace
}  // namespace braid
