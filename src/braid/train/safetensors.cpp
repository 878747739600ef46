// The safetensors format: u64 header size, header (JSON), then the tensors' bytes.
#include "braid/train/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "braid/core/check.h"
#include "braid/core/file.h"

namespace braid {
namespace {

using nlohmann::json;
static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own library

constexpr std::int64_t kBlockBytes = 16 << 20;

constexpr std::pair<const char*, at::ScalarType> kDtypes[] = {
    {"F64", at::kDouble},
    {"F32", at::kFloat},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"I8", at::kChar},
    {"U8", at::kByte},
    {"U16", at::kUInt16},
    {"U32", at::kUInt32},
    {"U64", at::kUInt64},
    {"BOOL", at::kBool},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
};

const char* dtype_name(at::ScalarType dtype) {
  for (const auto& [name, value] : kDtypes) {
    if (value == dtype) return name;
  }
  return nullptr;
}

const at::ScalarType* dtype_of(const std::string& text) {
  for (const auto& [name, value] : kDtypes) {
    if (text == name) return &value;
  }
  return nullptr;
}

std::string system_error() { return std::strerror(errno); }

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  operator int() const { return fd_; }

 private:
  int fd_;
};

// A value of the header, fit for one line of text.
std::string shown(const json& value) {
  std::string text = value.dump(-1, ' ', true);
  if (text.size() > 80) text.replace(77, std::string::npos, "...");
  return text;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  BRAID_CHECK(fd >= 0, "can't open ", path, ": ", system_error());
  struct stat status {};
  BRAID_CHECK(::fstat(fd, &status) == 0, "can't read ", path, ": ", system_error());
  BRAID_CHECK(S_ISREG(status.st_mode), path, " is not a file");
  const auto bytes = static_cast<std::uint64_t>(status.st_size);
  BRAID_CHECK(bytes >= 8, path, " is not a safetensors file: it has ", bytes,
              " bytes, a header needs 8 or more");
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
  BRAID_CHECK(memory != MAP_FAILED, "can't map ", path, ": ", system_error());
  mapping_ =
      std::shared_ptr<char>(static_cast<char*>(memory), [bytes](char* p) { ::munmap(p, bytes); });
  read_header(bytes);
}

