// Checked writes to standard output.
#include "braid/cli/output.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace braid::cli {

bool write_output(const std::string& text) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0)
    return true;
  TORCH_CHECK(errno == EPIPE, "can't write to standard output: ", std::strerror(errno));
  return false;
}

void print_text(const std::string& text) {
  TORCH_CHECK(write_output(text), "can't write to standard output: ", std::strerror(EPIPE));
}

void occupy_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    // The lowest free number is this one. To be written only, and read only: what is tried fails.
    if (::fcntl(fd, F_GETFD) < 0)
      (void)::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

}  // namespace braid::cli
