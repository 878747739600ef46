// Corpora of every kind, the order of sequences, the split, n-gram tables.
#include "braid/train/data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <map>
#include <set>

#include "tests/support/errors.h"
#include "tests/support/folders.h"

namespace braid {
namespace {

using test::TemporaryFolder;
using test::value_error;
using testing::HasSubstr;
namespace fs = std::filesystem;

std::string text_of(const Corpus& corpus) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(corpus.size()));
  corpus.copy(0, corpus.size(), tokens.data());
  return {tokens.begin(), tokens.end()};
}

std::vector<std::int64_t> counting(std::int64_t n, std::int64_t vocab) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i)
    tokens[static_cast<std::size_t>(i)] = (i * 7919 + 13) % vocab;
  return tokens;
}

TEST(Corpus, OfOneTextIsItsBytes) {
  TemporaryFolder folder;
  const std::string text = "caf\xc3\xa9\xff\n";
  const auto corpus = Corpus::open(folder.write("a.txt", text));
  EXPECT_EQ(text_of(*corpus), text);
  EXPECT_EQ(corpus->vocab(), 256);
  EXPECT_TRUE(corpus->is_text());
}

TEST(Corpus, OfAFolderIsInPathOrderWithoutBinaries) {
  TemporaryFolder folder;
  folder.write("b.txt", "BB");
  folder.write("a/z.txt", "AZ");
  folder.write("a/b/c.txt", "ABC");
  folder.write("binary", std::string("x\0y", 3));
  folder.write(".hidden/x.txt", "hidden");
  folder.write("empty.txt", "");
  fs::create_symlink(folder.path() / "nowhere", folder.path() / "dangling");
  fs::create_directory_symlink(folder.path(), folder.path() / "loop");
  const auto corpus = Corpus::open(folder.path());
  EXPECT_EQ(text_of(*corpus), "ABCAZBB");
  EXPECT_EQ(corpus->num_files(), 4);
  EXPECT_EQ(corpus->num_skipped(), 1);
}

TEST(Corpus, OfShardsHasTheTokensThatWereWritten) {
  TemporaryFolder folder;
  const std::vector<std::pair<TokenType, std::int64_t>> kinds = {
      {TokenType::u8, 256}, {TokenType::u16, 50000}, {TokenType::u32, 70000}};
  std::vector<std::int64_t> all;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const auto tokens = counting(1000 + static_cast<std::int64_t>(i), kinds[i].second);
    write_token_shard(folder.path() / ("shard" + std::to_string(i)), tokens, kinds[i].first,
                      kinds[i].second);
    const auto one = Corpus::open(folder.path() / ("shard" + std::to_string(i)));
    EXPECT_EQ(one->vocab(), kinds[i].second);
    EXPECT_FALSE(one->is_text());
    std::vector<std::int64_t> read(tokens.size());
    one->copy(0, one->size(), read.data());
    EXPECT_EQ(read, tokens);
    all.insert(all.end(), tokens.begin(), tokens.end());
  }
  const auto corpus = Corpus::open(folder.path());
  ASSERT_EQ(corpus->size(), 3003);
  EXPECT_EQ(corpus->vocab(), 70000);
  for (const std::int64_t begin :
       {0, 999, 1000, 1500, 2001}) {  // across the borders, with a stride
    std::vector<std::int64_t> read(2 * 1002, -1);
    corpus->copy(begin, 1002, read.data(), 2);
    for (std::size_t i = 0; i < 1002; ++i) {
      ASSERT_EQ(read[2 * i], all[static_cast<std::size_t>(begin) + i]) << begin << " " << i;
      ASSERT_EQ(read[2 * i + 1], -1);
    }
  }
}

TEST(Corpus, RefusesWhatIsNotData) {
  TemporaryFolder folder;
  const auto error = [](const fs::path& path) { return value_error([&] { Corpus::open(path); }); };
  EXPECT_THAT(error(folder.path() / "nothing"), HasSubstr("neither a file nor a folder"));
  EXPECT_THAT(error(folder.write("empty", "")), HasSubstr("no token in"));
  fs::create_directory(folder.path() / "none");
  EXPECT_THAT(error(folder.path() / "none"), HasSubstr("0 files read"));
  const auto shard = folder.path() / "mixed" / "shard";
  folder.write("mixed/text", "text");
  write_token_shard(shard, counting(100, 300), TokenType::u16, 300);
  EXPECT_THAT(error(folder.path() / "mixed"), HasSubstr("expected one kind"));
  fs::resize_file(shard, 32 + 199);
  EXPECT_THAT(error(shard), HasSubstr("declares 100 tokens of 2 bytes, but has 199 bytes"));
  fs::resize_file(shard, 20);
  EXPECT_THAT(error(shard), HasSubstr("has 20 bytes"));
  std::string header("BRAIDTOK\2\0\0\0\1\0\0\0\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0x", 33);
  EXPECT_THAT(error(folder.write("newer", header)), HasSubstr("version 2"));
  header[8] = 1, header[12] = 3;
  EXPECT_THAT(error(folder.write("odd", header)), HasSubstr("tokens of 3 bytes"));
  header[12] = 1;
  const auto beyond = Corpus::open(folder.write("beyond", header));  // vocabulary 1, token 'x'
  std::int64_t token = 0;
  EXPECT_THAT(value_error([&] { beyond->copy(0, 1, &token); }),
              HasSubstr("is 120, its header declares a vocabulary of 1"));
}

