// Writes beside a path and renames; locks by flock.
#include "braid/core/file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

namespace braid {
namespace {

namespace fs = std::filesystem;
using std::chrono_literals::operator""s;
using std::chrono_literals::operator""ms;

std::string system_error() { return std::strerror(errno); }

/// Where links lead; the last one's target need not be there.
fs::path followed(const std::string& path) {
  constexpr int kMostLinks = 40;  // as the kernel follows
  fs::path target = path;
  std::error_code error;
  for (int i = 0; fs::is_symlink(target, error); ++i) {
    const fs::path next = fs::read_symlink(target, error);
    TORCH_CHECK(!error && i < kMostLinks, "can't write ", path, ": ",
                error ? error.message() : std::strerror(ELOOP));
    target = target.parent_path() / next;
  }
  return target;
}

std::string partial_begin(const fs::path& path) {
  return fmt::format(".{}.", path.filename().string());
}

std::string partial_path(const fs::path& path) {
  static std::atomic<int> made{0};
  return path.parent_path() /
         fmt::format("{}{}.{}.partial", partial_begin(path), ::getpid(), made++);
}

/// False with errno set.
bool write_all(int fd, const void* data, std::size_t bytes, std::uint64_t offset) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const std::size_t piece = std::min(bytes, std::size_t{1} << 30);
    const ssize_t n = ::pwrite(fd, next, piece, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    next += n;
    offset += static_cast<std::uint64_t>(n);
    bytes -= static_cast<std::size_t>(n);
  }
  return true;
}

}  // namespace

NewFile::NewFile(std::string path) : path_(std::move(path)), target_(followed(path_)) {
  struct stat status {};
  const bool is_there = ::stat(target_.c_str(), &status) == 0;
  TORCH_CHECK(!is_there || S_ISREG(status.st_mode), "can't write ", path_,
              S_ISDIR(status.st_mode) ? ": it is a folder" : ": it is not a regular file");
  partial_ = partial_path(target_);
  fd_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
  TORCH_CHECK(fd_ >= 0, "can't write ", path_, ": ", system_error());
}

NewFile::~NewFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(partial_.c_str());
}

void NewFile::write(const void* data, std::size_t bytes, std::uint64_t offset) {
  TORCH_CHECK(write_all(fd_, data, bytes, offset), "can't write ", path_, ": ", system_error());
}

void NewFile::commit() {
  TORCH_CHECK(::fsync(fd_) == 0 && ::rename(partial_.c_str(), target_.c_str()) == 0, "can't write ",
              path_, ": ", system_error());
  ::close(std::exchange(fd_, -1));
  sync_folder(fs::path(target_).parent_path());
}

void replace_file(const std::string& path, std::string_view text) {
  NewFile file(path);
  file.write(text.data(), text.size(), 0);
  file.commit();
}

void replace_link(const std::string& path, const std::string& target) {
  std::error_code error;
  if (fs::read_symlink(path, error) == target && !error) return;
  const std::string partial = partial_path(path);
  const bool done = ::symlink(target.c_str(), partial.c_str()) == 0 &&
                    ::rename(partial.c_str(), path.c_str()) == 0;
  const std::string reason = system_error();
  if (!done) ::unlink(partial.c_str());
  TORCH_CHECK(done, "can't make the link ", path, ": ", reason);
}

void remove_partials(const std::string& path) noexcept {
  const fs::path folder = fs::path(path).parent_path();
  const std::string begin = partial_begin(path);
  std::error_code ignored;
  fs::directory_iterator at(folder.empty() ? "." : folder, ignored);
  for (; !ignored && at != fs::directory_iterator(); at.increment(ignored)) {
    const std::string name = at->path().filename();
    if (name.starts_with(begin) && name.ends_with(".partial")) ::unlink(at->path().c_str());
  }
}

void sync_folder(const std::string& path) {
  const int fd = ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = fd >= 0 && (::fsync(fd) == 0 || errno == EINVAL);
  const std::string reason = system_error();
  if (fd >= 0) ::close(fd);
  TORCH_CHECK(synced, "can't write ", path, ": ", reason);
}

FileLock::FileLock(const std::string& path) {
  const fs::path target = followed(path);
  lock_path_ = target.parent_path() / fmt::format(".{}.lock", target.filename().string());
  for (const auto deadline = std::chrono::steady_clock::now() + 10s;;) {
    fd_ = ::open(lock_path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    TORCH_CHECK(fd_ >= 0, "can't write ", path, ": ", lock_path_, ": ", system_error());
    const bool locked = ::flock(fd_, LOCK_EX | LOCK_NB) == 0;
    const int error = errno;
    // Whoever had it before may have removed the file that was opened: then there is another one.
    struct stat opened {
    }, present{};
    if (locked && ::fstat(fd_, &opened) == 0 && ::stat(lock_path_.c_str(), &present) == 0 &&
        opened.st_ino == present.st_ino)
      return;
    ::close(std::exchange(fd_, -1));
    TORCH_CHECK(locked || error == EWOULDBLOCK, "can't lock ", path, ": ", std::strerror(error));
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "can't lock ", path,
                ": another process has locked ", lock_path_, " for 10 s");
    std::this_thread::sleep_for(5ms);
  }
}

FileLock::~FileLock() {
  ::unlink(lock_path_.c_str());
  ::close(fd_);
}

}  // namespace braid