void SafetensorsFile::read_header(std::uint64_t file_bytes) {
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, mapping_.get(), 8);
  BRAID_CHECK(header_bytes <= kMaxHeaderBytes, path_,
              " is not a safetensors file: its header would have ", header_bytes,
              " bytes, at most ", kMaxHeaderBytes, " are allowed");
  BRAID_CHECK(header_bytes <= file_bytes - 8, path_, " is truncated: its header has ", header_bytes,
              " bytes, the file ", file_bytes);
  const std::uint64_t data_bytes = file_bytes - 8 - header_bytes;
  const char* text = mapping_.get() + 8;
  json header;
  try {
    header = json::parse(text, text + header_bytes);
  } catch (const json::exception& error) {
    BRAID_CHECK(false, path_, " is not a safetensors file: its header is no JSON (", error.what(),
                ")");
  }
  BRAID_CHECK(header.is_object(), path_, " is not a safetensors file: its header is a ",
              header.type_name(), ", expected an object");

  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  for (const auto& [name, entry] : header.items()) {
    const auto at = [&, &name = name] { return path_ + ": tensor " + shown(name); };
    if (name == "__metadata__") {
      BRAID_CHECK(entry.is_object(), path_, ": __metadata__ is a ", entry.type_name(),
                  ", expected an object");
      for (const auto& [key, value] : entry.items()) {
        BRAID_CHECK(value.is_string(), path_, ": __metadata__ ", shown(key), " is a ",
                    value.type_name(), ", expected a string");
        metadata_[key] = value;
      }
      continue;
    }
    BRAID_CHECK(entry.is_object() && entry.contains("dtype") && entry.contains("shape") &&
                    entry.contains("data_offsets"),
                at(), " lacks dtype, shape or data_offsets");
    const json &dtype = entry["dtype"], &shape = entry["shape"], &offsets = entry["data_offsets"];
    const at::ScalarType* type = dtype.is_string() ? dtype_of(dtype) : nullptr;
    BRAID_CHECK(type != nullptr, at(), " has the dtype ", shown(dtype),
                ", which braid does not know");
    BRAID_CHECK(shape.is_array(), at(), " has a shape that is a ", shape.type_name(),
                ", expected an array");
    TensorInfo info{name, *type, {}};
    std::uint64_t bytes = at::elementSize(*type);
    for (const json& size : shape) {
      BRAID_CHECK(size.is_number_unsigned(), at(), " has a size of ", shown(size), " in its shape");
      const auto n = size.get<std::uint64_t>();
      BRAID_CHECK(n <= INT64_MAX && !__builtin_mul_overflow(bytes, n, &bytes), at(),
                  " is larger than memory can be");
      info.shape.push_back(static_cast<std::int64_t>(n));
    }
    BRAID_CHECK(offsets.is_array() && offsets.size() == 2 && offsets[0].is_number_unsigned() &&
                    offsets[1].is_number_unsigned(),
                at(), " has the data_offsets ", shown(offsets), ", expected [begin, end]");
    const auto begin = offsets[0].get<std::uint64_t>(), end = offsets[1].get<std::uint64_t>();
    BRAID_CHECK(begin <= end && end <= data_bytes, at(), " lies at bytes [", begin, ", ", end,
                "), the file holds ", data_bytes, " bytes of data; it is truncated or damaged");
    BRAID_CHECK(end - begin == bytes, at(), " of shape ", at::IntArrayRef(info.shape),
                " and dtype ", dtype_name(*type), " needs ", bytes,
                " bytes, its data_offsets give ", end - begin);
    ranges.emplace_back(begin, end);
    begins_[name] = 8 + header_bytes + begin;
    tensors_[name] = std::move(info);
  }
  std::sort(ranges.begin(), ranges.end());
  std::uint64_t covered = 0;
  for (const auto& [begin, end] : ranges) {
    BRAID_CHECK(begin == covered, path_, " is damaged: its tensors ",
                begin < covered ? "overlap" : "leave a gap", " at byte ", std::min(begin, covered),
                " of the data");
    covered = end;
  }
  BRAID_CHECK(covered == data_bytes, path_, " is damaged: its tensors end at byte ", covered,
              " of ", data_bytes, " bytes of data");
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const auto found = tensors_.find(name);
  BRAID_CHECK(found != tensors_.end(), path_, " holds no tensor ", name);
  const TensorInfo& info = found->second;
  char* data = mapping_.get() + begins_.at(name);
  const auto options = at::TensorOptions().dtype(info.dtype);
  if (c10::multiply_integers(info.shape) == 0) return at::empty(info.shape, options);
  if (reinterpret_cast<std::uintptr_t>(data) % at::elementSize(info.dtype) != 0) {
    at::Tensor copy = at::empty(info.shape, options);
    std::memcpy(copy.data_ptr(), data, copy.nbytes());
    return copy;
  }
  return at::from_blob(
      data, info.shape, [mapping = mapping_](void*) {}, options);
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<TensorInfo> tensors,
                                     std::map<std::string, std::string> metadata)
    : path_(std::move(path)) {
  // Wide elements first, so that every tensor is aligned.
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return at::elementSize(a.dtype) > at::elementSize(b.dtype);
  });
  json header;
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t end = 0;
  for (TensorInfo& info : tensors) {
    const char* dtype = dtype_name(info.dtype);
    BRAID_CHECK(dtype != nullptr, path_, ": tensor ", info.name, " has the dtype ", info.dtype,
                ", which safetensors can't hold");
    const std::uint64_t begin = end;
    end += static_cast<std::uint64_t>(c10::multiply_integers(info.shape)) *
           at::elementSize(info.dtype);
    header[info.name] = {{"dtype", dtype}, {"shape", info.shape}, {"data_offsets", {begin, end}}};
    const std::string name = info.name;
    const bool is_new = slots_.try_emplace(name, Slot{std::move(info), begin, false}).second;
    BRAID_CHECK(is_new && name != "__metadata__", path_, ": the name ", name, " is taken");
  }
  std::string text = tensors.empty() && metadata.empty() ? "{}" : header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  for (auto& [name, slot] : slots_) slot.begin += 8 + text.size();

  const std::uint64_t header_bytes = text.size();
  file_ = std::make_unique<NewFile>(path_);
  file_->write(&header_bytes, 8, 0);
  file_->write(text.data(), text.size(), 8);
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write(const std::string& name, const at::Tensor& value) {
  const auto found = slots_.find(name);
  BRAID_CHECK(found != slots_.end(), path_, ": tensor ", name, " was not announced");
  Slot& slot = found->second;
  BRAID_CHECK(!slot.written, path_, ": tensor ", name, " was written before");
  BRAID_CHECK(value.scalar_type() == slot.info.dtype && value.sizes() == slot.info.shape, path_,
              ": tensor ", name, " was announced as ", slot.info.dtype, " ",
              at::IntArrayRef(slot.info.shape), " and is ", value.scalar_type(), " ",
              value.sizes());
  // A strided tensor is copied by blocks of rows, so that no second whole one is needed.
  const at::Tensor rows = value.dim() == 0 ? value.detach().reshape({1}) : value.detach();
  const std::int64_t row_bytes = std::max<std::int64_t>(
      1, static_cast<std::int64_t>(rows.nbytes()) / std::max<std::int64_t>(1, rows.size(0)));
  const std::int64_t num_rows =
      rows.is_contiguous() ? rows.size(0) : std::max<std::int64_t>(1, kBlockBytes / row_bytes);
  std::uint64_t begin = slot.begin;
  for (std::int64_t row = 0; row < rows.size(0); row += num_rows) {
    const at::Tensor block =
        rows.narrow(0, row, std::min(num_rows, rows.size(0) - row)).contiguous();
    file_->write(block.const_data_ptr(), block.nbytes(), begin);
    begin += block.nbytes();
  }
  slot.written = true;
}

void SafetensorsWriter::commit() {
  for (const auto& [name, slot] : slots_)
    BRAID_CHECK(slot.written, path_, ": tensor ", name, " was not written");
  file_->commit();
}

}  // namespace braid