TEST(Corpus, WriterRefusesTokensThatDoNotFit) {
  TemporaryFolder folder;
  const auto path = folder.path() / "shard";
  const auto error = [&](std::vector<std::int64_t> tokens, TokenType type, std::int64_t vocab) {
    return value_error([&] { write_token_shard(path, tokens, type, vocab); });
  };
  EXPECT_THAT(error({1, 9}, TokenType::u8, 9), HasSubstr("token 1 is 9, the vocabulary is 9"));
  EXPECT_THAT(error({-1}, TokenType::u8, 9), HasSubstr("token 0 is -1"));
  EXPECT_THAT(error({1}, TokenType::u8, 257),
              HasSubstr("a vocabulary of 257 does not fit tokens of 1 bytes"));
  EXPECT_TRUE(fs::is_empty(folder.path()));
  EXPECT_THROW(write_token_shard(folder.path() / "no" / "shard", {1}, TokenType::u8, 9),
               c10::Error);
}

// A dataset over tokens 0, 1, 2, ... so that a token says where it was.
struct Counting {
  explicit Counting(std::int64_t n) {
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) tokens[static_cast<std::size_t>(i)] = i;
    write_token_shard(folder.path() / "s", tokens, TokenType::u32, n);
    corpus = Corpus::open(folder.path() / "s");
  }
  TemporaryFolder folder;
  std::shared_ptr<const Corpus> corpus;
};

TEST(Dataset, BatchIsSequenceFirstAndLabelsAreTheNextTokens) {
  const Counting data(100);
  const Dataset dataset(data.corpus, 10, 61, 5, 1234, "training");
  EXPECT_EQ(dataset.num_sequences(), 10);
  EXPECT_EQ(Dataset(data.corpus, 10, 60, 5, 1234, "training").num_sequences(),
            9);  // the last has no label
  const auto batch = dataset.batch(3, 4);
  ASSERT_EQ(batch.tokens.sizes(), (at::IntArrayRef{5, 4}));
  EXPECT_EQ(batch.tokens.scalar_type(), at::kLong);
  EXPECT_TRUE(batch.labels.equal(batch.tokens + 1));
  for (std::int64_t j = 0; j < 4; ++j) {
    const auto first = batch.tokens[0][j].item<std::int64_t>();
    EXPECT_EQ((first - 10) % 5, 0);
    EXPECT_TRUE(batch.tokens.select(1, j).equal(at::arange(first, first + 5)));
  }
}

TEST(Dataset, EachSequenceOnceAnEpochInAnotherOrder) {
  const Counting data(1000);
  const Dataset dataset(data.corpus, 0, 1000, 9, 7, "training");
  const auto n = dataset.num_sequences();
  ASSERT_EQ(n, 111);
  std::vector<std::vector<std::int64_t>> orders;
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    const auto firsts = dataset.batch(epoch * n, n).tokens[0].contiguous();
    orders.emplace_back(firsts.data_ptr<std::int64_t>(), firsts.data_ptr<std::int64_t>() + n);
    const std::set<std::int64_t> distinct(orders.back().begin(), orders.back().end());
    EXPECT_EQ(distinct.size(), n);
    EXPECT_EQ(*distinct.rbegin(), (n - 1) * 9);
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
  EXPECT_FALSE(std::is_sorted(orders[0].begin(), orders[0].end()));
}

TEST(Dataset, IsAFunctionOfSeedAndSample) {
  const Counting data(1000);
  const Dataset one(data.corpus, 0, 1000, 9, 7, "training"),
      same(data.corpus, 0, 1000, 9, 7, "training"), other(data.corpus, 0, 1000, 9, 8, "training");
  const auto late = one.batch(300, 5).tokens;
  for (std::int64_t i = 0; i < 300; i += 50) same.batch(i, 1);
  EXPECT_TRUE(same.batch(300, 5).tokens.equal(late));
  EXPECT_TRUE(one.batch(108, 6).tokens.narrow(1, 3, 3).equal(
      one.batch(111, 3).tokens));  // over the end of an epoch
  EXPECT_FALSE(other.batch(300, 5).tokens.equal(late));
}

