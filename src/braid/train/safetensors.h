// safetensors files: a reader that maps them, a writer that streams tensors one by one.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace braid {

struct TensorInfo {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;
};

/// An open file whose header was checked wholly: sizes, dtypes, offsets without overlap or gap,
/// nothing missing or left. Copies share the mapping.
class SafetensorsFile {
 public:
  /// Errors: ValueError naming the file: unreadable, not a safetensors file,
  /// truncated, header and data disagree.
  explicit SafetensorsFile(const std::string& path);

  const std::string& path() const { return path_; }
  /// By name.
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  /// The tensor's data where the file is mapped: no copy (but of data that the file did not align),
  /// valid as long as the tensor lives. Writing into it changes neither the file nor other
  /// mappings. Errors: ValueError naming file and tensor when there is none of that name.
  at::Tensor tensor(const std::string& name) const;

 private:
  void read_header(std::uint64_t file_bytes);

  std::string path_;
  std::shared_ptr<char> mapping_;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, std::uint64_t> begins_;  // in the mapping
};

/// Writes a file that appears under its name, whole and on disk, at commit() and not before.
/// Dropped without commit (an exception passed), it leaves nothing behind and the file that was
/// there before as it was.
class SafetensorsWriter {
 public:
  /// Errors: c10::Error naming the file and the system's reason; ValueError when a dtype has no
  /// name in the format.
  SafetensorsWriter(std::string path, std::vector<TensorInfo> tensors,
                    std::map<std::string, std::string> metadata = {{"format", "pt"}});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// Writes one of the announced tensors, in any order; `value` may be strided.
  /// Errors: as the constructor; ValueError when name, dtype or shape are not as announced, or it
  /// was written before.
  void write(const std::string& name, const at::Tensor& value);
  /// Flushes to disk and renames. Errors: as write; ValueError naming an announced tensor that was not written.
  void commit();

 private:
  struct Slot {
    TensorInfo info;
    std::uint64_t begin = 0;
    bool written = false;
  };
  std::string path_, partial_;
  int fd_ = -1;
  std::map<std::string, Slot> slots_;
};

/// Writes a small text file as SafetensorsWriter does: whole or not at all. Errors: c10::Error
/// naming the file.
void write_file_atomically(const std::string& path, const std::string& text);
/// Makes renames in the folder durable. Errors: c10::Error naming the folder.
void sync_folder(const std::string& path);

}  // namespace braid
