// Makes a rank's store, environment and process.
#include "braid/comm/spawn.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "braid/core/check.h"

namespace braid {
namespace {

/// Threads that start meanwhile take none of the process's signals.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

HostedStore::HostedStore() : socket_(listen_tcp(0, Listening::loopback)) {}
HostedStore::HostedStore(int port) : socket_(listen_tcp(port, Listening::everywhere)) {}

c10::intrusive_ptr<c10d::Store> HostedStore::start() {
  TORCH_INTERNAL_ASSERT(socket_.get() >= 0);
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port());
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = socket_.release();
  const NoSignals for_the_stores_threads;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

Place place_on_this_host(int rank, int num_ranks, int port) {
  Place place;
  place.rank = place.local_rank = rank;
  place.world_size = place.local_world_size = num_ranks;
  place.master_addr = "127.0.0.1";
  place.master_port = port;
  place.run = fmt::format("braid {}", getpid());
  return place;
}

Environment environment_of_rank(const Place& place) {
  Environment values;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view line = *entry;
    const auto name = line.substr(0, line.find('='));
    if (name.size() < line.size()) values[std::string(name)] = line.substr(name.size() + 1);
  }
  values["RANK"] = std::to_string(place.rank);
  values["WORLD_SIZE"] = std::to_string(place.world_size);
  values["LOCAL_RANK"] = std::to_string(place.local_rank);
  values["LOCAL_WORLD_SIZE"] = std::to_string(place.local_world_size);
  values["MASTER_ADDR"] = place.master_addr;
  values["MASTER_PORT"] = std::to_string(place.master_port);
  values["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  values["TORCHELASTIC_RUN_ID"] = place.run;
  values.erase("TORCHELASTIC_RESTART_COUNT");
  return values;
}

namespace {

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (auto& text : texts) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

}  // namespace

pid_t spawn(std::string program, std::vector<std::string> arguments, const Environment& environment,
            const sigset_t& mask, int output) {
  arguments.insert(arguments.begin(),
                   program == "/proc/self/exe" ? program_invocation_name : program);
  // By its own path, so that ps and pkill know the ranks by their name; by /proc where a rebuild has replaced the file.
  if (program == "/proc/self/exe") {
    const auto path = std::filesystem::read_symlink(program);
    if (std::filesystem::exists(path)) program = path;
  }
  std::vector<std::string> lines;
  for (const auto& [name, value] : environment) lines.push_back(name + "=" + value);
  const auto argv = pointers(arguments), envp = pointers(lines);
  // A process in the background that read from the terminal would be stopped.
  const int null = ::isatty(STDIN_FILENO) != 0 ? ::open("/dev/null", O_RDONLY | O_CLOEXEC) : -1;
  int failure[2];
  TORCH_CHECK(::pipe2(failure, O_CLOEXEC) == 0, "can't make a pipe: ", std::strerror(errno));
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) {
    // Only async-signal-safe calls here: the parent may have threads.
    // Its own children can be ended with it, and the terminal's signals come from the launcher.
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);  // it died before prctl
    if (null >= 0 && ::dup2(null, STDIN_FILENO) < 0) ::_exit(1);
    if (output >= 0 && ::dup2(output, STDOUT_FILENO) < 0) ::_exit(1);
    if (output >= 0 && ::dup2(output, STDERR_FILENO) < 0) ::_exit(1);
    ::sigprocmask(SIG_SETMASK, &mask, nullptr);
    ::execvpe(program.c_str(), argv.data(), envp.data());
    const int error = errno;
    [[maybe_unused]] const auto written = ::write(failure[1], &error, sizeof error);
    ::_exit(127);
  }
  int error = errno;
  if (null >= 0) ::close(null);
  ::close(failure[1]);
  // End of file: exec has closed the pipe.
  const bool runs = pid > 0 && ::read(failure[0], &error, sizeof error) == 0;
  ::close(failure[0]);
  TORCH_CHECK(pid > 0, "can't start a process: ", std::strerror(error));
  if (!runs) ::waitpid(pid, nullptr, 0);
  std::string hint;
  if (!runs && std::filesystem::exists(program)) {
    if (program.ends_with(".py"))
      hint = ". HINT: python " + program;
    else if (program.find('/') == std::string::npos)
      hint = ". HINT: ./" + program;
  }
  BRAID_CHECK(runs, "can't run ", program, ": ", std::strerror(error), hint);
  return pid;
}

}  // namespace braid
