// safetensors files: a reader that maps them, a writer that streams tensors one by one.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace braid {

class NewFile;

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

/// Writes a file tensor by tensor; as every NewFile (core/file.h) it appears, whole and on disk, at commit().
class SafetensorsWriter {
 public:
  /// Errors: as NewFile's; ValueError when a dtype has no name in the format.
  SafetensorsWriter(std::string path, std::vector<TensorInfo> tensors,
                    std::map<std::string, std::string> metadata = {{"format", "pt"}});
  ~SafetensorsWriter();

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
  std::string path_;
  std::unique_ptr<NewFile> file_;
  std::map<std::string, Slot> slots_;
};

}  // namespace braid
