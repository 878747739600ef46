// A started operation: wait() finishes it and gives the result.
#pragma once

#include <atomic>
#include <functional>
#include <utility>

#include "braid/core/check.h"

namespace braid {

/// Operations dropped without wait(), in this process; tests assert that it is 0.
inline std::atomic<int64_t> num_dropped_pending{0};

/// Move-only. The inputs of the operation must stay unwritten until wait() returns.
/// Dropped without a wait (an exception passed), the destructor waits: peers need this rank's part.
template <class T>
class [[nodiscard]] Pending {
 public:
  Pending() = default;
  explicit Pending(std::function<T()> finish) : finish_(std::move(finish)) {}
  Pending(Pending&& other) noexcept : finish_(std::exchange(other.finish_, nullptr)) {}
  Pending& operator=(Pending&& other) noexcept {
    if (this != &other) {
      drop();
      finish_ = std::exchange(other.finish_, nullptr);
    }
    return *this;
  }
  ~Pending() { drop(); }

  /// True until wait().
  bool valid() const { return finish_ != nullptr; }

  /// Blocks until the operation is complete. Once only: a second wait is a caller's error.
  T wait() {
    BRAID_CHECK(valid(), "wait() on an operation that was not started or was waited for already");
    return std::exchange(finish_, nullptr)();
  }

 private:
  void drop() noexcept {
    if (!valid()) return;
    ++num_dropped_pending;
    try {
      std::exchange(finish_, nullptr)();
    } catch (...) {  // the loss that made the caller unwind is already on its way up
    }
  }

  std::function<T()> finish_;
};

}  // namespace braid