TEST(Dataset, GlobalBatchIsTheSameForEveryDivision) {
  const auto samples = [](std::int64_t dp_size, std::int64_t micro_batch_size) {
    std::multiset<std::int64_t> all;
    for (std::int64_t micro = 0; micro < 24 / dp_size / micro_batch_size; ++micro) {
      for (std::int64_t rank = 0; rank < dp_size; ++rank) {
        const auto first = first_sample(5, micro, rank, dp_size, micro_batch_size, 24);
        for (std::int64_t j = 0; j < micro_batch_size; ++j) all.insert(first + j);
      }
    }
    return all;
  };
  std::multiset<std::int64_t> expected;
  for (std::int64_t i = 120; i < 144; ++i) expected.insert(i);
  EXPECT_EQ(samples(1, 24), expected);
  EXPECT_EQ(samples(1, 3), expected);
  EXPECT_EQ(samples(4, 2), expected);
  EXPECT_EQ(samples(3, 8), expected);
}

TEST(SplitData, CutsTrainingThenValidation) {
  const Counting data(1000);
  const auto parts = split_data(data.corpus, "80,15,5", 9, 1000, 1);
  EXPECT_EQ(parts.train->begin(), 0);
  EXPECT_EQ(parts.train->end(), 800);
  EXPECT_EQ(parts.validation->begin(), 800);
  EXPECT_EQ(parts.validation->end(), 950);
  EXPECT_EQ(split_data(data.corpus, "1", 9, 1000, 1).validation, nullptr);
}

TEST(SplitData, RefusesPartsThatAreTooShortAndTokensBeyondTheVocabulary) {
  const Counting data(1000);
  const auto error = [&](const char* split, std::int64_t seq_length, std::int64_t vocab) {
    return value_error([&] { split_data(data.corpus, split, seq_length, vocab, 1); });
  };
  EXPECT_THAT(
      error("1", 1000, 1000),
      HasSubstr("the training data has 1000 tokens, --seq-length 1000 needs at least 1001"));
  split_data(data.corpus, "1", 999, 1000, 1);
  EXPECT_THAT(error("95,5", 60, 1000),
              HasSubstr("the validation data has 50 tokens, --seq-length 60 needs at least 61"));
  EXPECT_THAT(error("1", 9, 999), HasSubstr("tokens go up to 999, --vocab-size is 999"));
}

TEST(NgramLoss, EqualsTheFormulaCountedPlainly) {
  TemporaryFolder folder;
  std::string text;
  std::uint32_t state = 1;
  for (int i = 0; i < 200000;
       ++i) {  // longer than a block of the reader; pairs and triples that are not even
    state = state * 1664525 + 1013904223;
    text += static_cast<char>('a' + ((state >> 20) % 11) * ((i % 3) + 1) % 13);
  }
  const auto corpus = Corpus::open(folder.write("t", text));
  const auto parts = split_data(corpus, "9,1", 100, 256, 1);
  const auto loss = ngram_loss(*corpus, *parts.train, *parts.validation);
  const auto train = text.substr(0, 180000), held_out = text.substr(180000);
  std::map<std::string, double> counts;
  for (std::size_t i = 2; i < train.size(); ++i) {
    ++counts["3" + train.substr(i - 2, 3)];
    ++counts["c" + train.substr(i - 2, 2)];
    ++counts["2" + train.substr(i - 1, 2)];
    ++counts["1" + train.substr(i - 1, 1)];
  }
  double bigram = 0, trigram = 0;
  for (std::size_t i = 2; i < held_out.size(); ++i) {
    const auto p2 = (counts["2" + held_out.substr(i - 1, 2)] + 1) /
                    (counts["1" + held_out.substr(i - 1, 1)] + 256);
    bigram -= std::log(p2);
    trigram -= std::log((counts["3" + held_out.substr(i - 2, 3)] + 5 * p2) /
                        (counts["c" + held_out.substr(i - 2, 2)] + 5));
  }
  const auto n = static_cast<double>(held_out.size() - 2);
  EXPECT_NEAR(loss.bigram, bigram / n, 1e-9);
  EXPECT_NEAR(loss.trigram, trigram / n, 1e-9);
  EXPECT_LT(loss.trigram, loss.bigram);
}

}  // namespace
}  // namespace braid
