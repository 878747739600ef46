// Cuts a corpus into sequences and orders them; n-gram tables to read a loss by.
#include "braid/train/data.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>

#include "braid/core/check.h"
#include "braid/train/config.h"

namespace braid {
namespace {

constexpr std::int64_t kBytes = 256;
constexpr double kTrigramBackoff = 5;  // counts

// The order of an epoch does not depend on those before it.
at::Tensor epoch_order(std::int64_t num_sequences, std::int64_t seed, std::int64_t epoch) {
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;  // spreads epochs over the seeds
  const auto mixed = static_cast<std::uint64_t>(seed) + kOdd * static_cast<std::uint64_t>(epoch);
  auto generator =
      at::detail::createCPUGenerator(mixed ^ (mixed >> 32));  // it uses the low 32 bits
  return at::randperm(num_sequences, generator, at::kLong);
}

// Calls visit(a, b, c) for each three successive tokens of [begin, end).
template <class Visit>
void for_each_triple(const Corpus& corpus, std::int64_t begin, std::int64_t end, Visit visit) {
  std::vector<std::int64_t> block(std::size_t{1} << 16);
  for (auto at = begin; at + 2 < end; at += static_cast<std::int64_t>(block.size()) - 2) {
    const auto n = std::min(static_cast<std::int64_t>(block.size()), end - at);
    corpus.copy(at, n, block.data());
    for (std::int64_t i = 2; i < n; ++i) visit(block[i - 2], block[i - 1], block[i]);
  }
}

}  // namespace

Dataset::Dataset(std::shared_ptr<const Corpus> corpus, std::int64_t begin, std::int64_t end,
                 std::int64_t seq_length, std::int64_t seed, const std::string& what)
    : corpus_(std::move(corpus)),
      begin_(begin),
      end_(end),
      seq_length_(seq_length),
      seed_(seed),
      num_sequences_((end - begin - 1) / seq_length) {
  BRAID_CHECK(end - begin > seq_length, "the ", what, " data has ", end - begin,
              " tokens, --seq-length ", seq_length, " needs at least ", seq_length + 1);
}

std::int64_t Dataset::sequence_of_sample(std::int64_t sample) const {
  const auto epoch = sample / num_sequences_;
  if (epoch != epoch_) {
    order_ = epoch_order(num_sequences_, seed_, epoch);
    epoch_ = epoch;
  }
  return order_.const_data_ptr<std::int64_t>()[sample % num_sequences_];
}

Batch Dataset::batch(std::int64_t first, std::int64_t count) const {
  Batch batch{at::empty({seq_length_, count}, at::kLong),
              at::empty({seq_length_, count}, at::kLong)};
  for (std::int64_t j = 0; j < count; ++j) {
    const auto begin = begin_ + sequence_of_sample(first + j) * seq_length_;
    corpus_->copy(begin, seq_length_, batch.tokens.mutable_data_ptr<std::int64_t>() + j, count);
    corpus_->copy(begin + 1, seq_length_, batch.labels.mutable_data_ptr<std::int64_t>() + j, count);
  }
  return batch;
}

std::int64_t first_sample(std::int64_t iteration, std::int64_t micro_batch, std::int64_t dp_rank,
                          std::int64_t dp_size, std::int64_t micro_batch_size,
                          std::int64_t global_batch_size) {
  return iteration * global_batch_size + (micro_batch * dp_size + dp_rank) * micro_batch_size;
}

DataSplit split_data(const std::shared_ptr<const Corpus>& corpus, const std::string& split,
                     std::int64_t seq_length, std::int64_t vocab_size, std::int64_t seed) {
  BRAID_CHECK(corpus->vocab() <= vocab_size, "the data's tokens go up to ", corpus->vocab() - 1,
              ", --vocab-size is ", vocab_size);
  const auto fractions = split_fractions(split);
  const auto size = static_cast<double>(corpus->size());
  const auto train_end = std::llround(size * fractions[0]);
  const auto validation_end = std::llround(size * (fractions[0] + fractions[1]));
  DataSplit parts;
  parts.train = std::make_unique<Dataset>(corpus, 0, train_end, seq_length, seed, "training");
  if (fractions[1] > 0) {
    parts.validation = std::make_unique<Dataset>(corpus, train_end, validation_end, seq_length,
                                                 seed, "validation");
  }
  return parts;
}

NgramLoss ngram_loss(const Corpus& corpus, const Dataset& train, const Dataset& validation) {
  BRAID_CHECK(corpus.is_text(), "n-gram tables are for text, the data has a vocabulary of ",
              corpus.vocab());
  std::vector<std::uint32_t> triples(kBytes * kBytes * kBytes), pairs(kBytes * kBytes),
      firsts(kBytes);
  for_each_triple(corpus, train.begin(), train.end(), [&](auto a, auto b, auto c) {
    ++triples[(a * kBytes + b) * kBytes + c];
    ++pairs[b * kBytes + c];
    ++firsts[b];
  });
  // How often a pair was the beginning of a triple: not pairs[a, b], which misses the part's first pair.
  std::vector<std::uint32_t> contexts(kBytes * kBytes);
  for (std::size_t i = 0; i < triples.size(); ++i) contexts[i / kBytes] += triples[i];
  NgramLoss loss;
  std::int64_t count = 0;
  for_each_triple(corpus, validation.begin(), validation.end(), [&](auto a, auto b, auto c) {
    const double bigram = (pairs[b * kBytes + c] + 1.0) / (firsts[b] + static_cast<double>(kBytes));
    const auto context = a * kBytes + b;
    const double trigram = (triples[context * kBytes + c] + kTrigramBackoff * bigram) /
                           (contexts[context] + kTrigramBackoff);
    loss.bigram -= std::log(bigram);
    loss.trigram -= std::log(trigram);
    ++count;
  });
  loss.bigram /= static_cast<double>(count);
  loss.trigram /= static_cast<double>(count);
  return loss;
}

}  // namespace braid
