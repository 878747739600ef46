// Opens texts, folders and token shard files, and writes shard files.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>

#include "braid/core/check.h"
#include "braid/core/file.h"
#include "braid/train/data.h"

namespace braid {
namespace {

namespace fs = std::filesystem;
static_assert(std::endian::native == std::endian::little, "shard files are little-endian");

constexpr std::array<char, 8> kMagic = {'B', 'R', 'A', 'I', 'D', 'T', 'O', 'K'};
constexpr std::size_t kBinaryProbeBytes = 8000;

struct ShardHeader {
  std::array<char, 8> magic = kMagic;
  std::uint32_t version = 1;
  std::uint32_t token_bytes = 0;
  std::uint64_t count = 0;
  std::uint64_t vocab = 0;
};
static_assert(sizeof(ShardHeader) == 32);

std::string reason() { return std::generic_category().message(errno); }

/// A file's bytes, mapped read-only.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(const fs::path& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    BRAID_CHECK(file >= 0, "can't read ", path.string(), ": ", reason());
    struct stat status {};
    if (::fstat(file, &status) == 0) size_ = static_cast<std::size_t>(status.st_size);
    void* data = size_ == 0 ? nullptr : ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
    const int error = errno;
    ::close(file);
    BRAID_CHECK(data != MAP_FAILED, "can't map ", path.string(), ": ",
                std::generic_category().message(error));
    data_ = static_cast<const std::uint8_t*>(data);
  }
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping() {
    if (data_ != nullptr) ::munmap(const_cast<std::uint8_t*>(data_), size_);
  }
  const std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  const std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
};

bool is_shard(const fs::path& path) {
  std::array<char, kMagic.size()> begin{};
  std::ifstream file(path, std::ios::binary);
  return file.read(begin.data(), begin.size()) && begin == kMagic;
}

// Files below `folder`, unsorted. Returns how many folders could not be read.
std::int64_t collect_files(const fs::path& folder, std::vector<fs::path>& files) {
  std::error_code error;
  std::int64_t num_unreadable = 0;
  fs::directory_iterator at(folder, error);
  for (; !error && at != fs::directory_iterator(); at.increment(error)) {
    if (at->path().filename().native().starts_with(".")) continue;
    std::error_code ignored;
    if (at->is_directory(ignored)) {
      if (!at->is_symlink(ignored)) num_unreadable += collect_files(at->path(), files);
    } else if (at->is_regular_file(ignored)) {
      files.push_back(at->path());
    }
  }
  return num_unreadable + (error ? 1 : 0);
}

// Appends the file's bytes; false, with `text` as it was, where it can't be read or is binary.
bool append_text(const fs::path& path, std::vector<std::uint8_t>& text) {
  std::error_code error;
  const auto num_bytes = fs::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  if (error || !file) return false;
  const auto begin = text.size();
  const auto read_up_to = [&](std::size_t end) {
    auto at = text.size();
    text.resize(end);
    file.read(reinterpret_cast<char*>(text.data() + at), static_cast<std::streamsize>(end - at));
    text.resize(at + static_cast<std::size_t>(file.gcount()));
  };
  read_up_to(begin + std::min<std::size_t>(num_bytes, kBinaryProbeBytes));
  const bool binary =
      std::find(text.begin() + static_cast<std::ptrdiff_t>(begin), text.end(), 0) != text.end();
  if (!binary && file) read_up_to(begin + num_bytes);
  if (binary || file.bad()) text.resize(begin);
  return !binary && !file.bad();
}

template <class T>
void copy_tokens(const std::uint8_t* from, std::int64_t count, std::int64_t* out,
                 std::int64_t stride) {
  for (std::int64_t i = 0; i < count; ++i) {
    T token;
    std::memcpy(&token, from + i * sizeof(T), sizeof(T));
    out[i * stride] = token;
  }
}

}  // namespace

struct Corpus::Segment {
  std::int64_t begin;  // in the corpus
  std::int64_t count;
  std::int64_t token_bytes, vocab;
  const std::uint8_t* data;
  Mapping mapping;
  std::string name;
};

Corpus::Corpus() = default;
Corpus::~Corpus() = default;

std::shared_ptr<const Corpus> Corpus::open(const fs::path& path) {
  std::shared_ptr<Corpus> corpus(new Corpus);
  std::error_code error;
  if (fs::is_directory(path, error)) {
    corpus->add_folder(path);
  } else {
    BRAID_CHECK(fs::is_regular_file(path, error), "--data-path: ", path.string(),
                " is neither a file nor a folder");
    if (is_shard(path)) {
      corpus->add_shard(path);
    } else {
      corpus->add_text(path);
    }
  }
  BRAID_CHECK(corpus->size_ > 0, "--data-path: no token in ", path.string(), " (",
              corpus->num_files_, " files read, ", corpus->num_skipped_,
              " unreadable or binary left out)");
  return corpus;
}

