// Files that appear under their name whole or not at all, and the lock of a file that several runs write.
//
// NOTE [replacing]. What is new is written beside its place, as .<name>.<pid>.<number>.partial, flushed to disk and
// renamed: so a reader finds the old file or the new one, and a failure, a full disk or a kill leaves the old one.
// A link is followed: what it points at is replaced, and the link stays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace braid {

/// A file that is written piece by piece and appears under its name at commit(). Dropped without it (an
/// exception passed), it leaves nothing behind. Errors of all calls: c10::Error naming the path and
/// the system's reason.
class NewFile {
 public:
  /// Errors: also where the path is there and no regular file (a folder, a device).
  explicit NewFile(std::string path);
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, std::size_t bytes, std::uint64_t offset);
  /// Flushes to disk and renames. Once, nothing is written afterwards.
  void commit();

 private:
  std::string path_, target_, partial_;  // target_: where path_ leads
  int fd_ = -1;
};

/// Replaces the file by one that holds `text`. Errors: as NewFile's.
void replace_file(const std::string& path, std::string_view text);
/// Replaces the link, which is not followed, by one to `target`; nothing happens where it is that already.
///   Errors  c10::Error naming the path and the system's reason
void replace_link(const std::string& path, const std::string& target);
/// Removes what killed processes left of replacements of `path`: while nobody else may be replacing it.
void remove_partials(const std::string& path) noexcept;
/// Makes renames in the folder durable. Errors: c10::Error naming the folder.
void sync_folder(const std::string& path);

/// Keeps out other processes, and other threads, that lock the same file, until destroyed; by a file .<name>.lock
/// beside it, which goes in the end. A killed process leaves no lock.
class FileLock {
 public:
  /// Waits 10 s at most. Errors: c10::Error naming the path: somebody else has it, or the system's reason.
  explicit FileLock(const std::string& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  std::string lock_path_;
  int fd_ = -1;
};

}  // namespace braid
