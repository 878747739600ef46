// Tokens of texts, folders and shard files; batches as a pure function of seed and iteration.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace braid {

/// How a shard file stores a token.
enum class TokenType : std::uint8_t { u8 = 1, u16 = 2, u32 = 4 };  // the value is the size in bytes

/// Writes a token shard file (docs/data.md): a header of 32 bytes, then the tokens. An existing
/// file is replaced at once or not at all.
///   Errors  ValueError: a token is negative or >= vocab, or vocab does not fit the type;
///           c10::Error naming the path: it can't be written
void write_token_shard(const std::filesystem::path& path, const std::vector<std::int64_t>& tokens,
                       TokenType type, std::int64_t vocab);

/// The tokens of --data-path, read-only: a text (its bytes; a single file is mapped, a folder
/// read), or one shard file or a folder of them (mapped).
///
/// A folder is walked recursively (links to folders are not followed), its files are taken in the
/// order of their paths' bytes. Names that begin with a dot are left out; so are, and are counted,
/// what can't be read and binary files (a zero byte within the first 8000). Shards and texts in one
/// folder are an error.
class Corpus {
 public:
  ///   Errors  ValueError naming the path: nothing there, no token in it, a shard file that is
  ///           cut short or not of a known version or type
  static std::shared_ptr<const Corpus> open(const std::filesystem::path& path);
  ~Corpus();
  Corpus(const Corpus&) = delete;
  Corpus& operator=(const Corpus&) = delete;

  std::int64_t size() const { return size_; }
  /// Tokens are below it: 256 for text, the largest of the shards' otherwise.
  std::int64_t vocab() const { return vocab_; }
  /// True for text: a token is a byte.
  bool is_text() const { return is_text_; }
  std::int64_t num_files() const { return num_files_; }
  std::int64_t num_skipped() const { return num_skipped_; }

  /// Copies tokens [begin, begin + count), which must lie within the corpus, to `out`, `stride` elements apart.
  ///   Errors  ValueError naming the token and its place: a shard holds one beyond its vocabulary
  void copy(std::int64_t begin, std::int64_t count, std::int64_t* out,
            std::int64_t stride = 1) const;

 private:
  struct Segment;
  Corpus();
  void add_shard(const std::filesystem::path& path);
  void add_text(const std::filesystem::path& path);
  void add_folder(const std::filesystem::path& path);

  std::vector<Segment> segments_;   // in order of their first token
  std::vector<std::uint8_t> text_;  // of a folder's files, one after the other
  std::int64_t size_ = 0, vocab_ = 256, num_files_ = 0, num_skipped_ = 0;
  bool is_text_ = true;
};

/// int64 [seq_length, sequences]; labels[i] is the token after tokens[i].
struct Batch {
  at::Tensor tokens, labels;
};

/// Sequences of seq_length tokens cut from one part of a corpus, in an order of its own for each
/// pass over them (epoch): each occurs once an epoch. Sequence i covers tokens
/// [i * seq_length, (i + 1) * seq_length] of the part, the last one as label only; what is left
/// at the end is unused. Same bits for the same (corpus, part, seq_length, seed).
/// Used by one thread.
class Dataset {
 public:
  /// The part is tokens [begin, end) of the corpus.
  ///   Errors  ValueError naming `what` (the part), both numbers: fewer than seq_length + 1 tokens
  Dataset(std::shared_ptr<const Corpus> corpus, std::int64_t begin, std::int64_t end,
          std::int64_t seq_length, std::int64_t seed, const std::string& what);

  std::int64_t num_sequences() const { return num_sequences_; }
  std::int64_t begin() const { return begin_; }
  std::int64_t end() const { return end_; }

  /// Samples [first, first + count) of the endless order: sample n is number n % num_sequences() of
  /// epoch n / num_sequences().
  Batch batch(std::int64_t first, std::int64_t count) const;

 private:
  std::int64_t sequence_of_sample(std::int64_t sample) const;

  std::shared_ptr<const Corpus> corpus_;
  std::int64_t begin_, end_, seq_length_, seed_, num_sequences_;
  mutable std::int64_t epoch_ = -1;  // whose order is kept
  mutable at::Tensor order_;         // int64 [num_sequences]
};

/// The first sample of a rank's micro-batch. A global batch is the same samples for every number of
/// ranks and micro-batches.
///   iteration  counts from 0; micro_batch within the iteration
std::int64_t first_sample(std::int64_t iteration, std::int64_t micro_batch, std::int64_t dp_rank,
                          std::int64_t dp_size, std::int64_t micro_batch_size,
                          std::int64_t global_batch_size);

/// Training and validation data.
struct DataSplit {
  std::unique_ptr<Dataset> train;
  std::unique_ptr<Dataset> validation;  // null where --split gives it nothing
};

/// Cuts the corpus as --split says: training first, then validation.
///   Errors  ValueError with both numbers: a part too short for one sequence; corpus->vocab()
///           above vocab_size
DataSplit split_data(const std::shared_ptr<const Corpus>& corpus, const std::string& split,
                     std::int64_t seq_length, std::int64_t vocab_size, std::int64_t seed);

/// What tables of byte pairs and triples reach on text: a scale to read a model's loss by.
struct NgramLoss {
  double bigram = 0, trigram = 0;  // nats per byte
};

/// Counts the training part's bytes and measures the validation part's. The bigram table adds one
/// to every count; the trigram table is backed off to it with the weight of 5 counts. Takes 64 MB
/// and about 10 ns per byte.
///   Errors  ValueError: the corpus is not text
NgramLoss ngram_loss(const Corpus& corpus, const Dataset& train, const Dataset& validation);

}  // namespace braid
