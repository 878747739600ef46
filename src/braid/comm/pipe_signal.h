// Keeps a lost connection from ending the process: Gloo writes to sockets without MSG_NOSIGNAL.
#pragma once

#include <csignal>
#include <ctime>

namespace braid {

/// While it lives, a write of this thread to a closed connection fails without SIGPIPE; threads that are
/// started meanwhile never get that signal. What a program does about its own pipes stays as it is.
class NoPipeSignal {
 public:
  NoPipeSignal() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoPipeSignal() {
    const timespec none{};
    if (sigismember(&before_, SIGPIPE) == 0) sigtimedwait(&pipe_, nullptr, &none);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoPipeSignal(const NoPipeSignal&) = delete;
  NoPipeSignal& operator=(const NoPipeSignal&) = delete;

 private:
  sigset_t pipe_{}, before_{};
};

}  // namespace braid