void Corpus::add_shard(const fs::path& path) {
  Mapping mapping(path);
  ShardHeader header;
  BRAID_CHECK(mapping.size() >= sizeof(header), "--data-path: ", path.string(), " has ",
              mapping.size(), " bytes, a shard file's header has ", sizeof(header));
  std::memcpy(&header, mapping.data(), sizeof(header));
  BRAID_CHECK(header.version == 1, "--data-path: ", path.string(), " is a shard file of version ",
              header.version, ", this program reads version 1");
  BRAID_CHECK(header.token_bytes == 1 || header.token_bytes == 2 || header.token_bytes == 4,
              "--data-path: ", path.string(), " has tokens of ", header.token_bytes,
              " bytes, expected 1, 2 or 4");
  const auto payload = mapping.size() - sizeof(header);
  BRAID_CHECK(
      header.count <= payload / header.token_bytes && header.count * header.token_bytes == payload,
      "--data-path: ", path.string(), " declares ", header.count, " tokens of ", header.token_bytes,
      " bytes, but has ", payload, " bytes of them");
  BRAID_CHECK(header.vocab >= 1 && header.vocab <= std::uint64_t{1} << 32,
              "--data-path: ", path.string(), " declares a vocabulary of ", header.vocab);
  const auto* data = mapping.data() + sizeof(header);
  const auto vocab = static_cast<std::int64_t>(header.vocab);
  vocab_ = is_text_ ? vocab : std::max(vocab_, vocab);
  is_text_ = false;
  ++num_files_;
  segments_.push_back({size_, static_cast<std::int64_t>(header.count), header.token_bytes, vocab,
                       data, std::move(mapping), path.string()});
  size_ += segments_.back().count;
}

void Corpus::add_text(const fs::path& path) {
  Mapping mapping(path);
  const auto* data = mapping.data();
  size_ = static_cast<std::int64_t>(mapping.size());
  num_files_ = 1;
  segments_.push_back({0, size_, 1, 256, data, std::move(mapping), path.string()});
}

void Corpus::add_folder(const fs::path& path) {
  std::vector<fs::path> files;
  num_skipped_ = collect_files(path, files);
  std::sort(files.begin(), files.end(),
            [](const auto& a, const auto& b) { return a.native() < b.native(); });
  std::string a_text;
  for (const auto& file : files) {
    if (is_shard(file)) {
      add_shard(file);
    } else if (append_text(file, text_)) {
      ++num_files_;
      a_text = file.string();
    } else {
      ++num_skipped_;
    }
  }
  BRAID_CHECK(text_.empty() || segments_.empty(), "--data-path: ", path.string(),
              " holds shard files (", segments_[0].name, ") and texts (", a_text,
              "), expected one kind");
  if (!text_.empty()) {
    size_ = static_cast<std::int64_t>(text_.size());
    segments_.push_back({0, size_, 1, 256, text_.data(), Mapping(), path.string()});
  }
}

void Corpus::copy(std::int64_t begin, std::int64_t count, std::int64_t* out,
                  std::int64_t stride) const {
  auto segment = std::upper_bound(segments_.begin(), segments_.end(), begin,
                                  [](std::int64_t at, const Segment& s) { return at < s.begin; }) -
                 1;
  while (count > 0) {
    const auto offset = begin - segment->begin;
    const auto n = std::min(count, segment->count - offset);
    const auto* from = segment->data + offset * segment->token_bytes;
    switch (segment->token_bytes) {
      case 1:
        copy_tokens<std::uint8_t>(from, n, out, stride);
        break;
      case 2:
        copy_tokens<std::uint16_t>(from, n, out, stride);
        break;
      default:
        copy_tokens<std::uint32_t>(from, n, out, stride);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      BRAID_CHECK(out[i * stride] < segment->vocab, "--data-path: token ", offset + i, " of ",
                  segment->name, " is ", out[i * stride], ", its header declares a vocabulary of ",
                  segment->vocab);
    }
    begin += n;
    count -= n;
    out += n * stride;
    ++segment;
  }
}

void write_token_shard(const fs::path& path, const std::vector<std::int64_t>& tokens,
                       TokenType type, std::int64_t vocab) {
  const auto token_bytes = static_cast<std::size_t>(type);
  BRAID_CHECK(vocab >= 1 && vocab <= std::int64_t{1} << (8 * token_bytes), "a vocabulary of ",
              vocab, " does not fit tokens of ", token_bytes, " bytes");
  std::vector<std::uint8_t> bytes(tokens.size() * token_bytes);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    BRAID_CHECK(tokens[i] >= 0 && tokens[i] < vocab, "token ", i, " is ", tokens[i],
                ", the vocabulary is ", vocab);
    std::memcpy(bytes.data() + i * token_bytes, &tokens[i], token_bytes);
  }
  ShardHeader header;
  header.token_bytes = static_cast<std::uint32_t>(token_bytes);
  header.count = tokens.size();
  header.vocab = static_cast<std::uint64_t>(vocab);
  NewFile file(path);
  file.write(&header, sizeof(header), 0);
  file.write(bytes.data(), bytes.size(), sizeof(header));
  file.commit();
}

}  // namespace braid
